"""What every fused optimizer takes, and the ranges of what most take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

from torch import Tensor


class Options(TypedDict, total=False):
    """Keyword arguments that every fused optimizer takes; see FusedOptimizer."""

    maximize: bool
    max_grad_norm: float | None
    check_overflow: bool
    amp_scaling: bool
    memory: str | None
    master: str | None
    rounding: str
    seed: int
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


def check_ranges(lr: Any, betas: Iterable[float], eps: float, weight_decay: float) -> None:
    """Raises ValueError naming the argument; a tensor lr has to have one element."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"lr must be a number or a tensor of one element, found shape {tuple(lr.shape)}"
        )
    if not float(lr) >= 0:
        raise ValueError(f"lr must not be negative, found {lr!r}")
    for i, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}] must be in [0, 1), found {beta!r}")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, found {eps!r}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, found {weight_decay!r}")
