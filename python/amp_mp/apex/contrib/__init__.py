"""apex.contrib: clipping and the cross entropy."""

from amp_mp.apex.contrib import clip_grad, xentropy

__all__ = ["clip_grad", "xentropy"]
