"""What the step and the work during backward need of an optimizer and of a loss scaler."""

from collections.abc import MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Group, Rule, Shape
from amp_mp.optim.step.step_report import StepLog


@runtime_checkable
class Scaler(Protocol):
    """A loss scaler that an optimizer can ask for the scale during the backward pass."""

    def is_enabled(self) -> bool: ...

    # The factor of the losses, float32 [] on the device, without waiting; None for 1.
    def scale_on(self, device: torch.device) -> Tensor | None: ...


class Steppable(Protocol):
    """An optimizer as the step and the work during backward see it; see FusedOptimizer."""

    param_groups: list[Group]
    max_grad_norm: float | None
    process_groups: tuple[Any, ...]
    attachment: Any  # an Attachment (backward/attachment.py, which imports this) or None

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]: ...
    @property
    def amp_scaling(self) -> bool: ...
    @property
    def log(self) -> StepLog: ...
    def group_rules(self) -> list[Rule]: ...
    def hyper(self, index: int, shape: Shape | None = None) -> _C.Hyper: ...
    def measures(self) -> bool: ...
