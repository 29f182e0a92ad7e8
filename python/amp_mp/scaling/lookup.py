"""From a `loss_scale=` argument or a snapshot to a policy."""

from typing import Any

from amp_mp.scaling.dynamic import Backoff, LogMax
from amp_mp.scaling.policies import ScalePolicy, Static, check_scale

NAMES: dict[str, type[ScalePolicy]] = {
    "dynamic": Backoff,
    "backoff": Backoff,
    "logmax": LogMax,
    "lognormal": LogMax,
}


def make_policy(
    loss_scale: float | str | ScalePolicy, dynamic: ScalePolicy | None = None
) -> ScalePolicy:
    """The policy of a `loss_scale=` argument: a number, a policy, or a name.

    Args:
        loss_scale: a number makes a Static policy, a policy is taken as it is; "Backoff", "LogMax"
            (or "LogNormal") with their defaults, "dynamic".
        dynamic: the policy that "dynamic" stands for; default: Backoff with its defaults.

    Raises:
        ValueError: an unknown name, or a number that is not finite and above 0.
    """
    if isinstance(loss_scale, ScalePolicy):
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


def from_state_dict(state_dict: dict[str, Any]) -> ScalePolicy:
    """The policy of a snapshot, in the state it had.

    Raises ValueError for an unknown policy, or a number that is missing or out of range.
    """
    name = state_dict.get("policy")
    kinds = {kind.__name__: kind for kind in ScalePolicy.__subclasses__()}
    if name not in kinds:
        raise ValueError(f"state_dict: policy must be one of {', '.join(kinds)}, found {name!r}")
    policy = kinds[name]()
    policy.load_state_dict(state_dict)
    return policy
