"""Autograd functions whose values, gradients and arithmetic have types of their own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from amp_mp.dtypes import rounded
from amp_mp.nn.float32_layers import autocast_off
from amp_mp.torch_private import functorch_is_active, has_forward_derivatives

# What torch.convolution takes after the bias; None stands for a linear layer.
Geometry = tuple[Any, ...] | None


class Types(NamedTuple):
    """The four types of a layer: of storage and of arithmetic, forward and backward."""

    forward: torch.dtype
    backward: torch.dtype
    forward_math: torch.dtype
    backward_math: torch.dtype

    @property
    def visible(self) -> torch.dtype:
        """The dtype of a layer's result: torch gives a tensor and its gradient one dtype."""
        return torch.promote_types(self.forward, self.backward)

    @property
    def kept(self) -> torch.dtype:
        """The narrowest dtype from which the backward pass can compute."""
        narrow = self.backward_math.itemsize < self.forward.itemsize
        return self.backward_math if narrow else self.forward


def converted(tensor: Tensor, *dtypes: torch.dtype, saturate: bool = False) -> Tensor:
    """The tensor in the last of the dtypes, rounded to each on the way.

    saturate: float16 is clamped to +-65504, which is for weights; else an overflow becomes inf.
    """
    for dtype in dtypes:
        narrows = saturate and dtype == torch.float16 and tensor.dtype != dtype
        tensor = rounded(tensor, dtype) if narrows else tensor.to(dtype)
    return tensor


def border(
    tensor: Tensor, dtypes: tuple[torch.dtype, ...], backward: torch.dtype, saturate: bool = False
) -> Tensor:
    """Rounds as `converted` does, and rounds the gradient to `backward` on its way back.

    An overflow of the gradient becomes inf. Integers are returned as they are.
    """
    if not tensor.is_floating_point():
        return tensor
    if all(dtype == tensor.dtype for dtype in dtypes) and (
        backward == tensor.dtype or not (tensor.requires_grad and torch.is_grad_enabled())
    ):
        return tensor  # torch gives a gradient its tensor's dtype itself
    return _applied(_Border, _DualBorder, tensor, dtypes, backward, saturate)  # type: ignore[no-any-return]


def _applied(function: Any, dual: Any, *arguments: Any) -> Any:
    """Applies `dual`, which has forward derivatives, where torch.func or a dual level may ask.

    torch.compile takes no function that has them.
    """
    if torch.compiler.is_compiling():
        return function.apply(*arguments)
    asked = functorch_is_active() or has_forward_derivatives()
    return (dual if asked else function).apply(*arguments)


class _Border(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        tensor: Tensor, dtypes: tuple[torch.dtype, ...], backward: torch.dtype, saturate: bool
    ) -> Tensor:
        result = converted(tensor, *dtypes, saturate=saturate)
        # A function's result that is its input, or a view, could not be written in place.
        return result.detach() if result is tensor else result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.type, ctx.result_type = inputs[2], output.dtype
        ctx.set_materialize_grads(False)  # see _Product: what it keeps has no first derivative

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return None if grad is None else grad.to(ctx.type), None, None, None


class _DualBorder(_Border):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: None) -> Tensor | None:
        return None if tangent is None else tangent.to(ctx.result_type)


def product(
    input: Tensor, weight: Tensor, bias: Tensor | None, types: Types, geometry: Geometry
) -> Tensor:
    """A linear layer or a convolution in these types; the result has types.visible.

    The backward pass reads the input in types.kept and the weight itself.
    """
    through = (types.forward, types.kept)
    kept = border(input, through, types.backward) if torch.is_grad_enabled() else input
    apart = None if kept is input else kept  # torch.compile takes no tensor twice
    return _applied(_Product, _DualProduct, input, apart, weight, bias, types, geometry)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """kept: the input in the dtype that the backward pass reads; None for the input itself.

    The input's gradient goes to `input`, in its dtype, and none to `kept`. What the backward pass
    computes from `kept` can be differentiated again, and leads to the input.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        kept: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        types: Types,
        geometry: Geometry,
    ) -> Tensor:
        through = (types.forward, types.forward_math)
        stored = kept if kept is not None and types.kept == types.forward else input
        x = converted(stored, *through)
        w = converted(weight, *through, saturate=True)
        b = None if bias is None else converted(bias, *through, saturate=True)
        y = _product(x, w, b, geometry)
        return converted(y, types.forward, types.visible)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, kept, weight, bias, ctx.types, ctx.geometry = inputs
        ctx.save_for_backward(input if kept is None else kept, weight)
        ctx.bias_sizes = None if bias is None else [bias.numel()]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        types: Types = ctx.types
        math = types.backward_math
        g, x = converted(grad, types.backward, math), kept.to(math)
        w = converted(weight, types.forward, math, saturate=True)
        wanted = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        with autocast_off(grad):
            if ctx.geometry is None:
                found = _linear_backward(g, x, w, wanted)
            else:
                found = torch.ops.aten.convolution_backward(
                    g, x, w, ctx.bias_sizes, *ctx.geometry, wanted
                )
        dx, dw, db = (None if each is None else each.to(types.backward) for each in found)
        return dx, None, dw, db, None, None


class _DualProduct(_Product):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Product.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[0] if inputs[1] is None else inputs[1], inputs[2])

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, _: None, dw: Tensor | None, db: Tensor | None, *__: None
    ) -> Tensor:
        kept, weight = ctx.saved_tensors
        types: Types = ctx.types
        through = (types.forward, types.forward_math)
        x, w = converted(kept, *through), converted(weight, *through, saturate=True)
        dx, dw, db = (None if d is None else converted(d, *through) for d in (dx, dw, db))
        y = _product(torch.zeros_like(x) if dx is None else dx, w, db, ctx.geometry)
        if dw is not None:
            y = y + _product(x, dw, None, ctx.geometry)
        return converted(y, types.forward, types.visible)


def _product(x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
    with autocast_off(x):
        if geometry is None:
            return functional.linear(x, w, b)
        return torch.convolution(x, w, b, *geometry)


def _linear_backward(
    grad: Tensor, input: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor | None, ...]:
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        grad @ weight if wanted[0] else None,
        rows.t() @ input.reshape(-1, input.shape[-1]) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


# A layer as a function of the tensors that it reads; it returns its tensors. The flag says that it
# runs for the backward pass, and may change nothing besides.
Compute = Callable[[list[Tensor], bool], list[Tensor]]


class _Recomputed(torch.autograd.Function):
    """Any layer in these types, whose backward pass runs it again in types.backward_math.

    inputs: how many of the tensors are; the others are weights. random: whether the layer may draw
    random numbers on the CPU, which are then the same in both.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Compute, types: Types, inputs: int, random: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.compute = compute
        ctx.types = types
        ctx.inputs = inputs
        ctx.random = torch.get_rng_state() if random else None
        kept = [t.to(types.forward) for t in tensors[:inputs]]
        weights = [converted(t, types.forward, saturate=True) for t in tensors[inputs:]]
        math = types.forward_math
        outputs = compute([t.to(math) for t in (*kept, *weights)], False)
        ctx.save_for_backward(*(t.to(types.kept) for t in kept), *tensors[inputs:])
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        # Detached: a layer may return its input, or a view of it (see _Border).
        return tuple(
            converted(t, types.forward, types.visible).detach() if t.is_floating_point() else t
            for t in outputs
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True through a layer that has two math types, and whose backward "
                "pass runs it again, which cannot be differentiated twice: give it one math type"
            )
        types: Types = ctx.types
        math = types.backward_math
        saved = ctx.saved_tensors
        n = ctx.inputs
        weights = (converted(t, types.forward, math, saturate=True) for t in saved[n:])
        leaves = [t.to(math).detach() for t in (*saved[:n], *weights)]
        for leaf, needed in zip(leaves, ctx.needs_input_grad[4:], strict=True):
            leaf.requires_grad_(needed)
        with torch.enable_grad(), _random_state(ctx.random):
            outputs = ctx.compute(leaves, True)
        pairs = zip(outputs, grads, strict=True)
        given = [(y, converted(g, types.backward, math)) for y, g in pairs if g is not None]
        given = [(y, g) for y, g in given if y.requires_grad]
        found: Iterator[Tensor | None] = iter(())
        if given:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            ys, gs = zip(*given, strict=True)
            found = iter(torch.autograd.grad(ys, wanted, gs, allow_unused=True))
        computed = [next(found, None) if leaf.requires_grad else None for leaf in leaves]
        rounded_grads = (None if grad is None else grad.to(types.backward) for grad in computed)
        return None, None, None, None, *rounded_grads


recomputed: Callable[..., Any] = _Recomputed.apply


@contextmanager
def _random_state(state: Tensor | None) -> Iterator[None]:
    """A block that begins with this state of the CPU's generator, which is then as before."""
    if state is None:
        yield
        return
    with torch.random.fork_rng([]):
        torch.set_rng_state(state)
        yield
