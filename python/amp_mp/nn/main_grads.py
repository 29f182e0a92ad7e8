"""A model whose float16 and bfloat16 parameters have float32 gradients."""

from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_mp.dtypes import LOW_PRECISION
from amp_mp.module_names import is_wrapper
from amp_mp.nn.functional import accumulating_linear, is_plain
from amp_mp.sharding.shards import local_of
from amp_mp.sharding.units import check_open, units_of
from amp_mp.torch_private import keeps_grad_dtype


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
