"""The base of the fused optimizers: torch's surface above the three native passes.

A subclass declares its rules (rule.py) and its arguments. What a step does is in step/, the state
in state/, work during the backward pass in backward/, and the update itself in csrc/core/rules.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.optimizer import required

from amp_mp import _C
from amp_mp.callers import lightning_asks, zero_redundancy_group
from amp_mp.optim.backward.release import Release, Scaler, attach
from amp_mp.optim.options import (
    SHARED,
    FullSignature,
    Options,
    check_group,
    check_keys,
    check_options,
    check_scatter,
    make_plain,
    warn_of_small_rate,
)
from amp_mp.optim.rule import Group, Rule, choosable_states
from amp_mp.optim.state.edit_blocks import edit_masters
from amp_mp.optim.state.memory_report import MemoryReport, report_memory
from amp_mp.optim.state.state_dicts import load_state, shown_state, torch_state_dict
from amp_mp.optim.state.stored_formats import PRESETS, resolve, resolve_group, rounding_of
from amp_mp.optim.step.params import drop_repeats
from amp_mp.optim.step.stepper import Stepper, StepReport
from amp_mp.param_groups import labelled, params_in
from amp_mp.scaling.norm_spike import NormSpike
from amp_mp.sharding.gradients import narrow_zeros
from amp_mp.sharding.reduction import GroupsOfRun, checked_groups
from amp_mp.torch_private import outside_graphs

# Attributes in a pickle besides torch's own.
PICKLED = (
    "max_grad_norm",
    "skip_norm_above",
    "raise_after_skips",
    "check_overflow",
    "_checks_each",
    "_amp_scaling",
    "_own_defaults",
    "_chosen",
)


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the fused optimizers; a torch.optim.Optimizer.

    Parameters are float32, bfloat16 or float16 tensors of any dense layout, or DTensors (FSDP2,
    tensor parallel: docs/distributed.md), gradients any of the three dtypes. Formats and seed may
    differ between param_groups. After `step()` see `step_was_skipped`, `grad_norm` and
    `last_report()`.
    """

    _rules: ClassVar[tuple[Rule, ...]]  # all that the class may use
    _stepper_class = Stepper
    __signature__ = FullSignature()

    def __init__(self, params: Any, numbers: Mapping[str, Any], options: Options) -> None:
        """Raises TypeError or ValueError naming the argument.

        numbers: the rule's own, by name. options: the arguments that all fused optimizers take, and
        how single states are stored.
        """
        kinds = _C.kinds_of(self._rules)
        check_options(type(self).__name__, choosable_states(self._rules), options)
        numbers = dict(numbers)
        make_plain(numbers)
        check_group({n: x for n, x in {**numbers, **options}.items() if x is not required})
        given: Mapping[str, Any] = options
        self.max_grad_norm = options.get("max_grad_norm")
        self.skip_norm_above = options.get("skip_norm_above")
        self.raise_after_skips = options.get("raise_after_skips")
        checks = options.get("check_overflow")
        self.check_overflow, self._checks_each = checks is None or bool(checks), bool(checks)
        self._amp_scaling = options.get("amp_scaling", True)
        process_groups = checked_groups(options.get("process_groups"))
        self._chosen = {name: given.get(name) for name in ("master", *kinds)}
        stored = resolve(options.get("memory"), self._chosen, kinds)
        shared = {"maximize": False, "rounding": rounding_of(options.get("memory"))}
        shared |= {"seed": 0, "offload": None}
        defaults = {**numbers, **stored, **{n: given.get(n, v) for n, v in shared.items()}}
        if process_groups:
            defaults["process_groups"] = process_groups
        if isinstance(self.skip_norm_above, NormSpike):
            defaults["norm_history"] = (0.0,) * 4
        self._own_defaults = tuple(defaults)  # torch adds others when it unpickles
        self._make_stepper()
        if not process_groups and (group := zero_redundancy_group()):
            self._stepper.process_groups = (group,)
        super().__init__(params, defaults)

    def __init_subclass__(cls) -> None:
        """Adds the shared arguments to the docstring; help() shows them in the signature too."""
        super().__init_subclass__()
        if cls.__doc__:
            cls.__doc__ = f"{cls.__doc__.rstrip()}\n{SHARED}"

    def _rule_of(self, group: Group) -> Rule:
        """The rule of a param_group, also one of a file; the class's first by default."""
        return self._rules[0]

    def _own_keys(self) -> frozenset[str]:
        """The entries of param_groups that are the optimizer's; no step reads a script's own."""
        return frozenset(self._own_defaults)

    def _make_stepper(self) -> None:
        rules = self._rules, type(self)._rule_of
        self._stepper = self._stepper_class(self, *rules, self._own_keys())
        self._stepper.checks_each = self._checks_each

    def _complete(self, group: Group) -> None:
        """Gives a param_group the numbers and formats that it lacks."""
        for name in self._own_defaults:
            group.setdefault(name, self.defaults[name])

    def _patch_step_function(self) -> None:
        """Adds hooks to the class's step, as torch's does; it stays outside of compiled graphs."""
        super()._patch_step_function()
        kind: Any = type(self)
        if not getattr(kind.step, "is_outside_graphs", False):
            kind.step = outside_graphs(kind.step)
            kind.step.is_outside_graphs = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's result.

        torch.compile leaves it outside of graphs. Raises ValueError or TypeError, before anything
        is changed, where a gradient is sparse or of another shape, dtype or device than it can
        have, where two parameters share memory, or where a state was lost; RuntimeError for a first
        step in torch.inference_mode.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._stepper.run(self)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; once a CUDA graph has captured a step, gradients stay where it reads them."""
        stays = set_to_none and self._stepper.native.is_captured
        super().zero_grad(set_to_none and not stays)
        if not set_to_none:
            narrow_zeros(params_in(self.param_groups))
        self._stepper.keep_gradients(stays)

    @property
    def amp_scaling(self) -> bool:
        """Whether the step takes over unscaling and skipping from a loss scaler."""
        return self._amp_scaling

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether loss scalers leave unscaling to the step.

        Lightning asks, too, and where the answer is yes it refuses to clip. So it unscales and
        clips before the step itself, except float16 gradients, which torch does not unscale.
        """
        if not lightning_asks():
            return self._amp_scaling
        half = any(p.dtype == torch.float16 for p in params_in(self.param_groups))
        return self._amp_scaling and half

    def init_state(self) -> None:
        """Makes the state of every trainable parameter now, not at its first gradient.

        With it torch.distributed.checkpoint.state_dict takes no step of its own to make state.
        Existing state stays. Raises what a first step raises: TypeError or ValueError naming the
        parameter, RuntimeError in torch.inference_mode or while a CUDA graph is captured.
        """
        _C.init_states(self._stepper.group_rules(), self.param_groups, self.state)

    def masters(self, params: Any = None) -> AbstractContextManager[Any]:
        """Float32 masters, to be read and written in a `with` block: docs/between_steps.md.

            with optimizer.masters(layer.weight) as master:
                master.mul_(0.99)  # layer.weight.mul_(0.99) would be rounded

        params: a parameter, or a list or dict of them; by default a list of all. In their places
        are float32 copies of the masters, or of the values where there is no master, laid out and
        sharded as the parameters. The end of the block, in which gradients are off, stores the
        elements that were written, master and parameter, in place; after an exception nothing.

        Raises TypeError or ValueError naming what is not a parameter of the optimizer; RuntimeError
        in inference mode, AveragedModel.swap and another block with the parameter, for a step in
        the block, and at its end for a parameter that was written itself.
        """
        return edit_masters(params, self._stepper.group_rules(), self.param_groups, self.state)

    def attach(
        self,
        model: nn.Module,
        *,
        scaler: Scaler | None = None,
        clip: str = "parameter",
    ) -> Release:
        """Steps each parameter as soon as its gradient is complete: docs/accumulation.md.

        The gradient is then freed (DistributedDataParallel keeps it). Every backward steps, but
        those with reentrant checkpoints, whose gradients wait for `step`; else `step` only ends
        the iteration.

        Args:
            model: the module whose parameters are handled as soon as their gradients are complete
                (under DistributedDataParallel: averaged). `step` handles the optimizer's others.
            scaler: the amp_mp.GradScaler of the losses. Default None.
            clip: how max_grad_norm clips, as the norm of all gradients is known too late: each
                gradient by its own norm ("parameter", the default), or by the norm of the last step
                without overflow ("previous", at first as "parameter").

        Returns what ends it, by `remove()` or as a `with` block.
        Raises ValueError or TypeError naming the argument, RuntimeError if attached already.
        """
        self._stepper.release = made = attach(self._stepper, model, scaler, clip)
        return made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group's parameters get their state at the next step.

        The group may have formats of its own, by `memory` or by name. TypeError or ValueError
        naming a parameter or number that is refused, or an option of the whole optimizer; the group
        is then not added. A misspelt option gets a warning; other keys stay, as in torch. A
        parameter that is in a group twice gets torch's warning; it is kept once, and stepped
        once, where torch steps twice.
        """
        make_plain(param_group)
        brought = param_group.keys() - {"params", "param_names"}
        check_keys(param_group, self._own_defaults, self)
        resolve_group(param_group, self._chosen, _C.kinds_of(self._rules))
        super().add_param_group(param_group)
        drop_repeats(param_group)
        number, group = len(self.param_groups) - 1, self.param_groups[-1]
        try:  # the others were checked when they were added: one look at each parameter
            # The constructor has checked the defaults, but for what each group has to bring.
            if brought or [v for v in self.defaults.values() if isinstance(v, type(required))]:
                check_group(group)
            check_scatter(group)
            warn_of_small_rate(group)
            self._complete(group)
            _C.refuse_params(group, number)
            labels = labelled(group, number)
            self._stepper.refuse_shapes(self._rule_of(group), group, labels, is_new=True)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._stepper.forget()

    def memory_report(self) -> MemoryReport:
        """Bytes of weights, gradients, masters and states now, counted from their storages."""
        return report_memory(self)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; docs/formats.md lists the entries of a parameter's state.

        16-bit integers (entries `remainder16` and `NAME_ue8m8`) are shown as their bytes, uint8
        with one more, last dimension of 2, because gloo and NCCL carry no 16-bit integers. Numbers
        of NumPy and Decimal are shown as Python's, which torch.load reads. All tensors share the
        state's memory, as torch's do. Post-hooks see them so. With a NormSpike
        param_groups have norm_history, and the host waits for the device.
        """
        self._show_history()
        _C.put_entries(self.param_groups, self.state)
        return shown_state(self, self._rules, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep the precision they were saved with.

        torch casts every state to its parameter's dtype, which would round masters and moments of
        low-precision parameters. States in another format than this optimizer's are converted, and
        `rounding` stays its own. Load the model first: a split master is stored partly in the
        weights. Reads checkpoints of torch.optim too: a missing master is made from the parameter.
        Post-hooks see the state as it will be, and their edits stay. Where file and optimizer have
        param_names, parameters are matched by name. Raises ValueError naming an entry that is
        missing, or of a shape, dtype or value that does not fit; then, and where a hook raises,
        every byte is as before.
        """
        _C.refuse_borrowed(params_in(self.param_groups), "load_state_dict()")
        kept = (*self._chosen, "rounding", "offload", "process_groups")
        load_state(self._stepper, kept, state_dict, super().load_state_dict)
        self._stepper.forget()
        self._stepper.native.norm_history = self.param_groups[0].get("norm_history")

    def _show_history(self) -> None:
        """Writes what a NormSpike knows into the param_groups, for files."""
        if (known := self._stepper.native.norm_history) is not None:
            for group in self.param_groups:
                group["norm_history"] = known

    def torch_state_dict(self) -> dict[str, Any]:
        """The state dict for the optimizer of torch.optim with the same name and float32 weights.

        States are decoded to float32. The float32 weights themselves are the masters:
        amp_mp.float32_state_dict.
        """
        own = {*self._chosen, "rounding", "seed", "offload"}
        return torch_state_dict(self, self._stepper.group_rules(), own)

    def last_report(self, wait: bool = False) -> StepReport | None:
        """What the last step did, None before it; and how many steps were skipped for what.

        wait: wait for the device until the last step's report is on the host. Otherwise the report
        is of the last step that has arrived there.
        """
        found = self._stepper.native.log.newest(wait)
        return None if found is None else StepReport(*found)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step (with attach, any parameter) was skipped; waits for it."""
        report = self.last_report(wait=True)
        return report is not None and report.skipped

    @property
    def grad_norm(self) -> float | None:
        """2-norm of the last step's true gradients (unscaled, before clipping); waits for the step.

        inf after an overflow; None where the gradients were not measured.
        """
        report = self.last_report(wait=True)
        return report.grad_norm if report is not None else None

    def __repr__(self) -> str:
        stored = [{n: g.get(n) for n in self._chosen} for g in self.param_groups]
        default = dict.fromkeys(self._chosen)
        kinds = _C.kinds_of(self._rules)
        roundings = {g.get("rounding") for g in self.param_groups}
        presets = [
            p
            for p, formats in PRESETS.items()
            if all(s == resolve(p, default, kinds) for s in stored)
            and ("rounding" not in formats or roundings == {formats["rounding"]})
        ]
        numbers = f"memory={presets[0] if presets else 'mixed'!r}, "
        numbers += f"max_grad_norm={self.max_grad_norm}, check_overflow={self.check_overflow}"
        return super().__repr__().replace(" (", f" ({numbers})", 1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by torch when it unpickles the optimizer, and when it loads a state dict."""
        super().__setstate__(state)
        if "_stepper" not in vars(self):  # being unpickled
            vars(self).setdefault("_checks_each", self.check_overflow)  # as up to 0.3
            for group in (self.defaults, *self.param_groups):
                if isinstance(named := group.get("process_groups"), GroupsOfRun):
                    group["process_groups"] = named.unpacked()
            self._make_stepper()
            self._stepper.native.norm_history = self.param_groups[0].get("norm_history")
            params = params_in(self.param_groups)
            weights = vars(self).pop("_weights", None)
            _C.set_weight_states(params, weights or [None] * len(params))
            _C.put_entries(self.param_groups, self.state, takes=weights is None)
        for group in self.param_groups:  # a torch.optim checkpoint lacks some keys
            self._complete(group)
        self._stepper.forget()

    def __getstate__(self) -> dict[str, Any]:
        """What torch pickles, the fused optimizers' own arguments, and the weights' masters."""

        def packed(group: dict[str, Any]) -> dict[str, Any]:
            named = group.get("process_groups")
            if not named or isinstance(named, GroupsOfRun):
                return group
            return {**group, "process_groups": known.setdefault(id(named), GroupsOfRun(named))}

        known: dict[int, GroupsOfRun] = {}  # one of each, which a pickle warns of once
        self._show_history()
        _C.put_entries(self.param_groups, self.state)
        weights = _C.weight_states(params_in(self.param_groups))
        own = {name: getattr(self, name) for name in PICKLED}
        state = {**super().__getstate__(), **own, "_weights": weights}
        state["defaults"] = packed(state["defaults"])
        if any(packed(group) is not group for group in self.param_groups):
            state["param_groups"] = [packed(group) for group in self.param_groups]
        return state


def stepper_of(optimizer: FusedOptimizer) -> Stepper:
    """What a fused optimizer keeps for the other files of this package."""
    return optimizer._stepper


def rules_of(kind: type[FusedOptimizer]) -> tuple[Rule, ...]:
    """The rules that optimizers of a class may use."""
    return kind._rules


def forget(optimizer: FusedOptimizer) -> None:
    """Drops what an optimizer derives from its param_groups and state, and its last report.

    Call it before modules or tensors are exchanged by hand, as torch.utils.swap_tensors does; and
    after a script has put other tensors into the state (on the CPU, say), to free the old ones
    at once and not at the next step. The next step makes it anew. Masters stay with their weights;
    amp_mp.drop_masters frees those of a model.
    """
    optimizer._stepper.forget()
    _C.put_entries(optimizer.param_groups, optimizer.state)
    _C.release_weights(params_in(optimizer.param_groups))
