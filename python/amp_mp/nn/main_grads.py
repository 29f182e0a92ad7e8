"""attach_main_grads: float32 gradients for the low-precision parameters of a model."""

from contextlib import AbstractContextManager
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_mp.dtypes import LOW_PRECISION
from amp_mp.nn.functional import accumulating_linear, is_plain


class MainGrads(AbstractContextManager["MainGrads"]):
    """The handle of attach_main_grads. `remove`, or the end of a `with` block, undoes it."""

    def __init__(self, model: nn.Module) -> None:
        low = [p for p in model.parameters() if p.dtype in LOW_PRECISION]
        self._params = [(p, p.grad_dtype) for p in low if p.grad_dtype != torch.float32]
        self._modules = [module for module in model.modules() if _is_linear(module)]
        for param, _ in self._params:
            _set_grad_dtype(param, torch.float32)
        for module in self._modules:  # a method named forward: copies and pickles find their own
            module.forward = MethodType(forward, module)

    def remove(self) -> None:
        """Gives the parameters gradients of their own dtypes again, and rounds the present ones."""
        for module in self._modules:
            if _is_attached(module):
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

    Under torch.compile a Linear's weight is treated as any other parameter. A deep copy of the
    model is not attached. torch's DistributedDataParallel takes no float32 gradients for these
    parameters: do not wrap the model in it, but average `.grad` before each step with all_reduce.

    The model is changed in place. `remove()` of the handle returned, which need not be kept, or the
    end of a `with` block undoes it all.

    Raises TypeError if model is not a module; ValueError if it is or contains a
    DistributedDataParallel or FSDP wrapper, or if a low-precision parameter is a tensor subclass
    (FSDP2's DTensor), lazy, or not on a CPU or a GPU; RuntimeError if it is attached already. Its
    forward raises RuntimeError if it is wrapped in a DistributedDataParallel later.
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
        if param.dtype in LOW_PRECISION and not is_plain(param):
            raise ValueError(
                f"model.{name} is a {type(param).__name__} on {param.device}; only plain dense "
                "parameters on a CPU or a CUDA device can have float32 gradients"
            )
    return MainGrads(model)


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
    return accumulating_linear(input, self.weight, self.bias)


def _is_linear(module: nn.Module) -> bool:
    """Whether its forward is nn.Linear's own and its weight a low-precision parameter."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and getattr(module._parameters.get("weight"), "dtype", None) in LOW_PRECISION
    )


def _is_attached(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def _set_grad_dtype(param: nn.Parameter, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None  # torch refuses to change grad_dtype beside a gradient
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype or param.dtype)
