"""Loss scaling: policies, and a torch.amp.GradScaler that reads gradients once."""

from amp_mp.scaling.dynamic import AdaptiveGradScale, Backoff, Hysteresis, LogMax
from amp_mp.scaling.grad_scaler import GradScaler
from amp_mp.scaling.make import from_state_dict, make_policy
from amp_mp.scaling.policies import Policy, Static
from amp_mp.scaling.shift import shift_for_scale

LogNormal = LogMax

__all__ = [
    "AdaptiveGradScale",
    "Backoff",
    "GradScaler",
    "Hysteresis",
    "LogMax",
    "LogNormal",
    "Policy",
    "Static",
    "from_state_dict",
    "make_policy",
    "shift_for_scale",
]
