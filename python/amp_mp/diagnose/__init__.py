"""What low precision does to a training run: gradients, loss scale, updates.

`python -m amp_mp.diagnose run.py --its-own arguments` runs a whole script unchanged and reports on
it; `diagnose.start()` at the top of the script prints the same when it ends. In a training loop
`watch` shows which gradients float16 would lose or overflow, `UpdateRatios` which updates would be
lost without float32 masters, `diagnose_overflow` and `OverflowTracker` which gradients are inf or
NaN. `plot_gradients`, `plot_updates` and `log` make pictures and TensorBoard records of these.
`sharded_memory` counts the bytes that a process holds and receives under fully_shard.
"""

from amp_mp.diagnose.histogram import Diagnosis, ExponentHistogram
from amp_mp.diagnose.overflow import OverflowTracker, diagnose_overflow
from amp_mp.diagnose.plot import log, plot_gradients, plot_updates, save
from amp_mp.diagnose.recording import start
from amp_mp.diagnose.sharded_memory import ShardedMemory, sharded_memory
from amp_mp.diagnose.updates import UpdateRatios, UpdateTable
from amp_mp.diagnose.watch import GradientReport, Watch, watch
from amp_mp.scaling.observe import OverflowReport

# fmt: off
__all__ = [
    "Diagnosis", "ExponentHistogram", "GradientReport", "OverflowReport", "OverflowTracker",
    "ShardedMemory", "UpdateRatios", "UpdateTable", "Watch", "diagnose_overflow", "log",
    "plot_gradients", "plot_updates", "save", "sharded_memory", "start", "watch",
]
