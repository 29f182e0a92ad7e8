"""Gradient release: steps each parameter, and frees its gradient, as soon as it is complete.

`attach` is FusedOptimizer.attach.
"""

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_mp import _C
from amp_mp.dtypes import NATIVE, check_choice
from amp_mp.messages import warn
from amp_mp.optim.backward.ddp_hook import DDPHook, ddp_hook_of
from amp_mp.optim.backward.nested_backward import Passes
from amp_mp.optim.step.stepper import Stepper, set_updates
from amp_mp.param_groups import ParamInfo, param_infos, params_in
from amp_mp.sharding.gradients import Statistics, Verdict, joined, local_gradient
from amp_mp.sharding.reduction import WholeStatistics
from amp_mp.sharding.shards import is_dtensor, local_of


@runtime_checkable
class Scaler(Protocol):
    """A loss scaler that an optimizer can ask for the scale during the backward pass."""

    def is_enabled(self) -> bool:
        """Whether it scales losses."""

    def scale_on(self, device: torch.device) -> Tensor | None:
        """The factor of the losses, float32 [] on the device, without waiting; None for 1."""


class Release(AbstractContextManager["Release"]):
    """What FusedOptimizer.attach returns; `remove()` or the end of a `with` block ends it.

    Steps each parameter in a hook; `finish` does what remains for the optimizer's step.
    """

    def __init__(
        self, stepper: Stepper, model: nn.Module, scaler: Scaler | None, clip: str
    ) -> None:
        refuse_norm_limit(stepper.optimizer)
        self._stepper = stepper
        self._optimizer: Any = stepper.optimizer
        self._handles: list[Any] = []
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._clip = clip
        # Gradients of several devices, and of gloo's threads, come at the same time.
        self._lock = threading.Lock()
        self._infos: dict[Tensor, ParamInfo] = {}
        self._whole = WholeStatistics([])
        self._located = False  # whether _infos is known to be right in this iteration
        self._buckets: dict[Tensor, _C.Bucket] = {}  # each of one parameter
        self._rows: dict[Tensor, Tensor] = {}  # statistics since the last step, float64 [3]
        # Parameters that still have the gradient they were stepped with.
        self._stepped: set[Tensor] = set()
        self._passes = Passes()
        self._has_kept = False  # whether gradients had to wait for the optimizer's step
        self._previous = PreviousNorm()
        self._locate()
        self._ddp_hook: DDPHook | None = None
        if isinstance(model, DistributedDataParallel):
            self._ddp_hook = ddp_hook_of(model)
        if self._ddp_hook is None:
            self._hook(model)
        else:
            self._ddp_hook.steppers.add(self)

    def _hook(self, model: nn.Module) -> None:
        """Has `_arrive` called with the optimizer's parameters in the model as gradients come."""
        own = set(params_in(self._optimizer.param_groups))
        ref = weakref.ref(self)  # a model may outlive its optimizer

        def hook(param: Tensor) -> None:
            release = ref()
            if release is not None and param.grad is not None:
                release._arrive(param)

        for param in model.parameters():
            if param in own and param.requires_grad:
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def has_released(self) -> bool:
        """Whether gradients were stepped and freed since the last step."""
        return bool(self._rows)

    def forget(self) -> None:
        """Drops what is derived from param_groups and state."""
        self._located = False
        self._previous.forget()
        self._buckets.clear()

    def remove(self) -> None:
        """Ends the work during backward; `step` then does everything. Call after a step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._stepper.release is self:
            self._stepper.release = None
        if self._ddp_hook is not None:
            self._ddp_hook.steppers.discard(self)

    def __exit__(self, *_: object) -> None:
        self.remove()

    # One parameter.

    def _arrive(self, param: Tensor) -> None:
        with self._lock, torch.no_grad():
            if self._passes.is_whole(param):
                self._step(param)
            else:
                self._keep(param)

    def _keep(self, param: Tensor) -> None:
        """Leaves the gradient, which may be a part, to `finish`."""
        if self._passes.was_whole(param) and param in self._infos:
            raise RuntimeError(
                f"gradient release has stepped {self._infos[param].label}, and a backward pass "
                "inside of this one, of a checkpoint that is not torch's, now adds to its "
                "gradient. The weights are not those of ordinary training any more: load the last "
                "checkpoint, and train without attach"
            )
        if not self._has_kept:
            self._has_kept = True
            warn(
                "gradient release steps and frees nothing in this backward pass, nor in others "
                "like it: reentrant checkpoints run backward passes inside, which give parts of "
                "gradients. optimizer.step() will step. Take use_reentrant=False, and gradients "
                "are freed again"
            )

    def arrive_averaged(self, param: Tensor, grad: Tensor) -> None:
        """Steps one of a DistributedDataParallel's parameters with a gradient from its bucket."""
        with self._lock, torch.no_grad():
            kept, param.grad = param.grad, grad
            try:
                if kept is None and param in self._infos:
                    raise RuntimeError(
                        f"{self._infos[param].label} has taken no part in this backward; with "
                        "gradient release every parameter has to under DistributedDataParallel: "
                        "whether another rank has a gradient of it is not known yet"
                    )
                self._step(param)
            finally:
                param.grad = kept

    def _step(self, param: Tensor) -> None:
        _C.refuse_borrowed([param], "a backward pass that steps (attach)")
        self._locate()
        info = self._infos.get(param)
        if info is None:
            return
        optimizer, device = self._optimizer, local_of(param).device
        refuse_norm_limit(optimizer)
        is_shard = is_dtensor(param)
        if is_shard:
            refuse_shards(self._stepper, self.scaler, self._clip)
            if self._postpones():
                return
        bucket = self._bucket(param, info)
        bucket.find_gradients()
        measured = bucket.measure() if self._measures() else None
        max_norm = None if measured is None else optimizer.max_grad_norm
        scale = self._scale(device)
        total = None
        if measured is not None and max_norm is not None and self._previous.is_there():
            total = self._previous.statistics(measured.rows[1], scale, is_shard)
        bucket.step(optimizer.param_groups, measured, scale, max_norm, total)
        if measured is not None:
            row, old = measured.rows[0], self._rows.get(param)
            if old is not None:  # another backward of the same iteration
                _C.used_on_current_stream([old])
                row = joined(old, row)
            self._rows[param] = row
        if self._ddp_hook is None:
            param.grad = None
        else:
            self._stepped.add(param)

    def _measures(self) -> bool:
        return self._stepper.measures_each() or self.scaler is not None

    def _scale(self, device: torch.device) -> Tensor | None:
        """The factor of the losses on the device, read without waiting; None for 1."""
        return self.scaler.scale_on(device) if self.scaler is not None else None

    # Where things are.

    def _bucket(self, param: Tensor, info: ParamInfo) -> _C.Bucket:
        optimizer = self._optimizer
        bucket = self._buckets.get(param)
        rules, groups, states = self._stepper.group_rules(), optimizer.param_groups, optimizer.state
        if bucket is None or not bucket.is_of(rules, groups, states):
            self._stepper.check(rules)
            # This parameter alone: all of them for each would be the square of their number.
            rule, group, matrices = rules[info.group], groups[info.group], {}
            self._stepper.refuse_shapes(rule, group, [(param, info.label)])
            if rule.directions is not None:
                matrices[info.tensor_index] = rule.directions.matrices(group, param)
            known = _C.GroupInfo(self._stepper.own_keys, matrices)
            bucket = self._buckets[param] = _C.Bucket(rules, groups, states, known, param, *info)
            set_updates(bucket)
        return bucket

    def _locate(self) -> None:
        """Finds the parameters in their groups; ValueError where two of them share memory."""
        if self._located:
            return
        groups = self._optimizer.param_groups
        if not self._whole.is_of(groups):
            infos = dict(param_infos(groups))
            trained = [p for p in infos if p.requires_grad and p.dtype in NATIVE]
            # A step of one parameter cannot see the memory of the others.
            _C.check_weights([local_of(p) for p in trained], [infos[p].label for p in trained])
            self._infos = infos
            self._whole = WholeStatistics(groups)
            self._buckets.clear()
        self._located = True

    # All of them.

    def _postpones(self) -> bool:
        """Whether shards wait for `finish`: there is no norm of an earlier step to clip by yet."""
        return self._measures() and not self._previous.is_there() and self._whole.is_needed

    def totals(self) -> dict[torch.device, Tensor]:
        """The statistics since the last step, added in the order of measuring all at once."""
        with self._lock, torch.no_grad():
            self._step_others()
            _C.used_on_current_stream(list(self._rows.values()))  # of backward passes' streams
            if not self._measures():
                raise RuntimeError(
                    "gradient release has freed the gradients, and nothing has measured them: call "
                    "optimizer.attach(model, scaler=scaler)"
                )
            if self._whole.is_needed:
                device = self._whole.device
                none = no_gradient_on(device)
                known = [self._rows[p].to(device) if p in self._rows else none for p in self._infos]
                # One more, because torch stacks no empty list.
                return {device: self._whole.total(torch.stack([*known, none])[:-1])}
            rows: dict[torch.device, list[Tensor]] = {}
            for param in self._infos:
                own = rows.setdefault(param.device, [])
                if param in self._rows:
                    own.append(self._rows[param])
                elif self._optimizer.state.get(param):  # counts, as in a step
                    own.append(no_gradient_on(param.device))
            return {
                device: _C.combine(torch.stack(own))[-1] if own else no_gradient_on(device)
                for device, own in rows.items()
            }

    def _step_others(self) -> None:
        """Steps parameters without a hook: outside the model, or unfrozen or added since."""
        self._locate()
        if self._postpones():
            grads = [local_gradient(param, info.label) for param, info in self._infos.items()]
            self._previous.known = self._whole.total(self._whole.measured(grads))
        for param in self._infos:
            if param.grad is not None and param not in self._stepped:
                self._step(param)

    def _describe(self, _: float) -> str:
        found = {param: Statistics(*row.tolist()) for param, row in self._rows.items()}
        return "\n".join(self._infos[p].label for p, row in found.items() if row.non_finite > 0)

    def finish(self, inputs: _C.StepInputs) -> None:
        """Ends the iteration, in place of the optimizer's step."""
        log = self._stepper.native.log
        if self.scaler is None and inputs.scale is not None:
            raise RuntimeError(
                "gradient release has stepped with scaled gradients: attach with scaler=, an "
                "amp_mp.GradScaler; other loss scalers come too late"
            )
        log.forget()
        if self._measures():
            totals = self.totals()
            device = next(iter(totals))
            verdict = log.decide(device, list(totals.values()), self._scale(device))
            self._stepper.warn(log.skipped(), self._describe, self.scaler is not None)
            if self._clip == "previous" and (self._rows or self._whole.is_needed):
                if self._whole.is_needed and self._previous.known is None:
                    number, skipped, *_ = log.newest(wait=False) or (0, False)
                    if skipped:
                        warn(
                            f"gradients were inf or NaN in step {number}, and gradient release has "
                            "stepped shards with them: a hook cannot know what other processes "
                            "find. Load the last checkpoint, and train without release where this "
                            "may happen"
                        )
                self._previous.take(verdict)
        else:
            with self._lock, torch.no_grad():
                self._step_others()
        self._rows.clear()
        self._stepped.clear()
        self._passes.forget()
        self._located = False


def no_gradient_on(device: torch.device) -> Tensor:
    """The statistics of a parameter without a gradient, float64 [3]."""
    return torch.zeros(3, dtype=torch.float64, device=device)


class PreviousNorm:
    """The norm of the last step without overflow.

    norm: float64 [], -1 while no step was clean; None before the first step. known: float64 [3],
    the statistics of all gradients of the step under way. They are known only in the first step of
    shards, whose gradients wait for all processes.
    """

    def __init__(self) -> None:
        self.norm: Tensor | None = None
        self.known: Tensor | None = None

    def forget(self) -> None:
        """Starts from the beginning."""
        self.norm = self.known = None

    def is_there(self) -> bool:
        """Whether `statistics` has something to clip by."""
        return self.norm is not None or self.known is not None

    def statistics(self, own: Tensor, scale: Tensor | None, is_shard: bool) -> Tensor:
        """What a parameter's step is decided from, float64 [3].

        own: the statistics of its gradient, or of this process's shard of it. scale: that the
        gradient carries.
        """
        if self.known is not None:
            return self.known.to(own.device)
        assert self.norm is not None
        if is_shard:  # what is inf on this process may be finite on another, which would not skip
            own = torch.zeros_like(own)
        norm = self.norm.to(own.device)
        squares = (norm if scale is None else norm * scale.double()).square()
        found = Statistics(*own)
        return torch.stack(
            found._replace(sum_squares=torch.where(norm >= 0, squares, found.sum_squares))
        )

    def take(self, verdict: Tensor) -> None:
        """Takes the norm of a step's verdict; keeps the present one after an overflow.

        Shards go on waiting until a step was clean, which the host has to know: it waits for the
        device, in these first steps alone.
        """
        found = Verdict(*verdict)
        first, self.known = self.known, None
        if first is not None and bool(found.skip != 0):
            return
        before = torch.full_like(found.norm, -1.0) if self.norm is None else self.norm
        _C.used_on_current_stream([before])  # of another step's stream, and dropped here
        self.norm = torch.where(found.skip != 0, before, found.norm)


def refuse_norm_limit(optimizer: Any) -> None:
    """Raises ValueError where a step would depend on the norm of gradients still to come."""
    if optimizer.skip_norm_above is not None:
        raise ValueError(
            "attach: skip_norm_above needs the norm of all gradients before the first weight "
            "changes; leave one of them out"
        )


def refuse_shards(stepper: Stepper, scaler: Any, clip: str) -> None:
    """Raises ValueError where a shard's step would depend on gradients of other processes.

    A step in a gradient's hook knows this process's shard alone. It would clip by a part of the
    norm, and skip where another process does not.
    """
    optimizer, rules = stepper.optimizer, stepper.group_rules()
    wrong = ""
    if scaler is not None:
        wrong = "scaler= checks each gradient for overflow"
    elif stepper.checks_each:
        wrong = "check_overflow=True checks each gradient"
    elif any(rule.is_layerwise for rule in rules):
        wrong = f"{type(optimizer).__name__} needs the norms of whole tensors"
    elif any(rule.directions is not None for rule in rules):
        wrong = f"{type(optimizer).__name__} needs whole matrices"
    elif optimizer.max_grad_norm is not None and clip == "parameter":
        wrong = 'clip="parameter" clips by the norm of a whole tensor'
    if wrong:
        raise ValueError(
            f"attach: {wrong}, and a hook sees only this process's shard of a DTensor; take "
            'clip="previous" to clip by the last step\'s norm, leave it out, or train without '
            "attach"
        )


def attach(stepper: Stepper, model: Any, scaler: Any, clip: str) -> Release:
    """See FusedOptimizer.attach. Every argument is checked before anything is changed."""
    optimizer = stepper.optimizer
    if stepper.release is not None:
        raise RuntimeError("the optimizer is attached already; call remove() of that one first")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model)}")
    check_choice("clip", clip, ("parameter", "previous"))
    if scaler is not None and not isinstance(scaler, Scaler):
        raise TypeError(
            f"scaler must be an amp_mp.GradScaler, found {type(scaler)}: torch's own asserts that "
            "it has seen gradients, which are gone by then"
        )
    if scaler is not None and not optimizer.amp_scaling:
        raise ValueError(
            "scaler= needs amp_scaling=True: without it the scaler unscales gradients, now freed"
        )
    own = set(params_in(optimizer.param_groups))
    if own and not any(p in own for p in model.parameters()):
        raise ValueError("model holds none of the optimizer's parameters; pass the one it updates")
    wrapped = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if wrapped and not isinstance(model, DistributedDataParallel):
        raise ValueError("model holds a DistributedDataParallel; attach to that one itself")
    if any(m.find_unused_parameters for m in wrapped):
        raise ValueError(
            "model: attach does not go with find_unused_parameters=True; which parameters "
            "have no gradient is known only after the last one has been averaged"
        )
    if any(is_dtensor(p) and p in own for p in model.parameters()):
        refuse_shards(stepper, scaler, clip)
    if any(group.get("offload") for group in optimizer.param_groups):
        optimizer.init_state()  # a hook would pin memory while NCCL works
    return Release(stepper, model, scaler, clip)
