"""Apex's conversions of a whole model, and marks for what stays float32 in any conversion."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from amp_mp.master.prepare import MARKS, NORMALISATIONS, compute_in_float32, select
from amp_mp.optim.originals import LOW_PRECISION, rounded

Kept = Iterable[type[nn.Module] | str]


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
    modules, tensors = select(model, patterns_or_types)
    whole = set(map(id, modules))
    for module in model.modules():
        own = {**module._parameters, **module._buffers}
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
        keep_fp32: module types, and fnmatch patterns over the names of modules, parameters and
            buffers. Default: normalisation layers. What the function keep_fp32 has marked is kept
            as well. A kept module computes in float32 and returns the dtype it was given.

    Raises:
        ValueError: dtype is another one, or a pattern matches nothing.
        TypeError: keep_fp32 holds something that is neither type nor string.
    """
    if dtype not in (*LOW_PRECISION, torch.float32):
        raise ValueError(
            f"dtype must be torch.float16, torch.bfloat16 or torch.float32, found {dtype}"
        )
    kept_modules, kept = select(model, NORMALISATIONS if keep_fp32 is None else keep_fp32)
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


def BN_convert_float(model: nn.Module) -> nn.Module:  # noqa: N802 (Apex's name)
    """Turns every batch norm of the model, with its statistics, into float32; Apex's function.

    In place; returns the model. What low precision has rounded stays rounded.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.float()
    return model


class tofp16(nn.Module):  # noqa: N801 (Apex's name)
    """A layer that casts its input to low precision, unless that is no floating-point tensor.

    A plain cast: what is beyond float16 becomes inf.

    Args:
        dtype: of the output.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        """See the class."""
        super().__init__()
        self.dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        """Any shape; token ids and masks pass unchanged."""
        return input.to(self.dtype) if input.is_floating_point() else input

    def extra_repr(self) -> str:
        """The dtype."""
        return str(self.dtype)


def network_to_half(model: nn.Module, dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """The model, converted in place, behind a layer that casts its input; Apex's function.

    Batch norms and the other normalisation layers stay float32, and so does what keep_fp32 has
    marked. As in Apex, names in the result's state_dict start with "1.".

    Args:
        model: see `convert_network`.
        dtype: torch.float16 or torch.bfloat16, which is the fast one on a CPU.

    Raises:
        ValueError: another dtype.
    """
    if dtype not in LOW_PRECISION:
        raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, found {dtype}")
    return nn.Sequential(tofp16(dtype), convert_network(model, dtype))
