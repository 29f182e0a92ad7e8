"""Softmax and attention with float32 logits."""

import math

import torch
from torch import Tensor

from amp_mp.nn.norms import autocast_off, compute_dtype, in_float32


def fp32_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax in float32, returned in x's dtype; also inside autocast. float64 stays float64.

    x: floating-point, any shape, otherwise TypeError. dim: the dimension that sums to 1; default:
    the last; ValueError where x has none such. Elements that are all -inf give NaN, as torch's do;
    `attention_weights` gives 0.
    """
    return in_float32(torch.softmax, x, _check_dim(x, dim))


def fp32_log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """log(fp32_softmax(x, dim)) by torch.log_softmax; arguments and errors are fp32_softmax's."""
    return in_float32(torch.log_softmax, x, _check_dim(x, dim))


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(query key^T * scale + mask) in float32 (Vaswani et al., 2017, equation 1).

    The logits are computed in float32, also inside autocast: a float16 product would overflow
    above 65504, and -1e9 in a float16 mask would be -inf. A row that is masked everywhere is 0,
    where softmax gives NaN, and its gradient is 0. float64 is computed in float64.

    Args:
        query: (..., L, E).
        key: (..., S, E); the leading dimensions broadcast against query's.
        mask: broadcasts to (..., L, S). Boolean: True takes part, as in torch's
            scaled_dot_product_attention. Floating point: added to the logits, -inf masks.
        scale: default: 1 / sqrt(E).

    Returns:
        (..., L, S) in query's dtype.

    Raises TypeError for tensors that are not floating-point (a mask may be boolean), ValueError for
    shapes that do not fit.
    """
    dtype = torch.promote_types(compute_dtype("query", query), compute_dtype("key", key))
    shape = _logits_shape(query, key)
    if mask is not None:
        _check_mask(mask, shape)
    scale = 1 / math.sqrt(max(query.size(-1), 1)) if scale is None else scale
    with autocast_off(query):
        logits = (query.to(dtype) * scale) @ key.to(dtype).transpose(-2, -1)
        if mask is None:
            return torch.softmax(logits, -1).to(query.dtype)
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(hidden := ~mask, -math.inf)
        else:
            logits = logits + (mask := mask.to(dtype))
            hidden = mask == -math.inf
        # The mask is asked, not the logits: their -inf may also be an overflow in the query.
        empty = hidden.all(-1, keepdim=True)
        # Filled before and after softmax: its gradient would multiply a NaN inside by 0, to NaN.
        weights = torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        return weights.to(query.dtype)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """attention_weights(query, key, mask, scale) @ value; 0 where everything is masked.

    The float32 weights are rounded to value's dtype for the second product, whose terms cannot
    overflow because weights are at most 1.

    value: (..., S, D), floating-point; the leading dimensions broadcast against the weights'. The
    other arguments, and the errors, are those of attention_weights.

    Returns (..., L, D) in value's dtype, or in autocast's.
    """
    weights = attention_weights(query, key, mask, scale)
    compute_dtype("value", value)
    if value.dim() < 2 or value.size(-2) != weights.size(-1):
        wanted = f"(..., {weights.size(-1)}, D) for key's {weights.size(-1)} rows"
        raise ValueError(f"value must have shape {wanted}, found {tuple(value.shape)}")
    _leading_dimensions("value", value, "the weights'", weights)
    return weights.to(value.dtype) @ value


def _check_dim(x: Tensor, dim: int) -> int:
    compute_dtype("x", x)
    dims = max(x.dim(), 1)  # torch lets a tensor without dimensions have one
    if not -dims <= dim < dims:
        raise ValueError(f"dim must be a dimension of x, of shape {tuple(x.shape)}, found {dim}")
    return dim


def _logits_shape(query: Tensor, key: Tensor) -> torch.Size:
    """The shape of query key^T; ValueError where there is no such product."""
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() < 2:
            found = tuple(tensor.shape)
            raise ValueError(f"{name} must have at least two dimensions, found {found}")
    if query.size(-1) != key.size(-1):
        raise ValueError(
            f"key must have query's last dimension, {query.size(-1)}, found {tuple(key.shape)}"
        )
    leading = _leading_dimensions("key", key, "query's", query)
    return torch.Size((*leading, query.size(-2), key.size(-2)))


def _leading_dimensions(name: str, tensor: Tensor, others: str, other: Tensor) -> torch.Size:
    """The dimensions of both tensors but the last two, broadcast."""
    own, leading = tensor.shape[:-2], other.shape[:-2]
    try:
        return torch.Size(torch.broadcast_shapes(own, leading))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ValueError(
            f"{name}'s leading dimensions must broadcast with {others}, {tuple(leading)}, "
            f"found {tuple(tensor.shape)}"
        ) from None


def _check_mask(mask: Tensor, shape: torch.Size) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"mask must be boolean or floating point, found {mask.dtype}")
    try:
        mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"mask must broadcast to the weights' shape {tuple(shape)}, found {tuple(mask.shape)}"
        ) from None
