"""FP16_Optimizer: float32 masters and loss scaling around any torch optimizer."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_mp.apex.fp16_state import WrappedOptimizer, apex_policy
from amp_mp.apex.fused_masters import FusedMasters
from amp_mp.apex.masters import Masters
from amp_mp.apex.swapped_masters import SwappedMasters
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.step.gradient_marks import GradientMarks
from amp_mp.optim.step.outside_graphs import outside_graphs
from amp_mp.scaling.observe import OverflowCounter, describe_nonfinite, update_scale
from amp_mp.scaling.policies import ScalePolicy


class FP16_Optimizer(WrappedOptimizer):  # noqa: N801 (Apex's name)
    """Wraps an optimizer whose parameters are partly in low precision; Apex's class of this name.

    Each float16 or bfloat16 parameter gets a float32 master, which replaces it in the wrapped
    optimizer's param_groups (the lists stay the same objects, so schedulers keep working). float32
    parameters need no master, and frozen ones stay as they are. From then on use this object:

        optimizer = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                       dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)  # in place of loss.backward()
        optimizer.step()

    Around an amp_mp optimizer, which keeps masters itself, nothing is copied: param_groups keep the
    model's parameters, `.grad` carries the scale until the step, and the step's one pass unscales,
    clips, updates and rounds.

    It is a torch.optim.Optimizer: schedulers and frameworks take it. Its step hooks are its own;
    torch's hooks for all optimizers run for the wrapped one.

    A static scale checks nothing, as in Apex: an infinite gradient reaches the master. A dynamic
    one skips the step on overflow, leaving every byte as it was, prints so, and lowers the scale.

    Args:
        init_optimizer: the optimizer to wrap; state it already has moves to the masters.
        static_loss_scale: what losses are multiplied by, unless dynamic.
        dynamic_loss_scale: start at 2^32, halve on overflow (not below 1), double after 1000 steps
            without one.
        dynamic_loss_args: init_scale, scale_factor, scale_window to change that.
        verbose: print what is wrapped. Default True.
        loss_scale: instead of the three before: a number, "dynamic", "Backoff", "LogMax", or a
            policy.
        check_overflow: check and skip also with a static scale, as a dynamic one does: for
            bfloat16, which needs no scaling.

    Raises:
        TypeError: a trainable parameter is neither float16, bfloat16 nor float32, or the optimizer
            is an FP16_Optimizer.
        ValueError: a scale that is not a positive number, or an unknown name in dynamic_loss_args.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
        *,
        loss_scale: float | str | ScalePolicy | None = None,
        check_overflow: bool = False,
    ) -> None:
        if isinstance(init_optimizer, FP16_Optimizer):
            raise TypeError("init_optimizer is an FP16_Optimizer already; wrap it once")
        policy = apex_policy(static_loss_scale, dynamic_loss_scale, dynamic_loss_args, loss_scale)
        masters = self._make_masters(init_optimizer)
        super().__init__(init_optimizer, masters, policy, check_overflow)
        self._overflows = OverflowCounter()
        self._max_abs = 0.0  # the largest true |g| of the last backward
        self._called_backward = False  # since the last step
        self._marks = GradientMarks(())  # the model's gradients after the last backward
        if verbose:
            low = sum(map(len, self.fp32_from_fp16_groups))
            own = sum(map(len, self.fp32_from_fp32_groups))
            print(f"FP16_Optimizer: {low} parameters with float32 masters, {own} float32")

    def _make_masters(self, optimizer: torch.optim.Optimizer) -> Masters:
        """For subclasses: which kind of masters an optimizer gets."""
        if isinstance(optimizer, FusedOptimizer):  # it keeps masters itself
            return FusedMasters(optimizer)
        return SwappedMasters(optimizer)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """loss.backward() on the scaled loss; afterwards the masters' gradients are the true ones.

        Args:
            loss: a tensor of one element; it is multiplied in float32.
            update_master_grads: False to accumulate several losses and call update_master_grads()
                once.
            retain_graph: as in Tensor.backward.
        """
        with self._masters.backward(self.loss_scale, update_master_grads):
            scaled_loss = loss.float() * self.loss_scale
            torch.autograd.backward(scaled_loss, retain_graph=retain_graph)
            if update_master_grads:
                self.update_master_grads()
        self._note_backward()

    def _note_backward(self) -> None:
        self._called_backward = True
        self._marks = GradientMarks(self._masters.scaled_params())

    def _check_backward(self) -> None:
        """Raises RuntimeError for gradients that came without backward: masters have none of them.

        Gradients of 0, and those that an earlier backward made, are nothing to complain of.
        """
        if self._called_backward:
            return
        foreign = self._marks.changed(self._masters.scaled_params())
        if foreign:
            raise RuntimeError(
                f"step: {self._masters.label(foreign[0])} has a gradient that did not come from "
                "this FP16_Optimizer, so that its master would not be updated; call "
                "optimizer.backward(loss) in place of loss.backward()"
            )

    def update_master_grads(self) -> None:
        """Copies the model's gradients to the masters, divided by the scale.

        A dynamic scale, or check_overflow, checks them first; an overflow sets `overflow` and
        copies nothing. Around an amp_mp optimizer nothing is copied at all.
        """
        self._note_backward()
        overflow, max_abs = self._masters.collect(self.loss_scale, self._checks)
        if self._checks:
            self.overflow, self._max_abs = overflow, max_abs
        if not overflow:
            self._complete_gradients()

    def _complete_gradients(self) -> None:
        """For subclasses: adds terms to the masters' true gradients."""

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        """Clips the masters' gradients by their global norm; returns the norm, -1 on overflow.

        As torch.nn.utils.clip_grad_norm_; call it between backward and step. Around an amp_mp
        optimizer the step itself clips by the 2-norm.
        """
        return -1.0 if self.overflow else self._masters.clip(max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The true gradients, a list per group; None, with a warning, after an overflow."""
        if self.overflow:
            warnings.warn("amp_mp: after an overflow there are no master gradients", stacklevel=2)
            return None
        return self._masters.gradients()

    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves the scale, then steps the wrapped optimizer and copies the masters to the model.

        On overflow nothing is stepped, None is returned, and the message that Apex scripts look for
        is printed. A closure must call this object's zero_grad and backward; the model has the
        masters' newest values before each evaluation. An evaluation that overflows is repeated with
        a lower scale; RuntimeError where the scale cannot fall any more, or where loss.backward()
        was called in place of this object's backward.
        """
        for before in self._optimizer_step_pre_hooks.values():
            changed = before(self, (self, closure), {})
            closure = closure if changed is None else changed[0][1]
        result = self._stepped(closure)
        for after in self._optimizer_step_post_hooks.values():
            after(self, (self, closure), {})
        return result

    def _stepped(self, closure: Callable[[], Any] | None) -> Any:
        """The step without hooks."""
        if closure is None:
            self._check_backward()
        self._called_backward = False
        before = self.loss_scale
        model_param = self._masters.model_param
        describe = partial(describe_nonfinite, [self.param_groups], model_param=model_param)
        update_scale(self.loss_scaler, self._overflows, self.overflow, self._max_abs, describe)
        if self.overflow:
            self._report(before)
            return None
        result = self._masters.step(None) if closure is None else self._step_with_closure(closure)
        self._masters.to_model()
        return result

    def _report(self, before: float) -> None:
        print(
            f"[OVERFLOW! Skipping step. Attempted loss scale: {before}, "
            f"reducing to {self.loss_scale}]"
        )

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            if not self.first_closure_call_this_step:
                self._masters.to_model()
            self.first_closure_call_this_step = False
            self._called_backward = False
            loss = closure()
            self._check_backward()
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
            return self._masters.step(evaluate)
        finally:
            self.first_closure_call_this_step = True

    def zero_grad(  # type: ignore[override]
        self,
        set_grads_to_None: bool = False,  # noqa: N803
        *,
        set_to_none: bool = False,
    ) -> None:
        """Clears the gradients of masters and model parameters; the second spelling is torch's."""
        self._masters.zero_grad(drop=set_grads_to_None or set_to_none)
