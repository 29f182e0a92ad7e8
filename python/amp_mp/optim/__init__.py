"""Fused optimizers: torch.optim's arguments, state names and results, one native pass a step."""

from amp_mp.optim.adagrad import Adagrad
from amp_mp.optim.adam import Adam
from amp_mp.optim.adamax import Adamax
from amp_mp.optim.adamw import AdamW
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.lamb import LAMB
from amp_mp.optim.lars import LARS
from amp_mp.optim.lion import Lion
from amp_mp.optim.novograd import NovoGrad
from amp_mp.optim.rmsprop import RMSprop
from amp_mp.optim.sgd import SGD
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
