"""Checkpoints of a model and its optimizer, in torch's distributed format, for any processes.

`save` writes one directory, which `load` reads on any number of processes, into any storage format.
`contents` finds what is in a directory, `model_part` fills the model and its masters,
`optimizer_part` makes the optimizer's state dict. `local_part` finds what differs between
processes, `places` says where that is in a checkpoint. `processes` raises the error of one process
on all of them. `pending` writes a copy while training goes on.
"""

from amp_mp.checkpoint.pending import PendingSave
from amp_mp.checkpoint.save_load import load, save

__all__ = ["PendingSave", "load", "save"]
