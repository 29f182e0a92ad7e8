"""Converts a whole model to a dtype, with or without keeping the float32 values for masters."""

import fnmatch
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from amp_mp.dtypes import LOW_PRECISION, NATIVE, rounded
from amp_mp.optim.state.masters import keep_original

# Statistics and small affine weights, where low precision saves nothing and costs accuracy.
NORMALISATIONS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)

# Of these, the ones that torch can give low-precision inputs beside float32 weights on a CPU, which
# saves the casts. Not LayerNorm: it would sum its weights' gradients in low precision.
MIXING = (nn.GroupNorm, nn.modules.batchnorm._NormBase)

# The attribute that the function keep_fp32 sets on a module: the names of its own parameters and
# buffers that stay float32, "" for all of them. Names and not ids, so that copies have the marks.
MARKS = "_amp_mp_keep_fp32"

Kept = Iterable[type[nn.Module] | str]

# The dtype that a kept module was given, between its two hooks.
_entered: WeakKeyDictionary[nn.Module, torch.dtype] = WeakKeyDictionary()


def prepare(model: nn.Module, dtype: torch.dtype, keep_fp32: Kept | None = None) -> nn.Module:
    """Turns a float32 model's parameters and buffers into `dtype`, in place, and returns the model.

    The float32 values are kept: the first amp_mp optimizer that steps a parameter starts its master
    from them, so that the first update is float32's. If the weight was written in between, say by
    load_state_dict, the master starts from the weight instead.

    Args:
        model: its float32 parameters and buffers are converted; integers, float64 and what is
            already in low precision stay. Parameter objects stay the same, so optimizers, ties and
            hooks live on.
        dtype: torch.bfloat16 or torch.float16.
        keep_fp32: what stays float32: module types, and fnmatch patterns over the names of modules,
            parameters and buffers ("head", "blocks.*.norm1"). Default: normalisation layers. What
            amp_mp.keep_fp32 has marked stays as well. A kept module computes in float32 and returns
            the dtype it was given.

    Raises:
        ValueError: dtype is another one, or a pattern matches nothing (a typo would go unnoticed).
        TypeError: keep_fp32 holds something that is neither type nor string.
    """
    if dtype not in LOW_PRECISION:
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, found {dtype}")
    kept_modules, kept = select(model, keep_fp32)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype != torch.float32 or id(tensor) in kept:
            continue
        if isinstance(tensor, nn.Parameter):
            keep_original(tensor)
        tensor.data = rounded(tensor.detach(), dtype)
        tensor.grad = None  # it has the old dtype
    compute_in_float32(kept_modules)
    return model


def keep_fp32(model: nn.Module, patterns_or_types: Kept) -> nn.Module:
    """Marks what stays float32 when `prepare` or `convert_network` converts; returns the model.

    The marks add to those functions' own keep_fp32 arguments and defaults. They sit on the modules:
    copies and pickles have them, and so does a module that becomes part of another model.

    Args:
        model: where to look. Nothing in it is converted.
        patterns_or_types: one or several nn.Module types, and fnmatch patterns over the names of
            modules, parameters and buffers ("decoder.*", "*.table"). A marked module computes in
            float32 and returns the dtype it was given. A parameter alone is marked for modules
            that mix dtypes themselves; torch's Linear does not.

    Errors in patterns_or_types as for `prepare`'s keep_fp32; nothing is marked then.
    """
    if patterns_or_types is None:  # which is the default elsewhere
        raise TypeError("keep_fp32 takes nn.Module types and strings, found None")
    modules, tensors = select(model, patterns_or_types)
    whole = set(map(id, modules))
    for module in model.modules():
        own = named_tensors(module, recurse=False)
        marks = {name for name, tensor in own.items() if id(tensor) in tensors}
        if id(module) in whole:
            marks.add("")
        if marks:
            setattr(module, MARKS, marks)
    return model


def convert_network(
    model: nn.Module, dtype: torch.dtype, keep_fp32: Kept | None = None
) -> nn.Module:
    """Converts a model's floating-point parameters and buffers in place and returns it, as Apex's.

    Unlike `prepare` it keeps no float32 values aside for masters, takes any floating-point model
    and keeps its gradients. Parameter objects stay the same, so shared ones stay shared. float16
    weights saturate at +-65504, gradients do not.

    Args:
        model: in place. What is kept in it is float32 afterwards, or float64 as it was.
        dtype: torch.float16, torch.bfloat16 or torch.float32.
        keep_fp32: what stays float32, as for `prepare`; errors as there, too.
    """
    if dtype not in NATIVE:
        raise ValueError(
            f"dtype must be torch.float16, torch.bfloat16 or torch.float32, found {dtype}"
        )
    kept_modules, kept = select(model, keep_fp32)
    for tensor in (*model.parameters(), *model.buffers()):
        target = torch.promote_types(tensor.dtype, torch.float32) if id(tensor) in kept else dtype
        if not tensor.is_floating_point() or tensor.dtype == target:
            continue
        tensor.data = rounded(tensor.detach().float(), target)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(target)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants the new weights in one piece, too
    if dtype in LOW_PRECISION:
        compute_in_float32(kept_modules)
    return model


def compute_in_float32(modules: Iterable[nn.Module]) -> None:
    """Makes these modules compute in float32: hooks cast inputs up, and outputs back."""
    for module in modules:
        if _enter_float32 in module._forward_pre_hooks.values():
            continue  # prepared before
        module.register_forward_pre_hook(_enter_float32, with_kwargs=True)
        module.register_forward_hook(_leave_float32)


def select(model: nn.Module, wanted: Kept | None) -> tuple[list[nn.Module], set[int]]:
    """The modules that stay float32, by `prepare`'s keep_fp32 or marks, and their tensors' ids."""
    wanted = NORMALISATIONS if wanted is None else wanted
    modules: dict[int, nn.Module] = {}
    kept: set[int] = set()
    tensors = named_tensors(model)
    for entry in [wanted] if isinstance(wanted, str | type) else wanted:
        if isinstance(entry, type) and issubclass(entry, nn.Module):
            modules |= {id(m): m for m in model.modules() if isinstance(m, entry)}
        elif isinstance(entry, str):
            found = {id(m): m for n, m in model.named_modules() if n and fnmatch.fnmatch(n, entry)}
            matching = fnmatch.filter(tensors, entry)
            if not found and not matching:
                raise ValueError(
                    f"keep_fp32: {entry!r} matches no module or parameter of the model"
                )
            modules |= found
            kept |= {id(tensors[name]) for name in matching}
        else:
            raise TypeError(f"keep_fp32 takes nn.Module types and strings, found {entry!r}")
    for module in model.modules():
        marks = vars(module).get(MARKS, ())
        if "" in marks:
            modules[id(module)] = module
        kept |= {id(getattr(module, name, None)) for name in marks if name}
    for module in modules.values():
        kept |= set(map(id, named_tensors(module).values()))
    return list(modules.values()), kept


def named_tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """The module's parameters and buffers by name; a tied weight has several names."""
    params = module.named_parameters(recurse=recurse, remove_duplicate=False)
    return dict([*params, *module.named_buffers(recurse=recurse, remove_duplicate=False)])


def _enter_float32(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Casts low-precision inputs to float32, unless the module can mix dtypes itself."""
    inputs = [a for a in (*args, *kwargs.values()) if _is_low(a)]
    native = isinstance(module, MIXING) and all(a.device.type == "cpu" for a in inputs)
    if not inputs or native:
        _entered.pop(module, None)
        return args, kwargs
    _entered[module] = inputs[0].dtype
    return tuple(map(_up, args)), {name: _up(a) for name, a in kwargs.items()}


def _leave_float32(module: nn.Module, _args: Any, output: Any) -> Any:
    """Casts the output back to the dtype of the module's inputs."""
    dtype = _entered.pop(module, None)
    is_float32 = isinstance(output, Tensor) and output.dtype == torch.float32
    return output.to(dtype) if dtype is not None and is_float32 else output


def _up(value: Any) -> Any:
    return value.float() if _is_low(value) else value


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in LOW_PRECISION
