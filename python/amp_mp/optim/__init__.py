"""Fused optimizers: torch.optim's arguments, state names and results, one native pass per step.

`base` is torch's surface, `rule` what an optimizer declares about its update, `options` the
arguments that all share; the optimizers are in files named as in csrc/core/rules. A step is in
`step/`, what it keeps in `state/`, and work during the backward pass in `backward/`.
"""

from amp_mp.optim.adam import Adam, AdamW, NAdam, RAdam
from amp_mp.optim.adaptive import Adadelta, Adagrad, Adamax, Lion, RMSprop
from amp_mp.optim.base import FusedOptimizer, forget
from amp_mp.optim.layerwise import LAMB, NovoGrad
from amp_mp.optim.muon.muon import Muon
from amp_mp.optim.qk_clip import qk_clip_
from amp_mp.optim.sgd import LARS, SGD

# fmt: off
__all__ = [
    "LAMB", "LARS", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "FusedOptimizer",
    "Lion", "Muon", "NAdam", "NovoGrad", "RAdam", "RMSprop", "forget", "qk_clip_",
]
