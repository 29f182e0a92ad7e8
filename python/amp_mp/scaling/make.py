"""What loss_scale= arguments mean."""

from __future__ import annotations

from typing import Any

from amp_mp.scaling.dynamic import AdaptiveGradScale, Backoff, Hysteresis, LogMax
from amp_mp.scaling.policies import NO_CEILING, Policy, Static, check_scale

NAMES: dict[str, type[Policy]] = {
    "dynamic": Backoff,
    "backoff": Backoff,
    "logmax": LogMax,
    "lognormal": LogMax,
}
ALL = (Static, Backoff, Hysteresis, LogMax, AdaptiveGradScale)


def make_policy(loss_scale: float | str | Policy, dynamic: Policy | None = None) -> Policy:
    """What a `loss_scale=` argument means: a number, a policy, or a name.

    Args:
        loss_scale: a number makes a Static policy, a policy is taken as it is; "Backoff", "LogMax"
            (or "LogNormal") with their defaults, "dynamic".
        dynamic: what "dynamic" means here; a Backoff policy with its defaults if not given.

    Raises:
        ValueError: an unknown name, or a number that is no scale.
    """
    if isinstance(loss_scale, Policy):
        return loss_scale
    if isinstance(loss_scale, str):
        name = loss_scale.lower().strip()
        if name == "dynamic" and dynamic is not None:
            return dynamic
        if name in NAMES:
            return NAMES[name]()
        raise ValueError(
            f'loss_scale: Unknown scaling algorithm: {loss_scale}; expected "dynamic", "Backoff", '
            '"LogMax", a number, or a policy of amp_mp.scaling'
        )
    return Static(check_scale(loss_scale, "loss_scale"))


def apex_policy(
    static: float,
    dynamic: bool,
    arguments: dict[str, Any] | None,
    loss_scale: float | str | Policy | None,
) -> Policy:
    """What the scale arguments of Apex's FP16_Optimizer mean.

    Its dynamic scale starts at 2^32, halves on overflow but not below 1, doubles after 1000 steps
    without one, and has no ceiling.

    Raises:
        ValueError: an unknown name in the arguments, or a number that is no scale.
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
    except ValueError as error:  # Apex's names are others
        raise ValueError(f"dynamic_loss_args: {error}") from None
    if loss_scale is not None:
        return make_policy(loss_scale, preset)
    return preset if dynamic else make_policy(check_scale(static, "static_loss_scale"))


def from_state_dict(state_dict: dict[str, Any]) -> Policy:
    """The policy that a snapshot was taken of, as it was.

    Raises ValueError for a snapshot of no policy, or a number in it that makes no sense.
    """
    for kind in ALL:
        if state_dict.get("policy") == kind.__name__:
            policy: Policy = kind()
            policy.load_state_dict(state_dict)
            return policy
    known = ", ".join(kind.__name__ for kind in ALL)
    raise ValueError(
        f"state_dict: policy must be one of {known}, found {state_dict.get('policy')!r}"
    )
