"""Loss-scale policies: when the loss scale grows and shrinks.

A policy has a `scale`, and `update(found_inf, max_abs)` moves it after a step. The arithmetic is
csrc/core/scale.h, so that a policy runs on the host or on a device. `overflows` counts overflows in
a row and warns. `norm_spike` is a limit for norms, which no policy sees.
"""

from amp_mp.scaling.norm_spike import NormSpike
from amp_mp.scaling.policies import (
    AdaptiveGradScale,
    Backoff,
    Hysteresis,
    LogMax,
    ScalePolicy,
    Static,
    Tolerance,
    from_state_dict,
    make_policy,
)

LogNormal = LogMax
Policy = ScalePolicy

# fmt: off
__all__ = [
    "AdaptiveGradScale", "Backoff", "Hysteresis", "LogMax", "LogNormal", "NormSpike", "Policy",
    "ScalePolicy", "Static", "Tolerance", "from_state_dict", "make_policy",
]
