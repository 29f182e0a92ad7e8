"""Norms, softmax and attention in float32, for inputs of any dtype and inside autocast."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from amp_mp import _C
from amp_mp.casting import products
from amp_mp.dtypes import LOW_PRECISION, NATIVE
from amp_mp.torch_private import fused_rms_norm
from amp_mp.torch_versions import has_autocast


class Fp32LayerNorm(nn.LayerNorm):
    """nn.LayerNorm in float32: (x - mean) / sqrt(var + eps) * weight + bias (Ba et al., 2016).

    The input and the parameters are converted to float32, the result to the input's dtype, and
    gradients have the dtypes of the input and the parameters. Autocast changes nothing. float64
    inputs are computed in float64. Arguments, parameters and state_dict are nn.LayerNorm's. Input
    and output: (*, *normalized_shape). Raises ValueError for another input shape, TypeError for an
    input that is not floating-point.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the input; see the class."""
        shape = self.normalized_shape
        _check_shape("input", input, input.shape[-len(shape) :] == shape, "*", *shape)
        return in_float32(functional.layer_norm, input, shape, self.weight, self.bias, self.eps)


class Fp32RMSNorm(nn.RMSNorm):
    """nn.RMSNorm in float32: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).

    As Fp32LayerNorm. eps=None is the epsilon of the dtype it computes in, 2^-23 for float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the input; see the class."""
        shape = self.normalized_shape
        _check_shape("x", x, x.shape[-len(shape) :] == shape, "*", *shape)
        return in_float32(functional.rms_norm, x, shape, self.weight, self.eps)


class Fp32GroupNorm(nn.GroupNorm):
    """nn.GroupNorm in float32 (Wu and He, 2018), of (N, num_channels, *); else as Fp32LayerNorm."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the input; see the class."""
        groups, channels = self.num_groups, self.num_channels
        _check_shape("input", input, input.shape[1:2] == (channels,), "N", channels, "*")
        return in_float32(functional.group_norm, input, groups, self.weight, self.bias, self.eps)


def fp32_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax in float32, returned in x's dtype; also inside autocast. float64 stays float64.

    x: floating-point, any shape, otherwise TypeError. dim: the dimension that sums to 1; default:
    the last; ValueError if x has no such dimension. Elements that are all -inf give NaN, as with
    torch; `attention_weights` gives 0.
    """
    return _softmax(torch.softmax, x, dim)


def fp32_log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """log(fp32_softmax(x, dim)) by torch.log_softmax; arguments and errors are fp32_softmax's."""
    return _softmax(torch.log_softmax, x, dim)


def _softmax(function: Callable[..., Tensor], x: Tensor, dim: int) -> Tensor:
    _compute_dtype("x", x)
    dims = max(x.dim(), 1)  # torch lets a tensor without dimensions have one
    if not -dims <= dim < dims:
        raise ValueError(f"dim must be a dimension of x, of shape {tuple(x.shape)}, found {dim}")
    return in_float32(function, x, dim)


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(query key^T * scale + mask) in float32 (Vaswani et al., 2017, equation 1).

    The logits are float32, also inside autocast, and float64 for float64: float16 overflows above
    65504. A row that is masked everywhere is 0, not softmax's NaN, and its gradient is 0.

    query: (..., L, E). key: (..., S, E); the leading dimensions broadcast against query's. mask:
    broadcasts to (..., L, S); boolean: True takes part, as in torch's
    scaled_dot_product_attention; floating point: added to the logits, -inf masks. scale: default:
    1 / sqrt(E). Returns (..., L, S) in query's dtype. Raises TypeError for tensors that are not
    floating-point (a mask may be boolean), ValueError for shapes that do not fit.
    """
    dtype = torch.promote_types(_compute_dtype("query", query), _compute_dtype("key", key))
    _check_shapes(query, key, mask)
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
        # The mask decides, not the logits: their -inf may also be an overflow in the query.
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
    other arguments, and the errors, are those of attention_weights. Returns (..., L, D) in value's
    dtype, or in autocast's.
    """
    weights = attention_weights(query, key, mask, scale)
    rows = weights.size(-1)
    fits = value.dim() >= 2 and value.size(-2) == rows
    _check_shape("value", value, fits, "...", rows, "D", why=f" for key's {rows} rows")
    _broadcast("value", value, "the weights'", weights)
    return weights.to(value.dtype) @ value


def autocast_off(tensor: Tensor) -> AbstractContextManager[object]:
    """Turns autocast off on the tensor's device, if it has autocast; meta has none."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if has_autocast(kind) else nullcontext()


def in_float32(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """function(x, *args) in x's compute dtype, without autocast; the result has x's dtype."""
    dtype = _compute_dtype("x", x)
    with autocast_off(x):
        if _is_fused(function, x, *args):
            if not is_compiling():
                _C.products.fuse_norms()
            is_rms = function is functional.rms_norm
            return fused_rms_norm(x, *args)[0] if is_rms else function(x, *args)
        args = tuple(arg.to(dtype) if isinstance(arg, Tensor) else arg for arg in args)
        return function(x.to(dtype), *args).to(x.dtype)


def _is_fused(function: Callable[..., Tensor], x: Tensor, *args: Any) -> bool:
    """Whether a norm computes in float32 by itself, without an activation in float32."""
    tensors, compiling = [arg for arg in args if isinstance(arg, Tensor)], is_compiling()
    weights, is_low = {tensor.dtype for tensor in tensors}, x.dtype in LOW_PRECISION
    if x.device.type != "cpu" or not weights <= {x.dtype, torch.float32}:
        return False
    if function is functional.rms_norm:
        plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in (x, *tensors))
        return plain and x.dtype in NATIVE and not compiling
    if function is functional.group_norm:  # torch sums gradients of low-precision weights in these
        return is_low and weights == {torch.float32}
    chosen = not compiling or products.is_chosen(x.dtype)
    return function is functional.layer_norm and is_low and chosen


def _compute_dtype(name: str, tensor: Tensor) -> torch.dtype:
    """float64 for a float64 tensor, float32 for lower precision; TypeError for an integer one."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, found {tensor.dtype}")
    return torch.promote_types(tensor.dtype, torch.float32)


def _check_shape(name: str, x: Tensor, fits: bool, *shape: object, why: str = "") -> None:
    _compute_dtype(name, x)
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} must have shape ({wanted}){why}, found {tuple(x.shape)}")


def _check_shapes(query: Tensor, key: Tensor, mask: Tensor | None) -> None:
    for name, x in (("query", query), ("key", key)):
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least two dimensions, found {tuple(x.shape)}")
    if (size := query.size(-1)) != key.size(-1):
        raise ValueError(f"key must have query's last dimension, {size}, found {tuple(key.shape)}")
    wanted = (*_broadcast("key", key, "query's", query), query.size(-2), key.size(-2))
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"mask must be boolean or floating point, found {mask.dtype}")
    try:
        mask.expand(wanted)
    except RuntimeError:
        message = f"mask must broadcast to the weights' shape {wanted}, found {tuple(mask.shape)}"
        raise ValueError(message) from None


def _broadcast(name: str, x: Tensor, others: str, other: Tensor) -> torch.Size:
    leading = other.shape[:-2]
    try:
        return torch.Size(torch.broadcast_shapes(x.shape[:-2], leading))  # type: ignore[no-untyped-call]
    except RuntimeError:
        wanted = f"{name}'s leading dimensions must broadcast with {others}, {tuple(leading)}"
        raise ValueError(f"{wanted}, found {tuple(x.shape)}") from None
