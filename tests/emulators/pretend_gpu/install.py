"""Puts the pretend GPU in place: `install()` before amp_mp is imported.

`amp_mp._C` then comes from build.py's library, torch knows two CUDA devices, and of torch.cuda what
is Python answers as if they were real. Tests with device="cuda" run as they are. With
AMP_MP_DELAYED_STREAMS=<seed> kernels run as late as their streams permit (device.delayed_streams).
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

from pretend_gpu.build import build

NATIVE = "amp_mp_pretend_gpu"


class _Finder(MetaPathFinder):
    """Finds both modules of the library, wherever else there may be one of that name."""

    def __init__(self, library: Path) -> None:
        self.library = library

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in ("amp_mp._C", NATIVE):
            return None
        return importlib.util.spec_from_file_location(fullname, self.library)


def install() -> None:
    """Build what is not current, load it and change torch.cuda; once a process is enough.

    Raises:
        RuntimeError: amp_mp has been imported already, or does not compile.
    """
    if NATIVE in sys.modules:
        return
    if "amp_mp" in sys.modules:
        raise RuntimeError("pretend_gpu.install() has to come before amp_mp is imported")
    os.environ.pop("AMP_MP_CPU", None)  # the library has the baseline's loops alone
    sys.meta_path.insert(0, _Finder(build()))
    from pretend_gpu import device, torch_cuda

    torch_cuda.replace()
    device.delay_as_asked("")
    # autograd starts a thread for each device. One that waits for Python's lock while Python ends
    # would end the process with an error: it gets the lock first.
    atexit.register(time.sleep, 0.02)
