"""An optimizer's steps: its param_groups and a loss scaler's inputs go to one native call."""

import weakref
from collections.abc import Callable
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


class Hooks:
    """What the native step asks of Python where it gathers an optimizer's tensors."""

    def __init__(self, optimizer: weakref.ref[Any], own_keys: frozenset[str]) -> None:
        """own_keys: the entries of param_groups that are the optimizer's."""
        self._optimizer = optimizer
        self.own_keys = own_keys
        self.replaced = ReplacedCheck()
        self.memory: list[Any] | None = None  # of each group when tensors were gathered last
        self.offload: list[Any] = []  # the same

    def check(self, rules: list[Rule], groups: list[Group], captured: bool = False) -> None:
        """Raises ValueError, by name, for what a script has written into param_groups.

        captured: whether a CUDA graph has captured a step of these tensors; RuntimeError where they
        would move.
        """
        self.check_replaced(groups)
        given = [group.get("memory") for group in groups]
        for rule, now, before in zip(rules, given, self.memory or given, strict=False):
            if now != before:
                raise ValueError(
                    "memory in a param_group is for new optimizers and new groups; delete it and "
                    "write the formats that it stands for: " + ", ".join(("master", *rule.names))
                )
        for index, (rule, group) in enumerate(zip(rules, groups, strict=True)):
            try:
                check_choices(group)
                for name, kind in {"master": "master", **_C.kinds_of([rule])}.items():
                    if group[name] not in KINDS[kind]:
                        check_choice(name, group[name], KINDS[kind])
                if rule.directions is not None:
                    rule.directions.check(group)
                if "hyperball" in self.own_keys and group.get("hyperball"):
                    for param, label in labelled(group, index):
                        refuse_sphere(param, label, False)
            except ValueError as error:
                raise ValueError(f"param_group {index}: {error}") from None
        offload = [group.get("offload") for group in groups]
        count = min(len(offload), len(self.offload))
        if offload[:count] != self.offload[:count]:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("offload cannot change while a CUDA graph is captured")
            if captured:
                raise RuntimeError("offload cannot change: a captured graph holds these arrays")
        self.memory, self.offload = given, offload

    def check_replaced(self, groups: list[Group]) -> None:
        """Warns where no parameter has had a gradient so far."""
        if self.replaced.had_gradient:
            return
        params = [param for group in groups for param in _C.params_of(group)]
        self.replaced.check_gradients(params, partial(param_infos, groups))

    def warn_of_graph(self) -> None:
        """Warns that a CUDA graph has captured a step of tensors that are no longer these."""
        warn(
            "a CUDA graph has captured this optimizer's step, and its tensors are others now (a "
            "state dict was loaded, or a param_group, a format, a device or a NormSpike's history "
            "has changed); replays go on with the old ones. Capture the step again"
        )

    def make_whole(
        self,
        held: list[tuple[torch.device, list[int], list[int]]],
        groups: list[Group],
        any_dtensor: bool,
    ) -> WholeStatistics | None:
        """What adds statistics over processes; None where no other process has a part.

        held: the buckets, as WholeStatistics takes them.
        """
        if not any_dtensor and not any(group.get("process_groups") for group in groups):
            return None
        whole = WholeStatistics(groups, buckets=held)
        return whole if whole.is_needed else None


class Stepper:
    """A fused optimizer's steps, and what it keeps besides its param_groups and state.

    Other files of this package reach it by `stepper_of`; users see the optimizer alone.
    """

    def __init__(
        self,
        optimizer: Any,
        rules: tuple[Rule, ...],
        rules_of: Callable[[Group], tuple[Rule, ...]],
        group_rules: Callable[[Any], list[Rule]],
        own_keys: frozenset[str],
    ) -> None:
        """rules: all that the optimizer may use. rules_of: those that one param_group may have.

        group_rules: gives the rule of each group of the optimizer now. own_keys: the entries of a
        group that are the optimizer's own.
        """
        self._optimizer = weakref.ref(optimizer)
        self._group_rules = group_rules
        self.rules = rules
        self.rules_of = rules_of
        self.scaler_inputs: _C.StepInputs | None = None  # of the step under way, in step_with
        self.attachment: Any = None  # an Attachment (backward/attachment.py, which imports this)
        self.checked: Any = None  # states that the next load_state_dict needs not check
        self.hooks = Hooks(self._optimizer, own_keys)
        self.native = _C.Stepper(self.hooks)
        self._watch = OverflowWatch()
        self._kept: list[RemovableHandle] = []

    @property
    def optimizer(self) -> Any:
        """The optimizer that this belongs to."""
        return self._optimizer()

    def group_rules(self) -> list[Rule]:
        """The rule of each param_group."""
        return self._group_rules(self._optimizer())

    @property
    def releases(self) -> bool:
        """Whether gradients are stepped and freed during backward (attach)."""
        return self.attachment is not None and self.attachment.releases

    def forget(self) -> None:
        """Drops what is derived from param_groups and state, and the last step's report."""
        self.native.forget()
        self.hooks.memory = None
        if self.attachment is not None:
            self.attachment.forget()

    def keep_gradients(self, kept: bool) -> None:
        """kept: whether zero_grad has written zeros into gradients that it was to drop."""
        for hook in self._kept:
            hook.remove()
        params = params_in(self.optimizer.param_groups)
        if kept and not torch.cuda.is_current_stream_capturing():
            self._kept = [drop_in_a_capture(p) for p in params if p.requires_grad]

    def run(self, optimizer: Any) -> _C.StepInputs:
        """Measures, decides and applies, or ends the iteration; returns the scaler's inputs."""
        if self.hooks.replaced.seen != ReplacedCheck.assignments:
            self.hooks.replaced.check_assigned(param_infos(optimizer.param_groups))
        inputs = self._inputs_of_this_step(optimizer)
        attachment = self.attachment
        if attachment is not None and attachment.releases:
            _C.refuse_borrowed(params_in(optimizer.param_groups), "step()")
            attachment.finish(inputs)
            return inputs
        max_norm, limit = optimizer.max_grad_norm, optimizer.skip_norm_above
        is_spike = isinstance(limit, NormSpike)
        options = _C.StepOptions(
            checks=optimizer.check_overflow or (max_norm, limit) != (None, None),
            max_norm=max_norm,
            norm_limit=0.0 if is_spike else float(limit or 0),
            spike=(limit.sigmas, limit.window) if is_spike else (0.0, 0.0),
        )
        rules, groups, states = self.group_rules(), optimizer.param_groups, optimizer.state
        read = None if attachment is None else attachment.read
        skipped = self.native.step(rules, groups, states, inputs, options, read)
        if skipped is not None:
            self.warn(skipped, lambda scale: describe_nonfinite([groups], scale))
        return inputs

    def step_with(self, inputs: _C.StepInputs, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's `step`, with what a loss scaler passes to it."""
        before, self.scaler_inputs = self.scaler_inputs, inputs
        try:
            return self.optimizer.step(*args, **kwargs)
        finally:
            self.scaler_inputs = before

    def _inputs_of_this_step(self, optimizer: Any) -> _C.StepInputs:
        """Those of `step_with`; torch's own GradScaler sets two attributes instead."""
        if self.scaler_inputs is not None:
            return self.scaler_inputs
        scale = getattr(optimizer, "grad_scale", None)
        found_inf = getattr(optimizer, "found_inf", None)
        return _C.StepInputs(scale, found_inf, from_stock=found_inf is not None)

    def measures(self) -> bool:
        """Whether a step needs the gradients' norms, or whether they overflow."""
        optimizer = self.optimizer
        limits = optimizer.max_grad_norm, optimizer.skip_norm_above
        checks = optimizer.check_overflow or limits != (None, None)
        return checks or any(r.is_layerwise for r in self.group_rules())

    def measure(self) -> _C.Measured:
        """Reads the gradients once, for a step that gets the result as StepInputs.measured."""
        optimizer, attachment = self.optimizer, self.attachment
        read = None if attachment is None else attachment.read
        groups, states = optimizer.param_groups, optimizer.state
        return self.native.measure(self.group_rules(), groups, states, read)

    def totals(self) -> dict[torch.device, Tensor]:
        """Measures the gradients as they are, in one read.

        Returns, per device, float64 [3]: sum of squares, largest finite |g|, number of elements
        that are inf or NaN, of all gradients together. Attached with release=True, of those that
        were released since the last step; RuntimeError where nothing asked for measuring them.
        """
        found: dict[torch.device, Tensor]
        found = self.attachment.totals() if self.releases else self.measure().totals()
        return found

    def warn(self, skipped: tuple[Any, ...] | None, describe: Callable[..., str]) -> None:
        """Warns where steps are skipped again and again; RuntimeError after raise_after_skips.

        skipped: what the native step returns. describe: says which gradients are inf or NaN, given
        the scale they carry.
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
        watch.warn_of_skips(name, lambda: describe(scale), what if is_spike else "")
