"""Optimizers at work during the backward pass: FusedOptimizer.attach."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import TensorWeakRef

from amp_mp import _C
from amp_mp.optim.state import Bucket

if TYPE_CHECKING:
    from amp_mp.optim.base import FusedOptimizer
    from amp_mp.scaling.grad_scaler import GradScaler

CLIPS = ("parameter", "previous")
NATIVE = (torch.float32, torch.float16, torch.bfloat16)


class Attachment(ABC):
    """What FusedOptimizer.attach returns; `remove()`, or the end of a `with` block, ends it."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        """See FusedOptimizer.attach."""
        self._optimizer = optimizer
        self._handles: list[Any] = []

    def _hook(self, model: nn.Module) -> None:
        """Has `_arrive` called with every parameter of both whose gradient has been accumulated."""
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
        """Called with a parameter whose gradient is there."""

    def forget(self) -> None:  # noqa: B027 (there may be nothing to drop)
        """Drops what is derived from param_groups and state."""

    def remove(self) -> None:
        """From now on the optimizer works in `step` alone, as ever. Call it after a step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._optimizer._attachment is self:
            self._optimizer._attachment = None

    def __enter__(self) -> Attachment:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Removes it."""
        self.remove()


class Measure(Attachment):
    """Reads each gradient in the hook, for the step."""

    def __init__(self, optimizer: FusedOptimizer, model: nn.Module) -> None:
        """See FusedOptimizer.attach."""
        super().__init__(optimizer)
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
        """What is known of the gradient as it is now."""
        grad = param.grad
        if grad is None:
            return torch.zeros(3, dtype=torch.float64, device=param.device)
        if param not in self._rows:
            return None
        ref, memory, version, row = self._rows[param]
        fresh = ref() is grad and grad.data_ptr() == memory and grad._version == version
        return row if fresh else None

    def read(self, bucket: Bucket) -> _C.Measurement:
        """bucket.slots.measure(), the same bits; reads only what the hooks have not seen so."""
        rows = [self._row(param) for param in bucket.params]
        stale = [i for i, row in enumerate(rows) if row is None]
        grads = [bucket.params[i].grad for i in stale]
        if len(stale) == len(rows) or not all(g is not None and _is_plain(g) for g in grads):
            return bucket.slots.measure()
        if grads:
            for i, row in zip(stale, _C.measure(grads), strict=False):
                rows[i] = row
        known = torch.stack([row for row in rows if row is not None])
        return _C.Measurement(_C.combine(known))


def _is_plain(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.layout == torch.strided and grad.dtype in NATIVE


def attach(
    optimizer: FusedOptimizer,
    model: nn.Module,
    *,
    release: bool,
    measure: bool,
    scaler: GradScaler | None,
    clip: str,
) -> Attachment:
    """See FusedOptimizer.attach."""
    from amp_mp.optim.release import Release

    _check(optimizer, model, release, measure, scaler, clip)
    found: Attachment
    found = Release(optimizer, model, scaler, clip) if release else Measure(optimizer, model)
    optimizer._attachment = found
    return found


def _check(
    optimizer: FusedOptimizer, model: Any, release: bool, measure: bool, scaler: Any, clip: str
) -> None:
    """Raises what `attach` is to raise; afterwards nothing is left that can be wrong."""
    from amp_mp.scaling.grad_scaler import GradScaler

    if optimizer._attachment is not None:
        raise RuntimeError("the optimizer is attached already; remove() that attachment first")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model)}")
    if release == measure:
        raise ValueError(
            "release and measure: exactly one of them has to be True, found "
            f"{release!r} and {measure!r}; release=True measures where anything needs it"
        )
    if clip not in CLIPS:
        raise ValueError(f"clip must be one of {', '.join(CLIPS)}; found {clip!r}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(
            f"scaler must be an amp_mp.GradScaler, found {type(scaler)}: torch's own asserts that "
            "it has seen gradients, which are gone by then"
        )
    if scaler is not None and measure:
        raise ValueError("scaler is for release=True; with measure=True a scaler needs no telling")
    if scaler is not None and not optimizer._step_supports_amp_scaling:
        raise ValueError(
            "scaler goes with amp_scaling=True only: without, it looks for gradients to unscale"
        )
    own = {p for group in optimizer.param_groups for p in group["params"]}
    if not any(p in own for p in model.parameters()):
        raise ValueError("model holds none of the optimizer's parameters")
    wrapped = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if wrapped and measure:
        raise ValueError(
            "measure=True does not go with DistributedDataParallel: gradients are averaged after "
            "they could be measured"
        )
    if wrapped and not isinstance(model, DistributedDataParallel):
        raise ValueError("model holds a DistributedDataParallel; attach to that one itself")
    if any(m.find_unused_parameters for m in wrapped):
        raise ValueError(
            "model: release=True does not go with find_unused_parameters=True; which parameters "
            "have no gradient is known only after the last one has been averaged"
        )
