"""RMSprop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.base import FusedOptimizer, check_ranges


class RMSprop(FusedOptimizer):
    """Tieleman & Hinton, lecture 6.5 of "Neural networks for machine learning" (2012), as in torch.

        g = g + weight_decay w
        v = alpha v + (1 - alpha) g^2
        u = g / (sqrt(v) + eps), with momentum b = momentum b + u in its place
        w = w - lr u

    Arguments are torch's, without `centered`; `max_grad_norm`, `check_overflow`, `amp_scaling`, and
    how masters and states are stored, `master`, `square_avg`, `momentum_buffer`: see
    FusedOptimizer. State: step, beta_powers (unused), square_avg, momentum_buffer where a group has
    momentum, and master for low-precision parameters.

    Raises ValueError for an argument out of range, and for centered=True.
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
        maximize: bool = False,
        max_grad_norm: float | None = None,
        check_overflow: bool = False,
        amp_scaling: bool = True,
        master: str = "float32",
        square_avg: str = "float32",
        momentum_buffer: str = "float32",
    ) -> None:
        """See the class."""
        check_ranges(lr, (), eps, weight_decay)
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be in [0, 1), found {alpha!r}")
        if not momentum >= 0:
            raise ValueError(f"momentum must not be negative, found {momentum!r}")
        if centered:
            raise ValueError("centered=True is not there; use torch.optim.RMSprop")
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            max_grad_norm=max_grad_norm,
            check_overflow=check_overflow,
            amp_scaling=amp_scaling,
            master=master,
            formats={"square_avg": square_avg, "momentum_buffer": momentum_buffer},
        )

    def _has_momentum(self) -> bool:
        return any(group["momentum"] != 0 for group in self.param_groups)

    def _states(self) -> tuple[str, ...]:
        return ("square_avg", "momentum_buffer") if self._has_momentum() else ("square_avg",)

    def _hyper(self, group: dict[str, Any]) -> _C.Hyper:
        return _C.Hyper(
            lr=float(group["lr"]),
            beta2=group["alpha"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            maximize=group["maximize"],
        )

    def _operator(self) -> Callable[..., None]:
        return _C.rmsprop_ if self._has_momentum() else _C.plain_rmsprop_
