"""Fused optimizers: torch.optim's arguments, state names and results, one native pass a step."""

from amp_mp.optim.adam import Adam, AdamW
from amp_mp.optim.adaptive import Adagrad, Adamax, Lion, RMSprop
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.layerwise import LAMB, NovoGrad
from amp_mp.optim.sgd import LARS, SGD
from amp_mp.optim.state.memory_report import MemoryReport

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "FusedOptimizer",
    "Lion",
    "MemoryReport",
    "NovoGrad",
    "RMSprop",
]
