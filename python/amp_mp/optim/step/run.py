"""Runs a step: the tensors, the groups' numbers and a loss scaler's inputs to one native call."""

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.step.decide import decide, decide_inputs
from amp_mp.optim.step.gather import Bucket, Gatherer
from amp_mp.optim.step.handed import Handed, Measured
from amp_mp.optim.step.hypers import Hypers
from amp_mp.optim.step.protocols import Steppable
from amp_mp.optim.step.step_report import StepLog


class StepRunner:
    """An optimizer's steps, and what is kept from one to the next because it seldom changes."""

    def __init__(self) -> None:
        self.log = StepLog()
        self._gatherer = Gatherer()
        self._hypers = Hypers()

    def forget(self) -> None:
        """Drops what is derived from param_groups and state, and the last step's report."""
        self._gatherer.forget()
        self.log.forget()

    def hyper(self, optimizer: Steppable, index: int) -> _C.Hyper:
        """The numbers of one param_group."""
        return self._hypers.one(optimizer.rule(), optimizer.param_groups, index)

    def measure(self, optimizer: Steppable) -> Measured:
        """Reads the gradients once, for a step that is handed the result."""
        buckets = self._gather(optimizer)
        return Measured(buckets, [_read(optimizer, bucket) for bucket in buckets])

    def run(self, optimizer: Steppable, handed: Handed) -> None:
        """Measures, decides and applies: in one native call where there is one device."""
        buckets = self._gather(optimizer)
        measures = handed.measure or optimizer.measures()
        found: list[_C.Measurement] | None = None
        if handed.measured is not None and handed.measured.buckets is buckets:
            found = handed.measured.found
        elif measures and (len(buckets) != 1 or optimizer.attachment is not None):
            found = [_read(optimizer, bucket) for bucket in buckets]
        device = buckets[0].device if buckets else torch.device("cpu")
        same = isinstance(handed.scale, Tensor) and handed.scale.device == device
        handed.scale_updated = handed.scale_update is not None and same and len(buckets) == 1
        inputs = decide_inputs(
            device,
            scale=handed.scale,
            found_inf=handed.found_inf,
            max_norm=handed.max_norm or optimizer.max_grad_norm,
            scale_update=handed.scale_update if handed.scale_updated else None,
            reports=self.log.reports_on(device),
        )
        rule = optimizer.rule()
        hypers, operator = (
            self._hypers.of(rule, optimizer.param_groups),
            _C.operators[rule.operator],
        )
        if len(buckets) == 1:
            verdict = self.log.verdict_on(device)
            known = found[0] if found else None
            operator(buckets[0].slots, hypers, verdict, known, inputs, measures and known is None)
        else:
            verdict = decide(device, [each.rows for each in found or ()], inputs)
            for i, bucket in enumerate(buckets):
                own = found[i] if found else None
                operator(bucket.slots, hypers, verdict.to(bucket.device), own)
        self.log.add(verdict, bool(buckets) and (found is not None or measures))

    def _gather(self, optimizer: Steppable) -> list[Bucket]:
        return self._gatherer.gather(optimizer.rule(), optimizer.param_groups, optimizer.state)


def _read(optimizer: Steppable, bucket: Bucket) -> _C.Measurement:
    attachment = optimizer.attachment
    return bucket.slots.measure() if attachment is None else attachment.read(bucket)
