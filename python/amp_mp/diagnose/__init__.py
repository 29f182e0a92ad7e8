"""What low precision does to a training run: gradients, loss scale, updates.

`python -m amp_mp.diagnose run.py --its-own arguments` runs a whole script and reports on it;
`diagnose.start()` at its top does the same. In a training loop `Watch` counts gradients,
`UpdateRatios` updates; `diagnose_overflow` and `OverflowTracker` find inf and NaN.
`tensor_core_report` lists matrix sizes that waste Tensor Cores.
"""

from amp_mp.diagnose.gradient_watch import OverflowTracker, Watch, diagnose_overflow
from amp_mp.diagnose.histogram import ExponentHistogram
from amp_mp.diagnose.matrix_sizes import pad_to_multiple, tensor_core_report
from amp_mp.diagnose.plot import plot_gradients, plot_updates
from amp_mp.diagnose.rank_bytes import sharded_memory
from amp_mp.diagnose.recording import start
from amp_mp.diagnose.tensorboard import log
from amp_mp.diagnose.updates import UpdateRatios

# fmt: off
__all__ = [
    "ExponentHistogram", "OverflowTracker", "UpdateRatios", "Watch", "diagnose_overflow", "log",
    "pad_to_multiple", "plot_gradients", "plot_updates", "sharded_memory", "start",
    "tensor_core_report",
]
