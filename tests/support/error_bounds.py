"""Bounds of rounding errors, carried through an expression beside its exact value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Half a unit in the last place relative to the number, and half the smallest subnormal number.
UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
TINY = {
    torch.float64: 0.0,
    torch.float32: 2.0**-150,
    torch.float16: 2.0**-25,
    torch.bfloat16: 2.0**-134,
}


@dataclass
class Bounded:
    """The value in float64, and the most by which a computed one differs from it."""

    value: Tensor
    error: Tensor

    @classmethod
    def of(cls, value: Tensor) -> Bounded:
        exact = value.detach().double()
        return cls(exact, torch.zeros_like(exact))

    def rounded(self, *dtypes: torch.dtype) -> Bounded:
        """After one rounding to each of these."""
        error = self.error
        for dtype in dtypes:
            error = error + UNIT[dtype] * (self.value.abs() + error) + TINY[dtype]
        return Bounded(self.value, error)

    def holds(self, found: Tensor) -> bool:
        difference = (found.detach().double() - self.value).abs()
        return bool((difference <= self.error).all())

    def __add__(self, other: Bounded) -> Bounded:
        return Bounded(self.value + other.value, self.error + other.error)


def product(
    function: Callable[[Tensor, Tensor], Tensor],
    a: Bounded,
    b: Bounded,
    terms: int,
    dtype: torch.dtype,
) -> Bounded:
    """A bilinear function whose sums of so many terms are accumulated in float32 at least.

    The sum of the terms' absolute values, with both factors as large as they may be, times
    (1 + unit)^(terms + 1) - 1, bounds what adding and multiplying does in any order.
    """
    most = function(a.value.abs() + a.error, b.value.abs() + b.error)
    from_factors = most - function(a.value.abs(), b.value.abs())
    unit = min(UNIT[dtype], UNIT[torch.float32])
    adding = ((1 + unit) ** (terms + 1) - 1) * most
    # float64 arithmetic of the bound itself
    slack = 2.0**-40 * most
    result = Bounded(function(a.value, b.value), from_factors + adding + slack)
    return result.rounded(dtype)
