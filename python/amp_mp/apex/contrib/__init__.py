"""apex.contrib: clipping and the cross entropy."""

from amp_mp.apex.contrib import clip_grad, xentropy
from amp_mp.apex.missing import missing_from

__all__ = ["clip_grad", "xentropy"]
__getattr__ = missing_from(__name__)
