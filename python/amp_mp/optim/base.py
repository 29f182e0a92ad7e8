"""What the fused optimizers share: measure, decide, apply, once a device.

A subclass names its native operator and states and turns a param_group into numbers; the update
itself is in csrc/core/rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.optim.attach import Attachment, Measure, attach
from amp_mp.optim.capture import refuse_dormant
from amp_mp.optim.decide import decide, new_verdict, terms
from amp_mp.optim.loading import restore_state, torch_state_dict
from amp_mp.optim.options import Options as Options
from amp_mp.optim.options import check_options
from amp_mp.optim.options import check_ranges as check_ranges
from amp_mp.optim.outcome import Outcomes, StepReport
from amp_mp.optim.release import Release
from amp_mp.optim.report import MemoryReport, report_memory
from amp_mp.optim.state import Bucket, all_current, gather_buckets
from amp_mp.optim.storage import check_low_precision, resolve

if TYPE_CHECKING:
    from amp_mp.scaling.grad_scaler import GradScaler


class FusedOptimizer(torch.optim.Optimizer, ABC):
    """Base of the fused optimizers, a torch.optim.Optimizer.

    Parameters are float32, bfloat16 or float16 tensors of any dense layout; gradients any of the
    three. All take, besides torch's arguments:

        maximize=False: ascend.
        max_grad_norm=None: clip by the global norm over all groups, as
            torch.nn.utils.clip_grad_norm_, inside the step.
        check_overflow=False: skip steps with an inf or NaN gradient. Whenever gradients are
            measured, for this, for clipping, by a scaler or by LAMB, LARS and NovoGrad, such a
            gradient makes the step leave every byte as it was. Without any of these nothing is
            checked, as in torch.
        amp_scaling=True: with torch.amp.GradScaler the step takes over unscaling and skipping,
            which also lets the scaler accept float16 gradients. False where a framework insists on
            unscaled gradients itself (Lightning's gradient clipping, Accelerate's
            step_was_skipped).
        memory=None: how masters and states are stored: "exact" (12 bytes a parameter beside the
            gradient, with bfloat16 weights; loses nothing), "lean" (7), "tiny" (6.1).
        master=None: one of them alone. "float32" (the default): the update works on a float32
            tensor, the parameter is its rounded copy (nearest even; float16 saturates at +-65504).
            "split32", "split24": the parameter and a remainder of 2 or 1 bytes together are the
            master (nearest, ties away from zero). "none": the parameter itself is updated and
            rounded, and an update below half a unit in its last place is lost, unless
            rounding="stochastic".
        A state's own name, exp_avg="bfloat16" and the like: first moments are "float32",
            "bfloat16", "float16" or "m8", sums of squares "float32", "bfloat16", "float16",
            "float16_root" or "ue8m8". amp_mp.formats explains them.
        rounding="nearest": of the weights, where there is no master.
        seed=0: of stochastic rounding. Saved and restored; has to be the same on all replicas.
        foreach, fused, capturable: torch's; accepted, and without effect: every step is fused, and
            can be captured by a CUDA graph (docs/cuda.md). lr may be a tensor, which on the
            parameters' device is read when the step runs.

    Formats and seed may differ from group to group.

    After `step()`: `step_was_skipped` and `grad_norm`.
    """

    _needs_norms = False  # whether the rule looks at the gradients' norms
    _attachment: Attachment | None = None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        formats: dict[str, str | None],
        **options: Unpack[Options],
    ) -> None:
        """Raises ValueError naming the argument; formats: the states' as given, None for any."""
        check_options(type(self).__name__, options)
        self.max_grad_norm = options.get("max_grad_norm")
        self.check_overflow = options.get("check_overflow", False)
        self._step_supports_amp_scaling = options.get("amp_scaling", True)
        self._chosen = {"master": options.get("master"), **formats}
        stored = resolve(options.get("memory"), self._chosen)
        defaults = {
            **defaults,
            "maximize": options.get("maximize", False),
            **stored,
            "rounding": options.get("rounding", "nearest"),
            "seed": options.get("seed", 0),
        }
        self._own_defaults = tuple(defaults)  # torch adds others when it unpickles
        self._forget()
        super().__init__(params, defaults)
        everything = [p for group in self.param_groups for p in group["params"]]
        check_low_precision(stored["master"], everything)

    def _forget(self) -> None:
        """Drops what is derived from param_groups and state, or known of the last step."""
        self._buckets: list[Bucket] | None = None
        self._ready: tuple[list[Bucket], list[_C.Measurement]] | None = None
        self._outcomes: Outcomes = vars(self).get("_outcomes") or Outcomes()  # keeps its memory
        self._outcomes.forget()
        if self._attachment is not None:
            self._attachment.forget()

    # What a subclass gives.

    @abstractmethod
    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        """A param_group's numbers, as _C.Hyper has them."""

    @abstractmethod
    def _operator(self) -> Callable[..., None]:
        """The native operator."""

    @abstractmethod
    def _states(self) -> tuple[str, ...]:
        """The names of the operator's states, in its order."""

    def _fill(self, name: str, group: dict[str, Any]) -> float:
        """What a new state starts as."""
        return 0.0

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's result.

        Raises ValueError or TypeError, before anything is changed, where a gradient is sparse, of a
        foreign shape, dtype or device, or where two parameters share memory.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if isinstance(self._attachment, Release):
            self._attachment.finish()
            return loss
        buckets, measured = self._measure()
        self._apply(buckets, measured)
        return loss

    def _apply(self, buckets: list[Bucket], measured: list[_C.Measurement] | None) -> None:
        """Decides and updates: with one device in one native call, with several once for all."""
        device = buckets[0].device if buckets else torch.device("cpu")
        on = terms(
            device,
            scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            max_norm=self.max_grad_norm,
            next_scale=self.__dict__.get("_next_scale"),
            reports=self._outcomes.reports_on(device),
        )
        hypers = [self._hyper(group) for group in self.param_groups]
        operator = self._operator()
        found: list[_C.Measurement | None] = [*measured] if measured else [None] * len(buckets)
        if len(buckets) == 1:
            verdict = new_verdict(device)
            operator(buckets[0].slots, hypers, verdict, found[0], on)
        else:
            verdict = decide(device, [m.rows for m in measured or ()], on)
            for bucket, own in zip(buckets, found, strict=True):
                operator(bucket.slots, hypers, verdict.to(bucket.device), own)
        self._outcomes.add(verdict, bool(measured))

    def _hyper(self, group: dict[str, Any]) -> _C.Hyper:
        return _C.Hyper(seed=group["seed"], maximize=group["maximize"], **self._numbers(group))

    def _gather(self) -> list[Bucket]:
        lists = [group["params"] for group in self.param_groups]
        if self._buckets is None or not all_current(self._buckets, lists, self._states()):
            self._buckets = gather_buckets(self)
        refuse_dormant(self._buckets)
        return self._buckets

    def _measure(self) -> tuple[list[Bucket], list[_C.Measurement] | None]:
        """The tensors to step, and their gradients' statistics if anything asks for them."""
        ready, self._ready = self._ready, None
        if ready is not None and hasattr(self, "found_inf"):
            return ready  # a scaler has measured for this very step
        buckets = self._gather()
        return buckets, [self._read(bucket) for bucket in buckets] if self._asks() else None

    def _asks(self) -> bool:
        """Whether a step has to know the gradients' norms or overflows."""
        return self.max_grad_norm is not None or self.check_overflow or self._needs_norms

    def _read(self, bucket: Bucket) -> _C.Measurement:
        attached = self._attachment
        return attached.read(bucket) if isinstance(attached, Measure) else bucket.slots.measure()

    def _measure_ahead(self) -> list[tuple[torch.device, _C.Measurement]]:
        """Measures the gradients as they are for the step that follows, if it finds found_inf."""
        buckets = self._gather()
        measured = [self._read(bucket) for bucket in buckets]
        self._ready = buckets, measured
        return [(bucket.device, own) for bucket, own in zip(buckets, measured, strict=True)]

    def measure_gradients(self) -> dict[torch.device, Tensor]:
        """Measures the gradients as they are, one read, for the step that follows.

        Returns, per device, the total's row: sum of squares, largest finite |g|, number of
        non-finite elements, float64 [3]. Attached with release=True: what has been released since
        the last step; RuntimeError where nothing has asked for measuring it.
        """
        if isinstance(self._attachment, Release):
            return self._attachment.totals()
        return {device: measured.rows[-1] for device, measured in self._measure_ahead()}

    @property
    def releases(self) -> bool:
        """Whether gradients are stepped and freed during backward (attach)."""
        return isinstance(self._attachment, Release)

    def last_report(self, wait: bool = False) -> StepReport | None:
        """The last step's outcome, or without waiting the last that has reached the host.

        Args:
            wait: for the device, should it not have come as far; with a step replayed from a CUDA
                graph it is always asked.

        Returns:
            number, skipped, grad_norm, max_abs, loss_scale; None while there is none.
        """
        return self._outcomes.newest(wait)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step met an overflow and so changed nothing. Waits as last_report.

        Attached with release=True: whether any parameter was left as it was.
        """
        report = self.last_report(wait=True)
        return report is not None and report.skipped

    @property
    def grad_norm(self) -> float | None:
        """Global 2-norm of the last step's true gradients (unscaled, before clipping).

        inf after an overflow; None where nothing asked for measuring. Waits as last_report.
        """
        report = self.last_report(wait=True)
        return report.grad_norm if report is not None else None

    def memory_report(self) -> MemoryReport:
        """Bytes of weights, gradients, masters and states as they are now, from real storages."""
        return report_memory(self)

    def attach(
        self,
        model: nn.Module,
        *,
        release: bool = False,
        measure: bool = False,
        scaler: GradScaler | None = None,
        clip: str = "parameter",
    ) -> Attachment:
        """Works during the backward pass, on each gradient as it is made: docs/gradient_release.md.

        Args:
            model: whose parameters to attend to; those of a DistributedDataParallel once they are
                averaged. The optimizer's other parameters, if any, wait for `step`.
            release: step each parameter as soon as its gradient is there, and free the gradient
                (under DistributedDataParallel it stays). Every backward steps; `step` only ends
                the iteration.
            measure: read each gradient while it is in the cache, so that `step` need not. One of
                release and measure has to be True.
            scaler: the amp_mp.GradScaler of the losses; with release only.
            clip: how max_grad_norm is kept with release, where no gradient waits for the norm of
                all: "parameter", each by its own norm; "previous", all by the norm of the last
                step without overflow, before the first one as "parameter".

        Returns:
            The attachment: `remove()` ends it, as does the end of a `with` block.

        Raises ValueError or TypeError naming the argument, RuntimeError if attached already.
        """
        return attach(self, model, release=release, measure=measure, scaler=scaler, clip=clip)

    # State.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group's parameters get their state at the next step.

        The group may have formats of its own, by `memory` or by name.
        """
        own = {name: param_group.get(name) for name in self._chosen}
        memory = param_group.pop("memory", None)
        if memory is not None or any(own.values()):
            given = {name: own[name] or self._chosen[name] for name in own}
            stored = resolve(memory, own if memory is not None else given)
            param_group.update({n: s for n, s in stored.items() if memory or own[n]})
        super().add_param_group(param_group)
        self._forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep the width they were saved with.

        torch casts every state to its parameter's dtype, which would round masters and moments of
        low-precision parameters. States saved in another format than this optimizer's are
        converted; load the model first, since a split master is stored in its weights. Reads
        checkpoints of torch.optim too: a missing master is made from the parameter. Raises
        ValueError on a shape that does not fit, before anything is changed.
        """
        restore_state(self, state_dict, super().load_state_dict)
        self._forget()

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as the optimizer of torch.optim with the same name has it, for float32 weights.

        States are decoded to float32; masters are left out: they are the float32 weights
        (amp_mp.float32_state_dict).
        """
        return torch_state_dict(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickles, or as torch does, reloads; what was derived is built anew."""
        super().__setstate__(state)
        for group in self.param_groups:  # a torch.optim checkpoint lacks some keys
            for name in self._own_defaults:
                group.setdefault(name, self.defaults[name])
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """What torch pickles and the fused optimizers' own arguments."""
        own = ["max_grad_norm", "check_overflow", "_step_supports_amp_scaling", "_own_defaults"]
        own += ["_chosen"]
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}
