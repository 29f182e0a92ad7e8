"""apex.amp."""

from amp_mp.wrappers.fp16_utils import master_params
from amp_mp.wrappers.handle import init

__all__ = ["init", "master_params"]
