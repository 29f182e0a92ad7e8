"""Linear layers whose weight gradients add up in float32, straight from the low-precision product.

Autograd rounds the weight gradient of every micro-batch to the weight's dtype before it is added to
`.grad`. Here the product grad_output^T input is made in float32 and added to a float32 `.grad`.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from amp_mp import _C
from amp_mp.nn.norms import casts_off

LOW = (torch.float16, torch.bfloat16)
# Two threads' backwards may meet at one weight: AccumulateGrad has a lock of its own for that.
_lock = threading.Lock()


def linear_accumulate(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear, with the weight's gradient accumulated in float32.

    Returns input weight^T + bias, bit for bit what F.linear returns. In the backward

        weight.grad += grad_output^T input, over all rows, in float32,

    where the products of low-precision numbers are exact and nothing is rounded to the weight's
    dtype, neither one micro-batch's gradient nor the sum. `weight.grad` is float32: the call sets
    `weight.grad_dtype = torch.float32`. The bias' gradient is summed in float32 and comes in its
    own grad_dtype; the input's is F.linear's.

    With a hook on the weight (`register_hook`, `register_post_accumulate_grad_hook`), in
    `torch.autograd.grad` and on a CUDA stream other than the default one, the micro-batch's
    gradient is made apart, in float32, and autograd adds it: the same sum for one more pass and
    buffer. A hook on the weight's AccumulateGrad node sees None instead.

    Plain F.linear, with the gradients that gives: weights of other dtypes, frozen ones, no_grad,
    torch.compile, torch.func, tensor subclasses as input, input and weight of different dtypes
    outside of autocast, a bias of another dtype than the weight's. Not twice differentiable.

    Shapes: input [..., in], weight [out, in], bias [out], result [..., out].

    Args:
        input: floating-point, of the weight's dtype unless autocast is on.
        weight: a leaf; float16 or bfloat16 for any of this to happen.
        bias: of the weight's dtype, or None.

    Raises:
        TypeError: weight is a tensor subclass (a DTensor).
        ValueError: weight is no leaf, or has a gradient in low precision already.
        RuntimeError: F.linear's own, for shapes and dtypes that do not go together.
    """
    if weight.dtype in LOW and weight.requires_grad and torch.is_grad_enabled():
        _prepare(weight)
    return accumulating_linear(input, weight, bias)


def _prepare(weight: Tensor) -> None:
    if not is_plain(weight):
        raise TypeError(
            f"weight must be a plain tensor, found {type(weight)}; use torch.nn.functional.linear"
        )
    if not weight.is_leaf:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} is computed by {weight.grad_fn}, so it keeps "
            "no gradient; pass a leaf, or use torch.nn.functional.linear"
        )
    if weight.grad_dtype == torch.float32:
        return
    if weight.grad is not None and weight.grad.dtype != torch.float32:
        raise ValueError(
            f"weight has a gradient in {weight.grad.dtype} already; set weight.grad = None first, "
            "or have amp_mp.attach_main_grads(model) convert it"
        )
    weight.grad_dtype = torch.float32


def accumulating_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear_accumulate where the weight is ready for it, F.linear anywhere else."""
    if _applies(input, weight, bias):
        return _Linear.apply(input, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
    return functional.linear(input, weight, bias)


def is_plain(tensor: Any) -> bool:
    """Whether it is a strided tensor with memory of its own on a CPU or GPU."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type in ("cpu", "cuda")
        and tensor.layout == torch.strided
    )


def _applies(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        weight.dtype in LOW
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and is_plain(weight)
        and weight.is_leaf
        and weight.grad_dtype == torch.float32
        and is_plain(input)
        and (input.dtype == weight.dtype or torch.is_autocast_enabled(weight.device.type))
        and (bias is None or bias.dtype == weight.dtype)
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = functional.linear(input, weight, bias)
        # Under autocast its table says what the product ran in; the backward runs in the same.
        ctx.save_for_backward(input.to(output.dtype), weight)
        ctx.parameter = weight  # the tensor with the gradient; a saved one may be a copy
        return output

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        with casts_off(grad_output):
            if ctx.needs_input_grad[0]:
                grad_input = grad_output @ weight.to(grad_output.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = _weight_grad(ctx.parameter, grad_output, input)
            if ctx.needs_input_grad[2]:
                grad_bias = _rows(grad_output).sum(0, dtype=torch.float32)
        return grad_input, grad_weight, grad_bias


def _weight_grad(weight: Tensor, grad_output: Tensor, input: Tensor) -> Tensor | None:
    """What autograd is to add to the weight's gradient; None where it has been added already."""
    added = _C.accumulates(weight)
    if added is None:
        return None
    if added and _may_write(weight):
        with _lock:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight, dtype=torch.float32)
            _add_product(weight.grad, grad_output, input)
        return None
    grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    _add_product(grad, grad_output, input)
    return grad


def _may_write(weight: Any) -> bool:
    """Whether nobody can tell that the gradient did not come through autograd.

    Hooks could: those of register_hook get None for it, and whether the others are called then
    is up to the torch version.
    """
    grad = weight if weight.grad is None else weight.grad  # it will have the weight's layout
    return (
        is_plain(grad)
        and grad.is_contiguous()
        and (weight.grad is None or (grad.dtype == torch.float32 and not grad.requires_grad))
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and (not grad.is_cuda or _is_default_stream(grad.device))
    )


def _is_default_stream(device: torch.device) -> bool:
    # Where the next stream needs a gradient, autograd waits for those it was given and no other.
    return bool(torch.cuda.current_stream(device) == torch.cuda.default_stream(device))


def _add_product(grad: Tensor, grad_output: Tensor, input: Tensor) -> None:
    if not grad.is_cuda:
        _C.accumulate_weight_grad_(grad, grad_output, input)
    elif (gemm := _gemm()) is not None:
        with torch.cuda.device(grad.device):
            # Its stream is the current one.
            handle = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            _C.accumulate_weight_grad_(grad, grad_output, input, gemm, handle)
    elif input.dtype == torch.float32:
        grad.addmm_(_rows(grad_output).t(), _rows(input))
    else:
        grad.add_(torch.mm(_rows(grad_output).t(), _rows(input), out_dtype=torch.float32))


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


@functools.cache
def _gemm() -> _C.Gemm | None:
    """The running torch's cuBLAS, or None: linked into it, or of another maker."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return _C.Gemm(f"libcublas.so.{major}")
    except RuntimeError:
        return None
