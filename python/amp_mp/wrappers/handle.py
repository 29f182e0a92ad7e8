"""Apex's amp.init and its handle: casts for a whole script, and scale_loss."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.casting import active_castings, autocast
from amp_mp.casting.active_castings import Casting
from amp_mp.casting.products import choose_products
from amp_mp.casting.step_hooks import install_step_hooks
from amp_mp.messages import say
from amp_mp.scaling.policies import Backoff, ScalePolicy, Static, make_policy
from amp_mp.switch import ENABLED
from amp_mp.wrappers.scale_loss import OptimWrapper, ScaledLosses, SkippedSteps


def init(
    enabled: bool = ENABLED,
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
    """Switches casting on for this thread and returns the handle with scale_loss.

        handle = amp.init()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    Casting stays on for good, or until `handle.deactivate()`, or the end of `with amp.init():`.
    The newest handle decides; where it is deactivated, the next older one does that is still on.

    Args:
        enabled: False gives a handle that does nothing, to compare; the default under AMP_MP=0.
        enable_caching: cast each weight once an iteration, where gradients are on: until backward
            has reached it, scale_loss or amp.casting.backward ends, or an optimizer steps.
        verbose: say what was switched on, and print every cast that is computed to stderr.
        allow_banned: compute binary_cross_entropy in float32 instead of refusing it.
        policies: "apex", its lists of 2018 and what they missed, on CPU and CUDA; or "torch",
            torch's own. One table is in force in a process; `amp.set_policy` changes it. On a CPU
            "apex" leaves a product in float32 where that is faster, "torch" casts every size.
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
    device, low = autocast.resolve(device_type, dtype)
    if device == "cpu":
        choose_products("auto", low)
    if loss_scale is None:
        loss_scale = "dynamic" if low == torch.float16 else 1.0
    policy = make_policy(loss_scale, dynamic=Backoff(init_scale=2.0**16))
    table = policies, allow_banned
    casting = Casting(device, True, low, enable_caching, keep_casts, table, verbose)
    handle = AmpHandle(casting, policy)
    if verbose:
        say(f"amp_mp: casting to {low} on {device}, loss scale {policy!r}")
    return handle


class AmpHandle:
    """Casting that `init` switched on, and its loss scale; with enabled=False it does nothing.

    Use init to make one. As a context it is deactivated at the block's end.
    """

    def __init__(self, casting: Casting | None = None, policy: ScalePolicy | None = None) -> None:
        policy = policy or Static()
        self.device_type = casting.device if casting else "cpu"
        self.dtype = casting.dtype if casting else None
        self.has_cache = casting is not None and casting.caching
        self.loss_scaler = policy
        losses = ScaledLosses(policy, self.device_type, SkippedSteps())
        self._default_scaler: ScaledLosses | None = losses  # Apex's name; None once wrapped
        self._losses = [losses]
        self._active = casting is not None
        if casting is not None:
            install_step_hooks()
            active_castings.begin(self, casting)

    def __enter__(self) -> Self:
        if self.dtype is not None and not self._active:
            raise RuntimeError("this handle was deactivated; amp.init() switches casting on again")
        return self

    def __exit__(self, *error: object) -> None:
        self.deactivate()

    def is_active(self) -> bool:
        """Whether casts are on here and now: not after deactivate, nor inside scale_loss."""
        return self._active and torch.is_autocast_enabled(self.device_type)

    def deactivate(self) -> None:
        """Ends this handle's casting, as if it had never been; a second call does nothing.

        Handles end in any order: of those left the newest is in force, and after the last one what
        was before the first. Call it in the thread of init. scale_loss goes on scaling.
        """
        if self._active:
            self._active = False
            active_castings.end(self)

    _deactivate = deactivate  # Apex's name

    def state_dict(self) -> dict[str, Any]:
        """Snapshots of the loss scales, of wrapped optimizers too; {} with enabled=False."""
        if self.dtype is None:
            return {}
        return {"loss_scalers": [losses.loss_scaler.state_dict() for losses in self._losses]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the loss scales of a snapshot; with enabled=False it does nothing.

        ValueError, before any change: it has another number of losses or other policies. Wrap the
        same optimizers first.
        """
        if self.dtype is None:
            return
        found, policies = state_dict.get("loss_scalers", ()), [x.loss_scaler for x in self._losses]
        if len(found) != len(policies):
            raise ValueError(
                f"state_dict: expected loss_scalers of {len(policies)} losses, found {len(found)}; "
                "call wrap_optimizer, with the same num_loss, for the same optimizers first"
            )
        for each in copy.deepcopy(policies), policies:  # the copies say what is wrong
            for policy, snapshot in zip(each, found, strict=True):
                policy.load_state_dict(snapshot)
        for losses in self._losses:
            losses.give_up()

    def scale_loss(
        self, loss: Tensor, optimizer: Optimizer | Sequence[Optimizer]
    ) -> AbstractContextManager[Tensor]:
        """Yields the loss times the scale, casts off; afterwards the gradients are the true ones.

        At a static scale of 1, the default for bfloat16, loss and gradients stay as they are, and
        nothing is checked. Otherwise the gradients of the optimizer's parameters are divided by the
        scale on exit, each once, also where several losses add up before a step. Low-precision ones
        of an optimizer of amp_mp.optim become float32 (4 bytes per parameter), others stay in their
        dtype. If one is inf or NaN the scale falls, unless it is static, and the optimizer's next
        step changes nothing. Gradients cleared without a step move the scale as after one. Calling
        backward() on the loss itself inside gives a warning.

        Args:
            loss: the loss, any floating dtype; it is multiplied in float32.
            optimizer: the optimizer, or all of them, that own what this loss has gradients for.

        Raises:
            TypeError: one of them is not a torch.optim.Optimizer, or is an FP16_Optimizer.
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
        if self._default_scaler is not None:
            self._default_scaler = None
            self._losses = []
        self._losses += wrapper.losses
        return wrapper

    @property
    def cache(self) -> dict[Tensor, Tensor]:
        """The weights that have a low-precision copy at the moment, and the copies."""
        return {} if self.dtype is None else _C.casting.cached()

    def _clear_cache(self) -> None:
        if self.dtype is not None:
            active_castings.clear_casts()

    def _disable_casts(self) -> Any:
        return nullcontext() if self.dtype is None else autocast.disable_casts(self.device_type)
