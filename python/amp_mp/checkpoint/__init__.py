"""Checkpoints of a model and its optimizer, in torch's distributed format, for any processes.

`save` writes one directory, which `load` reads on any number of processes, into any storage format.
`names` finds the names of parameters, `contents` says what is in a directory.
"""

from amp_mp.checkpoint.load import load
from amp_mp.checkpoint.save import save

__all__ = ["load", "save"]
