"""What the fused optimizers share: measure, decide, apply, once a device.

A subclass names its native operator and states and turns a param_group into hyperparameters; the
update itself is in csrc/core/rules.h.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.state import Bucket, all_current, gather_buckets, restore_state

STATE_FORMATS = ("float32", "float16", "float16_root")
SQUARES = ("exp_avg_sq", "square_avg", "sum")  # sums of squares, of which the root may be stored


class FusedOptimizer(torch.optim.Optimizer, ABC):
    """Base of the fused optimizers, a torch.optim.Optimizer.

    Parameters are float32, bfloat16 or float16 tensors of any dense layout; gradients any of the
    three. A low-precision parameter has a float32 `master` in its state, which the update works on;
    the parameter is its rounded copy (nearest even; float16 saturates at +-65504). With
    `master="none"` there is none and the parameter itself is updated, in float32 registers, and
    rounded: half the memory, but an update below half a unit in the last place of a weight is lost
    (docs/fp16_momentum.md).

    States are float32 unless told otherwise, by an argument of the state's name: "float16", and for
    sums of squares also "float16_root", which stores the square root, since squares of gradients
    below 2^-12 underflow in float16. Rounding is to nearest, saturating.

    `max_grad_norm` clips by the global norm over all groups, as torch.nn.utils.clip_grad_norm_,
    inside the step. Whenever gradients are measured (for clipping, by `check_overflow=True`, or by
    a scaler) an inf or NaN among them makes the step leave every byte as it was. Without any of
    these nothing is checked, as in torch.

    After `step()`: `step_was_skipped` and `grad_norm`.

    With torch.amp.GradScaler the step takes over unscaling and skipping (`amp_scaling=True`), which
    also lets it accept float16 gradients. Pass `amp_scaling=False` where a framework insists on
    unscaled gradients itself (Lightning's gradient clipping, Accelerate's step_was_skipped).
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        max_grad_norm: float | None,
        check_overflow: bool,
        amp_scaling: bool,
        master: str = "float32",
        formats: dict[str, str] | None = None,
    ) -> None:
        """Checks what all fused optimizers take; raises ValueError naming the argument."""
        if master not in ("float32", "none"):
            raise ValueError(f'master must be "float32" or "none", found {master!r}')
        for name, stored in (formats or {}).items():
            known = STATE_FORMATS if name in SQUARES else STATE_FORMATS[:-1]
            if stored not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; found {stored!r}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive or None, found {max_grad_norm!r}")
        self.max_grad_norm = max_grad_norm
        self.check_overflow = check_overflow
        self._step_supports_amp_scaling = amp_scaling
        self.master = master
        self.formats = dict(formats or {})  # how states are stored, where not in float32
        self._own_defaults = tuple(defaults)  # torch adds others when it unpickles
        self._forget()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """Drops what is derived from param_groups and state, or known of the last step."""
        self._buckets: list[Bucket] | None = None
        self._ready: tuple[list[Bucket], list[Tensor]] | None = None
        self._verdict: Tensor | None = None
        self._measured = False

    # What a subclass gives.

    @abstractmethod
    def _hyper(self, group: dict[str, Any]) -> _C.Hyper:
        """A param_group's numbers."""

    @abstractmethod
    def _operator(self) -> Callable[..., None]:
        """The native operator."""

    @abstractmethod
    def _states(self) -> tuple[str, ...]:
        """The names of the operator's states, in its order."""

    def _fill(self, name: str, state: Tensor, group: dict[str, Any]) -> None:
        """What a new state starts as, in its format; it is zero already."""

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
        buckets, statistics = self._measure()
        verdict = self._decide(buckets, statistics)
        hypers = [self._hyper(group) for group in self.param_groups]
        operator = self._operator()
        for bucket in buckets:
            operator(bucket.slots, hypers, verdict.to(bucket.device))
        return loss

    def _gather(self) -> list[Bucket]:
        lists = [group["params"] for group in self.param_groups]
        if self._buckets is None or not all_current(self._buckets, lists, self._states()):
            self._buckets = gather_buckets(self)
        return self._buckets

    def _measure(self) -> tuple[list[Bucket], list[Tensor] | None]:
        """The tensors to step, and their gradients' statistics if anything asks for them."""
        ready, self._ready = self._ready, None
        if ready is not None and hasattr(self, "found_inf"):
            return ready  # a scaler has measured for this very step
        buckets = self._gather()
        if self.max_grad_norm is None and not self.check_overflow:
            return buckets, None
        return buckets, [bucket.slots.measure() for bucket in buckets]

    def _decide(self, buckets: list[Bucket], statistics: list[Tensor] | None) -> Tensor:
        device = buckets[0].device if buckets else torch.device("cpu")
        total = None
        if statistics:
            total = statistics[0]
            if len(statistics) > 1:  # parameters on several devices: one norm, one verdict
                rows = torch.stack([s[-1].to(device) for s in statistics])
                total = torch.stack([rows[:, 0].sum(), rows[:, 1].max(), rows[:, 2].sum()])
        self._verdict = torch.empty(_C.VERDICT_SIZE, dtype=torch.float64, device=device)
        self._measured = total is not None
        _C.decide_(
            self._verdict,
            statistics=total,
            scale=_scalar(getattr(self, "grad_scale", None), device),
            found_inf=_scalar(getattr(self, "found_inf", None), device),
            max_norm=self.max_grad_norm or 0.0,
        )
        return self._verdict

    def measure_gradients(self) -> dict[torch.device, Tensor]:
        """Measures the gradients as they are, one read, for the step that follows.

        Returns, per device, the total's row: sum of squares, largest finite |g|, number of
        non-finite elements, float64 [3]; amp_mp.GradScaler asks for it in place of torch's
        read-and-write check.
        """
        buckets = self._gather()
        statistics = [bucket.slots.measure() for bucket in buckets]
        self._ready = buckets, statistics
        return {bucket.device: rows[-1] for bucket, rows in zip(buckets, statistics, strict=True)}

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step met an overflow and so changed nothing. Waits for the device."""
        return self._verdict is not None and bool(self._verdict[0].item())

    @property
    def grad_norm(self) -> float | None:
        """Global 2-norm of the last step's true gradients (unscaled, before clipping).

        inf after an overflow; None where nothing asked for measuring. Waits for the device if
        asked.
        """
        return (
            float(self._verdict[2].item()) if self._verdict is not None and self._measured else None
        )

    # State.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group's parameters get their state at the next step."""
        super().add_param_group(param_group)
        self._forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep the width they were saved with.

        torch casts every state to its parameter's dtype, which would round masters and moments of
        low-precision parameters. Reads checkpoints of torch.optim too: a missing master is made
        from the parameter. Raises ValueError on a shape that does not fit, before anything is
        changed.
        """
        restore_state(self, state_dict, super().load_state_dict)
        self._forget()

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
        own += ["master", "formats"]
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}


def _scalar(value: Tensor | float | None, device: torch.device) -> Tensor | None:
    """A scaler's number as a float32 tensor on the device, or None."""
    if value is None:
        return None
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())


def check_ranges(lr: Any, betas: Iterable[float], eps: float, weight_decay: float) -> None:
    """Raises ValueError naming the argument; a tensor lr has to have one element."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"lr must be a number or a tensor of one element, found shape {tuple(lr.shape)}"
        )
    if not float(lr) >= 0:
        raise ValueError(f"lr must not be negative, found {lr!r}")
    for i, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}] must be in [0, 1), found {beta!r}")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, found {eps!r}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, found {weight_decay!r}")
