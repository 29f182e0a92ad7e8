"""What FusedOptimizer.attach returns: the base of measuring and of stepping during backward."""

import weakref
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.optim.step.stepper import Stepper


@runtime_checkable
class Scaler(Protocol):
    """A loss scaler that an optimizer can ask for the scale during the backward pass."""

    def is_enabled(self) -> bool:
        """Whether it scales losses."""

    def scale_on(self, device: torch.device) -> Tensor | None:
        """The factor of the losses, float32 [] on the device, without waiting; None for 1."""


class Attachment(ABC):
    """An optimizer's work during backward; `remove()` or the end of a `with` block ends it."""

    releases: ClassVar[bool] = False  # whether gradients are stepped and freed
    scaler: Scaler | None = None

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._optimizer: Any = stepper.optimizer
        self._handles: list[Any] = []

    def _hook(self, model: nn.Module) -> None:
        """Has `_arrive` called with the optimizer's parameters in the model as gradients come."""
        own = {p for group in self._optimizer.param_groups for p in group["params"]}
        ref = weakref.ref(self)  # a model may outlive its optimizer

        def hook(param: Tensor) -> None:
            attachment = ref()
            if attachment is not None and param.grad is not None:
                attachment._arrive(param)

        for param in model.parameters():
            if param in own and param.requires_grad:
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    @abstractmethod
    def _arrive(self, param: Tensor) -> None:
        """Called with a parameter whose gradient has been accumulated."""

    def read(self, bucket: _C.Bucket) -> _C.Measurement:
        """The statistics of a bucket's gradients."""
        return bucket.measure()

    def has_released(self) -> bool:
        """Whether gradients were stepped and freed since the last step."""
        return False

    def forget(self) -> None:  # noqa: B027 (there may be nothing to drop)
        """Drops what is derived from param_groups and state."""

    def remove(self) -> None:
        """Ends the work during backward: from now on `step` does everything. Call after a step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._stepper.attachment is self:
            self._stepper.attachment = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def no_gradient_on(device: torch.device) -> Tensor:
    """The statistics of a parameter without a gradient, float64 [3]."""
    return torch.zeros(3, dtype=torch.float64, device=device)
