"""FP16_Optimizer: float32 masters and loss scaling around any torch optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.master.facade import OptimizerFacade
from amp_mp.master.gradients import copy_all_, gradients_of, observe, scaled_backward
from amp_mp.master.masters import Masters
from amp_mp.master.streak import OverflowStreak, names_of
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.decide import decide
from amp_mp.scaling.make import apex_policy
from amp_mp.scaling.policies import Policy, Static


class FP16_Optimizer(OptimizerFacade):  # noqa: N801 (Apex's name)
    """Wraps an optimizer whose parameters are partly in low precision; Apex's class of this name.

    Each float16 or bfloat16 parameter gets a float32 master, which takes its place in the wrapped
    optimizer's param_groups (the lists themselves stay, so schedulers live on). float32 parameters
    are their own masters; frozen ones stay as they are. From then on use this object, not the
    wrapped one:

        optimizer = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                       dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)  # in place of loss.backward()
        optimizer.step()

    Around an amp_mp optimizer, which keeps masters itself, nothing is copied: param_groups keep the
    model's parameters, `.grad` carries the scale until the step, and the step's one pass unscales,
    clips, updates and rounds.

    A static scale checks nothing, as in Apex: an infinite gradient reaches the master. A dynamic
    one skips the step on overflow, leaving every byte as it was, prints so, and lowers the scale.

    Args:
        init_optimizer: the optimizer to wrap; state it already has moves to the masters.
        static_loss_scale: what losses are multiplied by, unless dynamic.
        dynamic_loss_scale: start at 2^32, halve on overflow (not below 1), double after 1000 steps
            without one.
        dynamic_loss_args: init_scale, scale_factor, scale_window to change that.
        verbose: say at construction what is wrapped.
        loss_scale: instead of the three before: a number, "dynamic", "Backoff", "LogMax", or a
            policy.

        check_overflow: check and skip as a dynamic scale does, also with a static one: for
            bfloat16, which needs no scaling.

    Raises:
        TypeError: a trainable parameter is neither float16, bfloat16 nor float32.
        ValueError: a scale that is no positive number, or an unknown name in dynamic_loss_args.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
        *,
        loss_scale: float | str | Policy | None = None,
        check_overflow: bool = False,
    ) -> None:
        """See the class."""
        policy = apex_policy(static_loss_scale, dynamic_loss_scale, dynamic_loss_args, loss_scale)
        self._masters = self._make_masters(init_optimizer)
        self.optimizer = init_optimizer
        self.loss_scaler = policy
        self.dynamic_loss_scale = not isinstance(policy, Static)
        self._checks = self.dynamic_loss_scale or check_overflow
        self._streak = OverflowStreak()
        self.overflow = False
        self.first_closure_call_this_step = True
        if verbose:
            masters, whole = len(self._masters.pairs()), len(self._masters.whole())
            print(f"FP16_Optimizer: {masters} parameters with float32 masters, {whole} float32")

    def __new__(cls, init_optimizer: Any = None, *args: Any, **kwargs: Any) -> FP16_Optimizer:
        """One of amp_mp's optimizers has masters of its own: nothing is copied."""
        if cls is FP16_Optimizer and isinstance(init_optimizer, FusedOptimizer):
            from amp_mp.master.folded import FoldedFP16Optimizer  # a subclass of this one

            return super().__new__(FoldedFP16Optimizer)
        return super().__new__(cls)

    def _make_masters(self, optimizer: torch.optim.Optimizer) -> Masters:
        return Masters(optimizer)

    # Gradients.

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """loss.backward() on the scaled loss; the masters' gradients are the true ones afterwards.

        Args:
            loss: a tensor of one element; multiplied in float32.
            update_master_grads: False to accumulate several losses and call update_master_grads()
                once.
            retain_graph: as in Tensor.backward.
        """
        if not self._masters.are_complete():
            self._masters.refresh()
        # float32 parameters are their own masters: what earlier calls have unscaled is set aside,
        # so that every gradient is divided by the scale exactly once. Where unscaling is put off,
        # they are scaled again, to be unscaled with the others.
        whole = [] if self._pending else self._masters.whole()
        if not update_master_grads:
            copy_all_(gradients_of(whole), gradients_of(whole), multiplier=self.loss_scale)
            self._pending, whole = True, []
        with scaled_backward(whole):
            scaled_loss = loss.float() * self.loss_scale
            torch.autograd.backward(scaled_loss, retain_graph=retain_graph)
            self._pending = True
            if update_master_grads:
                self.update_master_grads()

    _max_abs = 0.0  # the largest |g| of the last backward, unscaled
    _pending = False  # whether gradients of float32 parameters still carry the scale

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copies the model's gradients to the masters, divided by the scale.

        A dynamic scale, or check_overflow, checks them first; on overflow `overflow` is set and
        nothing is copied.
        """
        pairs = self._masters.pairs()
        whole = gradients_of(self._masters.whole())
        sources = gradients_of(p for p, _ in pairs) + whole
        if self._checks:
            self.overflow, self._max_abs = observe(sources, self.loss_scale)
            if self.overflow:
                return
        for param, master in pairs:
            _make_gradient(param, master)
        targets = gradients_of(m for _, m in pairs) + whole
        copy_all_(targets, sources, multiplier=1.0 / self.loss_scale)
        self._pending = False
        self._complete_gradients(pairs)

    def _complete_gradients(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """For subclasses: what else joins the masters' gradients, which are the true ones now."""

    @torch.no_grad()
    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        """Clips the masters' gradients by their global norm; returns the norm, -1 on overflow.

        As torch.nn.utils.clip_grad_norm_; call it between backward and step.
        """
        if self.overflow:
            return -1.0
        masters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = gradients_of(masters)
        if norm_type != 2 or len({g.device for g in grads}) != 1:
            return float(nn.utils.clip_grad_norm_(masters, max_norm, norm_type))
        verdict = decide(grads[0].device, [_C.measure(grads)], _C.Terms(max_norm=max_norm))
        _C.copy_(grads, grads, verdict=verdict)
        return float(verdict[2])

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The masters' gradients, a list a group; None, with a warning, after an overflow."""
        if self.overflow:
            warnings.warn("amp_mp: after an overflow there are no master gradients", stacklevel=2)
            return None
        return [
            [None if p.grad is None else p.grad.detach() for p in group["params"]]
            for group in self.optimizer.param_groups
        ]

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves the scale, then steps the wrapped optimizer and copies the masters to the model.

        On overflow nothing is stepped, None is returned, and the message Apex scripts look for is
        printed. With a closure (which must call this object's zero_grad and backward) the model
        sees the masters' newest values before each evaluation. One that overflows is repeated with
        a lower scale until it does not; RuntimeError says so if the scale is at its floor.
        """
        before = self.loss_scale
        self.loss_scaler.update(self.overflow, self._max_abs)
        if self._checks:
            params = self._model_params() if self.overflow else []
            self._streak.observe(self.overflow, before, self.loss_scale, params)
        if self.overflow:
            self._report(before)
            return None
        result = self._step_inner(None) if closure is None else self._step_with_closure(closure)
        self._masters.to_model()
        return result

    def _step_inner(self, closure: Callable[[], Any] | None) -> Any:
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def _hand_over(self) -> None:
        """For subclasses: the gradients are there, the wrapped optimizer goes on with them."""

    def _model_params(self) -> list[tuple[str, Tensor]]:
        """By name, the parameters that backward gives gradients to."""
        low = {master: param for param, master in self._masters.pairs()}
        return [(name, low.get(param, param)) for name, param in names_of([self.optimizer])]

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
            loss = closure()
            while self.overflow:
                before = self.loss_scale
                self.loss_scaler.update(True, self._max_abs)
                if self.loss_scale == before:
                    self.overflow = False  # the error tells of it; the next step starts afresh
                    raise RuntimeError(
                        "the closure's gradients are inf or NaN even at the lowest loss scale, "
                        f"{before}; no scale can cure that, look for the NaN in the model"
                    )
                self._report(before)
                loss = closure()
            self._hand_over()
            return loss

        self.first_closure_call_this_step = True
        try:
            return self._step_inner(evaluate)
        finally:
            self.first_closure_call_this_step = True

    def zero_grad(self, set_grads_to_None: bool = False, *, set_to_none: bool = False) -> None:  # noqa: N803
        """Clears the gradients of masters and model parameters; the second spelling is torch's."""
        drop = set_grads_to_None or set_to_none
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        for param in params + [low for low, _ in self._masters.pairs()]:
            if param.grad is None:
                continue
            if drop:
                param.grad = None
            else:
                param.grad = param.grad.detach().zero_()
        self._pending = False


def _make_gradient(param: Tensor, master: Tensor) -> None:
    """Makes the master's gradient one to copy the parameter's into: dense, sparse or None."""
    grad = param.grad
    if grad is None:
        master.grad = None
    elif grad.is_sparse:
        values = torch.empty_like(grad._values(), dtype=torch.float32)
        master.grad = torch.sparse_coo_tensor(
            grad._indices(), values, grad.shape, is_coalesced=True, check_invariants=False
        )
    elif master.grad is None or master.grad.is_sparse:
        master.grad = torch.empty_like(master, memory_format=torch.preserve_format)
