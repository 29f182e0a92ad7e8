"""The stored formats, for single tensors: what a state or a split master holds.

    name          bytes  what it is
    split32       2 + 2  a float32 as a bfloat16 or float16 weight and a remainder
    split24       2 + 1  the same, rounded to 24 bits
    split20       2 + 1/2  a float32 as a bfloat16 weight and four bits; stochastic rounding
    bfloat16      2      stochastic rounding
    float16       2      nearest, saturating at +-65504
    float16_root  2      the square root of a number >= 0, in float16
    ue8m8         2      a number >= 0: 8 bits of exponent, 8 of mantissa; stochastic rounding
    m8            1 + 1/16  groups of 32 with a bfloat16 scale, codes of nearly a cube; stochastic
    i8            1 + 1/16  groups of 32 with a bfloat16 scale, codes in equal steps; stochastic
    log8          1 + 1/32  a number >= 0: groups of 32 with a power of two as scale, logarithmic
                  codes with a floor of 2^-26 of the scale in place of 0; stochastic

Every NaN stays a NaN, and makes its group NaN where there are groups. docs/formats.md has
errors and ranges.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, check_choice, check_dtype
from amp_mp.optim.state import stored_formats as stored

SPLITS = ("split32", "split24", "split20")
NAMES = (*SPLITS, *dict.fromkeys((*stored.MOMENTS, *stored.SQUARES)))


def encode(
    x: Tensor,
    format: str,
    *,
    weight_dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    step: int = 0,
    number: int = 0,
) -> tuple[Tensor, ...]:
    """Stores float32 numbers.

    Args:
        x: any shape, float32, dense. A negative number becomes NaN in float16_root and ue8m8; in
            log8 all its group does.
        format: one of the module's.
        weight_dtype: the dtype of a split's first part, torch.bfloat16 or torch.float16; of
            split20's torch.bfloat16.
        seed, step, number: choose the random bits of stochastic rounding; the optimizers pass a
            group's seed, the parameter's step and its number among the optimizer's parameters.

    Returns:
        The arrays: for a split (weight, remainder), for m8, i8 and log8 (codes, scales), else one.
        split20's second, uint8, has the remainders of two neighbours in a byte, the first in its
        low half.

    Raises:
        TypeError: x is not float32.
        ValueError: another format or weight_dtype, or a format of groups for a number of elements
            that is not a multiple of 32, or split20 for an odd one.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"x must be float32, found {x.dtype}")
    check_choice("format", format, NAMES)
    native = "bfloat16_stochastic" if format == "bfloat16" else format
    if format in SPLITS:
        dtypes = (torch.bfloat16,) if format == "split20" else LOW_PRECISION
        check_dtype(weight_dtype, dtypes, "weight_dtype")
        native = stored.split_name(format, weight_dtype)
    group = stored.NATIVE_FORMATS[native]["group"]
    if x.numel() % group:
        groups = f"{format} stores groups of {group}"
        raise ValueError(f"{groups}; x has {x.numel()} elements, shape {tuple(x.shape)}")
    data, second = _C.encode(x, native, seed=seed, step=step, tensor_index=number)
    return (data,) if second is None else (data, second)


def decode(parts: Sequence[Tensor], format: str) -> Tensor:
    """The float32 numbers that the arrays of `encode` hold, in the shape of the first.

    format: one of the module's. Raises ValueError for another format, or arrays that are not of it.
    """
    check_choice("format", format, NAMES)
    count = 2 if format in SPLITS or format in stored.GROUPED else 1
    if len(parts) != count:
        raise ValueError(f"{format} has {count} array(s), found {len(parts)}")
    data, second = parts[0], parts[1] if count == 2 else None
    if format not in SPLITS or second is None:
        return _C.decode(data, second, format)
    native = stored.split_name(format, data.dtype)
    if stored.REMAINDER_FORMATS.get(second.dtype) != format or native not in stored.NATIVE_FORMATS:
        raise ValueError(
            f"{format} is a low-precision weight and a remainder, found dtypes {data.dtype} "
            f"and {second.dtype}"
        )
    return _C.decode(data, second, native)


__all__ = ["NAMES", "decode", "encode"]
