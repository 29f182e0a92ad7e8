"""Skipped steps: how the loss scale moves after an overflow, and which gradient norm is a spike.

A policy has a `scale`, and `update(found_inf, max_abs)` moves it after a step. The arithmetic is
csrc/core/scale.h, so that a policy runs on the host or on a device. `NormSpike` is a limit for the
norm, the optimizers' `skip_norm_above`. `overflows` counts skipped steps in a row and warns.
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
)

# fmt: off
__all__ = [
    "AdaptiveGradScale", "Backoff", "Hysteresis", "LogMax", "NormSpike", "ScalePolicy", "Static",
    "Tolerance",
]
