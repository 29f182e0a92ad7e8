"""float32 masters: for models in low precision, and around any torch optimizer."""

from amp_mp.master.fp16_optimizer import FP16_Optimizer
from amp_mp.master.prepare import prepare

__all__ = ["FP16_Optimizer", "prepare"]
