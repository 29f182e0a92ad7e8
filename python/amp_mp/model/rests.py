"""What low-precision parameters need besides themselves to be masters."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.state.formats import beside
from amp_mp.optim.state.original_values import original_of


def rests_of(optimizers: Sequence[Any]) -> Callable[[Tensor], Tensor | None]:
    """A function of a low-precision parameter: its remainder or float32 master, to be read only.

    Or None where the parameter is all there is. Before an optimizer's first step the values that
    `prepare` kept take the master's place.
    """
    states = [optimizer.state for optimizer in optimizers]
    apart: dict[Tensor, Tensor] = {}  # an FP16_Optimizer's masters around an optimizer of torch
    for each in optimizers:
        if hasattr(each, "fp16_groups") and not isinstance(each.optimizer, FusedOptimizer):
            groups = zip(each.fp16_groups, each.fp32_from_fp16_groups, strict=True)
            apart |= {p: m for low, masters in groups for p, m in zip(low, masters, strict=True)}

    def of(param: Tensor) -> Tensor | None:
        for state in states:
            rest = beside(param, state.get(param, {}))
            if rest is not None:
                return rest
        return apart[param] if param in apart else original_of(param)

    return of
