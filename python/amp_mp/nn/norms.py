"""Normalisation layers that compute in float32, for inputs of any dtype and inside autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Fp32LayerNorm(nn.LayerNorm):
    """nn.LayerNorm in float32: (x - mean) / sqrt(var + eps) * weight + bias (Ba et al., 2016).

    The input and the parameters are converted to float32, the result to the input's dtype, and
    gradients have the dtypes of the input and the parameters. Autocast changes nothing. float64
    inputs are computed in float64. Arguments, parameters and state_dict are nn.LayerNorm's.

    Input and output: (*, *normalized_shape); ValueError for another input shape, TypeError for an
    input that is not floating-point.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the input; see the class."""
        shape = self.normalized_shape
        _check("input", input, input.shape[-len(shape) :] == shape, ("*", *shape))
        return in_float32(functional.layer_norm, input, shape, self.weight, self.bias, self.eps)


class Fp32RMSNorm(nn.RMSNorm):
    """nn.RMSNorm in float32: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).

    Dtypes, shapes and errors are those of Fp32LayerNorm. eps=None is the epsilon of the dtype it
    computes in, 2^-23 for float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the input; see the class."""
        shape = self.normalized_shape
        _check("x", x, x.shape[-len(shape) :] == shape, ("*", *shape))
        return in_float32(functional.rms_norm, x, shape, self.weight, self.eps)


class Fp32GroupNorm(nn.GroupNorm):
    """nn.GroupNorm in float32 (Wu and He, 2018). Dtypes and errors are those of Fp32LayerNorm.

    Input and output: (N, num_channels, *).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the input; see the class."""
        channels = self.num_channels
        _check("input", input, input.shape[1:2] == (channels,), ("N", channels, "*"))
        arguments = self.num_groups, self.weight, self.bias, self.eps
        return in_float32(functional.group_norm, input, *arguments)


def compute_dtype(name: str, tensor: Tensor) -> torch.dtype:
    """float64 for a float64 tensor, float32 for lower precision; TypeError for an integer one."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, found {tensor.dtype}")
    return torch.promote_types(tensor.dtype, torch.float32)


def autocast_off(tensor: Tensor) -> AbstractContextManager[object]:
    """Turns autocast off on the tensor's device, if it has autocast; meta has none."""
    # Dynamo of torch 2.11 cannot trace is_autocast_available. Of the devices it compiles for, only
    # meta has no autocast. `assume_constant_result` would do too, but it imports all of Dynamo.
    kind, compiling = tensor.device.type, torch.compiler.is_compiling()
    available = kind != "meta" if compiling else torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if available else nullcontext()


def in_float32(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """function(x, *args) in x's compute_dtype, without autocast; the result has x's dtype."""
    dtype = compute_dtype("x", x)
    with autocast_off(x):
        args = tuple(arg.to(dtype) if isinstance(arg, Tensor) else arg for arg in args)
        return function(x.to(dtype), *args).to(x.dtype)


def _check(name: str, x: Tensor, fits: bool, shape: tuple[object, ...]) -> None:
    compute_dtype(name, x)
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} must have shape ({wanted}), found {tuple(x.shape)}")
