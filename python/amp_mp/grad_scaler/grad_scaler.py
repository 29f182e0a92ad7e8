"""torch's GradScaler with native passes: gradients are read once and never written."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.grad_scaler.scale_update import ScaleNumbers, ScaleUpdates
from amp_mp.optim.base import FusedOptimizer, stepper_of
from amp_mp.optim.step.cuda_graphs import is_capturing, refuse_split
from amp_mp.param_groups import param_infos, params_in
from amp_mp.scaling.policies import ScalePolicy, make_policy
from amp_mp.sharding import gradients
from amp_mp.sharding.reduction import (
    GroupsOfRun,
    WholeStatistics,
    checked_groups,
    named_groups,
    statistics_of,
)
from amp_mp.switch import ENABLED
from amp_mp.torch_private import outside_graphs

DERIVED = "_updates", "_statistics", "_places"  # what a copy or a pickle makes anew
LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


@dataclass
class Noted:
    """What the scaler notes of an optimizer in one iteration, beside torch's own entries."""

    # Of an optimizer whose gradients were read outside of its step.
    optimizer: Callable[[], Optimizer | None] = lambda: None
    captured: bool = False  # whether a CUDA graph has captured the search for inf and NaN
    max_abs: dict[torch.device, Tensor] = field(default_factory=dict)  # of the true gradients
    added_to: list[Tensor] = field(default_factory=list)  # parameters, by losses after unscale_
    hooks: list[Any] = field(default_factory=list)  # which fill added_to

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Noted":
        """The notes in torch's dict of an optimizer, with which they end."""
        found: Noted = state.setdefault("amp_mp", cls())
        return found


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler; arguments, methods and state_dict are torch's.

    With an amp_mp optimizer, `step` reads the gradients once for the overflow check and the norm
    for clipping, and the optimizer's own pass unscales. For another optimizer it unscales natively,
    once. float16 gradients are accepted either way. The scale never falls below 2^-126; torch's
    reaches 0. 25 iterations with an overflow in a row give a warning, once. A step without any
    gradient raises AssertionError, as torch's, but not with process_groups. After skipped steps the
    next one of torch's SGD(fused=True) is still its first; torch's scaler leaves it unwritten
    memory as momentum.

    By torch's rule and "Backoff" the scale falls in an iteration that is skipped and in no other,
    unless it is at its floor. LogMax and AdaptiveGradScale also lower it where nothing is skipped,
    Hysteresis and Tolerance may keep it: there `optimizer.step_was_skipped` tells.

    Args:
        device: "cuda" or "cpu"; default: "cuda" where there is one.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch; under
            AMP_MP=0 the default is enabled=False. ValueError for an init_scale that is not finite,
            or whose reciprocal float32 does not have.
        loss_scale: what moves the scale instead of torch's rule: "Backoff", "LogMax", a policy, or
            a number for a scale that never moves (overflowing steps are still skipped); in the
            state dict it is `loss_scaler`. ValueError for anything else.
        process_groups: torch.distributed process groups whose processes hold other parameters of
            the model (pipeline stages), for optimizers other than amp_mp's. Groups of DTensors are
            known already. Default None.

    With DTensors an overflow on one process skips the step on all; torch's scaler can miss it.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = ENABLED,
        *,
        loss_scale: float | str | ScalePolicy | None = None,
        process_groups: Any = None,
    ) -> None:
        self._process_groups = checked_groups(process_groups)
        self._statistics = WeakKeyDictionary[Optimizer, WholeStatistics]()
        # Where unscale_ puts its results.
        self._places = WeakKeyDictionary[Optimizer, dict[Any, Tensor]]()
        self._policy = None if loss_scale is None else make_policy(loss_scale)
        if self._policy is not None:
            init_scale = self._policy.scale
        if enabled and not 2.0**-128 < init_scale < float("inf"):
            raise ValueError(f"init_scale must be finite and above 2^-128, found {init_scale!r}")
        self._updates = ScaleUpdates(self._scale_numbers)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        numbers = init_scale, growth_factor, backoff_factor, growth_interval
        super().__init__(device, *numbers, enabled)

    def scale(self, outputs: Any) -> Any:
        """As torch's. May be captured by a CUDA graph, with or without the rest of an iteration."""
        self._updates.is_read(torch.device(self._device))
        for state in self._per_optimizer_states.values() if self._enabled else ():
            if state["stage"] is OptState.UNSCALED and not (noted := Noted.of(state)).hooks:
                groups = getattr(noted.optimizer(), "param_groups", ())
                note = noted.added_to.append  # called with the parameter
                leaves: list[Any] = [p for p in params_in(groups) if p.requires_grad and p.is_leaf]
                noted.hooks = [p.register_post_accumulate_grad_hook(note) for p in leaves]
        return super().scale(outputs)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale, tracker = super()._check_scale_growth_tracker(funcname)
        self._updates.is_read(scale.device)
        return scale, tracker

    @outside_graphs
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """As torch's; an amp_mp optimizer measures, decides and applies in its own step.

        RuntimeError where a scaled loss was added after unscale_, as where a loop begins again.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        noted = Noted.of(state)
        if noted.added_to:
            raise RuntimeError(
                "a scaled loss was added to gradients that unscale_ had divided by the loss scale; "
                f"the step would be up to {self.get_scale():g} times too large. Step before that "
                "loss's backward; after an interrupt call scaler.update() and optimizer.zero_grad()"
            )
        captures = is_capturing(torch.device(self._device))
        measures = state["stage"] is OptState.READY  # and not after unscale_
        if measures:
            noted.captured = captures
        # An eager unscale_ leaves its result at a fixed address, which a captured step reads.
        refuse_split("step", noted.captured or captures, captures)
        own = optimizer if isinstance(optimizer, FusedOptimizer) and optimizer.amp_scaling else None
        if own is None or "closure" in kwargs or stepper_of(own).release:
            # unscale_ may have found it on another stream
            _C.used_on_current_stream(list(state["found_inf_per_device"].values()))
            begun = begin_momentum(optimizer)
            result = super().step(optimizer, *args, **kwargs)
            if begun and any(found.item() for found in state["found_inf_per_device"].values()):
                for each in begun:
                    each.pop("momentum_buffer", None)
            return result
        scale, _ = self._check_scale_growth_tracker("step")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        check_gradients(own)
        outer = getattr(optimizer, "grad_scale", None)  # torch multiplies by it, too
        if measures:
            inputs = _C.StepInputs(scale if outer is None else scale * outer, measure=True)
            if len(self._per_optimizer_states) == 1:
                inputs.scale_update = self._updates.for_step()
        else:
            found_inf = combined([state["found_inf_per_device"]], scale.device, torch.sum)
            inputs = _C.StepInputs(outer, found_inf)
        stepper = stepper_of(own)
        log = stepper.native.log
        steps = log.count
        result = stepper.step_with(inputs, *args, **kwargs)
        verdict = log.verdict
        if measures and verdict is not None and log.count > steps:
            if log.scale_updated:
                self._updates.stepped(log.reports)
            decided = gradients.Verdict(*verdict)
            # A norm above the limit does not change the scale.
            limited = own.skip_norm_above is not None
            found = decided.skip == gradients.OVERFLOW if limited else decided.skip
            state["found_inf_per_device"] = {verdict.device: found.double()}
            noted.max_abs = {verdict.device: decided.max_abs}
        elif measures:  # a wrapper around the optimizer's step has not called it
            self._updates.forget()
            state["found_inf_per_device"] = self._keep(optimizer, stepper.totals())
        state["stage"] = OptState.STEPPED
        return result

    def _scale_numbers(self) -> ScaleNumbers:
        scale, tracker = self._check_scale_growth_tracker("update")
        if self._policy is not None:
            tracker = self._policy.to(scale.device).state_tensor
        settings = {
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
        }
        return ScaleNumbers(scale, tracker, self._policy, settings)

    def scale_on(self, device: torch.device) -> Tensor | None:
        """The factor of the losses, float32 [] on the device; None before the first scaled loss."""
        self._updates.is_read(device)
        return _C.scalar_on(device, self._get_scale_async())

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        """Called by torch's step for optimizers that unscale themselves: one read, no write."""
        if isinstance(optimizer, FusedOptimizer):
            attached = stepper_of(optimizer).release
            if attached is not None and attached.scaler is not self:
                raise RuntimeError("pass this scaler to attach, as scaler=scaler")
            check_gradients(optimizer)
            totals = stepper_of(optimizer).totals()
        elif (read := self._read(optimizer)) is not None:
            totals = read[1]
        else:
            return super()._check_inf_per_device(optimizer)
        found: dict[Any, Tensor] = dict(self._keep(optimizer, totals))
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _read(self, optimizer: Optimizer) -> tuple[list[Tensor], dict[torch.device, Tensor]] | None:
        """Gradients on this process, and all processes' totals; None if torch must handle one."""
        Noted.of(self._per_optimizer_states[id(optimizer)]).optimizer = weakref.ref(optimizer)
        groups = optimizer.param_groups
        grads = []
        for param, info in param_infos(groups):
            grad = gradients.writable_gradient(param, info.label)
            if grad is not None and grad.is_sparse:
                grad = gradients.values_of_sparse(param)
            if grad is not None and not is_native(grad):
                return None
            grads.append(grad)
        known = self._statistics.get(optimizer)
        known = statistics_of(known, groups, self._process_groups)
        self._statistics[optimizer] = known
        return [grad for grad in grads if grad is not None], known.totals_by_device(grads)

    def _keep(
        self, optimizer: Optimizer, totals: dict[torch.device, Tensor]
    ) -> dict[torch.device, Tensor]:
        """Keeps the largest gradients for the policy; returns 1 per device on overflow, else 0."""
        noted = Noted.of(self._per_optimizer_states[id(optimizer)])
        found = {device: gradients.Statistics(*total) for device, total in totals.items()}
        if self._policy is not None and self._policy.needs_max_abs and self._scale is not None:
            noted.max_abs = {d: found[d].max_abs / self._scale.to(d) for d in totals}
        # 1 too where the scale has no reciprocal in float32, as the steps' verdicts say.
        given = {device: _C.decide(device, [], scale=self._scale) for device in totals}
        unusable = {device: gradients.Verdict(*verdict).skip for device, verdict in given.items()}
        return {d: (t.non_finite + unusable[d]).clamp(max=1).float() for d, t in found.items()}

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """One native read, one native write, whatever the dtype."""
        if isinstance(optimizer, FusedOptimizer) and stepper_of(optimizer).release:
            attached = "the optimizer is attached and has stepped already"
            raise RuntimeError(f"unscale_: {attached}; its max_grad_norm clips")
        read = self._read(optimizer)
        self._updates.is_read(inv_scale.device)
        noted = Noted.of(self._per_optimizer_states[id(optimizer)])
        noted.captured = is_capturing(inv_scale.device)
        if read is None or self._scale is None:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            return self._placed(optimizer, "found_inf", found)
        grads, totals = read
        for device, indices in gradients.by_device(grads).items():
            own = [grads[i] for i in indices]
            _C.copy_(own, own, verdict=_C.decide(device, [], scale=self._scale))
        found = self._keep(optimizer, totals)
        noted.max_abs = self._placed(optimizer, "max_abs", noted.max_abs)
        return self._placed(optimizer, "found_inf", found)

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kw: Any) -> Any:
        """Called by torch's step, which asks on the host whether to step the optimizer."""
        gradients.refuse_capture(optimizer_state["found_inf_per_device"])
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kw)

    def _placed(
        self, optimizer: Optimizer, name: str, numbers: dict[torch.device, Tensor]
    ) -> dict[torch.device, Tensor]:
        """Numbers, moved to where those of this name always are: CUDA graphs keep the address."""
        places = self._places.setdefault(optimizer, {})
        return {d: places.setdefault((name, d), x).copy_(x) for d, x in numbers.items()}

    @outside_graphs
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's; with a loss_scale, that policy moves the scale. Never waits for the device.

        ValueError where a policy needs the largest of gradients in float64.
        """
        if not self._enabled:
            return
        states = list(self._per_optimizer_states.values())
        notes = [Noted.of(state) for state in states]
        for hook in [hook for noted in notes for hook in noted.hooks]:
            hook.remove()
        policy = self._policy
        if new_scale is not None:  # set by hand
            super().update(new_scale)
            self._updates.forget()
            if policy is not None:
                policy.scale = float(new_scale)
            return
        scale, _ = self._check_scale_growth_tracker("update")
        captures = is_capturing(scale.device)
        for noted in notes:
            refuse_split("update", noted.captured, captures)
        taken = self._updates.take(alone=len(states) == 1)
        if taken is not None and policy is None:
            self._scale, self._growth_tracker = taken
        elif taken is not None and policy is not None:
            self._scale, policy.state_tensor = taken
        else:
            found = [state["found_inf_per_device"] for state in states]
            found_inf = combined(found, scale.device, torch.sum)
            if found_inf is None:
                raise AssertionError("No inf checks were recorded prior to update.")
            max_abs = None
            largest = [noted.max_abs for noted in notes]
            if policy is not None and policy.needs_max_abs and all(largest):
                max_abs = combined(largest, scale.device, torch.max)
            self._updates.in_place(found_inf, max_abs)
            self._updates.warn_of_skips([noted.optimizer() for noted in notes], found_inf)
        self._per_optimizer_states.clear()

    def get_scale(self) -> float:
        """The scale after the last update, 1.0 where disabled; waits for the device's report."""
        known = self._updates.reported() if self._enabled else None
        return float(super().get_scale()) if known is None else known

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # raises in the middle of an iteration
        state = {name: x for name, x in state.items() if name not in DERIVED}
        if self._process_groups:
            state["_process_groups"] = GroupsOfRun(self._process_groups)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self._process_groups, GroupsOfRun):
            self._process_groups = self._process_groups.unpacked()
        self._updates = ScaleUpdates(self._scale_numbers)
        self._statistics, self._places = WeakKeyDictionary(), WeakKeyDictionary()

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys, and loss_scaler where one was given."""
        state: dict[str, Any] = super().state_dict()
        if self._policy is not None and state:
            state["loss_scaler"] = self._policy.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. Raises ValueError where the snapshot is of another policy."""
        state_dict = dict(state_dict)
        snapshot = state_dict.pop("loss_scaler", None)
        if self._policy is not None and self._enabled:
            self._policy.load_state_dict(snapshot or {})
        super().load_state_dict(state_dict)
        self._updates.forget()


def check_gradients(optimizer: FusedOptimizer) -> None:
    """Raises AssertionError, in torch's words, where no backward was called before the step.

    Not with process_groups: another process may have gradients, and wait for this one.
    """
    groups = optimizer.param_groups
    if any(param.grad is not None for param in params_in(groups)) or any(named_groups(groups)):
        return
    stepper = stepper_of(optimizer)
    if stepper.release is None or not stepper.release.has_released():
        stepper.check_replaced()
        raise AssertionError(
            "No inf checks were recorded for this optimizer: none of its parameters has a "
            "gradient. Call scaler.scale(loss).backward() before scaler.step(optimizer)"
        )


def begin_momentum(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Sets the momentum that a skipped first step of torch's fused SGD would leave unwritten.

    torch's next step is never a first one, and would take those buffers for momenta. A momentum of
    -0.0 makes it one: momentum * -0.0 + gradient is the gradient, bit for bit. With dampening there
    is no such number: returns the states whose buffer a skipped step must not leave.
    """
    undone = []
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        for param in group["params"] if group["fused"] and group["momentum"] else ():
            if param.grad is None or optimizer.state[param].get("momentum_buffer") is not None:
                continue
            if group["dampening"]:
                undone.append(optimizer.state[param])
            elif param.grad.layout == torch.strided:  # torch refuses others
                optimizer.state[param]["momentum_buffer"] = torch.full_like(param.grad, -0.0)
    return undone


def combined(
    found: Iterable[dict[torch.device, Tensor]],
    device: torch.device,
    combine: Callable[..., Tensor],
) -> Tensor | None:
    """The optimizers' numbers of all devices as one on this device; None if there are none."""
    numbers = [x for of_one in found for x in of_one.values()]
    _C.used_on_current_stream(numbers)
    numbers = [x.to(device) for x in numbers]
    if len(numbers) > 1:
        return combine(torch.stack(numbers))
    return numbers[0] if numbers else None


def is_native(grad: Tensor) -> bool:
    """Whether the native passes take a gradient."""
    return (
        type(grad) is Tensor
        and grad.dtype in NATIVE
        and grad.layout == torch.strided
        and any(grad.is_contiguous(memory_format=layout) for layout in LAYOUTS)
    )
