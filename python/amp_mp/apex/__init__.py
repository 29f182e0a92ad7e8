"""Apex's packages by their own names, for scripts that were written for it."""

from amp_mp.apex import amp, fp16_utils, parallel

__all__ = ["amp", "fp16_utils", "parallel"]
