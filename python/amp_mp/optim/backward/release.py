"""Gradient release: steps each parameter, and frees its gradient, as soon as it is complete."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.optim.backward.attachment import Attachment
from amp_mp.optim.backward.ddp_hook import ddp_hook_of
from amp_mp.optim.step.decide import decide, decide_inputs, new_verdict
from amp_mp.optim.step.gather import Bucket, ParamInfo, all_current, fill_bucket, param_infos
from amp_mp.optim.step.handed import Handed
from amp_mp.optim.step.protocols import Scaler, Steppable


class Release(Attachment):
    """Steps each parameter in a hook; `finish` does what remains for the optimizer's step."""

    releases = True

    def __init__(
        self,
        optimizer: Steppable,
        model: nn.Module,
        scaler: Scaler | None,
        clip: str,
        on_remove: Callable[[Attachment], None],
    ) -> None:
        super().__init__(optimizer, on_remove)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._clip = clip
        # Gradients of several devices, and of gloo's threads, come at the same time.
        self._lock = threading.Lock()
        self._infos: dict[Tensor, ParamInfo] = {}
        self._located = False  # whether _infos is known to be right in this iteration
        self._buckets: dict[Tensor, Bucket] = {}  # each of one parameter
        self._rows: dict[Tensor, Tensor] = {}  # statistics since the last step, float64 [3]
        self._stepped: set[Tensor] = set()  # those whose gradient is still there
        self._previous: Tensor | None = None  # norm of the last clean step, -1 before; float64 []
        self._locate()
        self._ddp_hook = ddp_hook_of(model) if isinstance(model, DistributedDataParallel) else None
        if self._ddp_hook is None:
            self._hook(model)
        else:
            self._ddp_hook.add(self)

    def forget(self) -> None:
        """See Attachment."""
        self._located, self._previous = False, None
        self._buckets.clear()

    def remove(self) -> None:
        """See Attachment."""
        super().remove()
        if self._ddp_hook is not None:
            self._ddp_hook.discard(self)

    # One parameter.

    def _arrive(self, param: Tensor) -> None:
        with self._lock, torch.no_grad():
            self._step(param)

    def arrive_averaged(self, param: Tensor, grad: Tensor) -> None:
        """Steps one of a DistributedDataParallel's parameters with a gradient from its bucket."""
        with self._lock, torch.no_grad():
            kept, param.grad = param.grad, grad
            try:
                if kept is None and param in self._infos:
                    raise RuntimeError(
                        f"{self._infos[param].label} has taken no part in this backward; with "
                        "release=True every parameter has to under DistributedDataParallel: "
                        "whether another rank has a gradient of it is not known yet"
                    )
                self._step(param)
            finally:
                param.grad = kept

    def _step(self, param: Tensor) -> None:
        if not self._located:
            self._locate()
        info = self._infos.get(param)
        if info is None:
            return
        optimizer = self._optimizer
        bucket = self._gather(param, info)
        measured = bucket.slots.measure() if self._measures() else None
        # The native step takes numbers for each group up to the parameter's and reads its own.
        hypers = [optimizer.hyper(info.group)] * (info.group + 1)
        scale, max_norm = self._scale(param.device), optimizer.max_grad_norm
        inputs: _C.DecideInputs | None
        if measured is not None and max_norm is not None and self._previous is not None:
            verdict = self._clipped_as_before(measured.rows[1], scale, max_norm)
            inputs = None
        else:
            verdict = new_verdict(param.device)
            clip = max_norm if measured else None
            inputs = decide_inputs(param.device, scale=scale, max_norm=clip)
        operator = _C.operators[optimizer.rule().operator]
        operator(bucket.slots, hypers, verdict, measured, inputs)
        if measured is not None:
            self._add(param, measured.rows[0])
        if self._ddp_hook is None:
            param.grad = None
        else:
            self._stepped.add(param)

    def _measures(self) -> bool:
        return self._optimizer.measures() or self.scaler is not None

    def _scale(self, device: torch.device) -> Tensor | None:
        """The factor of the losses on the device, read without waiting; None for 1."""
        return self.scaler.scale_on(device) if self.scaler is not None else None

    def _clipped_as_before(self, total: Tensor, scale: Tensor | None, max_norm: float) -> Tensor:
        """A verdict on the parameter that clips by the last step's norm instead of its own."""
        assert self._previous is not None
        norm = self._previous.to(total.device)
        squares = (norm if scale is None else norm * scale.double()).square()
        squares = torch.where(norm >= 0, squares, total[0])
        total = torch.stack([squares, total[1], total[2]])
        inputs = decide_inputs(total.device, scale=scale, max_norm=max_norm)
        return decide(total.device, [total], inputs)

    def _add(self, param: Tensor, row: Tensor) -> None:
        old = self._rows.get(param)
        if old is not None:  # another backward of the same iteration
            row = torch.stack([old[0] + row[0], torch.maximum(old[1], row[1]), old[2] + row[2]])
        self._rows[param] = row

    # Where things are.

    def _gather(self, param: Tensor, info: ParamInfo) -> Bucket:
        """The bucket of one parameter, made anew only where one of its tensors was replaced."""
        optimizer = self._optimizer
        bucket = self._buckets.get(param)
        if bucket is not None and all_current([bucket], [[param]], optimizer.rule()):
            return bucket
        bucket = Bucket(param.device, [param], everything=[param])
        groups, states = optimizer.param_groups, optimizer.state
        fill_bucket(optimizer.rule(), groups, states, bucket, [info])
        self._buckets[param] = bucket
        return bucket

    def _locate(self) -> None:
        """Finds the parameters in their groups; ValueError where two of them share memory."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        if not _C.same_items(lists, list(self._infos)):
            infos = dict(param_infos(self._optimizer.param_groups))
            _check_memory(infos)
            self._infos = infos
            self._buckets.clear()
        self._located = True

    # All of them.

    def totals(self) -> dict[torch.device, Tensor]:
        """The statistics since the last step, added in the order of measuring all at once."""
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
            for param in self._infos:
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
        """Steps parameters without a hook: outside the model, or unfrozen or added since."""
        if not self._located:
            self._locate()
        for param in self._infos:
            if param.grad is not None and param not in self._stepped:
                self._step(param)

    def finish(self, handed: Handed) -> None:
        """Ends the iteration, in place of the optimizer's step."""
        optimizer = self._optimizer
        if self.scaler is None and handed.scale is not None:
            raise RuntimeError(
                "release=True has stepped with scaled gradients: attach with scaler=, an "
                "amp_mp.GradScaler; other loss scalers come too late"
            )
        optimizer.log.forget()
        if self._measures():
            statistics = self._statistics()
            device = next(iter(statistics))
            scale = self._scale(device)
            reports = optimizer.log.reports_on(device)
            inputs = decide_inputs(device, scale=scale, reports=reports)
            verdict = decide(device, list(statistics.values()), inputs)
            optimizer.log.add(verdict, True)
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


def _check_memory(infos: dict[Tensor, ParamInfo]) -> None:
    """Raises ValueError where two parameters share memory: a step of one cannot see it."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in infos:
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
            tensor_indices=[0] * count,
            firsts=[0] * count,
            names=[infos[param].label for param in params],
        )
