"""Checkpoints of a model and its optimizer, in torch's distributed format, for any processes.

`save` writes one directory, which `load` reads on any number of processes, into any storage format.
`names` finds the names of parameters, `contents` what is in a directory, `templates` the empty
tensors that it is read into. Then `groups` makes the optimizer's state dict, `weights` fills the
model and its masters, and `structure` rebuilds everything else. `processes` makes an error of one
process that of all.
"""

from amp_mp.checkpoint.load import load
from amp_mp.checkpoint.save import save

__all__ = ["load", "save"]
