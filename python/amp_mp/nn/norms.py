"""Normalisation layers that compute in float32, whatever they are given and wherever they run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional


class Fp32LayerNorm(nn.LayerNorm):
    """nn.LayerNorm in float32: (x - mean) / sqrt(var + eps) * weight + bias (Ba et al., 2016).

    Input and parameters are turned to float32 on the way in and the result to the input's dtype;
    gradients come back in the dtypes of input and parameters. Also inside autocast. float64 inputs
    are computed in float64. Arguments, parameters and state_dict are nn.LayerNorm's.

    Shapes: input (*, *normalized_shape), output the same.

    Raises:
        TypeError: the input is no floating-point tensor.
        ValueError: its last dimensions are not normalized_shape.
    """

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        dtype = wide("input", input)
        _check_last("input", input, self.normalized_shape)
        with casts_off(input):
            output = functional.layer_norm(
                input.to(dtype),
                self.normalized_shape,
                _as(self.weight, dtype),
                _as(self.bias, dtype),
                self.eps,
            )
        return output.to(input.dtype)


class Fp32RMSNorm(nn.RMSNorm):
    """nn.RMSNorm in float32: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).

    As Fp32LayerNorm otherwise. eps=None is the computing dtype's, 2^-23 for float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        dtype = wide("x", x)
        _check_last("x", x, self.normalized_shape)
        with casts_off(x):
            output = functional.rms_norm(
                x.to(dtype), self.normalized_shape, _as(self.weight, dtype), self.eps
            )
        return output.to(x.dtype)


class Fp32GroupNorm(nn.GroupNorm):
    """nn.GroupNorm in float32 (Wu and He, 2018); as Fp32LayerNorm otherwise.

    Shapes: input (N, num_channels, *), output the same.

    Raises:
        TypeError: the input is no floating-point tensor.
        ValueError: its second dimension is not num_channels.
    """

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        dtype = wide("input", input)
        if input.dim() < 2 or input.size(1) != self.num_channels:
            raise ValueError(
                f"input must have shape (N, {self.num_channels}, *), found {tuple(input.shape)}"
            )
        with casts_off(input):
            output = functional.group_norm(
                input.to(dtype),
                self.num_groups,
                _as(self.weight, dtype),
                _as(self.bias, dtype),
                self.eps,
            )
        return output.to(input.dtype)


def wide(name: str, tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: float32, or float64 for what is float64."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, found {tensor.dtype}")
    return torch.promote_types(tensor.dtype, torch.float32)


def casts_off(tensor: Tensor) -> AbstractContextManager[object]:
    """No autocast on the tensor's device; some devices (meta) know none."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


# Dynamo of torch 2.11 cannot trace the question, so it gets the answer.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def _as(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def _check_last(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape[-len(shape) :] != torch.Size(shape):
        wanted = ", ".join(map(str, ("*", *shape)))
        raise ValueError(f"{name} must have shape ({wanted}), found {tuple(tensor.shape)}")
