"""Runs a step: the tensors, the groups' numbers and a loss scaler's inputs to one native call."""

from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.options import check_seed
from amp_mp.optim.rule import Group, Rule, Shape
from amp_mp.optim.step.decide import decide, decide_inputs
from amp_mp.optim.step.gather import Bucket, Gathered
from amp_mp.optim.step.handed import Handed, Measured
from amp_mp.optim.step.protocols import Steppable
from amp_mp.optim.step.replaced import ReplacedCheck
from amp_mp.optim.step.step_report import StepLog
from amp_mp.scaling.observe import describe_nonfinite


class StepRunner:
    """An optimizer's steps, and what is kept from one to the next because it seldom changes."""

    def __init__(self) -> None:
        self.log = StepLog()
        self._gathered: Gathered | None = None
        self.replaced = ReplacedCheck()
        # By the group's index, and the shape that the numbers are for.
        self._hypers: dict[tuple[int, Shape | None], tuple[dict[str, Any], _C.Hyper]] = {}

    def forget(self) -> None:
        """Drops what is derived from param_groups and state, and the last step's report."""
        self._gathered = None
        self.log.forget()

    def hyper(
        self, rule: Rule, groups: list[Group], index: int, shape: Shape | None = None
    ) -> _C.Hyper:
        """A group's numbers, the same object until one changes: making it takes microseconds.

        shape: of the matrices that they are for, where the rule looks at it.
        """
        group = groups[index]
        numbers = {**rule.numbers(group), "seed": group["seed"], "maximize": group["maximize"]}
        if rule.directions is not None and shape is not None:
            numbers |= rule.directions.numbers(group, shape)
        known = self._hypers.get((index, shape))
        if known is None or not _same(known[0], numbers):
            check_seed(group)
            known = self._hypers[index, shape] = numbers, _C.Hyper(**numbers)
        return known[1]

    def measure(self, optimizer: Steppable) -> Measured:
        """Reads the gradients once, for a step that is handed the result."""
        gathered = self._gather(optimizer)
        found = _measured(optimizer, gathered)
        for bucket in gathered.buckets:
            bucket.slots.drop_gradients()  # there may be no step, and zero_grad should free them
        return found

    def run(self, optimizer: Steppable, handed: Handed) -> None:
        """Measures, decides and applies: in one native call where there is one bucket."""
        groups = optimizer.param_groups
        gathered = self._gather(optimizer)
        buckets, whole = gathered.buckets, gathered.whole
        if handed.from_stock and whole is not None:
            whole.refuse_stock_scaler()
        one_bucket = len(buckets) == 1
        device = buckets[0].device if buckets else torch.device("cpu")
        one_device = all(bucket.device == device for bucket in buckets)
        measures = handed.measure or optimizer.measures()
        measured = handed.measured
        stale = whole is not None and _needs_norms(buckets)  # weights may have been written since
        if measured is None or measured.buckets is not buckets or stale:
            alone = one_bucket and whole is None and optimizer.attachment is None
            measured = None if alone or not measures else _measured(optimizer, gathered)
        # What may raise comes before the first bucket is stepped.
        all_hypers = [[self.hyper(b.rule, groups, *kind) for kind in b.kinds] for b in buckets]
        if not one_bucket:
            for bucket in buckets:
                bucket.slots.check_gradients()
        found = [] if measured is None else measured.found
        weights = [] if measured is None else measured.weights or []
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
        if one_bucket:
            verdict, own = self.log.verdict_on(device), inputs
        else:
            verdict, own = decide(device, [each.rows for each in found], inputs), None
        for number, (bucket, known, masters) in enumerate(zip_longest(buckets, found, weights)):
            hypers = all_hypers[number]
            local = verdict if one_device else verdict.to(bucket.device)
            reads = one_bucket and measures and not found
            updates = bucket.updates
            if whole is not None and updates is None:
                updates = partial(whole.updates, number)
            operator = _C.operators[bucket.rule.operator]
            operator(bucket.slots, hypers, local, known, own, reads, masters, updates)
        seen = bool(found) or (measures and one_bucket)
        self.log.add(verdict, seen)
        if seen or handed.found_inf is not None:
            name = type(optimizer).__name__
            self.log.warn_of_skips(name, lambda scale: describe_nonfinite([groups], scale))

    def _gather(self, optimizer: Steppable) -> Gathered:
        """The tensors, gathered anew where one was replaced; Gathered has the errors."""
        rules, groups = optimizer.group_rules(), optimizer.param_groups
        known, states = self._gathered, optimizer.state
        if known is None or self.replaced.is_due() or not known.is_current(rules, groups, states):
            self.replaced.check(groups)
            for bucket in () if known is None else known.buckets:
                bucket.refuse_new_memory(groups)
            known = self._gathered = Gathered(rules, groups, states, optimizer.process_groups)
        elif known.has_no_gradient():
            self.replaced.check(groups)
        known.check_capture()
        for bucket in known.buckets:
            bucket.find_gradients()
        return known


def _needs_norms(buckets: list[Bucket]) -> bool:
    return any(bucket.rule.needs_norms for bucket in buckets)


def _measured(optimizer: Steppable, gathered: Gathered) -> Measured:
    """The statistics of the gradients, of all processes' together."""
    buckets, whole = gathered.buckets, gathered.whole
    found = [_read(optimizer, bucket) for bucket in buckets]
    if whole is None:
        return Measured(buckets, found)
    if not _needs_norms(buckets):
        return Measured(buckets, whole.totals(found))
    weights = [bucket.slots.measure_weights() for bucket in buckets]
    return Measured(buckets, *whole.of_tensors(found, weights))


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
