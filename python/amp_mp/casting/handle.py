"""Apex's amp.init and its handle: casts for a whole script, and scale_loss."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.casting.autocast import resolve
from amp_mp.casting.policies import install, set_verbose
from amp_mp.casting.steps import install_step_hooks
from amp_mp.master.fp16_optimizer import FP16_Optimizer
from amp_mp.master.gradients import gradients_of, scaled_backward, unscale_
from amp_mp.scaling.policies import Backoff, Policy, Static, make_policy

logger = logging.getLogger("amp_mp")


def init(
    enabled: bool = True,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    policies: str = "apex",
    dtype: torch.dtype | None = None,
    device_type: str | None = None,
    loss_scale: float | str | Policy | None = None,
) -> AmpHandle | NoOpHandle:
    """Switches casting on for this thread, for good, and returns the handle with scale_loss.

        handle = amp.init()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    Args:
        enabled: False gives a handle that does nothing, so that a script need not change.
        enable_caching: cast each weight once an iteration, until an optimizer steps.
        verbose: say what was switched on, and print every cast to stderr.
        allow_banned: compute binary_cross_entropy in float32 instead of refusing it.
        policies: "apex", its lists of 2018 and what they missed, the same on CPU and CUDA; "torch",
            torch's own lists. One table is in force in a process; `amp.set_policy` changes it.
        dtype: torch.float16 or torch.bfloat16; default: float16 on CUDA, bfloat16 on a CPU.
        device_type: "cuda" or "cpu"; default: "cuda" where there is one.
        loss_scale: a number, "dynamic", "Backoff" or a policy; default: "dynamic" for float16
            (start 2^16, at most 2^24, halved on overflow but not below 1, doubled after 2000 steps
            without one), 1 for bfloat16, which needs none: then nothing is scaled or checked.

    Raises:
        ValueError: an unknown device type, dtype or loss scale.
    """
    if not enabled:
        return NoOpHandle()
    device, low = resolve(device_type, dtype)
    preset = Backoff(init_scale=2.0**16)
    default = "dynamic" if low == torch.float16 else 1.0
    policy = make_policy(default if loss_scale is None else loss_scale, preset)
    install(policies, device, allow_banned)
    set_verbose(verbose)
    if verbose:
        print(f"amp_mp: casting to {low} on {device}, loss scale {policy!r}")
    return AmpHandle(device, low, enable_caching, policy)


class NoOpHandle:
    """What init(enabled=False) returns: every use leaves the script as it was."""

    def is_active(self) -> bool:
        """False."""
        return False

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """The loss itself."""
        yield loss

    def _deactivate(self) -> None:
        """Nothing to do."""


class AmpHandle:
    """Casting that has been switched on, and the loss scale that goes with it."""

    def __init__(self, device_type: str, dtype: torch.dtype, caching: bool, policy: Policy) -> None:
        """Use init."""
        self.device_type = device_type
        self.dtype = dtype
        self.loss_scaler = policy
        self._before = (
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )
        install_step_hooks()
        self._active = True
        self._switch(True, dtype, caching)

    def _switch(self, enabled: bool, dtype: torch.dtype, caching: bool) -> None:
        torch.set_autocast_enabled(self.device_type, enabled)
        torch.set_autocast_dtype(self.device_type, dtype)
        torch.set_autocast_cache_enabled(caching)
        torch.clear_autocast_cache()
        _C.casting.clear_cache()

    def is_active(self) -> bool:
        """Whether casts are on here and now: not after _deactivate, nor inside scale_loss."""
        return self._active and torch.is_autocast_enabled(self.device_type)

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizer: Optimizer | Sequence[Optimizer]
    ) -> Iterator[Tensor]:
        """Yields the loss times the scale, casts off; afterwards the gradients are the true ones.

        On exit the gradients of the optimizer's parameters are divided by the scale, in place and
        each exactly once, also where several losses add up before a step: clip and inspect them as
        usual. If one is inf or NaN the scale falls and the next step of the optimizer changes
        nothing.

        Args:
            loss: the loss, any floating dtype; it is multiplied in float32.
            optimizer: the optimizer, or all of them, that own what this loss has gradients for.

        Raises:
            TypeError: something is no torch.optim.Optimizer, say an FP16_Optimizer, whose
                backward() scales itself.
        """
        optimizers = _checked(optimizer)
        policy = self.loss_scaler
        with torch.autocast(self.device_type, enabled=False):
            if isinstance(policy, Static) and policy.scale == 1:
                yield loss
                return
            params = _parameters(optimizers)
            with scaled_backward(params):
                yield loss.float() * policy.scale
                found_inf = unscale_(gradients_of(params), policy.scale)
            before = policy.scale
            policy.update(found_inf)
        if found_inf:
            logger.warning(
                "Gradient overflow, skipping update, reducing loss scale from %g to %g",
                before,
                policy.scale,
            )
            for each in optimizers:
                _skip_next_step(each)

    def _deactivate(self) -> None:
        """Puts the thread's autocast state back; every operator does what torch does."""
        if self._active:
            self._active = False
            self._switch(*self._before)
            install("stock", self.device_type)
            set_verbose(False)


def _checked(optimizer: Any) -> list[Optimizer]:
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for each in optimizers:
        if isinstance(each, FP16_Optimizer):
            raise TypeError("scale_loss: an FP16_Optimizer scales itself; call its backward(loss)")
        if not isinstance(each, Optimizer):
            raise TypeError(
                "scale_loss: optimizer must be a torch.optim.Optimizer or several of them, "
                f"found {type(each).__name__}"
            )
    return optimizers


def _parameters(optimizers: list[Optimizer]) -> list[Tensor]:
    """Each once, also where optimizers share it."""
    groups = [group for each in optimizers for group in each.param_groups]
    return list({id(p): p for group in groups for p in group["params"]}.values())


def _skip_next_step(optimizer: Optimizer) -> None:
    """Makes one step do nothing: gradients are set aside before it and put back after it.

    step itself is never replaced, so schedulers and wrappers see a step like any other.
    """
    if getattr(optimizer, "_amp_mp_skips", False):
        return  # two overflows before a step are one skip
    optimizer._amp_mp_skips = True  # type: ignore[attr-defined]
    aside: list[tuple[Tensor, Tensor]] = []

    def before(*_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    aside.append((param, param.grad))
                    param.grad = None

    def after(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        optimizer._amp_mp_skips = False  # type: ignore[attr-defined]
        for param, grad in aside:
            param.grad = grad

    handles = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(after),
    ]
