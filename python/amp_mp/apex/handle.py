"""Apex's amp.init and its handle: casts for a whole script, and scale_loss."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.apex.scale_loss import OptimWrapper, ScaledLosses, SkippedSteps
from amp_mp.casting.autocast import disable_casts, install_step_hooks, resolve, set_keep_casts
from amp_mp.casting.op_table import install, set_verbose
from amp_mp.casting.products import choose_products
from amp_mp.scaling.policies import Backoff, ScalePolicy, Static, make_policy


def init(
    enabled: bool = True,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    policies: str = "apex",
    dtype: torch.dtype | None = None,
    device_type: str | None = None,
    loss_scale: float | str | ScalePolicy | None = None,
    keep_casts: bool = False,
) -> "AmpHandle":
    """Switches casting on for this thread, for good, and returns the handle with scale_loss.

        handle = amp.init()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    Args:
        enabled: False gives a handle that does nothing, so that a script need not change.
        enable_caching: cast each weight once an iteration, where gradients are on: until backward
            has reached it, scale_loss or amp.casting.backward ends, or an optimizer steps.
        verbose: say what was switched on, and print every cast that is computed to stderr.
        allow_banned: compute binary_cross_entropy in float32 instead of refusing it.
        policies: "apex", its lists of 2018 and what they missed, on CPU and CUDA; or "torch",
            torch's own. One table is in force in a process; `amp.set_policy` changes it.
        dtype: torch.float16 or torch.bfloat16; default: float16 on CUDA, bfloat16 on a CPU.
        device_type: "cuda" or "cpu"; default: "cuda" where there is one.
        loss_scale: a number, "dynamic", "Backoff" or a policy; default: "dynamic" for float16
            (start 2^16, at most 2^24, halved on overflow but not below 1, doubled after 2000 steps
            without one), 1 for bfloat16: then nothing is scaled or checked.
        keep_casts: keep the casts of weights from step to step; amp_mp's optimizers write them.
            After a write through `.data`, `out=p.data`, NumPy or DLPack call
            amp.casting.clear_cache().

    Raises ValueError for an unknown device type, dtype or loss scale.
    """
    if not enabled:
        return AmpHandle()
    device, low = resolve(device_type, dtype)
    if device == "cpu":
        choose_products("auto", low)
    if loss_scale is None:
        loss_scale = "dynamic" if low == torch.float16 else 1.0
    policy = make_policy(loss_scale, dynamic=Backoff(init_scale=2.0**16))
    install(policies, device, allow_banned)
    set_verbose(verbose)
    if verbose:
        print(f"amp_mp: casting to {low} on {device}, loss scale {policy!r}")
    return AmpHandle(device, low, enable_caching, policy, keep_casts)


class AmpHandle:
    """Casting that `init` switched on, and its loss scale; without a dtype it does nothing.

    Use init to make one.
    """

    def __init__(
        self,
        device_type: str = "cpu",
        dtype: torch.dtype | None = None,
        caching: bool = False,
        policy: ScalePolicy | None = None,
        keep_casts: bool = False,
    ) -> None:
        policy = policy or Static()
        self.device_type, self.dtype, self.has_cache = device_type, dtype, caching
        self.loss_scaler = policy
        losses = ScaledLosses(policy, device_type, SkippedSteps())
        self._default_scaler: ScaledLosses | None = losses  # Apex's name; None once wrapped
        self._active = dtype is not None
        if dtype is None:
            return
        self._before = (
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )
        self._kept_before = set_keep_casts(keep_casts)
        install_step_hooks()
        self._switch(True, dtype, caching)

    def _switch(self, enabled: bool, dtype: torch.dtype, caching: bool) -> None:
        torch.set_autocast_enabled(self.device_type, enabled)
        torch.set_autocast_dtype(self.device_type, dtype)
        torch.set_autocast_cache_enabled(caching)
        self._clear_cache()

    def is_active(self) -> bool:
        """Whether casts are on here and now: not after _deactivate, nor inside scale_loss."""
        return self._active and torch.is_autocast_enabled(self.device_type)

    def scale_loss(
        self, loss: Tensor, optimizer: Optimizer | Sequence[Optimizer]
    ) -> AbstractContextManager[Tensor]:
        """Yields the loss times the scale, casts off; afterwards the gradients are the true ones.

        On exit the gradients of the optimizer's parameters are divided by the scale, in place and
        each once, also where several losses add up before a step. float16 gradients of an amp_mp
        optimizer carry the scale until its step divides them in float32: clip with its
        max_grad_norm, clear with its zero_grad; RuntimeError if they were written in between. If
        one is inf or NaN the scale falls and the optimizer's next step changes nothing. Gradients
        cleared without a step move the scale as after one. Calling backward() on the loss itself
        inside gives a warning.

        Args:
            loss: the loss, any floating dtype; it is multiplied in float32.
            optimizer: the optimizer, or all of them, that own what this loss has gradients for.

        Raises:
            TypeError: one of them is no torch.optim.Optimizer, or is an FP16_Optimizer.
            RuntimeError: wrap_optimizer was called; wrapped optimizers have their own scale_loss.
        """
        if self.dtype is None:
            return nullcontext(loss)
        if self._default_scaler is None:
            raise RuntimeError(
                "handle.scale_loss cannot be used after handle.wrap_optimizer: every wrapped "
                "optimizer has loss scales of its own. Call scale_loss of the wrapped optimizer"
            )
        return self._default_scaler.block(loss, optimizer)

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """The optimizer with a loss scale for each of num_loss losses a step.

        Then handle.scale_loss raises. TypeError, ValueError: another optimizer or count.
        """
        wrapper = OptimWrapper(optimizer, self.loss_scaler, num_loss, self.device_type)
        self._default_scaler = None
        return wrapper

    @property
    def cache(self) -> dict[Tensor, Tensor]:
        """The weights that have a low-precision copy at the moment, and the copies."""
        return {} if self.dtype is None else _C.casting.cached()

    def _clear_cache(self) -> None:
        if self.dtype is not None:
            torch.clear_autocast_cache()
            _C.casting.clear_cache()

    def _disable_casts(self) -> Any:
        return nullcontext() if self.dtype is None else disable_casts(self.device_type)

    def _deactivate(self) -> None:
        """Puts the thread's autocast state back; every operator does what torch does."""
        if self._active:
            self._active = False
            self._switch(*self._before)
            set_keep_casts(self._kept_before)
            install("stock", self.device_type)
            set_verbose(False)
