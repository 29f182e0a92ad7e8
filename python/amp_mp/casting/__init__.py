"""Casting: in which precision operators run, inside torch's own autocast.

`op_table` puts a policy for each into force (csrc/torch/casting) and shows what was cast,
`autocast` opens regions, `active_castings` knows which handle's casting is in force, `decorators`
wraps Python functions, `step_hooks` keeps casts away from optimizer steps.
"""

from amp_mp.casting.autocast import backward, clear_cache, disable_casts
from amp_mp.casting.decorators import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_mp.casting.op_table import uninstall

# fmt: off
__all__ = [
    "backward", "clear_cache", "disable_casts", "float_function", "half_function",
    "promote_function", "register_float_function", "register_half_function",
    "register_promote_function", "uninstall",
]
