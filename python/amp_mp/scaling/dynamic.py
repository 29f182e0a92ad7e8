"""Dynamic loss scales, each a class over a state machine of csrc/core/scale.h."""

import math
from typing import Any

from amp_mp.scaling.policies import NO_CEILING, ScalePolicy, check_scale


class Backoff(ScalePolicy):
    """Divide the scale by step_factor on overflow, multiply it after step_window steps without one.

    OpenSeq2Seq's rule, which is Apex's as well: at iteration i, counted from 0, the scale grows if
    (i - iteration of the last overflow, at first -1) is a multiple of step_window. The scale stays
    in [scale_min, scale_max] and starts at init_scale, by default scale_max.

    Raises ValueError naming the argument that is out of range.
    """

    _kind = "backoff"

    def __init__(
        self,
        scale_min: float = 1.0,
        scale_max: float = 2.0**24,
        step_factor: float = 2.0,
        step_window: int = 2000,
        *,
        init_scale: float | None = None,
    ) -> None:
        super().__init__(
            scale=scale_max if init_scale is None else init_scale,
            scale_min=scale_min,
            scale_max=scale_max,
            step_factor=step_factor,
            step_window=step_window,
            last_overflow=-1,
        )

    def _check(self, values: dict[str, Any]) -> None:
        _check_bounds(values)
        _check_above_1(values, "step_factor")
        _check_whole(values, "step_window")
        _check_counts(values, "iteration", "last_overflow")


class Hysteresis(ScalePolicy):
    """torch.amp's rule with patience: only the `hysteresis`-th overflow lowers the scale.

    An overflow reduces the patience by 1; at 0 it multiplies the scale by backoff_factor.
    growth_interval clean steps in a row multiply it by growth_factor.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval: as torch.amp.GradScaler.
        hysteresis: the patience; 1 is torch's rule.
        refill: when the patience is full again: "clean_step", after any step without overflow
            (Apex's update_scale_hysteresis), or "growth", only when the scale grows (Megatron-LM's
            DynamicGradScaler).
        scale_min, scale_max: bounds of the scale; the larger one keeps its reciprocal a normal
            float32.

    Raises:
        ValueError: naming the argument that is out of range.
    """

    _kind = "hysteresis"

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        *,
        refill: str = "clean_step",
        scale_min: float = 1.0,
        scale_max: float = NO_CEILING,
    ) -> None:
        if refill not in ("clean_step", "growth"):
            raise ValueError(f'refill must be "clean_step" or "growth", found {refill!r}')
        super().__init__(
            scale=init_scale,
            scale_min=scale_min,
            scale_max=scale_max,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            refill_on_growth=refill == "growth",
            hysteresis_tracker=hysteresis,
        )

    def _check(self, values: dict[str, Any]) -> None:
        _check_bounds(values)
        _check_above_1(values, "growth_factor")
        if check_scale(values["backoff_factor"], "backoff_factor") >= 1:
            raise ValueError(f"backoff_factor must be below 1, found {values['backoff_factor']!r}")
        _check_whole(values, "growth_interval", "hysteresis")
        _check_counts(values, "growth_tracker")


class LogMax(ScalePolicy):
    """OpenSeq2Seq's LogMax, also LogNormal: the scale follows the distribution of max |g|.

    x = log2 max |g| is taken to be normal. Its mean mu is an average over about 1 / (1 - beta1)
    steps and its deviation sigma over 1 / (1 - beta2), both corrected for their start;

        scale = 2^(log_max - (mu + overflow_std_dev sigma)), within [scale_min, scale_max]

    so that overflow_std_dev = 3.09 means an overflow in a thousand steps. The first step is taken
    at scale 1. An overflow enters as x = log_max; a step whose gradients are all zero leaves the
    state alone.

    Raises ValueError naming the argument that is out of range.
    """

    _kind = "log_max"
    needs_max_abs = True

    def __init__(
        self,
        scale_min: float = 1.0,
        scale_max: float = 2.0**24,
        log_max: float = 16.0,
        beta1: float = 0.99,
        beta2: float = 0.999,
        overflow_std_dev: float = 3.09,
    ) -> None:
        super().__init__(
            scale=min(max(1.0, scale_min), scale_max),
            scale_min=scale_min,
            scale_max=scale_max,
            log_max=log_max,
            beta1=beta1,
            beta2=beta2,
            overflow_std_dev=overflow_std_dev,
            missing=1,
            slow_missing=1,
        )

    def _check(self, values: dict[str, Any]) -> None:
        _check_bounds(values)
        _check_finite(values, *values)
        for name in ("beta1", "beta2"):
            if not 0 <= values[name] < 1:
                raise ValueError(f"{name} must be in [0, 1), found {values[name]!r}")


class AdaptiveGradScale(ScalePolicy):
    """NVCaffe's global_grad_scale_adaptive: keeps the largest scaled gradient at 4 target.

    scale = 4 target / max |g| of the step before, or target where all gradients were zero, within
    [scale_min, scale_max]. It starts at target.

    Raises ValueError naming the argument that is out of range.
    """

    _kind = "adaptive"
    needs_max_abs = True

    def __init__(
        self, target: float = 1000.0, scale_min: float = 2.0**-24, scale_max: float = NO_CEILING
    ) -> None:
        super().__init__(scale=target, scale_min=scale_min, scale_max=scale_max, target=target)

    def _check(self, values: dict[str, Any]) -> None:
        check_scale(values["target"], "target")
        _check_bounds(values)


class Tolerance(ScalePolicy):
    """fairseq's DynamicLossScaler: an occasional overflow skips its step but keeps the scale.

    On overflow the scale is divided by step_factor only if overflows / steps >= tolerance, counted
    since the scale last changed. It is multiplied by step_factor after step_window steps without
    overflow, and stays in [scale_min, scale_max]. A tolerance of 0 lowers it at every overflow.

    Raises ValueError naming the argument that is out of range.
    """

    _kind = "tolerance"

    def __init__(
        self,
        init_scale: float = 2.0**15,
        step_factor: float = 2.0,
        step_window: int = 2000,
        tolerance: float = 0.05,
        scale_min: float = 1e-4,
        scale_max: float = NO_CEILING,
    ) -> None:
        super().__init__(
            scale=init_scale,
            scale_min=scale_min,
            scale_max=scale_max,
            step_factor=step_factor,
            step_window=step_window,
            tolerance=tolerance,
            last_overflow=-1,
            last_rescale=-1,
        )

    def _check(self, values: dict[str, Any]) -> None:
        _check_bounds(values)
        _check_above_1(values, "step_factor")
        _check_finite(values, "tolerance")
        if not 0 <= values["tolerance"] <= 1:
            raise ValueError(f"tolerance must be in [0, 1], found {values['tolerance']!r}")
        _check_whole(values, "step_window")
        _check_counts(values, "iteration", "last_overflow", "last_rescale", "overflows")


def _check_bounds(values: dict[str, Any]) -> None:
    """Raises ValueError unless scale_min <= scale <= scale_max, all finite and above 0."""
    low = check_scale(values["scale_min"], "scale_min")
    high = check_scale(values["scale_max"], "scale_max")
    scale = check_scale(values["scale"], "init_scale")
    if not low <= scale <= high:
        raise ValueError(
            f"scale_min <= init_scale <= scale_max must hold, found {low}, {scale}, {high}"
        )


def _check_above_1(values: dict[str, Any], name: str) -> None:
    if check_scale(values[name], name) <= 1:
        raise ValueError(f"{name} must be above 1, found {values[name]!r}")


def _check_whole(values: dict[str, Any], *names: str) -> None:
    for name in names:
        if check_scale(values[name], name) % 1 != 0:
            raise ValueError(f"{name} must be a whole number from 1 on, found {values[name]!r}")


def _check_finite(values: dict[str, Any], *names: str) -> None:
    for name in names:
        x = values[name]
        if isinstance(x, bool) or not isinstance(x, int | float) or not math.isfinite(x):
            raise ValueError(f"{name} must be a finite number, found {x!r}")


def _check_counts(values: dict[str, Any], *names: str) -> None:
    for name in names:
        count = values[name]
        if not (isinstance(count, int | float) and -1 <= count < 2**53):
            raise ValueError(f"{name} must be a count of steps, found {count!r}")
