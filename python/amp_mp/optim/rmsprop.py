"""RMSprop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.base import FusedOptimizer, Options, check_ranges


class RMSprop(FusedOptimizer):
    """Tieleman & Hinton, lecture 6.5 of "Neural networks for machine learning" (2012), as in torch.

        g = g + weight_decay w
        v = alpha v + (1 - alpha) g^2
        u = g / (sqrt(v) + eps), with momentum b = momentum b + u in its place
        w = w - lr u

    centered=True subtracts the square of the averaged gradient from v (Graves 2013).

    Arguments are torch's, how states are stored, `square_avg`, `momentum_buffer`, and what all
    fused optimizers take: see FusedOptimizer. A centered v is a difference, so it is float32.
    State: step, square_avg, momentum_buffer where a group has momentum or all are centered,
    grad_avg with centered, and master or remainder for low-precision parameters.

    Raises ValueError for an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        square_avg: str | None = None,
        momentum_buffer: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """See the class."""
        check_ranges(lr, (), eps, weight_decay)
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be in [0, 1), found {alpha!r}")
        if not momentum >= 0:
            raise ValueError(f"momentum must not be negative, found {momentum!r}")
        if centered and square_avg not in (None, "float32"):
            raise ValueError(f'square_avg must be "float32" if centered, found {square_avg!r}')
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
        }
        formats = {
            "square_avg": "float32" if centered else square_avg,
            "momentum_buffer": momentum_buffer,
            "grad_avg": None,
        }
        super().__init__(params, defaults, formats, **options)

    def _has_momentum(self) -> bool:
        return any(group["momentum"] != 0 for group in self.param_groups)

    def _centered(self) -> bool:
        kinds = {bool(group["centered"]) for group in self.param_groups}
        if len(kinds) > 1:
            raise ValueError("centered must be the same in all param_groups, found both")
        return kinds == {True}

    def _states(self) -> tuple[str, ...]:
        if self._centered():
            return ("momentum_buffer", "square_avg", "grad_avg")
        return ("momentum_buffer", "square_avg") if self._has_momentum() else ("square_avg",)

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "lr": group["lr"],
            "beta2": group["alpha"],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "momentum": group["momentum"],
        }

    def _operator(self) -> Callable[..., None]:
        if self._centered():
            return _C.centered_rmsprop_
        return _C.rmsprop_ if self._has_momentum() else _C.plain_rmsprop_
