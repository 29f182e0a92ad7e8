"""Converts a whole model to a dtype, and marks what stays float32 in every conversion."""

import torch
from torch import nn

from amp_mp.dtypes import LOW_PRECISION, NATIVE, rounded
from amp_mp.model.prepare import MARKS, Kept, compute_in_float32, named_tensors, select


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

    Raises:
        ValueError: a pattern matches nothing (a typo would go unnoticed); nothing is marked.
        TypeError: an entry is neither type nor string; nothing is marked.
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
