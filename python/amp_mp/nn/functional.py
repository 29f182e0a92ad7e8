"""Gradients of low-precision weights that add up in float32: of a product, or a whole model's."""

import functools
import math
import threading
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.nn.float32_layers import autocast_off
from amp_mp.sharding.shards import local_of
from amp_mp.sharding.units import check_open, units_of
from amp_mp.torch_versions import keeps_grad_dtype

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
        and not torch._C._are_functorch_transforms_active()
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
    if (accumulates := _C.accumulates(weight)) is None:
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


class MainGrads(AbstractContextManager["MainGrads"]):
    """The handle of attach_main_grads. `remove`, or the end of a `with` block, undoes it."""

    def __init__(self, model: nn.Module) -> None:
        low = [p for p in model.parameters() if p.dtype in LOW_PRECISION]
        self._model = model
        self._params = [(p, p.grad_dtype) for p in low if p.grad_dtype != torch.float32]
        self._modules = [module for module in model.modules() if _is_linear(module)]
        for param, _ in self._params:
            _set_grad_dtype(param, torch.float32)
        for module in self._modules:  # a method named forward: copies and pickles find their own
            module.forward = MethodType(forward, module)

    def remove(self) -> None:
        """Gives the parameters gradients of their own dtypes again, and rounds the present ones.

        ValueError where fully_shard has fixed the gradients' dtypes, in the first forward.
        """
        check_open("remove()", self._model, {id(param) for param, _ in self._params})
        for module in self._modules:
            if _forward_of(module) is forward:
                del module.forward
        for param, dtype in self._params:
            _set_grad_dtype(param, dtype if param.dtype in LOW_PRECISION else param.dtype)
        self._modules, self._params = [], []

    def __exit__(self, *_: object) -> None:
        self.remove()


def attach_main_grads(model: nn.Module) -> MainGrads:
    """Keeps the gradients of a model's float16 and bfloat16 parameters in float32.

    `param.grad` itself is float32 (torch's `grad_dtype`), 4 bytes a parameter instead of 2; it is
    used as any gradient is. Present gradients are converted.

    - The weight of a low-precision nn.Linear: each micro-batch's gradient is made in float32 and
      added to `.grad` in the same product (amp_mp.nn.functional.linear_accumulate lists the
      exceptions). Its bias: summed and added in float32.
    - Other low-precision parameters, and those of a Linear whose forward is not called: each
      micro-batch's gradient is rounded once to the parameter's dtype, and added in float32.
    - float32 parameters: nothing changes.
    - Shards of fully_shard, from torch 2.15 on: all of this on the gathered parameters, and summed
      over the processes in the policy's reduce_dtype, float32 by default. Attach after `prepare`
      and before the first forward, which fixes the dtypes for good.
    - Other DTensors (parallelize_module): as other parameters; sums over the processes are float32.

    Under torch.compile a Linear's weight is treated as any other parameter. A copy or pickle of the
    model is not attached, because torch copies no grad_dtype: attach it, too. torch's
    DistributedDataParallel takes no float32 gradients for these parameters: do not wrap the model
    in it, but average `.grad` before each step with all_reduce.

    The model is changed in place. `remove()` of the handle returned, which need not be kept, or the
    end of a `with` block undoes it all.

    Raises TypeError if model is not a module; ValueError if it is or contains a
    DistributedDataParallel or FSDP1 wrapper, if a low-precision parameter is another tensor
    subclass, lazy, or not on a CPU or a GPU, if it is a shard of fully_shard and torch is older
    than 2.15 or has run a forward; RuntimeError if it is attached already. Its forward raises
    RuntimeError if it is wrapped in a DistributedDataParallel later, or if fully_shard replaces its
    parameters and torch drops the gradients' dtypes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model)}")
    for name, module in model.named_modules():
        if is_wrapper(module):
            raise ValueError(
                f"model{name and '.' + name} is a {type(module).__name__}, whose buckets have the "
                "parameters' dtypes and take no float32 gradients; pass the plain model and "
                "average .grad yourself"
            )
        if _is_attached(module):
            raise RuntimeError("model is attached already; remove() that attachment first")
    for name, param in model.named_parameters():
        if param.dtype in LOW_PRECISION and not is_plain(local_of(param)):
            raise ValueError(
                f"model.{name} is a {type(param).__name__} on {param.device}; only plain dense "
                "parameters and DTensors on a CPU or a CUDA device can have float32 gradients"
            )
    _check_units(model)
    return MainGrads(model)


def _check_units(model: nn.Module) -> None:
    """Raises ValueError where FSDP2 rounds gradients, or has fixed their dtypes."""
    low = {id(p): p.dtype for p in model.parameters() if p.dtype in LOW_PRECISION}
    for name, _, group in units_of(model):
        for each in group.fsdp_params:
            if id(each.sharded_param) in low and not keeps_grad_dtype(each):
                raise ValueError(
                    f"model{name} is a fully_shard unit with {each.sharded_param.dtype} shards, "
                    "and torch rounds their gradients to that dtype before torch 2.15, found "
                    f"torch {torch.__version__}. Instead of attaching give fully_shard a "
                    "MixedPrecisionPolicy(reduce_dtype=torch.float32), which sums gradients in "
                    "float32 and rounds once; float32 shards, with param_dtype in the policy and "
                    "without prepare, have float32 gradients"
                )
    check_open("attach_main_grads", model, low)


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is a DistributedDataParallel or FSDP1 module, around another one."""
    # By the class's name, because importing torch.distributed.fsdp takes a second.
    names = {kind.__name__ for kind in type(module).__mro__}
    return not names.isdisjoint(("DistributedDataParallel", "FullyShardedDataParallel"))


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """The forward method of an nn.Linear in an attached model."""
    if DistributedDataParallel._active_ddp_module is not None and torch.is_grad_enabled():
        raise RuntimeError(
            "attach_main_grads: DistributedDataParallel has buckets of the parameters' dtypes and "
            "takes no float32 gradients; call the model itself and average .grad yourself"
        )
    sharded = "_is_fsdp_managed_module" in self.__dict__
    if sharded and self.weight.grad_dtype != torch.float32 and torch.is_grad_enabled():
        raise RuntimeError(
            "attach_main_grads: fully_shard has replaced the parameters, and the new ones have "
            "gradients of their own dtypes; attach after fully_shard and prepare"
        )
    return accumulating_linear(input, self.weight, self.bias)


def _is_linear(module: nn.Module) -> bool:
    """Whether its forward is nn.Linear's own and its weight a low-precision parameter."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        # A deep copy of an attached one has ours, a pickle torch's.
        and _forward_of(module) in (None, forward, nn.Linear.forward)
        and getattr(module._parameters.get("weight"), "dtype", None) in LOW_PRECISION
    )


def _forward_of(module: nn.Module) -> Any:
    """The function of the method that someone has given this module as its forward, or None."""
    own = module.__dict__.get("forward")
    return getattr(own, "__func__", own)


def _is_attached(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    attached = weight is not None and weight.grad_dtype == torch.float32  # a copy's is its dtype
    return attached and _forward_of(module) is forward


def _set_grad_dtype(param: nn.Parameter, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None  # torch refuses to change grad_dtype beside a gradient
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype or param.dtype)
