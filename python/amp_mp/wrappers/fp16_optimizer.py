"""FP16_Optimizer: float32 masters and loss scaling around any torch optimizer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.messages import say, warn
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.step.overflow_report import describe_nonfinite
from amp_mp.scaling import policies
from amp_mp.scaling.overflows import OverflowWatch
from amp_mp.sharding import gradients, reduction
from amp_mp.switch import ENABLED
from amp_mp.torch_private import outside_graphs, tree_map_only
from amp_mp.wrappers.carriers import (
    InMasters,
    carrier_for,
    collect,
    model_groups,
    refuse_release,
)
from amp_mp.wrappers.loss_block import scaled_backward
from amp_mp.wrappers.masters import FusedMasters, Masters, model_params
from amp_mp.wrappers.wrapper import LOSS_SCALE, OptimizerAround, shown

FLAGS = ("dynamic_loss_scale", "overflow", "first_closure_call_this_step")  # in a snapshot


class FP16_Optimizer(OptimizerAround):  # noqa: N801 (Apex's name)
    """Wraps an optimizer whose parameters are partly in low precision; Apex's class of this name.

    Each trainable float16 or bfloat16 parameter gets a float32 master, which replaces it in the
    wrapped optimizer's param_groups; the lists stay the same objects. From then on use this object:

        optimizer = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                       dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)  # in place of loss.backward()
        optimizer.step()

    Around an amp_mp optimizer, which keeps masters itself, param_groups keep the model's
    parameters. Under a scale other than 1 their `.grad` is float32 after `backward`.

    It is a torch.optim.Optimizer with its own hooks; torch's hooks for all run for the wrapped one.
    It has the methods that the wrapped one alone has, such as SAM's first_step: what these write
    into masters is in the model when they return.

    A static scale checks nothing, as in Apex. A dynamic one skips the step on overflow, leaving
    every byte as it was, and lowers the scale.

    Args:
        init_optimizer: the optimizer to wrap; state it already has moves to the masters.
        static_loss_scale: what losses are multiplied by, unless dynamic.
        dynamic_loss_scale: start at 2^32, halve on overflow (not below 1), double after 1000 steps
            without one.
        dynamic_loss_args: init_scale, scale_factor, scale_window to change that.
        verbose: print what is wrapped, and each overflow, on rank 0. Default True.
        loss_scale: instead of the three before: a number, "dynamic", "Backoff", "LogMax", or a
            policy.
        check_overflow: check and skip also with a static scale.
        enabled: False, the default under AMP_MP=0, works as the wrapped optimizer, to compare:
            without masters, loss scale and checks, with its state_dict.

    Raises:
        TypeError: a trainable parameter is neither float16, bfloat16 nor float32, or the optimizer
            is an FP16_Optimizer.
        ValueError: a scale that is not a positive number, or an unknown name in dynamic_loss_args.
    """

    loss_scale: Any = LOSS_SCALE
    # The model's low-precision parameters, a list per group; their masters in the same order; and
    # its float32 parameters, which are their own masters.
    fp16_groups: Any = shown("_masters.fp16_groups")
    fp32_from_fp16_groups: Any = shown("_masters.fp32_from_fp16_groups")
    fp32_from_fp32_groups: Any = shown("_masters.fp32_from_fp32_groups")

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
        *,
        loss_scale: float | str | policies.ScalePolicy | None = None,
        check_overflow: bool = False,
        enabled: bool = ENABLED,
    ) -> None:
        if isinstance(init_optimizer, FP16_Optimizer):
            raise TypeError("init_optimizer is an FP16_Optimizer already; wrap it once")
        policy = apex_policy(static_loss_scale, dynamic_loss_scale, dynamic_loss_args, loss_scale)
        policy = policy if enabled else policies.Static()
        make_masters = self._make_masters if enabled else partial(Masters, enabled=False)
        self._masters = masters = make_masters(init_optimizer)
        is_fused = isinstance(masters, FusedMasters)
        self._carrier = carrier_for(init_optimizer) if is_fused else InMasters(masters)
        super().__init__(init_optimizer)
        self.loss_scaler = policy
        self.dynamic_loss_scale = not isinstance(policy, policies.Static)
        self.overflow = False
        self._waits = False  # an overflow that no step has skipped yet
        self.first_closure_call_this_step = True
        self._checks = self.dynamic_loss_scale or (enabled and check_overflow)
        self._watch = OverflowWatch()
        self._max_abs = 0.0  # the largest true |g| of the last backward
        self._verbose = verbose and enabled
        if self._verbose:
            low, own = self.fp32_from_fp16_groups, self.fp32_from_fp32_groups
            counts = f"{sum(map(len, low))} parameters with float32 masters, {sum(map(len, own))}"
            say(f"FP16_Optimizer: {counts} float32")

    def _make_masters(self, optimizer: torch.optim.Optimizer) -> Masters:
        """For subclasses: which kind of masters an optimizer gets."""
        if isinstance(optimizer, FusedOptimizer):  # it keeps masters itself
            return FusedMasters(optimizer)
        return Masters(optimizer)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """loss.backward() on the scaled loss; afterwards the masters' gradients are the true ones.

        loss: a tensor of one element; it is multiplied in float32. update_master_grads: False to
        accumulate several losses and call update_master_grads() once.
        """
        if not self._masters.enabled:
            return torch.autograd.backward(loss, retain_graph=retain_graph)
        refuse_release(self.optimizer, "backward")
        scale = self.loss_scale
        with scaled_backward([self._carrier], scale, delays=not update_master_grads):
            torch.autograd.backward(loss.float() * scale, retain_graph=retain_graph)
            if update_master_grads:
                self._collect(scale)

    def update_master_grads(self) -> None:
        """Divides the model's gradients by the scale, into those of the masters if there are any.

        If gradients are checked and one overflows, this sets `overflow` and divides none.
        """
        scales = self._scales()
        waiting = [scale for scale in scales.values() if scale is not None]
        divided_before = [param for param, scale in scales.items() if scale is None]
        self._collect(waiting[0] if waiting else self.loss_scale, divided_before)

    def _scales(self) -> dict[Tensor, float | None]:
        """Of the noted gradients: what each is still to be divided by; None for true ones."""
        return _C.gradient_scales(self._carrier.params())

    def _collect(self, scale: float, divided_before: Sequence[Tensor] = ()) -> None:
        if self._checks:
            totals = reduction.totals_of(model_groups([self._carrier]))
            self.overflow, self._max_abs = gradients.overflow_in(totals, scale)
        self._waits = self._checks and self.overflow
        if self._checks and self.overflow:
            _C.note_gradients(self._carrier.params(), scale)  # the next loss adds to them
        else:
            self._complete_gradients(collect([self._carrier], scale, divided_before))

    def _complete_gradients(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """For subclasses: adds terms to true gradients, once however many losses add up.

        pairs: the parameters and their masters whose gradients have begun with the last loss.
        """

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        """As torch.nn.utils.clip_grad_norm_ of the masters, before step; -1 on overflow.

        Around an amp_mp optimizer the step itself clips by the 2-norm.
        """
        return -1.0 if self.overflow else self._carrier.clip(max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The gradients of the wrapped optimizer's parameters, a list per group.

        They are the true ones, but for losses that `update_master_grads` has not collected yet.
        None, with a warning, after an overflow.
        """
        if self.overflow:
            warn("inspect_master_grad_data: the last backward overflowed: look at .overflow before")
            return None
        groups = [group["params"] for group in self.param_groups]
        return [[None if p.grad is None else p.grad.detach() for p in ps] for ps in groups]

    def masters(self, params: Any = None) -> AbstractContextManager[Any]:
        """As FusedOptimizer.masters, for the model's parameters; also around torch's optimizers."""
        return self._masters.edit(params)

    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves the scale, then steps the wrapped optimizer and copies the masters to the model.

        On overflow nothing is stepped, None is returned, and `verbose` says so. A closure must call
        this object's zero_grad and backward; the model then has the masters' newest values. An
        evaluation that overflows is repeated with a lower scale; RuntimeError where it
        cannot fall any more, or where loss.backward() was called in place of this object's.
        """
        for before in self._optimizer_step_pre_hooks.values():
            if (changed := before(self, (self, closure), {})) is not None:
                closure = changed[0][1]
        result = self._stepped(closure)
        for after in self._optimizer_step_post_hooks.values():
            after(self, (self, closure), {})
        return result

    def _stepped(self, closure: Callable[[], Any] | None) -> Any:
        if _C.Loan.is_any:
            _C.refuse_borrowed(model_params(self.optimizer), "an optimizer's step()")
        before = self.loss_scale
        to_model = self._masters.model_param
        describe = partial(describe_nonfinite, [self.param_groups], model_param=to_model)
        if closure is None:
            self._check_gradients()
        self._watch.update(self.loss_scaler, self.overflow, self._max_abs, describe)
        self._waits = False
        if self.overflow:
            self._carrier.collected = False
            self._report(before)
            return None
        self._masters.stale = True
        try:
            self._carrier.before_step()
            result = self._carrier.step() if closure is None else self._step_with_closure(closure)
        except Exception:  # a step that was refused, say inside of AveragedModel.swap
            self._masters.stale = False
            raise
        self._carrier.after_step()
        return result

    def _check_gradients(self) -> None:
        """Raises RuntimeError for gradients that still carry a scale or came without backward."""
        if not self._masters.enabled or (self.overflow and any(self._scales().values())):
            return  # an overflow: there will be no step
        self._carrier.check()
        if foreign := self._carrier.foreign():
            raise RuntimeError(
                f"step: {self._masters.label_of(foreign[0])} has a gradient that did not come from "
                "this FP16_Optimizer, so that its master would not be updated; call "
                "optimizer.backward(loss) in place of loss.backward()"
            )

    def _report(self, before: float) -> None:
        scales = f"Attempted loss scale: {before}, reducing to {self.loss_scale}"
        if self._verbose:
            say(f"[OVERFLOW! Skipping step. {scales}]")

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            self._masters.to_model()  # before the first call, too, SAM has moved them
            self.first_closure_call_this_step = False
            self._carrier.collected = False
            loss = closure()
            self._check_gradients()
            while self.overflow:
                before = self.loss_scale
                self.loss_scaler.update(True, self._max_abs)
                if self.loss_scale == before:
                    self.overflow = False  # the error says so; the next step starts afresh
                    raise RuntimeError(
                        "the closure's gradients are inf or NaN even at the lowest loss scale, "
                        f"{before}; no scale can cure that, look for the NaN in the model"
                    )
                self._report(before)
                loss = closure()
            return loss

        self.first_closure_call_this_step = True
        try:
            return self._carrier.step(evaluate)
        finally:
            self.first_closure_call_this_step = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, of masters and model parameters."""
        self._waits = False
        self._carrier.zero_grad(set_to_none)

    def _pass_on(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As around a step: before, masters follow the model, afterwards the model follows them."""
        if self._waits:
            raise RuntimeError(
                f"{method.__name__}: the last backward overflowed, so there are no gradients; call "
                "step(), which skips and lowers the scale, or zero_grad(). In step(closure) losses "
                "are repeated at a lower scale"
            )
        self._masters.follow()
        self._masters.stale = True
        try:
            return method(*args, **kwargs)
        finally:
            self._masters.to_model()

    def _patch_step_function(self) -> None:
        """Leaves torch's hooks of all steps to the wrapped optimizer's, lest they run twice."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; low-precision parameters get masters."""
        self.optimizer.add_param_group(param_group)
        try:
            self._masters.refresh(first=len(self.optimizer.param_groups) - 1)
        except TypeError:
            self.optimizer.param_groups.pop()
            raise

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """A snapshot in plain containers and tensors; the masters are in it, bit for bit."""
        if not self._masters.enabled:
            return self.optimizer.state_dict()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._masters.refresh()  # a weight may train that was frozen when it was wrapped
        self._masters.show()
        inner = tree_map_only(Tensor, torch.clone, self.optimizer.state_dict())
        for group in inner["param_groups"]:
            if "process_groups" in group:
                group["process_groups"] = None  # those of this run, which no file can hold
        found: dict[str, Any] = {
            "loss_scaler": self.loss_scaler.state_dict(),
            **{name: getattr(self, name) for name in FLAGS},
            "optimizer_state_dict": inner,
            "fp32_from_fp16": self._masters.snapshot(inner),
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a snapshot, also with its kind of loss scale; load the model separately.

        ValueError, before any change, where groups, shapes or keys do not match.
        """
        if not self._masters.enabled:
            return self.optimizer.load_state_dict(state_dict)
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        needed = {"loss_scaler", *FLAGS[1:], "optimizer_state_dict", "fp32_from_fp16"}
        missing = sorted(needed - state_dict.keys())
        if missing:
            raise ValueError(f"state_dict: {missing} missing; nothing was loaded")
        self._masters.refresh()
        self._masters.check(state_dict["fp32_from_fp16"])
        policy = policies.from_state_dict(state_dict["loss_scaler"])
        inner = tree_map_only(Tensor, torch.clone, state_dict["optimizer_state_dict"])
        for group in inner["param_groups"]:
            group.pop("process_groups", None)
        own = [group.get("process_groups") for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(inner)
        for group, kept in zip(self.optimizer.param_groups, own, strict=True):
            if kept is not None:  # torch's optimizers have taken the file's groups as they are
                group["process_groups"] = kept
        if type(policy) is type(self.loss_scaler):
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        else:  # the snapshot's kind counts, as in Apex
            self.loss_scaler = policy
        self.dynamic_loss_scale = not isinstance(policy, policies.Static)
        self._checks = self._checks or self.dynamic_loss_scale
        for name in FLAGS[1:]:
            setattr(self, name, state_dict[name])
        self._masters.load(state_dict["fp32_from_fp16"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> Any:
        # As Apex's. A pickled copy would not belong to its model.
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")


def apex_policy(
    static: float,
    dynamic: bool,
    arguments: dict[str, Any] | None,
    loss_scale: float | str | policies.ScalePolicy | None,
) -> policies.ScalePolicy:
    """The policy that the scale arguments of FP16_Optimizer describe."""
    given = dict(arguments or {})
    start = given.pop("init_scale", 2.0**32)
    policies.check_scale(start, "dynamic_loss_args['init_scale']")
    factor, window = given.pop("scale_factor", 2.0), given.pop("scale_window", 1000)
    if given:
        known = "init_scale, scale_factor, scale_window"
        raise ValueError(f"dynamic_loss_args: unknown {sorted(given)}; known are {known}")
    try:
        bounds = min(1.0, start), policies.NO_CEILING
        preset = policies.Backoff(*bounds, factor, window, init_scale=start)
    except ValueError as error:  # it names Backoff's arguments, not Apex's
        raise ValueError(f"dynamic_loss_args: {error}") from None
    if loss_scale is not None:
        return policies.make_policy(loss_scale, preset)
    if dynamic:
        return preset
    return policies.Static(policies.check_scale(static, "static_loss_scale"))
