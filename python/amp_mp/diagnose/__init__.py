"""What low precision does to a training run: gradients, loss scale, updates.

A whole script, unchanged:

    python -m amp_mp.diagnose run.py --its-own arguments

or by two lines at its top, which print the same when it ends:

    from amp_mp import diagnose
    diagnose.start()

Parts of it, in a training loop:

    with diagnose.watch(model, scaler) as seen, diagnose.UpdateRatios(optimizer) as ratios:
        train(model)
    print(seen.report())    # which gradients float16 would lose or overflow
    print(ratios.report())  # which updates would be lost without float32 masters
"""

from amp_mp.diagnose.histogram import Diagnosis, ExponentHistogram
from amp_mp.diagnose.overflow import OverflowTracker, diagnose_overflow
from amp_mp.diagnose.plot import log, plot_gradients, plot_updates, save
from amp_mp.diagnose.recording import start
from amp_mp.diagnose.report import GradientReport
from amp_mp.diagnose.updates import UpdateRatios, UpdateTable
from amp_mp.diagnose.watch import Watch, watch
from amp_mp.scaling.observe import OverflowReport

__all__ = [
    "Diagnosis",
    "ExponentHistogram",
    "GradientReport",
    "OverflowReport",
    "OverflowTracker",
    "UpdateRatios",
    "UpdateTable",
    "Watch",
    "diagnose_overflow",
    "log",
    "plot_gradients",
    "plot_updates",
    "save",
    "start",
    "watch",
]
