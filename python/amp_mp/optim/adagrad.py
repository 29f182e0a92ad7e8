"""Adagrad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.base import FusedOptimizer, check_ranges


class Adagrad(FusedOptimizer):
    """Duchi, Hazan & Singer, "Adaptive subgradient methods" (2011), as torch.optim.Adagrad.

        g = g + weight_decay w
        s = s + g^2, from initial_accumulator_value on
        w = w - lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)

    Arguments are torch's; `max_grad_norm`, `check_overflow`, `amp_scaling`, and how masters and the
    sum are stored, `master`, `sum`: see FusedOptimizer. State: step, beta_powers (unused), sum, and
    master for low-precision parameters.

    Raises ValueError for an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        check_overflow: bool = False,
        amp_scaling: bool = True,
        master: str = "float32",
        sum: str = "float32",
    ) -> None:
        """See the class."""
        check_ranges(lr, (), eps, weight_decay)
        for name, value in (
            ("lr_decay", lr_decay),
            ("initial_accumulator_value", initial_accumulator_value),
        ):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, found {value!r}")
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            max_grad_norm=max_grad_norm,
            check_overflow=check_overflow,
            amp_scaling=amp_scaling,
            master=master,
            formats={"sum": sum},
        )

    def _states(self) -> tuple[str, ...]:
        return ("sum",)

    def _fill(self, name: str, state: Tensor, group: dict[str, Any]) -> None:
        start = group["initial_accumulator_value"]
        state.fill_(start**0.5 if self.formats["sum"] == "float16_root" else start)

    def _hyper(self, group: dict[str, Any]) -> _C.Hyper:
        return _C.Hyper(
            lr=float(group["lr"]),
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )

    def _operator(self) -> Callable[..., None]:
        return _C.adagrad_
