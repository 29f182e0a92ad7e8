"""Casting: which precision operators run in, inside torch's own autocast."""

from amp_mp._C import casting as _native
from amp_mp.casting.autocast import autocast, backward, disable_casts
from amp_mp.casting.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_mp.casting.handle import AmpHandle, NoOpHandle, init
from amp_mp.casting.policies import explain, policies, set_policy, uninstall
from amp_mp.casting.show import Cast, CastTable, PolicyTable

clear_cache = _native.clear_cache

__all__ = [
    "AmpHandle",
    "Cast",
    "CastTable",
    "NoOpHandle",
    "PolicyTable",
    "autocast",
    "backward",
    "clear_cache",
    "disable_casts",
    "explain",
    "float_function",
    "half_function",
    "init",
    "policies",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "set_policy",
    "uninstall",
]
