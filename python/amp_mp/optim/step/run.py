"""Runs a step: the tensors, the groups' numbers and a loss scaler's inputs to one native call."""

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.step.decide import decide, decide_inputs
from amp_mp.optim.step.gather import Bucket, Gathered
from amp_mp.optim.step.handed import Handed, Measured
from amp_mp.optim.step.protocols import Steppable
from amp_mp.optim.step.step_report import StepLog
from amp_mp.scaling.observe import describe_nonfinite


class StepRunner:
    """An optimizer's steps, and what is kept from one to the next because it seldom changes."""

    def __init__(self) -> None:
        self.log = StepLog()
        self._gathered: Gathered | None = None
        self._hypers: dict[int, tuple[dict[str, Any], _C.Hyper]] = {}  # by the group's index

    def forget(self) -> None:
        """Drops what is derived from param_groups and state, and the last step's report."""
        self._gathered = None
        self.log.forget()

    def hyper(self, rule: Rule, groups: list[Group], index: int) -> _C.Hyper:
        """A group's numbers, the same object until one changes: making it takes microseconds."""
        group = groups[index]
        numbers = {**rule.numbers(group), "seed": group["seed"], "maximize": group["maximize"]}
        known = self._hypers.get(index)
        if known is None or not _same(known[0], numbers):
            known = self._hypers[index] = numbers, _C.Hyper(**numbers)
        return known[1]

    def measure(self, optimizer: Steppable) -> Measured:
        """Reads the gradients once, for a step that is handed the result."""
        buckets = self._gather(optimizer, optimizer.rule())
        return Measured(buckets, [_read(optimizer, bucket) for bucket in buckets])

    def run(self, optimizer: Steppable, handed: Handed) -> None:
        """Measures, decides and applies: in one native call where there is one device."""
        rule, groups = optimizer.rule(), optimizer.param_groups
        buckets = self._gather(optimizer, rule)
        one_device = len(buckets) == 1
        device = buckets[0].device if buckets else torch.device("cpu")
        measures = handed.measure or optimizer.measures()
        found: list[_C.Measurement] = []
        if handed.measured is not None and handed.measured.buckets is buckets:
            found = handed.measured.found
        elif measures and not (one_device and optimizer.attachment is None):
            found = [_read(optimizer, bucket) for bucket in buckets]
        same_device = isinstance(handed.scale, Tensor) and handed.scale.device == device
        handed.scale_updated = handed.scale_update is not None and same_device and one_device
        inputs = decide_inputs(
            device,
            scale=handed.scale,
            found_inf=handed.found_inf,
            max_norm=handed.max_norm or optimizer.max_grad_norm,
            scale_update=handed.scale_update if handed.scale_updated else None,
            reports=self.log.reports_on(device),
        )
        hypers = [self.hyper(rule, groups, index) for index in range(len(groups))]
        operator = _C.operators[rule.operator]
        if one_device:
            verdict, known = self.log.verdict_on(device), found[0] if found else None
            operator(buckets[0].slots, hypers, verdict, known, inputs, measures and not found)
        else:
            verdict = decide(device, [each.rows for each in found], inputs)
            for bucket, own in zip_longest(buckets, found):
                operator(bucket.slots, hypers, verdict.to(bucket.device), own)
        measured = bool(found) or (measures and one_device)
        self.log.add(verdict, measured)
        if measured or handed.found_inf is not None:
            name = type(optimizer).__name__
            self.log.warn_of_skips(name, lambda scale: describe_nonfinite([groups], scale))

    def _gather(self, optimizer: Steppable, rule: Rule) -> list[Bucket]:
        """The tensors in buckets, gathered anew where one was replaced; Gathered has the errors."""
        groups = optimizer.param_groups
        if self._gathered is None or not self._gathered.is_current(rule, groups):
            self._gathered = Gathered(rule, groups, optimizer.state)
        self._gathered.check_capture()
        return self._gathered.buckets


def _read(optimizer: Steppable, bucket: Bucket) -> _C.Measurement:
    """The statistics of a bucket's gradients, from the backward pass where they were read there."""
    attachment = optimizer.attachment
    return bucket.slots.measure() if attachment is None else attachment.read(bucket)


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal names and numbers; tensors by identity, since comparing values would make CUDA wait."""
    if a.keys() != b.keys():
        return False
    for name, x in a.items():
        y = b[name]
        if x is not y and (isinstance(x, Tensor) or isinstance(y, Tensor) or x != y):
            return False
    return True
