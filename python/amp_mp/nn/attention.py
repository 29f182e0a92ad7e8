"""Softmax and attention with float32 logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amp_mp.nn.norms import casts_off, wide


def fp32_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax in float32, returned in x's dtype; also inside autocast. float64 stays float64.

    Args:
        x: of any shape.
        dim: the dimension that sums to 1. A row of nothing but -inf gives NaN, as torch's does;
            `attention_weights` gives 0.

    Raises:
        TypeError: x is no floating-point tensor.
        ValueError: x has no such dimension.
    """
    dtype = _check_dim(x, dim)
    with casts_off(x):
        return torch.softmax(x.to(dtype), dim).to(x.dtype)


def fp32_log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of fp32_softmax, without the detour; arguments and errors are the same."""
    dtype = _check_dim(x, dim)
    with casts_off(x):
        return torch.log_softmax(x.to(dtype), dim).to(x.dtype)


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(query key^T * scale + mask) in float32 (Vaswani et al., 2017, equation 1).

    The logits are float32 from the start, also inside autocast: in float16 the product would
    overflow at 65504, and -1e9 in a mask would be -inf. A row that is masked altogether is 0, where
    softmax would give NaN, and so is its gradient. float64 is computed in float64.

    Args:
        query: (..., L, E).
        key: (..., S, E); the leading dimensions broadcast against query's.
        mask: broadcasts to (..., L, S). Boolean: True takes part, as in torch's
            scaled_dot_product_attention. Floating point: added to the logits, -inf masks.
        scale: default: 1 / sqrt(E).

    Returns:
        (..., L, S) in query's dtype.

    Raises:
        TypeError: query or key is no floating-point tensor, or mask neither that nor boolean.
        ValueError: shapes that do not fit.
    """
    dtype = torch.promote_types(wide("query", query), wide("key", key))
    shape = _logits_shape(query, key)
    if mask is not None:
        _check_mask(mask, shape)
    if scale is None:
        scale = 1 / math.sqrt(max(query.size(-1), 1))
    with casts_off(query):
        logits = (query.to(dtype) * scale) @ key.to(dtype).transpose(-2, -1)
        if mask is None:
            return torch.softmax(logits, -1).to(query.dtype)
        if mask.dtype == torch.bool:
            hidden = ~mask
            logits = logits.masked_fill(hidden, -math.inf)
        else:
            mask = mask.to(dtype)
            hidden = mask == -math.inf
            logits = logits + mask
        # From the mask and not from the logits, where -inf may also be an overflow of the query.
        nothing = hidden.all(-1, keepdim=True)
        # Filled on both sides: a NaN inside would come back through softmax's gradient, as 0 * NaN.
        weights = torch.softmax(logits.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
        return weights.to(query.dtype)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """attention_weights(query, key, mask, scale) @ value; 0 where everything is masked.

    The weights are float32's, rounded to value's dtype for the second product, whose terms cannot
    overflow: weights are at most 1.

    Args:
        query: (..., L, E).
        key: (..., S, E).
        value: (..., S, D); the leading dimensions broadcast.
        mask: see attention_weights.
        scale: see attention_weights.

    Returns:
        (..., L, D) in value's dtype, or autocast's.

    Raises:
        TypeError: see attention_weights; value likewise.
        ValueError: see attention_weights; value likewise.
    """
    wide("value", value)
    shape = _logits_shape(query, key)
    if value.dim() < 2 or value.size(-2) != shape[-1]:
        raise ValueError(
            f"value must have shape (..., {shape[-1]}, D) for key's {shape[-1]} rows, "
            f"found {tuple(value.shape)}"
        )
    if _broadcast(value.shape[:-2], shape[:-2]) is None:
        raise ValueError(
            f"value's leading dimensions must broadcast with {tuple(shape[:-2])}, "
            f"found {tuple(value.shape)}"
        )
    return attention_weights(query, key, mask, scale).to(value.dtype) @ value


def _check_dim(x: Tensor, dim: int) -> torch.dtype:
    dtype = wide("x", x)
    dims = max(x.dim(), 1)  # torch lets a single number have one
    if not -dims <= dim < dims:
        raise ValueError(f"dim must be a dimension of x, of shape {tuple(x.shape)}, found {dim}")
    return dtype


def _logits_shape(query: Tensor, key: Tensor) -> torch.Size:
    """Of query key^T, if there is one."""
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() < 2:
            raise ValueError(
                f"{name} must have at least two dimensions, found {tuple(tensor.shape)}"
            )
    if query.size(-1) != key.size(-1):
        raise ValueError(
            f"key must have query's last dimension, {query.size(-1)}, found {tuple(key.shape)}"
        )
    batch = _broadcast(query.shape[:-2], key.shape[:-2])
    if batch is None:
        raise ValueError(
            f"key's leading dimensions must broadcast with query's, {tuple(query.shape[:-2])}, "
            f"found {tuple(key.shape)}"
        )
    return torch.Size((*batch, query.size(-2), key.size(-2)))


def _check_mask(mask: Tensor, shape: torch.Size) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"mask must be boolean or floating point, found {mask.dtype}")
    if _broadcast(mask.shape, shape) != shape:
        raise ValueError(
            f"mask must broadcast to the weights' shape {tuple(shape)}, found {tuple(mask.shape)}"
        )


def _broadcast(first: torch.Size, second: torch.Size) -> torch.Size | None:
    """None if they do not."""
    try:
        return torch.Size(torch.broadcast_shapes(first, second))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
