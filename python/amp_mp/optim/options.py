"""What every fused optimizer takes, and the ranges of what most take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

from torch import Tensor

from amp_mp.optim.storage import ROUNDINGS


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


def check_options(name: str, options: Options) -> None:
    """Raises TypeError or ValueError naming the argument; name: the optimizer's."""
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise TypeError(
            f"{name} has no argument {sorted(unknown)[0]!r}; it takes its "
            f"own and {', '.join(Options.__annotations__)}"
        )
    if options.get("differentiable"):
        raise ValueError("differentiable=True is not there; use torch.optim")
    rounding = options.get("rounding", "nearest")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}; found {rounding!r}")
    seed = options.get("seed", 0)
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be a whole number of [0, 2^64), found {seed!r}")
    max_grad_norm = options.get("max_grad_norm")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive or None, found {max_grad_norm!r}")


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
