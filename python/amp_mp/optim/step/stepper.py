"""An optimizer's steps: its param_groups and a loss scaler's inputs go to one native call."""

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from amp_mp import _C
from amp_mp.dtypes import check_choice
from amp_mp.messages import warn
from amp_mp.optim.options import check_choices
from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.state.replaced import ReplacedCheck
from amp_mp.optim.state.stored_formats import KINDS
from amp_mp.optim.step.cuda_graphs import drop_in_a_capture
from amp_mp.optim.step.overflow_report import describe_nonfinite
from amp_mp.optim.step.params import refuse_sphere
from amp_mp.param_groups import labelled, param_infos, params_in
from amp_mp.scaling.norm_spike import NormSpike
from amp_mp.scaling.overflows import OverflowWatch
from amp_mp.sharding.reduction import WholeStatistics


class StepReport(NamedTuple):
    """What one step did."""

    number: int  # of the step, from 1
    skipped: bool  # a gradient was inf or NaN, or the norm too large, and nothing was changed
    grad_norm: float | None  # 2-norm of the true gradients before clipping; None if not measured
    max_abs: float | None  # largest finite true |g|; None if not measured
    loss_scale: float  # that the gradients carried
    overflows: int  # steps skipped so far, with this one, for an inf or NaN
    spikes: int  # steps skipped so far, with this one, for a norm that skip_norm_above refuses


class Stepper:
    """A fused optimizer's steps, and what it keeps besides its param_groups and state.

    Other files of this package reach it by `stepper_of`; users see the optimizer alone. A step asks
    whether the tensors gathered for the last one are still the optimizer's. Where a script has
    exchanged something it checks the param_groups and gathers the tensors again; then one native
    call measures, decides and applies.
    """

    def __init__(
        self,
        optimizer: Any,
        rules: tuple[Rule, ...],
        rule_of: Callable[[Any, Group], Rule],
        own_keys: frozenset[str],
    ) -> None:
        """rules: all that the optimizer may use. rule_of: gives that of one of its param_groups.

        own_keys: the groups' entries that are the optimizer's own.
        """
        self._optimizer = weakref.ref(optimizer)
        self.rules, self._rule_of, self.own_keys = rules, rule_of, own_keys
        self.scaler_inputs: _C.StepInputs | None = None  # of the step under way, in step_with
        self.release: Any = None  # a Release (backward/release.py, which imports this)
        self.checks_each = False  # whether a Release looks for inf and NaN in each gradient
        self.process_groups: tuple[Any, ...] = ()  # of those param_groups that name none
        self.checked: Any = None  # states that the next load_state_dict needs not check
        self.replaced = ReplacedCheck()
        self.native = _C.Steps()
        self._gathered: _C.Gathered | None = None
        self._whole: WholeStatistics | None = None  # None where no other process has a part
        # Of each group when tensors were gathered last: what `check` compares.
        self._memory: list[Any] | None = None
        self._offload: list[Any] = []
        self._watch = OverflowWatch()
        self._has_warned = False  # of the first skipped step
        self._kept: list[RemovableHandle] = []
        # Native calls release the GIL: another thread's step waits here.
        self._turn = threading.RLock()

    @property
    def optimizer(self) -> Any:
        """The optimizer that this belongs to."""
        return self._optimizer()

    def rule_of(self, group: Group) -> Rule:
        """The rule of a param_group, also of one of a file."""
        return self._rule_of(self.optimizer, group)

    def group_rules(self) -> list[Rule]:
        """The rule of each param_group."""
        optimizer = self.optimizer
        return [self._rule_of(optimizer, group) for group in optimizer.param_groups]

    def forget(self) -> None:
        """Drops what is derived from param_groups and state, and the last step's report."""
        with self._turn:
            self.native.forget()
            self._gathered = self._whole = self._memory = None
        if self.release is not None:
            self.release.forget()

    def keep_gradients(self, kept: bool) -> None:
        """kept: whether zero_grad has written zeros into gradients that it was to drop."""
        for hook in self._kept:
            hook.remove()
        params = params_in(self.optimizer.param_groups)
        if kept and not torch.cuda.is_current_stream_capturing():
            self._kept = [drop_in_a_capture(p) for p in params if p.requires_grad]

    def run(self, optimizer: Any) -> _C.StepInputs:
        """Measures, decides and applies, or ends the iteration; returns the scaler's inputs."""
        with self._turn:
            if self.replaced.seen != ReplacedCheck.assignments:
                self.replaced.check_assigned(param_infos(optimizer.param_groups))
            groups = optimizer.param_groups
            if _C.Loan.is_any:
                _C.refuse_borrowed(params_in(groups), "step()")
            inputs = self.scaler_inputs or _inputs_of_torch(optimizer)
            if self.release is not None:
                self.release.finish(inputs)
                return inputs
            gathered = self._gather(optimizer)
            is_stock = self.scaler_inputs is None and inputs.found_inf is not None
            if self._whole is not None and is_stock:
                self._whole.refuse_stock_scaler()
            max_norm, limit = optimizer.max_grad_norm, optimizer.skip_norm_above
            looks = optimizer.check_overflow and inputs.found_inf is None
            skipped = self.native.step(
                gathered,
                groups,
                inputs,
                checks=looks or (max_norm, limit) != (None, None),
                max_norm=max_norm,
                limit=None if limit is None else native_limit(limit),
            )
        if skipped is not None:
            is_scaled = (inputs.scale, inputs.found_inf) != (None, None)
            self.warn(skipped, lambda scale: describe_nonfinite([groups], scale), is_scaled)
        return inputs

    def _gather(self, optimizer: Any) -> _C.Gathered:
        """The optimizer's tensors for a step, gathered again where a script exchanged something."""
        groups, states = optimizer.param_groups, optimizer.state
        rules = [self._rule_of(optimizer, group) for group in groups]
        if not self.replaced.had_gradient:
            self.check_replaced()
        gathered = self._gathered
        if gathered is not None and gathered.is_current(rules, groups, states):
            return gathered
        self.check(rules)
        for index, (rule, group) in enumerate(zip(rules, groups, strict=True)):
            self.refuse_shapes(rule, group, labelled(group, index))
        self._gathered = self._whole = None
        gathered = self.native.gather(rules, groups, states, self.info(rules))
        for bucket in gathered.buckets:
            set_updates(bucket)
        given = self.process_groups or any(group.get("process_groups") for group in groups)
        if given or gathered.has_dtensors:
            whole = WholeStatistics(groups, self.process_groups, gathered.held)
            if whole.is_needed:
                self._whole = whole
                gathered.collectives = _C.Collectives(
                    whole.totals, whole.of_tensors, whole.updates_of
                )
        self._gathered = gathered
        return gathered

    def check(self, rules: list[Rule]) -> None:
        """Raises ValueError, by name, for what a script has written into param_groups.

        RuntimeError where offload would move tensors of a step that a CUDA graph has captured.
        """
        groups = self.optimizer.param_groups
        given = [group.get("memory") for group in groups]
        for rule, now, before in zip(rules, given, self._memory or given, strict=False):
            if now != before:
                raise ValueError(
                    "memory in a param_group is for new optimizers and new groups; delete it and "
                    "write the formats that it stands for: " + ", ".join(("master", *rule.names))
                )
        for index, (rule, group) in enumerate(zip(rules, groups, strict=True)):
            try:
                self._check_group(rule, group)
            except ValueError as error:
                raise ValueError(f"param_group {index}: {error}") from None
        offload = [group.get("offload") for group in groups]
        count = min(len(offload), len(self._offload))
        if offload[:count] != self._offload[:count]:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("offload cannot change while a CUDA graph is captured")
            if self.native.is_captured:
                raise RuntimeError("offload cannot change: a captured graph holds these arrays")
        self._memory, self._offload = given, offload

    def _check_group(self, rule: Rule, group: Group) -> None:
        check_choices(group)
        for name, kind in {"master": "master", **rule.kinds}.items():
            if group[name] not in KINDS[kind]:
                check_choice(name, group[name], KINDS[kind])
        directions = rule.directions
        if directions is not None:
            directions.check(group)

    def refuse_shapes(
        self, rule: Rule, group: Group, params: Iterable[tuple[Tensor, str]], is_new: bool = False
    ) -> None:
        """Raises ValueError, by name, for parameters of shapes that the rule cannot step.

        params: some of the param_group's, with their labels. is_new: whether the group is being
        added; refuse_sphere then asks more.
        """
        directions = rule.directions
        is_on_sphere = "hyperball" in self.own_keys and group.get("hyperball")
        for param, label in params if directions or is_on_sphere else ():
            if directions is not None:
                directions.refuse(group, param, label)
            if is_on_sphere:
                refuse_sphere(param, label, is_new and param.requires_grad)

    def info(self, rules: list[Rule]) -> _C.GroupInfo:
        """What the native step has to know of the param_groups besides what they hold."""
        matrices, number = {}, 0
        for rule, group in zip(rules, self.optimizer.param_groups, strict=True):
            if (directions := rule.directions) is not None:
                for at, param in enumerate(_C.params_of(group), number):
                    matrices[at] = directions.matrices(group, param)
            number += len(group["params"])
        return _C.GroupInfo(self.own_keys, matrices)

    def check_replaced(self) -> None:
        """Warns where no parameter has had a gradient so far."""
        groups = self.optimizer.param_groups
        params = [param for group in groups for param in _C.params_of(group)]
        self.replaced.check_gradients(params, partial(param_infos, groups))

    def step_with(self, inputs: _C.StepInputs, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's `step`, with what a loss scaler passes to it."""
        before, self.scaler_inputs = self.scaler_inputs, inputs
        try:
            return self.optimizer.step(*args, **kwargs)
        finally:
            self.scaler_inputs = before

    def measures_each(self) -> bool:
        """Whether a Release needs the norm of each gradient, or whether it overflows."""
        optimizer = self.optimizer
        limits = optimizer.max_grad_norm, optimizer.skip_norm_above
        checks = self.checks_each or limits != (None, None)
        return checks or self._is_layerwise()

    def measure(self) -> _C.Measured:
        """Reads the gradients once, for a step that gets the result as StepInputs.measured."""
        with self._turn:
            return self.native.measure(self._gather(self.optimizer))

    def totals(self) -> dict[torch.device, Tensor]:
        """Measures the gradients as they are, in one read.

        Returns, per device, float64 [3]: sum of squares, largest finite |g|, number of elements
        that are inf or NaN, of all gradients together. With `attach`, of those that were
        released since the last step; RuntimeError where nothing asked for measuring them.
        """
        found: dict[torch.device, Tensor]
        found = self.measure().totals() if self.release is None else self.release.totals()
        return found

    def warn(
        self, skipped: tuple[Any, ...] | None, describe: Callable[..., str], is_scaled: bool
    ) -> None:
        """Warns of the first skipped step, and of many in a row.

        RuntimeError after raise_after_skips.

        skipped: what the native step returns. describe: says which gradients are inf or NaN, given
        the scale they carry. is_scaled: whether a loss scaler is there, which skips as a matter of
        course.
        """
        if skipped is None:
            return
        optimizer, watch = self.optimizer, self._watch
        watch.steps, watch.in_a_row, scale, norm, is_spike = skipped
        name = type(optimizer).__name__
        limit = optimizer.raise_after_skips
        what = "gradients are inf or NaN"
        if is_spike:
            what = f"the gradients' norm, now {norm:g}, is above skip_norm_above"
        if limit is not None and watch.in_a_row >= limit:
            raise RuntimeError(
                f"{name} has skipped {watch.in_a_row} steps in a row, since step {watch.since}, "
                f"and raise_after_skips is {limit}: {what}. The weights are those of before; go on "
                "from an earlier checkpoint, with a lower learning rate, other data or other limits"
            )
        if not (is_spike or is_scaled or self._has_warned):
            self._has_warned = True
            # Reading a GPU's gradients would wait for it, and they may be a later step's by now.
            on_cpu = all(p.device.type == "cpu" for p in params_in(optimizer.param_groups))
            also = optimizer.max_grad_norm or optimizer.skip_norm_above or self._is_layerwise()
            left = "nothing was" if self.release is None else "the parameters of these were not"
            warn(
                f"{name} has skipped step {watch.steps}: gradients are inf or NaN, and {left} "
                "changed. last_report() tells of the next ones"
                + ("" if also else "; with check_overflow=False they are stepped, as torch does")
                + (f". The gradients concerned:\n{describe(scale)}" if on_cpu else "")
            )
        watch.warn_of_skips(name, lambda: describe(scale), what if is_spike else "")

    def _is_layerwise(self) -> bool:
        return any(rule.is_layerwise for rule in self.group_rules())


def _inputs_of_torch(optimizer: Any) -> _C.StepInputs:
    """What torch's own GradScaler has set as attributes of an optimizer."""
    scale = getattr(optimizer, "grad_scale", None)
    return _C.StepInputs(scale, getattr(optimizer, "found_inf", None))


def set_updates(bucket: _C.Bucket) -> None:
    """Gives a bucket whose rule has directions the function that makes updates of them."""
    if (directions := bucket.rule.directions) is not None:
        bucket.make_updates = directions.make(bucket.members)


def native_limit(limit: Any) -> _C.NormLimit:
    """skip_norm_above, a number or a NormSpike, as the native step has it."""
    if isinstance(limit, NormSpike):
        return _C.NormLimit(sigmas=limit.sigmas, window=limit.window)
    return _C.NormLimit(float(limit))
