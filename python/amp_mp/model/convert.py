"""Converts a whole model to a dtype, with or without keeping the float32 values for masters."""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from amp_mp import _C
from amp_mp.casting.products import check_products, choose_products
from amp_mp.dtypes import LOW_PRECISION, NATIVE, check_dtype, rounded
from amp_mp.messages import warn
from amp_mp.model import moving
from amp_mp.model.kept_modules import LowPrecisionWeight, compute_in_float32, return_given_dtype
from amp_mp.model.selection import Kept, named_tensors, select
from amp_mp.model.sharded import check_units, update_units
from amp_mp.module_names import is_wrapper, prepared_models
from amp_mp.optim.state import kept_masters
from amp_mp.optim.state.kept_masters import own_parameters
from amp_mp.param_groups import params_in
from amp_mp.sharding.shards import is_dtensor, local_of, set_local, why_without_memory
from amp_mp.switch import ENABLED
from amp_mp.torch_private import global_step_pre_hooks


def prepare(
    model: nn.Module,
    dtype: torch.dtype,
    keep_fp32: Kept | None = None,
    *,
    keep_fp32_only: Kept | None = None,
    products: str = "auto",
    enabled: bool = ENABLED,
) -> nn.Module:
    """Turns a model's parameters and buffers into `dtype`, in place, and returns the model.

    Gradients are converted, as torch's Module.to does.

    The float32 values of trainable parameters are kept, 2 bytes an element beside the weights: the
    first amp_mp optimizer that steps a parameter starts its master from them. Copies and pickles of
    the model have them, and load_state_dict of float32 values replaces them. If a weight was
    written otherwise, its master starts from the weight.

    Args:
        model: float32, or in low precision already. Integers and float64 stay. Parameter objects
            stay the same. Prepare before wrapping in DistributedDataParallel, and after fully_shard
            or parallelize_module, before the first forward.
        dtype: torch.bfloat16 or torch.float16.
        keep_fp32: what is float32 besides the default: module types, modules of the model, and
            fnmatch patterns over the names of modules, parameters and buffers ("head",
            "blocks.*.norm1"). By default these are normalisation layers (docs/prepare.md), rotary
            frequencies, and what amp_mp.keep_fp32 has marked. A kept module computes in float32 and
            returns the dtype it was given, also in tuples, dicts and dataclasses; given no
            floating-point tensor it returns `dtype`. One that shares a parameter is kept as well.
        keep_fp32_only: the same, in place of the default; marks still count.
        products: how a CPU computes products of `dtype`, in this process: "native", or "float32":
            rounded to `dtype` afterwards. Default "auto": what is faster on this processor
            (docs/prepare.md). CUDA's are native.
        enabled: False returns the model as it is, to compare; the default under AMP_MP=0.

    Raises, before anything is changed:
        ValueError: dtype or products is another one; a pattern or module is not in the model; the
            model is or contains a wrapper; a parameter is lazy or an inference tensor; a
            fully_shard unit has run a forward, or would have parameters of two dtypes.
        TypeError: model is not a module; keep_fp32 holds none of these; a parameter or buffer is of
            a tensor subclass without memory of its own.
        RuntimeError: called under torch.inference_mode().
    """
    check_dtype(dtype, LOW_PRECISION)
    check_products(products)
    _convert("prepare", model, dtype, enabled, keep_fp32, keep_fp32_only)
    if enabled and any(p.device.type == "cpu" and p.dtype == dtype for p in model.parameters()):
        choose_products(products, dtype)
    return model


def convert_network(
    model: nn.Module,
    dtype: torch.dtype,
    keep_fp32: Kept | None = None,
    *,
    keep_fp32_only: Kept | None = None,
) -> nn.Module:
    """Converts a model's floating-point parameters and buffers in place and returns it, as Apex's.

    Unlike `prepare` it keeps no float32 values aside for masters, and takes any floating-point
    model. Parameter objects stay the same. float16 weights saturate at +-65504, gradients do not.

    Args:
        model: is changed in place. What is kept in it is float32 afterwards, or float64 as before.
        dtype: torch.float16, torch.bfloat16 or torch.float32.
        keep_fp32, keep_fp32_only: what stays float32, as for `prepare`; errors as there, too.
    """
    check_dtype(dtype, NATIVE)
    return _convert("convert_network", model, dtype, True, keep_fp32, keep_fp32_only)


have_masters = WeakSet[Optimizer]()  # now or after a first step; and those already warned of


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Before each step of any optimizer; here, because each function costs time in every step."""
    if kept_masters.unwatched or moving.watches:
        moving.look()
    if optimizer not in have_masters:
        have_masters.add(optimizer)
        _warn_without_masters(optimizer)


def _warn_without_masters(optimizer: Optimizer) -> None:
    """Warns of a torch optimizer over prepared parameters."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    params = [p for p in params_in(optimizer.param_groups) if p.requires_grad]
    if any(map(kept_masters.is_prepared, params)):
        name = f"optim.{type(optimizer).__name__}"
        warn(
            f"torch.{name} updates low-precision weights of amp_mp.prepare without float32 "
            "masters, and loses updates that are small beside the weights: take amp_mp."
            f"{name}, or amp_mp.FP16_Optimizer around it"
        )


def _convert(
    function: str, model: nn.Module, dtype: torch.dtype, enabled: bool, *keep: Kept | None
) -> nn.Module:
    _check(function, model)
    if _before_step not in global_step_pre_hooks.values():
        hooks.register_optimizer_step_pre_hook(_before_step)
    prepares = function == "prepare"
    kept = select(model, *keep)
    targets: dict[int, tuple[Tensor, torch.dtype]] = {}
    for name, tensor in named_tensors(model).items():
        converts = tensor.dtype in NATIVE if prepares else tensor.is_floating_point()
        keeps = id(tensor) in kept.tensors
        target = torch.promote_types(tensor.dtype, torch.float32) if keeps else dtype
        if converts and tensor.dtype != target:
            if wrong := why_without_memory(tensor):
                raise TypeError(f"model.{name} {wrong}")
            targets[id(tensor)] = tensor, target
    check_units(function, model, targets)
    if not enabled:
        return model
    owners = {id(p): m for m in model.modules() for p in own_parameters(m).values()}
    for tensor, target in targets.values():
        has_more = prepares and tensor.dtype in LOW_PRECISION
        values = _C.float32_of(tensor) if has_more else local_of(tensor).detach().float()
        set_local(tensor, values if target == torch.float32 else rounded(values, target))
        if prepares and target == dtype and isinstance(tensor, nn.Parameter):
            kept_masters.keep(tensor, values, owners[id(tensor)])
        else:
            kept_masters.drop(tensor)
        if tensor.grad is not None:  # it has the old dtype
            tensor.grad = tensor.grad.to(tensor.grad_dtype or tensor.grad.dtype)
    update_units(model)
    prepared_models.add(model)
    for module in model.modules():
        if any(t.dtype in LOW_PRECISION for t in named_tensors(module, recurse=False).values()):
            if prepares:
                kept_masters.track(module)
            kept_masters.unwatched.add(module)
        if isinstance(module, nn.RNNBase) and not any(map(is_dtensor, module.parameters())):
            module.flatten_parameters()  # cuDNN wants the new weights in one piece, too
    if dtype in LOW_PRECISION:
        compute_in_float32(kept.modules, _smallest_low_precision(model))
        return_given_dtype(kept.rotary)
    return model


def _check(function: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be one torch.nn.Module, found {type(model).__name__}; call {function} for "
            "each, or with an nn.ModuleList"
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{function} was called under torch.inference_mode(), where it would make parameters "
            "that cannot be trained; call it outside"
        )
    for name, module in model.named_modules():
        if is_wrapper(module):
            raise ValueError(
                f"model{name and '.' + name} is a {type(module).__name__}, whose buffers have the "
                f"parameters' dtypes already; call {function} first, then wrap the model"
            )
    for name, tensor in named_tensors(model).items():
        if is_lazy(tensor):
            raise ValueError(f"model.{name} is lazy; run the model once before {function}")
        if tensor.is_inference():
            raise ValueError(
                f"model.{name} was made under torch.inference_mode() and cannot be converted in "
                "place or trained; make or load the model outside of it"
            )


def _smallest_low_precision(model: nn.Module) -> LowPrecisionWeight | None:
    """The low-precision parameter of the model with the fewest elements."""
    params = [(p, m, name) for m in model.modules() for name, p in own_parameters(m).items()]
    found = [
        (p.numel(), LowPrecisionWeight(m, n)) for p, m, n in params if p.dtype in LOW_PRECISION
    ]
    return min(found, key=lambda each: each[0], default=(0, None))[1]
