"""Checkpoints of a model and its optimizer, in torch's distributed format, for any processes.

`save` writes one directory, which `load` reads on any number of processes, into any storage format.
On the way: `names` finds the names of parameters, `contents` what is in a directory, `templates` the
empty tensors that it is read into, `groups` the optimizer's state dict, `weights` what the model and
its masters get, `structure` everything else. `processes` makes errors those of all processes.
"""

from amp_mp.checkpoint.load import load
from amp_mp.checkpoint.save import save

__all__ = ["load", "save"]
