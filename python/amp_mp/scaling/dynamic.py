"""Dynamic loss scales, each a class over a state machine of csrc/core/scale.h, and their names.

Each of them raises ValueError for an argument that is out of range, naming it.
"""

from typing import Any

from amp_mp.scaling.policies import NO_CEILING, ScalePolicy, Static, check_scale


class Backoff(ScalePolicy):
    """Divide the scale by step_factor on overflow, multiply it after step_window steps without one.

    OpenSeq2Seq's rule, which is Apex's as well: at iteration i, counted from 0, the scale grows if
    (i - iteration of the last overflow, at first -1) is a multiple of step_window. The scale stays
    in [scale_min, scale_max] and starts at init_scale, by default scale_max.
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
        scale = scale_max if init_scale is None else init_scale
        super().__init__(scale, scale_min, scale_max, step_factor, step_window, last_overflow=-1)


class Hysteresis(ScalePolicy):
    """torch.amp's rule with patience: only the `hysteresis`-th overflow lowers the scale.

    An overflow reduces the patience by 1; at 0 it multiplies the scale by backoff_factor.
    growth_interval clean steps in a row multiply it by growth_factor.

    Args:
        hysteresis: the patience; 1 is torch's rule, whose arguments the first four are.
        refill: when the patience is full again: "clean_step", after any step without overflow
            (Apex's update_scale_hysteresis), or "growth", only when the scale grows (Megatron-LM's
            DynamicGradScaler).
        scale_min, scale_max: bounds of the scale.
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
        settings = scale_min, scale_max, growth_factor, backoff_factor, growth_interval, hysteresis
        own = {"refill_on_growth": float(refill == "growth"), "hysteresis_tracker": hysteresis}
        super().__init__(init_scale, *settings, **own)


class LogMax(ScalePolicy):
    """OpenSeq2Seq's LogMax, also LogNormal: the scale follows the distribution of max |g|.

    x = log2 max |g| is taken to be normal. Its mean mu is an average over about 1 / (1 - beta1)
    steps and its deviation sigma over 1 / (1 - beta2), both corrected for their start:

        scale = 2^(log_max - (mu + overflow_std_dev sigma)), within [scale_min, scale_max]

    so that overflow_std_dev = 3.09 means an overflow in a thousand steps. The first step is taken
    at scale 1. An overflow enters as x = log_max; gradients that are all zero change nothing.
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
        scale = min(max(1.0, scale_min), scale_max)
        settings = scale_min, scale_max, log_max, beta1, beta2, overflow_std_dev
        super().__init__(scale, *settings, missing=1, slow_missing=1)


class AdaptiveGradScale(ScalePolicy):
    """NVCaffe's global_grad_scale_adaptive: keeps the largest scaled gradient at 4 target.

    scale = 4 target / max |g| of the step before, or target where all gradients were zero, within
    [scale_min, scale_max]. It starts at target.
    """

    _kind = "adaptive"
    needs_max_abs = True

    def __init__(
        self, target: float = 1000.0, scale_min: float = 2.0**-24, scale_max: float = NO_CEILING
    ) -> None:
        super().__init__(target, scale_min, scale_max, target)


class Tolerance(ScalePolicy):
    """fairseq's DynamicLossScaler: an occasional overflow skips its step but keeps the scale.

    On overflow the scale is divided by step_factor only if overflows / steps >= tolerance, counted
    since the scale last changed. It is multiplied by step_factor after step_window steps without
    overflow, and stays in [scale_min, scale_max]. A tolerance of 0 lowers it at every overflow.
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
        settings = scale_min, scale_max, step_factor, step_window, tolerance
        super().__init__(init_scale, *settings, last_overflow=-1, last_rescale=-1)


NAMES: dict[str, type[ScalePolicy]] = {
    **dict.fromkeys(("dynamic", "backoff"), Backoff),
    **dict.fromkeys(("logmax", "lognormal"), LogMax),
}


def make_policy(
    loss_scale: float | str | ScalePolicy, dynamic: ScalePolicy | None = None
) -> ScalePolicy:
    """The policy of a `loss_scale=` argument.

    loss_scale: a number makes a Static policy, a policy is taken as it is; "Backoff", "LogMax" (or
    "LogNormal") with their defaults, "dynamic". dynamic: what that stands for; default: Backoff
    with its defaults. ValueError for an unknown name, or a number not finite or not above 0.
    """
    if isinstance(loss_scale, ScalePolicy):
        return loss_scale
    if not isinstance(loss_scale, str):
        return Static(check_scale(loss_scale, "loss_scale"))
    name = loss_scale.lower().strip()
    if name == "dynamic" and dynamic is not None:
        return dynamic
    if name not in NAMES:
        raise ValueError(
            f'loss_scale: Unknown scaling algorithm: {loss_scale}; expected "dynamic", "Backoff", '
            '"LogMax", a number, or a policy of amp_mp.scaling'
        )
    return NAMES[name]()


def apex_policy(
    static: float,
    dynamic: bool,
    arguments: dict[str, Any] | None,
    loss_scale: float | str | ScalePolicy | None,
) -> ScalePolicy:
    """The policy that the scale arguments of FP16_Optimizer describe."""
    given = dict(arguments or {})
    start = check_scale(given.pop("init_scale", 2.0**32), "dynamic_loss_args['init_scale']")
    factor, window = given.pop("scale_factor", 2.0), given.pop("scale_window", 1000)
    if given:
        known = "init_scale, scale_factor, scale_window"
        raise ValueError(f"dynamic_loss_args: unknown {sorted(given)}; known are {known}")
    try:
        preset = Backoff(min(1.0, start), NO_CEILING, factor, window, init_scale=start)
    except ValueError as error:  # it names Backoff's arguments, not Apex's
        raise ValueError(f"dynamic_loss_args: {error}") from None
    if loss_scale is not None:
        return make_policy(loss_scale, preset)
    return preset if dynamic else make_policy(check_scale(static, "static_loss_scale"))


def from_state_dict(state_dict: dict[str, Any]) -> ScalePolicy:
    """The policy of a snapshot, in its state; ValueError: unknown, a number missing or wrong."""
    name = state_dict.get("policy")
    kinds = {kind.__name__: kind for kind in ScalePolicy.__subclasses__()}
    if name not in kinds:
        raise ValueError(f"state_dict: policy must be one of {', '.join(kinds)}, found {name!r}")
    policy = kinds[name]()
    policy.load_state_dict(state_dict)
    return policy
