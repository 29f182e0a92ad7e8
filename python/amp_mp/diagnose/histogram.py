"""How numbers spread over the binades, and what a loss scale makes of them in a format."""

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from amp_mp.dtypes import NATIVE, check_dtype
from amp_mp.scaling.policies import check_scale

EXPONENTS = range(-149, 128)  # floor(log2 |x|) of every finite float32 except 0

# Each exponent e has two bins, |x| = 2^e and |x| > 2^e: float16 rounds 2^-25 to 0, but not what is
# larger. inf and NaN follow because the index computed from a float32's bits goes on to them.
_INF = 2 * len(EXPONENTS)
_NAN, _ZERO, _BINS = _INF + 1, _INF + 2, _INF + 3
_CHUNK = 1 << 22  # elements counted at a time: keeps the temporaries below about 100 MB


class Limits(NamedTuple):
    """Where rounding to a format, to nearest even, changes its result; exact as Python floats."""

    lost: float  # the largest |x| that becomes 0: half the smallest subnormal, a tie
    normal: float  # the smallest normal number
    largest: float  # the largest finite number
    overflow: float  # the smallest |x| that becomes inf: half an ulp above `largest`


def limits(dtype: torch.dtype) -> Limits:
    """The limits of float16 (2^-25, 2^-14, 65504, 65520), bfloat16 or float32, or ValueError."""
    check_dtype(dtype, NATIVE)
    info = torch.finfo(dtype)
    half = info.smallest_normal * info.eps / 2
    binade = info.max / (2 - info.eps)  # where the largest binade starts
    return Limits(half, info.smallest_normal, info.max, binade * (2 - info.eps / 2))


class Diagnosis(NamedTuple):
    """What becomes of numbers x that are multiplied by a scale and rounded to a format.

    lost, subnormal, overflow: the shares, from 0 to 1, whose product becomes 0 (in float16 up to
    2^-25), is above that and below the smallest normal number (2^-14), or becomes inf (from 65520
    on); elements that are 0, inf or NaN are not counted. headroom: the number of binades by which
    the scale can grow until the largest |x| exceeds the format's largest number; None if all are 0,
    inf or NaN.
    """

    scale: float
    dtype: torch.dtype
    lost: float
    subnormal: float
    overflow: float
    headroom: int | None


def _count(bins: int | slice, doc: str) -> Any:
    return property(lambda self: int(self._bins[bins].sum()), doc=doc)


class ExponentHistogram:
    """Counts of floor(log2 |x|) from -149 to 127, of zeros, inf and NaN, and the largest |x|.

    Made by `of`; ExponentHistogram() is empty. Histograms add up with +, also across devices. The
    counting happens on the tensor's device, and reading a number waits for it.
    """

    def __init__(self, bins: Tensor | None = None, top: Tensor | None = None) -> None:
        self._bins = torch.zeros(_BINS, dtype=torch.int64) if bins is None else bins
        # The bits of the largest finite |x|; as integers they have the same order as the floats.
        self._top = torch.zeros((), dtype=torch.int32) if top is None else top

    @classmethod
    def of(cls, tensor: Tensor, scale: float = 1.0) -> Self:
        """Counts the elements of tensor / scale.

        tensor: float16, bfloat16 or float32, or TypeError; any shape, any layout with strides.
        scale: finite and above 0, or ValueError. The division is in float32. The counting reads
        bits, so it is exact also where the processor flushes subnormals to 0.
        """
        if tensor.dtype not in NATIVE:
            expected = "a histogram takes float16, bfloat16 and float32 tensors"
            raise TypeError(f"{expected}, found {tensor.dtype}")
        check_scale(scale, "scale")
        result = cls()
        # A tensor, since on a GPU torch multiplies by a number's reciprocal, which rounds twice.
        divisor = torch.full((), scale, dtype=torch.float64, device=tensor.device).float()
        for part in torch.split(tensor.detach().reshape(-1), _CHUNK) if tensor.numel() else ():
            values = part.float() if scale == 1 else part.float() / divisor
            bits = values.view(torch.int32) & 0x7FFFFFFF
            # A subnormal is bits * 2^-149. The integer `bits` as a float is a normal number with
            # the same fraction, whose exponent is 149 too high.
            normal = torch.where(bits < 1 << 23, bits.float().view(torch.int32) - (149 << 23), bits)
            exponent = (normal >> 23) - 127 - EXPONENTS[0]
            index = 2 * exponent + ((normal & 0x7FFFFF) != 0)
            bins = torch.bincount(index.masked_fill(bits == 0, _ZERO), minlength=_BINS)
            result += cls(bins, bits.masked_fill(bits >= 0x7F800000, 0).max())
        return result

    def __add__(self, other: Self) -> Self:
        bins, top = self._bins.to(other._bins.device), self._top.to(other._top.device)
        return type(self)(bins + other._bins, torch.maximum(top, other._top))

    @property
    def counts(self) -> Tensor:
        """int64 [277] on the CPU: how many elements have each of EXPONENTS."""
        return self._bins[:_INF].view(-1, 2).sum(1).cpu()

    zeros = _count(_ZERO, "How many elements are zero, of either sign.")
    infs = _count(_INF, "How many elements are inf, of either sign.")
    nans = _count(_NAN, "How many elements are NaN.")
    elements = _count(slice(None), "How many elements there are in all.")

    @property
    def amax(self) -> float:
        """The largest finite |x|, exact; 0 if there is none."""
        return float(self._top.view(torch.float32))

    def at(self, scale: float, dtype: torch.dtype = torch.float16) -> Diagnosis:
        """What becomes of the elements, times scale, in a format.

        Exact where scale is a power of two. Else a bin that an edge cuts is split as if its
        elements were spread evenly; yet overflow is 0 only if nothing overflows. ValueError for
        another dtype than float16, bfloat16 and float32, and a scale not finite or not above 0.
        """
        edges = limits(dtype)
        check_scale(scale, "scale")
        low = torch.tensor([scale * 2.0**e for e in EXPONENTS], dtype=torch.float64)
        powers, above = self._bins[:_INF].cpu().view(-1, 2).unbind(1)  # at low, in (low, 2 low)

        def below(edge: float, at: bool = False) -> float:  # with at: or at the edge
            whole = powers[low <= edge if at else low < edge].sum()
            return int(whole) + float((above * (edge / low - 1).clamp(0, 1)).sum())

        count = int(powers.sum() + above.sum())
        lost, small = below(edges.lost, at=True), below(edges.normal)
        over = count - below(edges.overflow)
        over = max(over, 1) if self.amax * scale >= edges.overflow else 0
        n = max(1, count)
        headroom = _floor_log2(edges.largest, self.amax * scale)
        return Diagnosis(scale, dtype, lost / n, (small - lost) / n, over / n, headroom)

    def largest_safe_log2_scale(self, dtype: torch.dtype = torch.float16) -> int | None:
        """floor(log2(largest number of the format / amax)), exact; None where amax is 0."""
        return _floor_log2(limits(dtype).largest, self.amax)

    def __repr__(self) -> str:
        return f"ExponentHistogram({self.elements} elements, amax={self.amax:g})"


def _floor_log2(a: float, b: float) -> int | None:
    """floor(log2(a / b)) without rounding; None for b = 0."""
    if b == 0:
        return None
    (fraction_a, exponent_a), (fraction_b, exponent_b) = math.frexp(a), math.frexp(b)
    return exponent_a - exponent_b - (fraction_a < fraction_b)
