"""Fused optimizers: torch.optim's arguments, state names and results, one native pass a step."""

from amp_mp.optim.adam import Adam
from amp_mp.optim.adamw import AdamW
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "FusedOptimizer"]
