"""What low precision does to a training run: gradients, loss scale, updates.

`python -m amp_mp.diagnose run.py --its-own arguments` runs a whole script and reports on it;
`diagnose.start()` at its top does the same. In a training loop `watch` counts gradients,
`UpdateRatios` updates; `diagnose_overflow` and `OverflowTracker` find inf and NaN.
`tensor_core_report` lists matrix sizes that waste Tensor Cores.
"""

from amp_mp.diagnose.histogram import Diagnosis, ExponentHistogram
from amp_mp.diagnose.matrix_sizes import pad_to_multiple, tensor_core_report
from amp_mp.diagnose.plot import plot_gradients, plot_updates, save
from amp_mp.diagnose.recording import start
from amp_mp.diagnose.sharded_memory import ShardedMemory, sharded_memory
from amp_mp.diagnose.tensorboard import log
from amp_mp.diagnose.updates import UpdateRatios, UpdateTable
from amp_mp.diagnose.watch import GradientReport, OverflowTracker, Watch, diagnose_overflow, watch
from amp_mp.optim.step.overflow_report import OverflowReport

# fmt: off
__all__ = [
    "Diagnosis", "ExponentHistogram", "GradientReport", "OverflowReport", "OverflowTracker",
    "ShardedMemory", "UpdateRatios", "UpdateTable", "Watch", "diagnose_overflow", "log",
    "pad_to_multiple", "plot_gradients", "plot_updates", "save", "sharded_memory", "start",
    "tensor_core_report", "watch",
]
