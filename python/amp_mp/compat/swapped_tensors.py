"""Other tensors in the places of a layer's weights and buffers, for the time of its forward."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# Where a weight is: the module, and the parameter's name in it.
WeightKey = tuple[nn.Module, str]


def weights_of(module: nn.Module) -> dict[WeightKey, Tensor]:
    """The floating-point parameters of a layer and its parts, each with its place."""
    return {
        (part, name): param
        for part in module.modules()
        for name, param in part._parameters.items()
        if param is not None and param.is_floating_point()
    }


@contextmanager
def weights_in_place(module: nn.Module, tensors: Mapping[WeightKey, Tensor]) -> Iterator[None]:
    """A block in which a layer's weights are these tensors; then they are what they were."""
    before = {place: place[0]._parameters[place[1]] for place in tensors}
    try:
        _put(module, tensors)
        yield
    finally:
        _put(module, before)


def _put(module: nn.Module, tensors: Mapping[WeightKey, Tensor | None]) -> None:
    for (part, name), tensor in tensors.items():
        parameters: Any = part._parameters
        parameters[name] = tensor
    if isinstance(module, nn.RNNBase) and tensors:  # reads a list of its own
        module.__dict__["_flat_weights"] = [
            module._parameters.get(name) for name in module._flat_weights_names
        ]


@contextmanager
def other_buffers(
    module: nn.Module, make: Callable[[Tensor], Tensor], copy_back: bool = False
) -> Iterator[None]:
    """A block in which a layer's buffers are what `make` gives for them.

    copy_back: what is in those after the block is copied to the layer's own.
    """
    places = [
        (part._buffers, name, buffer, make(buffer))
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        for buffers, name, _, made in places:
            buffers[name] = made
        yield
        for _, _, buffer, made in places:
            if copy_back and made is not buffer:
                buffer.copy_(made.detach())
    finally:
        for buffers, name, buffer, _ in places:
            buffers[name] = buffer
