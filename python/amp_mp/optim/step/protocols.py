"""What the parts around an optimizer need of it, and what an optimizer needs of a loss scaler."""

from collections.abc import MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.step.gather import Bucket
from amp_mp.optim.step.step_report import StepLog


@runtime_checkable
class Scaler(Protocol):
    """A loss scaler that an optimizer can ask for the scale during the backward pass."""

    def is_enabled(self) -> bool:
        """Whether losses are scaled at all."""

    def scale_on(self, device: torch.device) -> Tensor | None:
        """The factor of the losses, float32 [] on the device, without waiting; None for 1."""


class GradientReader(Protocol):
    """An attachment that may have read gradients during the backward pass."""

    def read(self, bucket: Bucket) -> _C.Measurement:
        """The statistics of a bucket's gradients."""


class Steppable(Protocol):
    """An optimizer as the step and gradient release see it."""

    param_groups: list[Group]
    max_grad_norm: float | None

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """Every parameter's tensors, by name."""

    @property
    def attachment(self) -> GradientReader | None:
        """What works during the backward pass, if anything does."""

    @property
    def log(self) -> StepLog:
        """The verdicts of the steps."""

    def rule(self) -> Rule:
        """The rule for the param_groups as they are now."""

    def hyper(self, index: int) -> _C.Hyper:
        """The numbers of one param_group."""

    def measures(self) -> bool:
        """Whether a step needs the gradients' norms, or whether they overflow."""
