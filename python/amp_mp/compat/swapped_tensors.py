"""Other tensors in the places of a layer's weights and buffers, for the time of its forward."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
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


def _buffers(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    return [
        (part._buffers, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]


@contextmanager
def buffers_aside(module: nn.Module) -> Iterator[None]:
    """A block in which the layer's buffers are copies: a second run must not change statistics."""
    places = _buffers(module)
    try:
        for buffers, name, buffer in places:
            buffers[name] = buffer.clone()
        yield
    finally:
        for buffers, name, buffer in places:
            buffers[name] = buffer


@contextmanager
def statistics_in(module: nn.Module, math: torch.dtype) -> Iterator[None]:
    """A block in which a norm's statistics have its math type; they are copied back in training."""
    places = [each for each in _buffers(module) if each[2].is_floating_point()]
    places = [each for each in places if each[2].dtype != math]
    try:
        for buffers, name, buffer in places:
            buffers[name] = buffer.to(math)
        yield
        if module.training:
            with torch.no_grad():
                for buffers, name, buffer in places:
                    buffer.copy_(buffers[name])  # type: ignore[arg-type]
    finally:
        for buffers, name, buffer in places:
            buffers[name] = buffer
