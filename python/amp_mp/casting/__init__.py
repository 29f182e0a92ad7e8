"""Casting: torch.autocast with sensible defaults, and Apex's init and handle on top of it."""

from amp_mp.casting.autocast import autocast, disable_casts
from amp_mp.casting.handle import AmpHandle, NoOpHandle, init

__all__ = ["AmpHandle", "NoOpHandle", "autocast", "disable_casts", "init"]
