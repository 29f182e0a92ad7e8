"""Which layers a model has, and the forward method of one that has types, with four ways to run it.

looks up rows         as it is, with its result rounded
Linear, convolution   `product`, whose derivatives are written out
one math type         as autograd records it, between a border before it and one after it; so does
                      what selects values, in a dtype that its gradients can have, and what draws
                      random numbers, in the wider of its math types
two math types        `recomputed`: the backward pass runs it again in its own math type
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import get_device_states

from amp_mp.compat.type_functions import Types, border, product, recomputed
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.model.kept_modules import float32_is_kept
from amp_mp.model.selection import is_normalisation
from amp_mp.nested import map_tensors, tensors_in
from amp_mp.nn.float32_layers import autocast_off
from amp_mp.torch_private import (
    BatchNorm,
    DropoutNd,
    Loss,
    MaxPoolNd,
    PaddingNd,
    functorch_is_active,
    outside_graphs,
)

# What a layer is, for its types. The text is what a table says.
PLAIN = ""
NORM = "norm: weights, statistics and math at least FLOAT"
SOFTMAX = "softmax: math at least FLOAT"
LOSS = "loss: at least FLOAT"
KEPT = "keep_fp32: FLOAT unless named"
SELECTS = "selects values: math makes no difference"
LOOKS_UP = "looks up rows in the weight's own type"

SELECTING = (
    nn.ReLU,
    nn.Hardtanh,
    nn.Threshold,
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ChannelShuffle,
    *MaxPoolNd,
    *PaddingNd,
)
SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.AdaptiveLogSoftmaxWithLoss)
# Modules of torch that use their children's weights without calling them.
WHOLE = (nn.MultiheadAttention, nn.AdaptiveLogSoftmaxWithLoss)

PRODUCTS = tuple(kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
BATCH_NORM = BatchNorm.forward
RANDOM = (DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)

# Where a tensor of a layer is: the module, which of its dicts, and the name there.
Store = Literal["_parameters", "_buffers"]
TensorKey = tuple[nn.Module, Store, str]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def layers_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """The model's layers, each with its names; a shared one has several.

    A layer is a module without children, or one of torch's that does not call its children.
    """
    found: dict[nn.Module, list[str]] = {}
    inside: tuple[str, ...] = ()  # how the names of a layer's own parts begin
    for name, module in model.named_modules(remove_duplicate=False):
        parts = name.startswith(inside) or "parametrizations" in name.split(".")
        if parts or type(module).forward is nn.Module.forward:  # a list of modules has no forward
            continue
        children = {name for name, _ in module.named_children()} - {"parametrizations"}
        if not children or isinstance(module, WHOLE):
            found.setdefault(module, []).append(name)
            inside += (f"{name}." if name else "",)
    return found


def kinds_of(model: nn.Module) -> dict[nn.Module, str]:
    """What each layer of the model is: one of the kinds above."""
    kept = [m for m in model.modules() if float32_is_kept(m) and not is_normalisation(m)]
    inside = {part for module in kept for part in module.modules()}
    return {module: _kind(module, module in inside) for module in layers_of(model)}


def _kind(module: nn.Module, is_kept: bool) -> str:
    kinds = {
        LOSS: isinstance(module, Loss),
        NORM: is_normalisation(module),
        KEPT: is_kept,
        SOFTMAX: isinstance(module, SOFTMAXES),
        LOOKS_UP: isinstance(module, nn.Embedding | nn.EmbeddingBag),
        SELECTS: isinstance(module, SELECTING),
    }
    return next((kind for kind, fits in kinds.items() if fits), PLAIN)


def forward_of(module: nn.Module) -> "TypedForward | None":
    """The TypedForward that gives a layer its types; None where it has none."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, TypedForward) else None


class TypedForward:
    """An attribute `forward` of a layer, in place of its class's. Copies have their own."""

    casts_by_itself = True  # the casts that `prepare` puts around kept modules are off

    def __init__(self, module: nn.Module, kind: str, types: Types) -> None:
        self.module, self.kind, self.types = module, kind, types

    def attach(self) -> None:
        """Gives the layer its types."""
        self.module.__dict__["forward"] = self
        if isinstance(self.module, nn.MultiheadAttention):
            self.module.register_forward_pre_hook(_is_called)

    def detach(self) -> None:
        """Gives the layer its own forward method back."""
        if forward_of(self.module) is self:
            del self.module.__dict__["forward"]
            hooks = self.module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is _is_called]:
                del hooks[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns for these arguments, in its types."""
        types = self.types
        if self.kind == LOOKS_UP:
            return self._leave(self._run(args, kwargs, {}))
        if self._is_product(args, kwargs):
            return _product(self.module, args[0], types)
        if self.kind == SELECTS:
            return self._in_one_math(args, kwargs, types.visible)
        if types.forward_math == types.backward_math or self._draws():
            wider = torch.promote_types(types.forward_math, types.backward_math)
            return self._in_one_math(args, kwargs, wider)
        return self._in_two_maths(args, kwargs)

    def _draws(self) -> bool:
        """Whether it is one of torch's layers that draw random numbers now.

        A second run in another dtype would draw others on a GPU: how many elements a thread of
        torch's dropout handles, and which attention kernel runs, depend on the dtype.
        """
        parts = self.module.modules()
        return self.module.training and any(
            isinstance(part, RANDOM) or bool(getattr(part, "dropout", 0)) for part in parts
        )

    def _is_product(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether it is a product of which autograd would keep more than the forward type."""
        if type(self.module).forward not in PRODUCTS or len(args) != 1 or kwargs:
            return False
        if not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return False  # torch refuses it by name
        own = {param.dtype for param in self.module.parameters()}
        types = self.types
        return {*own, types.forward_math, types.backward_math} != {types.forward}

    def _in_one_math(self, args: Args, kwargs: Kwargs, math: torch.dtype) -> Any:
        types, module = self.types, self.module
        # A norm's weights are not rounded. torch's batch norm takes low-precision inputs beside
        # float32 weights, computes in float32, and keeps the input as it is.
        through = (math,) if self.kind == NORM else (types.forward, math)
        backward = math if self.kind == NORM else types.backward
        mixes = type(module).forward is BATCH_NORM and math == torch.float32
        mixes = mixes and types.visible == types.forward in LOW_PRECISION
        enter = (types.forward,) if mixes else (types.forward, math)
        args, kwargs = _mapped(lambda t: border(t, enter, types.backward), args, kwargs)
        weights = {
            place: border(weight, through, backward, saturate=True)
            for place, weight in _tensors_of(module, "_parameters").items()
        }
        statistics = _tensors_of(module, "_buffers") if self.kind == NORM else {}
        in_math = {p: b.to(math) for p, b in statistics.items() if b.is_floating_point()}
        output = self._leave(self._run(args, kwargs, weights | in_math))
        for place, used in in_math.items():
            if module.training and used is not statistics[place]:
                statistics[place].copy_(used.detach())
        return output

    @outside_graphs
    def _in_two_maths(self, args: Args, kwargs: Kwargs) -> Any:
        module, trains = self.module, self.module.training
        if functorch_is_active():
            raise RuntimeError(
                f"{type(module).__name__} has two math types, and its backward pass runs it again, "
                "which torch.func cannot transform: give it one math type"
            )
        inputs: list[Tensor] = []

        def taken(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            inputs.append(tensor)
            return tensor.new_empty(0)  # in its place: the backward pass keeps a converted one

        args, kwargs = _mapped(taken, args, kwargs)
        weights = _tensors_of(module, "_parameters")
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
            buffers = _tensors_of(module, "_buffers") if again else {}
            copies = {place: buffer.clone() for place, buffer in buffers.items()}
            result = self._run(*given, dict(zip(weights, each, strict=True)) | copies)
            if not again:
                results.append(result)
            return tensors_in(result, results=True)

        random = trains and any(map(_is_of_others, module.modules()))
        tensors = (*inputs, *weights.values())
        before = get_device_states(*tensors) if random else None
        outputs = iter(recomputed(compute, self.types, len(inputs), random, *tensors))
        if before and not all(map(torch.equal, before[1], get_device_states(*tensors)[1])):
            raise RuntimeError(
                f"{type(module).__name__} has two math types and has drawn random numbers on a "
                "GPU, where its backward pass, which runs it again in another dtype, may draw "
                "others: give it one math type"
            )
        return map_tensors(lambda _: next(outputs), results.pop(), results=True)

    def _leave(self, output: Any) -> Any:
        types = self.types
        through = (types.forward, types.visible)
        return map_tensors(lambda t: border(t, through, types.backward), output, results=True)

    def _run(self, args: Args, kwargs: Kwargs, tensors: dict[TensorKey, Tensor]) -> Any:
        """The layer's own forward with these tensors in the places of its own."""
        module = self.module
        given = next(iter([*tensors.values(), *tensors_in((args, kwargs), results=True)]), None)
        no_casts = nullcontext() if given is None else autocast_off(given)
        with _in_place(module, tensors), no_casts:
            return type(module).forward(module, *args, **kwargs)


def _is_called(_: nn.Module, args: Any) -> None:
    """A hook that does nothing: without one TransformerEncoderLayer.eval() calls no layer."""


def _tensors_of(module: nn.Module, store: Store) -> dict[TensorKey, Tensor]:
    """The floating-point parameters, or all buffers, of a layer and its parts."""
    return {
        (part, store, name): tensor
        for part in module.modules()
        for name, tensor in getattr(part, store).items()
        if tensor is not None and (store == "_buffers" or tensor.is_floating_point())
    }


@contextmanager
def _in_place(module: nn.Module, tensors: Mapping[TensorKey, Tensor]) -> Iterator[None]:
    """A block in which a layer's weights and buffers are these; after it they are its own again."""
    before = {place: getattr(place[0], place[1])[place[2]] for place in tensors}
    try:
        _put(module, tensors)
        yield
    finally:
        _put(module, before)


def _put(module: nn.Module, tensors: Mapping[TensorKey, Tensor]) -> None:
    for (part, store, name), tensor in tensors.items():
        getattr(part, store)[name] = tensor
    if isinstance(module, nn.RNNBase) and tensors:  # reads a list of its own
        own = [module._parameters.get(name) for name in module._flat_weights_names]
        module.__dict__["_flat_weights"] = own


def _mapped(change: Callable[[Tensor], Tensor], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with a function applied to each tensor, once if it is there several times."""
    done: dict[Tensor, Tensor] = {}  # attention asks whether its query is its key

    def once(tensor: Tensor) -> Tensor:
        if tensor not in done:
            done[tensor] = change(tensor)
        return done[tensor]

    named = {name: map_tensors(once, value) for name, value in kwargs.items()}
    return tuple(map_tensors(once, value) for value in args), named


def _is_of_others(module: nn.Module) -> bool:
    """Whether a module is not torch's, so that it may draw random numbers."""
    return not type(module).__module__.startswith("torch.nn.")


def _product(module: Any, input: Tensor, types: Types) -> Tensor:
    if isinstance(module, nn.Linear):
        return product(input, module.weight, module.bias, types, None)
    padding = module.padding
    none = (0,) * len(module.stride)
    if module.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        input = functional.pad(input, module._reversed_padding_repeated_twice, mode)
        padding = none
    geometry = (module.stride, padding, module.dilation, False, none, module.groups)
    unbatched = input.dim() < module.weight.dim()
    input = input.unsqueeze(0) if unbatched else input
    output = product(input, module.weight, module.bias, types, geometry)
    return output.squeeze(0) if unbatched else output
