"""amp_C: Apex's functions over lists of tensors, by the native passes (csrc/torch/apex)."""

from amp_mp._C.amp_C import *  # noqa: F403
from amp_mp._C.amp_C import __all__ as __all__
