"""Gradient release: each parameter is stepped, and its gradient freed, as soon as there is one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_mp import _C
from amp_mp.optim.attach import NATIVE, Attachment
from amp_mp.optim.decide import decide, new_verdict, scalar, terms
from amp_mp.optim.reducer import reducer_of
from amp_mp.optim.state import Bucket, Place, all_current, fill_bucket, places_of

if TYPE_CHECKING:
    from amp_mp.optim.base import FusedOptimizer
    from amp_mp.scaling.grad_scaler import GradScaler


class Release(Attachment):
    """Steps each parameter in a hook; `finish` is what is left for the optimizer's step."""

    def __init__(
        self,
        optimizer: FusedOptimizer,
        model: nn.Module,
        scaler: GradScaler | None,
        clip: str,
    ) -> None:
        """See FusedOptimizer.attach."""
        super().__init__(optimizer)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._clip = clip
        # Gradients of several devices, and of gloo's threads, come at the same time.
        self._lock = threading.Lock()
        self._places: dict[Tensor, Place] = {}
        self._located = False  # whether _places is known to be right in this iteration
        self._buckets: dict[Tensor, Bucket] = {}  # each of one parameter
        self._rows: dict[Tensor, Tensor] = {}  # statistics since the last step, float64 [3]
        self._stepped: set[Tensor] = set()  # those whose gradient is still there
        self._previous: Tensor | None = None  # norm of the last clean step, -1 before; float64 []
        self._locate()
        self._reducer = reducer_of(model) if isinstance(model, DistributedDataParallel) else None
        if self._reducer is None:
            self._hook(model)
        else:
            self._reducer.add(self)

    def forget(self) -> None:
        """See Attachment."""
        self._located, self._previous = False, None
        self._buckets.clear()

    def remove(self) -> None:
        """See Attachment."""
        super().remove()
        if self._reducer is not None:
            self._reducer.discard(self)

    # One parameter.

    def _arrive(self, param: Tensor) -> None:
        with self._lock, torch.no_grad():
            self._step(param)

    def arrive_averaged(self, param: Tensor, grad: Tensor) -> None:
        """Steps one of a DistributedDataParallel's parameters with a gradient from its bucket."""
        with self._lock, torch.no_grad():
            kept, param.grad = param.grad, grad
            try:
                if kept is None and param in self._places:
                    raise RuntimeError(
                        f"{self._places[param].label} has taken no part in this backward; with "
                        "release=True every parameter has to under DistributedDataParallel: "
                        "whether another rank has a gradient of it is not known yet"
                    )
                self._step(param)
            finally:
                param.grad = kept

    def _step(self, param: Tensor) -> None:
        if not self._located:
            self._locate()
        place = self._places.get(param)
        if place is None:
            return
        optimizer = self._optimizer
        bucket = self._gather(param, place)
        measured = bucket.slots.measure() if self._measures() else None
        # groups() wants one set of numbers for each group up to the parameter's; its own are read.
        hypers = [optimizer._hyper(optimizer.param_groups[place.group])] * (place.group + 1)
        scale, max_norm = self._scale(param.device), optimizer.max_grad_norm
        on: _C.Terms | None
        if measured is not None and max_norm is not None and self._previous is not None:
            verdict = self._clipped_as_before(measured.rows[1], scale, max_norm)
            on = None
        else:
            verdict = new_verdict(param.device)
            on = terms(param.device, scale=scale, max_norm=max_norm if measured else None)
        optimizer._operator()(bucket.slots, hypers, verdict, measured, on)
        if measured is not None:
            self._add(param, measured.rows[0])
        if self._reducer is None:
            param.grad = None
        else:
            self._stepped.add(param)

    def _measures(self) -> bool:
        return self._optimizer._asks() or self.scaler is not None

    def _scale(self, device: torch.device) -> Tensor | None:
        """What losses are multiplied with, read without waiting; None for 1."""
        return scalar(self.scaler._get_scale_async(), device) if self.scaler is not None else None

    def _clipped_as_before(self, total: Tensor, scale: Tensor | None, max_norm: float) -> Tensor:
        """A verdict on the parameter with the last step's norm in place of its own."""
        assert self._previous is not None
        norm = self._previous.to(total.device)
        squares = (norm if scale is None else norm * scale.double()).square()
        squares = torch.where(norm >= 0, squares, total[0])
        total = torch.stack([squares, total[1], total[2]])
        return decide(total.device, [total], terms(total.device, scale=scale, max_norm=max_norm))

    def _add(self, param: Tensor, row: Tensor) -> None:
        old = self._rows.get(param)
        if old is not None:  # another backward of the same iteration
            row = torch.stack([old[0] + row[0], torch.maximum(old[1], row[1]), old[2] + row[2]])
        self._rows[param] = row

    # Where things are.

    def _gather(self, param: Tensor, place: Place) -> Bucket:
        """As gather_buckets, for one parameter; made anew only where its tensors have changed."""
        optimizer = self._optimizer
        bucket = self._buckets.get(param)
        if bucket is not None and all_current([bucket], [[param]], optimizer._states()):
            return bucket
        bucket = Bucket(param.device, [param], everything=[param])
        fill_bucket(optimizer, bucket, [place])
        self._buckets[param] = bucket
        return bucket

    def _locate(self) -> None:
        """Finds the parameters in their groups; ValueError where two of them share memory."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        if not _C.same_items(lists, list(self._places)):
            places = dict(places_of(self._optimizer))
            _check_memory(places)
            self._places = places
            self._buckets.clear()
        self._located = True

    # All of them.

    def totals(self) -> dict[torch.device, Tensor]:
        """What was measured since the last step, summed as measuring all at once would."""
        return {device: rows[-1] for device, rows in self._statistics().items()}

    def _statistics(self) -> dict[torch.device, Tensor]:
        with self._lock, torch.no_grad():
            self._step_others()
            if not self._measures():
                raise RuntimeError(
                    "release=True: the gradients are gone and nothing asked for measuring them; "
                    "attach with scaler="
                )
            by_device: dict[torch.device, list[Tensor]] = {}
            for param in self._places:
                rows = by_device.setdefault(param.device, [])
                if param in self._rows:
                    rows.append(self._rows[param])
                elif self._optimizer.state.get(param):  # counts as in gather_buckets
                    rows.append(torch.zeros(3, dtype=torch.float64, device=param.device))
            return {
                device: _C.combine(
                    torch.stack(rows)
                    if rows
                    else torch.zeros(0, 3, dtype=torch.float64, device=device)
                )
                for device, rows in by_device.items()
            }

    def _step_others(self) -> None:
        """Parameters that no hook knows: not the model's, or unfrozen or added since."""
        if not self._located:
            self._locate()
        for param in self._places:
            if param.grad is not None and param not in self._stepped:
                self._step(param)

    def finish(self) -> None:
        """Ends the iteration: the optimizer's step."""
        optimizer = self._optimizer
        if self.scaler is None and hasattr(optimizer, "grad_scale"):
            raise RuntimeError(
                "release=True has stepped with scaled gradients: attach with scaler=, an "
                "amp_mp.GradScaler; other loss scalers come too late"
            )
        optimizer._outcomes.forget()
        if self._measures():
            statistics = self._statistics()
            device = next(iter(statistics))
            scale = self._scale(device)
            reports = optimizer._outcomes.reports_on(device)
            on = terms(device, scale=scale, reports=reports)
            verdict = decide(device, list(statistics.values()), on)
            optimizer._outcomes.add(verdict, True)
            if self._clip == "previous" and self._rows:
                before = torch.full_like(verdict[2], -1.0)
                before = before if self._previous is None else self._previous
                self._previous = torch.where(verdict[0] != 0, before, verdict[2])
        else:
            with self._lock, torch.no_grad():
                self._step_others()
        self._rows.clear()
        self._stepped.clear()
        self._located = False


def _check_memory(places: dict[Tensor, Place]) -> None:
    """Raises ValueError where two parameters share memory, which no step of one alone sees."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in places:
        if param.requires_grad and param.dtype in NATIVE:
            by_device.setdefault(param.device, []).append(param)
    for device, params in by_device.items():
        count = len(params)
        _C.Slots(
            params=params,
            masters=[None] * count,
            states=[],
            scales=[None] * count,
            formats=[],
            stochastic=[False] * count,
            clocks=list(torch.zeros(count, 4, dtype=torch.float64, device=device)),
            groups=[0] * count,
            numbers=[0] * count,
            firsts=[0] * count,
            names=[places[param].label for param in params],
        )
