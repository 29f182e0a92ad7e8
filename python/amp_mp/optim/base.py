"""The base of the fused optimizers: torch's surface above the three native passes.

A subclass declares its rules (rule.py) and its arguments. What a step does is in step/, the state
in state/, work during the backward pass in backward/, and the update itself in csrc/core/rules.
"""

from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.optim.backward.attach import attach
from amp_mp.optim.backward.attachment import Attachment
from amp_mp.optim.backward.release import Release
from amp_mp.optim.new_group import check_last_group
from amp_mp.optim.options import SHARED_ARGUMENTS, Options, check_group, check_options
from amp_mp.optim.rule import Rule, Shape, kinds_of
from amp_mp.optim.state.checkpoint import rename_states
from amp_mp.optim.state.formats import resolve, resolve_group
from amp_mp.optim.state.init import init_states
from amp_mp.optim.state.saves_state import SavesState
from amp_mp.optim.step.capture import refuse_new_state
from amp_mp.optim.step.gather import param_infos
from amp_mp.optim.step.handed import Handed, Measured, handed_to
from amp_mp.optim.step.outside_graphs import outside_graphs
from amp_mp.optim.step.protocols import Scaler
from amp_mp.optim.step.refuse import refuse_param, refuse_state, refuse_zero
from amp_mp.optim.step.run import StepRunner
from amp_mp.optim.step.step_report import ReportsSteps, StepLog
from amp_mp.sharding.reduction import checked_groups
from amp_mp.sharding.shards import local_of

# Attributes in a pickle besides torch's own.
PICKLED = (
    "max_grad_norm check_overflow process_groups _step_supports_amp_scaling _own_defaults _chosen"
)


class FusedOptimizer(ReportsSteps, SavesState, ABC):
    """Base of the fused optimizers; a torch.optim.Optimizer.

    Parameters are float32, bfloat16 or float16 tensors of any dense layout, or DTensors (FSDP2,
    tensor parallel: docs/distributed.md), gradients any of the three dtypes. Formats and seed may
    differ between param_groups. After `step()` see `step_was_skipped`, `grad_norm` and
    `last_report()`.
    """

    rules: ClassVar[tuple[Rule, ...]]  # all that the class may use; rule() is the first by default
    handed: Handed | None = None  # by a loss scaler, to the step under way
    attachment: Attachment | None = None
    process_groups: tuple[Any, ...] = ()  # besides those of DTensors' meshes

    def __init__(self, params: Any, defaults: dict[str, Any], options: Options) -> None:
        """Raises TypeError or ValueError naming the argument.

        defaults: the rule's own numbers. options: the arguments that all fused optimizers take, and
        how single states are stored.
        """
        kinds = kinds_of(self.rules)
        choosable = tuple(name for name, kind in kinds.items() if kind != "exact")
        check_options(type(self).__name__, choosable, options)
        check_group({**defaults, **options})
        given: Mapping[str, Any] = options
        self.max_grad_norm = options.get("max_grad_norm")
        self.check_overflow = options.get("check_overflow", False)
        self.process_groups = checked_groups(options.get("process_groups"))
        self._step_supports_amp_scaling = options.get("amp_scaling", True)
        refuse_zero(self)
        self._chosen = {name: given.get(name) for name in ("master", *kinds)}
        stored = resolve(options.get("memory"), self._chosen, kinds)
        shared = {"maximize": False, "rounding": "nearest", "seed": 0}
        defaults = {**defaults, **stored, **{n: given.get(n, v) for n, v in shared.items()}}
        self._own_defaults = tuple(defaults)  # torch adds others when it unpickles
        self._runner = StepRunner()
        super().__init__(params, defaults)

    def __init_subclass__(cls) -> None:
        """Adds the shared arguments to the class's docstring, so that help() explains them all."""
        super().__init_subclass__()
        if cls.__doc__:
            cls.__doc__ = f"{cls.__doc__.rstrip()}\n{SHARED_ARGUMENTS}"

    def forget(self) -> None:
        """Drops what is derived from param_groups and state, and the last step's report.

        Call it after writing into `state` by hand where tensors were exchanged for others.
        """
        self._runner.forget()
        if self.attachment is not None:
            self.attachment.forget()

    def _patch_step_function(self) -> None:
        """torch's, which adds hooks to the class's step; with them it stays outside of graphs."""
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
        handed = handed_to(self)
        if isinstance(self.attachment, Release):
            if self._runner.replaced.is_due():
                self.refuse_replaced()
            self.attachment.finish(handed)
        else:
            self._runner.run(self, handed)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        super().zero_grad(set_to_none)
        if self.handed is not None and self.handed.marks is not None:
            self.handed = None  # no gradient carries a scale any more

    def step_with(self, handed: Handed, *args: Any, **kwargs: Any) -> Any:
        """`step`, with what a loss scaler passes to it."""
        before, self.handed = self.handed, handed
        try:
            return self.step(*args, **kwargs)
        finally:
            self.handed = before

    @property
    def log(self) -> StepLog:
        """The verdicts of the steps."""
        return self._runner.log

    def hyper(self, index: int, shape: Shape | None = None) -> _C.Hyper:
        """The numbers of one param_group, and of matrices of a shape, for the native step."""
        return self._runner.hyper(self.group_rules()[index], self.param_groups, index, shape)

    def measures(self) -> bool:
        """Whether a step needs the gradients' norms, or whether they overflow."""
        clips = self.max_grad_norm is not None
        return clips or self.check_overflow or any(r.needs_norms for r in self.group_rules())

    def measure(self) -> Measured:
        """Reads the gradients once, for a step that is handed the result."""
        return self._runner.measure(self)

    def measure_gradients(self) -> dict[torch.device, Tensor]:
        """Measures the gradients as they are, in one read.

        Returns, per device, float64 [3]: sum of squares, largest finite |g|, number of elements
        that are inf or NaN, of all gradients together. Attached with release=True: of the gradients
        released since the last step; RuntimeError where nothing asked for measuring them.
        """
        if isinstance(self.attachment, Release):
            return self.attachment.totals()
        return self.measure().totals()

    @property
    def amp_scaling(self) -> bool:
        """Whether the step takes over unscaling and skipping from a loss scaler."""
        return self._step_supports_amp_scaling

    @property
    def releases(self) -> bool:
        """Whether gradients are stepped and freed during backward (attach)."""
        return isinstance(self.attachment, Release)

    def refuse_replaced(self) -> None:
        """Raises ValueError, by name, for parameters whose modules have DTensors in their place."""
        self._runner.replaced.check(self.param_groups)

    def init_state(self) -> None:
        """Makes the state of every trainable parameter now, not at its first gradient.

        With it torch.distributed.checkpoint.state_dict takes no step of its own to make state.
        Existing state stays. Raises what a first step raises: TypeError or ValueError naming the
        parameter, RuntimeError in torch.inference_mode or while a CUDA graph is captured.
        """
        trained = [(p, info) for p, info in param_infos(self.param_groups) if p.requires_grad]
        refuse_new_state({local_of(param).device for param, _ in trained})
        rules = self.group_rules()
        self.refuse_replaced()
        for param, info in trained:
            refuse_param(param, info.label)
            refuse_state(rules[info.group], param, self.state.get(param, {}), info.label)
        with torch.no_grad():
            init_states(rules, self.param_groups, self.state)

    def attach(
        self,
        model: nn.Module,
        *,
        release: bool = False,
        measure: bool = False,
        scaler: Scaler | None = None,
        clip: str = "parameter",
    ) -> Attachment:
        """Makes the optimizer work during the backward pass: docs/gradient_release.md.

        Args:
            model: the module whose parameters are handled as soon as their gradients are complete
                (under DistributedDataParallel: averaged). `step` handles the optimizer's others.
            release: step each parameter right then and free its gradient (DistributedDataParallel
                keeps it). Every backward steps; `step` only ends the iteration.
            measure: read each gradient while it is in the cache. Either this or release is True.
            scaler: the amp_mp.GradScaler of the losses; with release only.
            clip: how max_grad_norm clips with release, where the norm of all gradients is known too
                late: each gradient by its own norm ("parameter"), or by the norm of the last step
                without overflow ("previous", at first as "parameter").

        Returns the attachment; `remove()` or the end of a `with` block ends it.
        Raises ValueError or TypeError naming the argument, RuntimeError if attached already.
        """
        self.attachment = attach(self, model, release, measure, scaler, clip)
        return self.attachment

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group's parameters get their state at the next step.

        The group may have formats of its own, by `memory` or by name. TypeError or ValueError
        naming a parameter or number that cannot be; the group is then not added.
        """
        resolve_group(param_group, self._chosen, kinds_of(self.rules))
        super().add_param_group(param_group)
        check_last_group(self.param_groups)
        self.forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickles, or as torch does it, reloads; derived data is made anew."""
        super().__setstate__(state)
        if "_runner" not in vars(self):  # being unpickled
            self._runner = StepRunner()
            rename_states(self)
        for group in self.param_groups:  # a torch.optim checkpoint lacks some keys
            self.complete(group)
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """What torch pickles, and the fused optimizers' own arguments."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in PICKLED.split()}}
