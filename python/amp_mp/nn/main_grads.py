"""attach_main_grads: float32 gradients for the low-precision parameters of a model."""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_mp.nn.functional import LOW, accumulating_linear, is_plain

# By name: importing torch.distributed.fsdp takes a second.
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}


class MainGrads:
    """What attach_main_grads returns; `remove()`, or the end of a `with` block, ends it."""

    def __init__(self, model: nn.Module) -> None:
        """See attach_main_grads."""
        self._params: list[tuple[nn.Parameter, torch.dtype | None]] = []
        self._modules: list[nn.Module] = []
        for param in model.parameters():
            if param.dtype in LOW and param.grad_dtype != torch.float32:
                self._params.append((param, param.grad_dtype))
                _set_grad_dtype(param, torch.float32)
        for module in model.modules():
            if _is_linear(module):
                # Under the method's own name, so that copies and pickles of the model find theirs.
                module.forward = MethodType(forward, module)
                self._modules.append(module)

    def remove(self) -> None:
        """Gradients are kept in the parameters' dtypes again; those there are, rounded to them."""
        for module in self._modules:
            if _is_attached(module):
                del module.forward
        for param, dtype in self._params:
            _set_grad_dtype(param, dtype if param.dtype in LOW else param.dtype)
        self._modules.clear()
        self._params.clear()

    def __enter__(self) -> MainGrads:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Removes it."""
        self.remove()


def attach_main_grads(model: nn.Module) -> MainGrads:
    """Keeps the gradients of a model's float16 and bfloat16 parameters in float32.

    `param.grad` itself is float32 (torch's `grad_dtype`), 4 bytes a parameter instead of 2, so
    optimizers, clipping, scalers and zero_grad find it where they look. Gradients that are there
    already are converted.

    - The weight of a low-precision nn.Linear: each micro-batch's gradient is made in float32 and
      added to `.grad` in the same product (amp_mp.nn.functional.linear_accumulate, which says when
      it is not). Its bias: summed and added in float32.
    - Any other low-precision parameter, also a Linear's that is used by other than its forward:
      each micro-batch's gradient is rounded once to the parameter's dtype, and added in float32.
    - float32 parameters: nothing changes.

    It goes with accumulation, activation checkpointing, tied weights, hooks, loss scaling, autocast
    and optimizer.attach. Under torch.compile weights are treated as any other parameter. A deep
    copy of the model is not attached.

    Data-parallel training: torch's DistributedDataParallel has buckets of the parameters' dtypes
    and does not take float32 gradients; leave it out and average `.grad` before each step, by
    torch.distributed.all_reduce.

    Args:
        model: changed in place, until the result is removed.

    Returns:
        A handle: `remove()`, or the end of a `with` block, puts everything back. It need not be
        kept.

    Raises:
        TypeError: model is no module.
        ValueError: model is or holds a DistributedDataParallel or FSDP wrapper, or a low-precision
            parameter is a tensor subclass (FSDP2's DTensor), lazy, or neither on a CPU nor a GPU.
        RuntimeError: model is attached already; or, in its forward, it has been wrapped in a
            DistributedDataParallel since.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model)}")
    for name, module in model.named_modules():
        if WRAPPERS & {kind.__name__ for kind in type(module).__mro__}:
            raise ValueError(
                f"model{name and '.' + name} is a {type(module).__name__}, whose buckets have the "
                "parameters' dtypes and take no float32 gradients; pass the plain model and "
                "average .grad yourself"
            )
        if _is_attached(module):
            raise RuntimeError("model is attached already; remove() that attachment first")
    for name, param in model.named_parameters():
        if param.dtype in LOW and not is_plain(param):
            raise ValueError(
                f"model.{name} is a {type(param).__name__} on {param.device}; only plain dense "
                "parameters on a CPU or a CUDA device can have float32 gradients"
            )
    return MainGrads(model)


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """nn.Linear.forward of a module that is attached."""
    if DistributedDataParallel._active_ddp_module is not None and torch.is_grad_enabled():
        raise RuntimeError(
            "attach_main_grads: DistributedDataParallel has buckets of the parameters' dtypes and "
            "takes no float32 gradients; call the model itself and average .grad yourself"
        )
    return accumulating_linear(input, self.weight, self.bias)


def _is_linear(module: nn.Module) -> bool:
    """Whether its forward is nn.Linear's own and its weight a low-precision parameter."""
    weight = module._parameters.get("weight")
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and weight is not None
        and weight.dtype in LOW
    )


def _is_attached(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def _set_grad_dtype(param: nn.Parameter, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None  # torch wants none there
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype or param.dtype)
