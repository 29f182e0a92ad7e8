"""The forward method of a layer that has types."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, _disable_dynamo, nn  # type: ignore[attr-defined]
from torch.nn import functional

from amp_mp.compat.layer_kinds import LOOKS_UP, NORM, SELECTS
from amp_mp.compat.swapped_tensors import (
    WeightKey,
    other_buffers,
    weights_in_place,
    weights_of,
)
from amp_mp.compat.type_functions import Types, border, product, recomputed
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.model.kept_modules import CONVERTS_ITSELF, map_arguments, map_results
from amp_mp.nn.float32_layers import autocast_off

PRODUCTS = tuple(kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
BATCH_NORM = nn.modules.batchnorm._BatchNorm.forward
RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def typed_forward(module: nn.Module) -> "TypedForward | None":
    """What gives a layer its types; None where it has none."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, TypedForward) else None


class TypedForward:
    """Takes the place of a layer's forward method, as an attribute of the layer's own.

    Copies and pickles of the layer have one of their own.
    """

    def __init__(self, module: nn.Module, kind: str, types: Types) -> None:
        self.module, self.kind, self.types = module, kind, types

    def attach(self) -> None:
        """Gives the layer its types."""
        self.module.__dict__["forward"] = self
        self.module.__dict__[CONVERTS_ITSELF] = True
        if isinstance(self.module, nn.MultiheadAttention):
            self.module.register_forward_pre_hook(_is_called)

    def detach(self) -> None:
        """Gives the layer its own forward method back."""
        if typed_forward(self.module) is self:
            del self.module.__dict__["forward"]
            self.module.__dict__.pop(CONVERTS_ITSELF, None)
            hooks = self.module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is _is_called]:
                del hooks[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns for these arguments, in its types."""
        types, module = self.types, self.module
        plain = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        plain = plain and args[0].is_floating_point()  # torch refuses others by name
        if self.kind == LOOKS_UP:
            return self._leave(self._run(args, kwargs, {}))
        if self.kind == SELECTS:  # in a dtype that its gradients can have
            entered = self._entered(args, kwargs, (types.forward, types.visible))
            return self._leave(self._run(*entered, {}))
        if plain and type(module).forward in PRODUCTS and self._casts():
            return _product(module, args[0], types)
        if types.forward_math == types.backward_math:
            return self._in_one_math(args, kwargs)
        return self._in_two_maths(args, kwargs)

    def _casts(self) -> bool:
        """Whether autograd would keep anything in another dtype than the forward type."""
        own = {param.dtype for param in self.module.parameters()}
        types = self.types
        return {*own, types.forward_math, types.backward_math} != {types.forward}

    def _in_one_math(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As autograd records it: a border before the layer, and one after it."""
        types, module = self.types, self.module
        math = types.forward_math
        # A norm's weights are not rounded. torch's batch norm takes low-precision inputs beside
        # float32 weights, computes in float32, and keeps the input as it is.
        through = (math,) if self.kind == NORM else (types.forward, math)
        backward = math if self.kind == NORM else types.backward
        mixes = type(module).forward is BATCH_NORM and math == torch.float32
        mixes = mixes and types.visible == types.forward in LOW_PRECISION
        entering = (types.forward,) if mixes else (types.forward, math)
        args, kwargs = self._entered(args, kwargs, entering)
        weights = {
            place: border(weight, through, backward, saturate=True)
            for place, weight in weights_of(module).items()
        }
        if self.kind != NORM:
            return self._leave(self._run(args, kwargs, weights))
        # Its statistics have its math type, too, for this time.
        in_math = lambda b: b.to(math) if b.is_floating_point() else b  # noqa: E731
        with other_buffers(module, in_math, copy_back=module.training):
            return self._leave(self._run(args, kwargs, weights))

    @_disable_dynamo
    def _in_two_maths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The backward pass runs the layer again, in its own math type."""
        module, trains = self.module, self.module.training
        inputs: list[Tensor] = []

        def taken(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            inputs.append(tensor)
            return tensor.new_empty(0)  # in its place: the backward pass keeps a converted one

        args, kwargs = _mapped(taken, args, kwargs)
        weights = weights_of(module)
        writes = any(getattr(part, "inplace", False) for part in module.modules())
        results: list[Any] = []

        def compute(tensors: list[Tensor], again: bool) -> list[Tensor]:
            if module.training != trains:
                raise RuntimeError(
                    f"{type(module).__name__} was switched between train() and eval() before its "
                    "backward pass, which runs it again; switch it after backward()"
                )
            # A layer that writes its input would write what is kept, and run on that again.
            each = iter([t.clone() for t in tensors] if writes else tensors)
            given = _mapped(lambda t: next(each) if t.is_floating_point() else t, args, kwargs)
            # A second run must not change a layer's statistics.
            with other_buffers(module, Tensor.clone) if again else nullcontext():
                result = self._run(*given, dict(zip(weights, each, strict=True)))
            if not again:
                results.append(result)
            return _tensors(result)

        random = trains and any(map(_may_draw, module.modules()))
        own = list(weights.values())
        outputs = iter(recomputed(compute, self.types, inputs, own, random))
        return map_results(lambda _: next(outputs), results.pop())

    def _entered(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: tuple[torch.dtype, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _mapped(lambda t: border(t, dtypes, self.types.backward), args, kwargs)

    def _leave(self, output: Any) -> Any:
        types = self.types
        through = (types.forward, types.visible)
        return map_results(lambda t: border(t, through, types.backward), output)

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], weights: dict[WeightKey, Tensor]
    ) -> Any:
        """The layer's own forward with these weights in the places of its own."""
        module = self.module
        given = next(iter([*weights.values(), *_tensors((args, kwargs))]), None)
        no_casts = nullcontext() if given is None else autocast_off(given)
        with weights_in_place(module, weights), no_casts:
            return type(module).forward(module, *args, **kwargs)


def _is_called(_: nn.Module, args: Any) -> None:
    """A hook that does nothing: without one TransformerEncoderLayer.eval() calls no layer."""


def _mapped(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the function applied to each tensor, once if it is there several times.

    Attention asks whether its query is its key.
    """
    done: dict[Tensor, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if tensor not in done:
            done[tensor] = function(tensor)
        return done[tensor]

    named = {name: map_arguments(once, value) for name, value in kwargs.items()}
    return tuple(map_arguments(once, value) for value in args), named


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_results(note, value)
    return found


def _may_draw(module: nn.Module) -> bool:
    """Whether a module may draw random numbers: dropout, and any that is not torch's."""
    own = type(module).__module__.startswith("torch.nn.")
    return not own or isinstance(module, RANDOM) or bool(getattr(module, "dropout", 0))


def _product(module: Any, input: Tensor, types: Types) -> Tensor:
    if isinstance(module, nn.Linear):
        return product(input, module.weight, module.bias, types, None)
    pads = module._reversed_padding_repeated_twice
    padding = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        input = functional.pad(input, pads, mode)
        padding = (0,) * len(module.stride)
    none = (0,) * len(module.stride)
    geometry = (module.stride, padding, module.dilation, False, none, module.groups)
    unbatched = input.dim() < module.weight.dim()
    output = product(
        input.unsqueeze(0) if unbatched else input, module.weight, module.bias, types, geometry
    )
    return output.squeeze(0) if unbatched else output
