"""Measures gradients during the backward pass, while they are in the cache."""

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.optim.backward.attachment import Attachment, no_gradient_on
from amp_mp.optim.step.stepper import Stepper


class Measure(Attachment):
    """Reads each gradient in its hook, so that the step need not."""

    def __init__(self, stepper: Stepper, model: nn.Module) -> None:
        super().__init__(stepper)
        # The gradient that was read, its memory and version then, and what was found.
        self._rows: dict[Tensor, tuple[TensorWeakRef, int, int, Tensor]] = {}
        self._hook(model)

    def remove(self) -> None:
        """See Attachment."""
        super().remove()
        self._rows.clear()

    def _arrive(self, param: Tensor) -> None:
        grad = param.grad
        if grad is not None and _is_plain(grad):  # any other is named by the step
            row = _C.measure([grad])[0]
            self._rows[param] = TensorWeakRef(grad), grad.data_ptr(), grad._version, row

    def _row(self, param: Tensor) -> Tensor | None:
        """The statistics of the gradient, if it has not changed since they were read."""
        grad = param.grad
        if grad is None:
            return no_gradient_on(param.device)
        if param not in self._rows:
            return None
        ref, memory, version, row = self._rows[param]
        fresh = ref() is grad and grad.data_ptr() == memory and grad._version == version
        return row if fresh else None

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
        known = torch.stack(read)
        return _C.Measurement(_C.combine(known))


def _is_plain(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.layout == torch.strided and grad.dtype in NATIVE
