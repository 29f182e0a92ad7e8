"""Apex's names for the loss scale, and the arguments that describe it."""

from typing import Any

from amp_mp.scaling.dynamic import Backoff, make_policy
from amp_mp.scaling.policies import NO_CEILING, ScalePolicy, check_scale


class LossScale:
    """A policy, `loss_scaler`, whose scale can be read and set as `loss_scale`."""

    def __init__(self, policy: ScalePolicy) -> None:
        self.loss_scaler = policy

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss. Can be set within the policy's bounds (ValueError)."""
        return self.loss_scaler.scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.scale = value


def apex_policy(
    static: float,
    dynamic: bool,
    arguments: dict[str, Any] | None,
    loss_scale: float | str | ScalePolicy | None,
) -> ScalePolicy:
    """The policy that the scale arguments of FP16_Optimizer describe, see there.

    Raises ValueError for an unknown name in the arguments, or a number that is not finite and
    above 0.
    """
    given = dict(arguments or {})
    start = check_scale(given.pop("init_scale", 2.0**32), "dynamic_loss_args['init_scale']")
    factor, window = given.pop("scale_factor", 2.0), given.pop("scale_window", 1000)
    if given:
        raise ValueError(
            f"dynamic_loss_args: unknown {sorted(given)}; "
            "known are init_scale, scale_factor, scale_window"
        )
    try:
        preset = Backoff(min(1.0, start), NO_CEILING, factor, window, init_scale=start)
    except ValueError as error:  # it names Backoff's arguments, not Apex's
        raise ValueError(f"dynamic_loss_args: {error}") from None
    if loss_scale is not None:
        return make_policy(loss_scale, preset)
    return preset if dynamic else make_policy(check_scale(static, "static_loss_scale"))
