"""A linear function whose low-precision weight accumulates its gradient in float32."""

import functools
import math
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.nn.float32_layers import autocast_off
from amp_mp.torch_private import functorch_is_active

# For backwards in two threads that add to one weight; autograd's own AccumulateGrad has one too.
_lock = threading.Lock()


def linear_accumulate(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear, with the weight's gradient accumulated in float32.

    Returns what F.linear does, bit for bit. The backward computes weight.grad += grad_output^T
    input over all rows in float32; autograd would round each micro-batch's gradient, and their sum,
    to the weight's dtype. Sets `weight.grad_dtype = torch.float32`. The bias' gradient is summed in
    float32 and has the bias' own grad_dtype; the input's is F.linear's.

    With a hook on the weight (`register_hook`, `register_post_accumulate_grad_hook`), in
    `torch.autograd.grad`, and on a CUDA stream other than the default one, autograd adds a float32
    gradient of the micro-batch: the same sum, with one more pass and buffer. A hook on the weight's
    AccumulateGrad node gets None instead of the gradient.

    It is plain F.linear for weights of other dtypes, frozen weights, no_grad, torch.compile,
    torch.func, tensor subclasses as input, input and weight of different dtypes outside autocast,
    and a bias of another dtype than the weight's. It cannot be differentiated twice.

    input: [..., in], floating-point, of the weight's dtype unless autocast is on. weight:
    [out, in], a leaf; only float16 and bfloat16 weights accumulate in float32. bias: [out], of the
    weight's dtype, or None. The result is [..., out].

    Raises TypeError for a weight that is a tensor subclass (a DTensor), ValueError for one that is
    not a leaf or already has a gradient in low precision, RuntimeError as F.linear does.
    """
    if weight.dtype in LOW_PRECISION and weight.requires_grad and torch.is_grad_enabled():
        instead = "use torch.nn.functional.linear"
        if not is_plain(weight):
            raise TypeError(f"weight must be a plain tensor, found {type(weight)}; {instead}")
        if not weight.is_leaf:
            raise ValueError(
                f"weight of shape {tuple(weight.shape)} is computed by {weight.grad_fn}, so it "
                f"keeps no gradient; pass a leaf, or {instead}"
            )
        if weight.grad is not None and weight.grad.dtype != torch.float32:
            raise ValueError(
                f"weight has a gradient in {weight.grad.dtype} already; set weight.grad = None "
                "first, or have amp_mp.attach_main_grads(model) convert it"
            )
        if weight.grad_dtype != torch.float32:
            weight.grad_dtype = torch.float32
    return accumulating_linear(input, weight, bias)


def accumulating_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear_accumulate for a weight whose grad_dtype is float32, F.linear for any other."""
    accumulates = (
        weight.dtype in LOW_PRECISION
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not functorch_is_active()
        and is_plain(weight)
        and weight.is_leaf
        and weight.grad_dtype == torch.float32
        and is_plain(input)
        and (input.dtype == weight.dtype or torch.is_autocast_enabled(weight.device.type))
        and (bias is None or bias.dtype == weight.dtype)
    )
    if not accumulates:
        return functional.linear(input, weight, bias)
    return _Linear.apply(input, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


def is_plain(tensor: Any) -> bool:
    """Whether it is a dense torch tensor, not of a subclass, on a CPU or CUDA device."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.device.type in ("cpu", "cuda")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = functional.linear(input, weight, bias)
        # Autocast decides the product's dtype; the backward has to compute in the same.
        ctx.save_for_backward(input.to(output.dtype), weight)
        ctx.parameter = weight  # the tensor that has the gradient; a saved one may be a copy
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        with autocast_off(grad_output):
            if ctx.needs_input_grad[0]:
                grad_input = grad_output @ weight.to(grad_output.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = _weight_grad(ctx.parameter, grad_output, input)
            if ctx.needs_input_grad[2]:
                grad_bias = _rows(grad_output).sum(0, dtype=torch.float32)
        return grad_input, grad_weight, grad_bias


def _weight_grad(weight: Tensor, grad_output: Tensor, input: Tensor) -> Tensor | None:
    """The gradient for autograd to add or return; None if it is added already or unwanted."""
    accumulates = _C.accumulates(weight)
    if accumulates is None or not weight.requires_grad:  # frozen since the forward
        return None
    if not (accumulates and _may_write(weight)):
        grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        _add_product(grad, grad_output, input)
        return grad
    with _lock:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=torch.float32)
        _add_product(weight.grad, grad_output, input)
    return None


def _may_write(weight: Any) -> bool:
    """Whether the gradient can be added here, without autograd, and no result is different.

    Hooks of register_hook would get None, and whether the other hooks are called then depends on
    the torch version. CUDA streams that need a gradient wait for those autograd has seen, only.
    """
    grad = weight if weight.grad is None else weight.grad  # a new one has the weight's layout
    cuda = torch.cuda
    device = grad.device
    return (
        is_plain(grad)
        and grad.is_contiguous()
        and (weight.grad is None or (grad.dtype == torch.float32 and not grad.requires_grad))
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and (not grad.is_cuda or cuda.current_stream(device) == cuda.default_stream(device))
    )


def _add_product(grad: Tensor, grad_output: Tensor, input: Tensor) -> None:
    if not grad.is_cuda:
        _C.accumulate_weight_grad_(grad, grad_output, input)
    elif (gemm := _gemm()) is not None:
        with torch.cuda.device(grad.device):
            # The handle's stream is the device's current one.
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
    """The running torch's cuBLAS; None if it is linked into torch, or torch is not for CUDA."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return _C.Gemm(f"libcublas.so.{major}")
    except RuntimeError:
        return None
