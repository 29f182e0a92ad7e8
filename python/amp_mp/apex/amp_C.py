"""amp_C: Apex's functions over lists of tensors, by the native passes (csrc/torch/apex).

help() of each says what it takes and does. noop_flag becomes 1 where an input is inf or NaN.
"""

from amp_mp._C.amp_C import *  # noqa: F403
from amp_mp._C.amp_C import __all__ as __all__
