"""apex.normalization: layer and RMS norms that compute in float32, with Apex's rules for dtypes.

The Fused ones return the input's dtype, the Mixed ones the weights', with or without autocast.
memory_efficient has no effect: torch's norms keep what it would keep.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_mp.nn.float32_layers import in_float32

# fmt: off
__all__ = [
    "FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm",
    "fused_layer_norm", "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine",
    "manual_rms_norm", "mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine",
]
# fmt: on


def _norm(norm: Callable[..., Tensor], mixed: bool, input: Tensor, shape: Any, *rest: Any) -> Any:
    """rest: the norm's weights, then eps."""
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    if tuple(input.shape[-len(size) :]) != size:
        raise ValueError(f"input must have shape (*, {size}), found {tuple(input.shape)}")
    dtype = next((w.dtype for w in rest if mixed and isinstance(w, Tensor)), input.dtype)
    wide = input.to(torch.promote_types(input.dtype, dtype))  # so that nothing is rounded twice
    return in_float32(norm, wide, size, *rest).to(dtype)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
    *,
    mixed: bool = False,
) -> Any:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimensions (Ba et al., 2016).

    input: (*, *normalized_shape), otherwise ValueError; floating-point, otherwise TypeError. Of
    float64 computed in float64. Returns input's dtype, or with mixed the weight's.
    """
    return _norm(functional.layer_norm, mixed, input, normalized_shape, weight, bias, eps)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
    *,
    mixed: bool = False,
) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019); as fused_layer_norm_affine."""
    return _norm(functional.rms_norm, mixed, input, normalized_shape, weight, eps)


mixed_dtype_fused_layer_norm_affine = partial(fused_layer_norm_affine, mixed=True)
mixed_dtype_fused_rms_norm_affine = partial(fused_rms_norm_affine, mixed=True)


def fused_layer_norm(input: Tensor, *args: Any, **named: Any) -> Any:
    """fused_layer_norm_affine(input, None, None, normalized_shape, eps, memory_efficient)."""
    return fused_layer_norm_affine(input, None, None, *args, **named)


def fused_rms_norm(input: Tensor, *args: Any, **named: Any) -> Any:
    """fused_rms_norm_affine(input, None, normalized_shape, eps, memory_efficient)."""
    return fused_rms_norm_affine(input, None, *args, **named)


def manual_rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None, eps: float) -> Any:
    """mixed_dtype_fused_rms_norm_affine; without a weight float32, of float64 float64."""
    wide = torch.promote_types(input.dtype, torch.float32)
    given = input.to(wide) if weight is None else input
    return fused_rms_norm_affine(given, weight, normalized_shape, eps, mixed=True)


class _Norm(nn.Module):
    normalized_shape: Any
    eps: Any
    _function: Any = staticmethod(functional.layer_norm)
    _mixed = False

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        if self._mixed and not elementwise_affine:
            raise RuntimeError("elementwise_affine must be True, found False: use the Fused norm")
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, input: Tensor) -> Any:
        """(*, *normalized_shape), in the input's dtype; of the Mixed norms in the weights'."""
        weights = self._parameters.values()
        return _norm(self._function, self._mixed, input, self.normalized_shape, *weights, self.eps)


class FusedLayerNorm(_Norm, nn.LayerNorm):
    """fused_layer_norm_affine as an nn.LayerNorm; elementwise_affine=False has no weights."""


class MixedFusedLayerNorm(FusedLayerNorm):
    """FusedLayerNorm that returns its weights' dtype; RuntimeError without weights."""

    _mixed = True


class FusedRMSNorm(_Norm, nn.RMSNorm):
    """fused_rms_norm_affine as an nn.RMSNorm; else as FusedLayerNorm, also eps 1e-5."""

    _function = staticmethod(functional.rms_norm)


class MixedFusedRMSNorm(FusedRMSNorm):
    """FusedRMSNorm that returns its weight's dtype; RuntimeError without a weight."""

    _mixed = True
