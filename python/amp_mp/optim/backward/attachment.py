"""What FusedOptimizer.attach returns: its base, and the one that measures during backward."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.optim.step.stepper import Stepper
from amp_mp.param_groups import params_in


@runtime_checkable
class Scaler(Protocol):
    """A loss scaler that an optimizer can ask for the scale during the backward pass."""

    def is_enabled(self) -> bool:
        """Whether it scales losses."""

    def scale_on(self, device: torch.device) -> Tensor | None:
        """The factor of the losses, float32 [] on the device, without waiting; None for 1."""


class Attachment(AbstractContextManager["Attachment"], ABC):
    """An optimizer's work during backward; `remove()` or the end of a `with` block ends it."""

    releases: ClassVar[bool] = False  # whether gradients are stepped and freed
    scaler: Scaler | None = None

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._optimizer: Any = stepper.optimizer
        self._handles: list[Any] = []

    def _hook(self, model: nn.Module) -> None:
        """Has `_arrive` called with the optimizer's parameters in the model as gradients come."""
        own = set(params_in(self._optimizer.param_groups))
        ref = weakref.ref(self)  # a model may outlive its optimizer

        def hook(param: Tensor) -> None:
            attachment = ref()
            if attachment is not None and param.grad is not None:
                attachment._arrive(param)

        for param in model.parameters():
            if param in own and param.requires_grad and (self.releases or not param.is_cuda):
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

    def forget(self) -> None:
        """Drops what is derived from param_groups and state."""

    def remove(self) -> None:
        """Ends the work during backward: from now on `step` does everything. Call after a step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._stepper.attachment is self:
            self._stepper.attachment = None

    def __exit__(self, *_: object) -> None:
        self.remove()


def no_gradient_on(device: torch.device) -> Tensor:
    """The statistics of a parameter without a gradient, float64 [3]."""
    return torch.zeros(3, dtype=torch.float64, device=device)


class Measure(Attachment):
    """Reads each gradient in its hook, so that the step need not; on a CPU.

    On CUDA hooks would launch two kernels for each parameter; a step's pass over all costs one.
    """

    def __init__(self, stepper: Stepper, model: nn.Module) -> None:
        super().__init__(stepper)
        # By the gradient that was read: its stamp then, and what was found.
        self._rows: MutableMapping[Tensor, tuple[_C.Stamp, Tensor]] = WeakTensorKeyDictionary()
        self._hook(model)

    def _arrive(self, param: Tensor) -> None:
        grad = param.grad
        if grad is not None and grad.is_cpu and _is_plain(grad):  # any other: the step's pass
            self._rows[grad] = _C.Stamp(grad), _C.measure([grad])[0]

    def _row(self, param: Tensor) -> Tensor | None:
        """The statistics of the gradient, if it has not changed since they were read."""
        grad = param.grad
        if grad is None:
            return no_gradient_on(param.device)
        if grad not in self._rows:
            return None
        stamp, row = self._rows[grad]
        return row if stamp.still(grad) else None

    def read(self, bucket: _C.Bucket) -> _C.Measurement:
        """As bucket.measure(), bit for bit; reads only gradients that changed since."""
        params = bucket.params
        rows = [self._row(param) for param in params]
        stale = [i for i, row in enumerate(rows) if row is None]
        grads = [params[i].grad for i in stale]
        if len(stale) == len(rows) or not all(g is not None and _is_plain(g) for g in grads):
            return bucket.measure()
        if grads:
            for i, row in zip(stale, _C.measure(grads), strict=False):
                rows[i] = row
        read = [row for row in rows if row is not None]
        _C.used_on_current_stream(read)  # a backward pass may be on another
        return _C.Measurement(_C.combine(torch.stack(read)))


def _is_plain(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.layout == torch.strided and grad.dtype in NATIVE
