"""Gradient release: steps each parameter, and frees its gradient, as soon as it is complete."""

import threading

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.optim.backward.attachment import Attachment, no_gradient_on
from amp_mp.optim.backward.ddp_hook import ddp_hook_of
from amp_mp.optim.backward.previous_norm import PreviousNorm
from amp_mp.optim.backward.refuse_shards import refuse_shards, warn_of_nonfinite
from amp_mp.optim.rule import Rule
from amp_mp.optim.step.decide import decide, decide_inputs, new_verdict
from amp_mp.optim.step.gather import Bucket, ParamInfo, param_infos
from amp_mp.optim.step.group_options import refuse_formats
from amp_mp.optim.step.handed import Handed
from amp_mp.optim.step.protocols import Scaler, Steppable
from amp_mp.sharding.gradients import GradientStatistics, local_gradient
from amp_mp.sharding.shards import is_dtensor, local_of


class Release(Attachment):
    """Steps each parameter in a hook; `finish` does what remains for the optimizer's step."""

    releases = True

    def __init__(
        self, optimizer: Steppable, model: nn.Module, scaler: Scaler | None, clip: str
    ) -> None:
        super().__init__(optimizer)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._clip = clip
        # Gradients of several devices, and of gloo's threads, come at the same time.
        self._lock = threading.Lock()
        self._infos: dict[Tensor, ParamInfo] = {}
        self._located = False  # whether _infos is known to be right in this iteration
        self._buckets: dict[Tensor, Bucket] = {}  # each of one parameter
        self._rows: dict[Tensor, Tensor] = {}  # statistics since the last step, float64 [3]
        self._stepped: set[Tensor] = set()  # those whose gradient is still there
        self._previous = PreviousNorm()
        self._locate()
        self._ddp_hook = ddp_hook_of(model) if isinstance(model, DistributedDataParallel) else None
        if self._ddp_hook is None:
            self._hook(model)
        else:
            self._ddp_hook.steppers.add(self)

    def has_released(self) -> bool:
        """See Attachment."""
        return bool(self._rows)

    def forget(self) -> None:
        """See Attachment."""
        self._located = False
        self._previous.forget()
        self._buckets.clear()

    def remove(self) -> None:
        """See Attachment."""
        super().remove()
        if self._ddp_hook is not None:
            self._ddp_hook.steppers.discard(self)

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
        self._locate()
        info = self._infos.get(param)
        if info is None:
            return
        optimizer, device = self._optimizer, local_of(param).device
        is_shard = is_dtensor(param)
        if is_shard:
            refuse_shards(optimizer, self.scaler, self._clip)
            if self._postpones():
                return
        rules = optimizer.group_rules()
        bucket = self._gather(param, info, rules)
        bucket.find_gradients()
        slots = bucket.slots
        measured = slots.measure() if self._measures() else None
        hypers = [optimizer.hyper(*kind) for kind in bucket.kinds]
        max_norm = None if measured is None else optimizer.max_grad_norm
        scale = self._scale(device)
        inputs = decide_inputs(device, scale=scale, max_norm=max_norm)
        operator = _C.operators[bucket.rule.operator]
        if measured is None or max_norm is None or not self._previous.is_there():
            verdict, own = new_verdict(device), inputs
        else:
            total = self._previous.statistics(measured.rows[1], scale, is_shard)
            verdict, own = decide(device, [total], inputs), None
        operator(slots, hypers, verdict, measured, own, gather_updates=bucket.updates)
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

    def _add(self, param: Tensor, row: Tensor) -> None:
        old = self._rows.get(param)
        if old is not None:  # another backward of the same iteration
            _C.used_on_current_stream([old])
            row = torch.stack([old[0] + row[0], torch.maximum(old[1], row[1]), old[2] + row[2]])
        self._rows[param] = row

    # Where things are.

    def _gather(self, param: Tensor, info: ParamInfo, rules: list[Rule]) -> Bucket:
        """The bucket of one parameter, made anew only where one of its tensors was replaced."""
        optimizer, bucket = self._optimizer, self._buckets.get(param)
        groups, states = optimizer.param_groups, optimizer.state
        if bucket is None or not bucket.is_of(states, rules, groups):
            if bucket is not None:
                bucket.refuse_new_memory(groups)
            rule, group = rules[info.group], groups[info.group]
            refuse_formats(rule, group, info.group)
            if rule.directions is not None:
                rule.directions.refuse(group, param, info.label)
            bucket = Bucket(local_of(param).device, [(param, info)], rule, groups, states)
            self._buckets[param] = bucket
        return bucket

    def _locate(self) -> None:
        """Finds the parameters in their groups; ValueError where two of them share memory."""
        if self._located:
            return
        groups = self._optimizer.param_groups
        if not _C.same_items([group["params"] for group in groups], list(self._infos)):
            infos = dict(param_infos(groups))
            trained = [p for p in infos if p.requires_grad and p.dtype in NATIVE]
            # A step of one parameter cannot see the memory of the others.
            _C.check_weights([local_of(p) for p in trained], [infos[p].label for p in trained])
            self._infos = infos
            self._whole = GradientStatistics(list(infos), self._optimizer.process_groups)
            self._buckets.clear()
        self._located = True

    # All of them.

    def _postpones(self) -> bool:
        """Whether shards wait for `finish`: there is no norm of an earlier step to clip by yet."""
        waits = self._measures() and not self._previous.is_there()
        return waits and self._whole.is_needed

    def totals(self) -> dict[torch.device, Tensor]:
        """The statistics since the last step, added in the order of measuring all at once."""
        with self._lock, torch.no_grad():
            self._step_others()
            _C.used_on_current_stream(list(self._rows.values()))  # of backward passes' streams
            if not self._measures():
                raise RuntimeError(
                    "release=True: the gradients are gone and nothing asked for measuring them; "
                    "attach with scaler="
                )
            if self._whole.is_needed:
                return self._whole_totals()
            rows: dict[torch.device, list[Tensor]] = {}
            for param in self._infos:
                own = rows.setdefault(param.device, [])
                if param in self._rows:
                    own.append(self._rows[param])
                elif self._optimizer.state.get(param):  # counts, as in Gathered
                    own.append(no_gradient_on(param.device))
            return {
                device: _C.combine(torch.stack(own))[-1] if own else no_gradient_on(device)
                for device, own in rows.items()
            }

    def _whole_totals(self) -> dict[torch.device, Tensor]:
        device = local_of(next(iter(self._infos))).device
        none = no_gradient_on(device)
        rows = [self._rows[p].to(device) if p in self._rows else none for p in self._infos]
        return {device: self._whole.total_of(torch.stack(rows))}

    def _step_others(self) -> None:
        """Steps parameters without a hook: outside the model, or unfrozen or added since."""
        self._locate()
        if self._postpones():
            grads = [local_gradient(param, info.label) for param, info in self._infos.items()]
            self._previous.known = self._whole.total(grads)
        for param in self._infos:
            if param.grad is not None and param not in self._stepped:
                self._step(param)

    def _describe(self, _: float) -> str:
        """The parameters whose gradients were inf or NaN, by the statistics of this iteration."""
        bad = [self._infos[p].label for p, row in self._rows.items() if float(row[2]) > 0]
        return "\n".join(bad)

    def finish(self, handed: Handed) -> None:
        """Ends the iteration, in place of the optimizer's step."""
        log = self._optimizer.log
        if self.scaler is None and handed.scale is not None:
            raise RuntimeError(
                "release=True has stepped with scaled gradients: attach with scaler=, an "
                "amp_mp.GradScaler; other loss scalers come too late"
            )
        log.forget()
        if self._measures():
            totals = self.totals()
            device = next(iter(totals))
            reports = log.reports_on(device)
            inputs = decide_inputs(device, scale=self._scale(device), reports=reports)
            verdict = decide(device, [total[None] for total in totals.values()], inputs)
            log.add(verdict, True)
            log.warn_of_skips(type(self._optimizer).__name__, self._describe)
            if self._clip == "previous" and self._rows:
                if self._whole.is_needed and self._previous.known is None:
                    warn_of_nonfinite(log.newest(wait=False))
                self._previous.take(verdict)
        else:
            with self._lock, torch.no_grad():
                self._step_others()
        self._rows.clear()
        self._stepped.clear()
        self._located = False
