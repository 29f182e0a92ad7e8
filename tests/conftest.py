"""For every test: the devices there are, a fixed seed, and no autocast state left behind."""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PRETEND_GPU

if PRETEND_GPU:  # has to come before amp_mp
    from pretend_gpu.install import install

    install()

from casts import products_in_low_precision  # imports amp_mp
from leftovers import global_state, restore
from log_progress import LogProgress
from pretend_gpu.suite import ON_A_GPU
from run_summary import RunSummary

import amp_mp as amp
from amp_mp.casting.products import choose_products
from amp_mp.dtypes import LOW_PRECISION

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

for low in LOW_PRECISION:  # before any test: the choice holds for the process
    choose_products("auto", low)

HAS_KERNELS = amp.build_info()["cuda"]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
if PRETEND_GPU:
    DEVICES = ["cuda"]
# Without a GPU, emulators/test_pretend_gpu.py runs these.
collect_ignore = [] if "cuda" in DEVICES else [f"{name}.py" for name in ON_A_GPU]
# Every test on a CUDA stream that is not the default one, where there is a device.
SIDE_STREAM = os.environ.get("AMP_MP_SIDE_STREAM") == "1" and "cuda" in DEVICES
if not os.environ.get("AMP_MP_ZOO"):  # `make test-zoo`, which has other libraries
    collect_ignore.append("zoo")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Where nobody watches, a line for each ten per cent takes the place of the dots.

    What ends a run is in run_summary.py.
    """
    reporter = config.pluginmanager.getplugin("terminalreporter")
    several = config.getoption("dist", "no") != "no"  # processes; one alone names its files
    if reporter and several and config.option.verbose == 0 and not sys.stdout.isatty():
        config.pluginmanager.register(LogProgress(reporter))
    if reporter:  # not in pytest-xdist's processes
        config.pluginmanager.register(RunSummary())


@pytest.hookimpl(tryfirst=True)  # before what is not chosen by -m is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that workers end together.

    Tests of kernels run in `make test` where the build has kernels, because only there a change of
    these can be used; elsewhere in `make test-rest`.
    """
    if not HAS_KERNELS:
        for item in items:
            if item.get_closest_marker("kernels"):
                item.add_marker("full")
    items.sort(key=lambda item: item.path.parent.name not in ("distributed", "emulators"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist hands out all cases of a function together, in the order above.

    Single cases take a message each, and a search through all that were handed out before. Files
    whose tests have an xdist_group stay together whole: of groups pytest-xdist 3.8 learns nothing
    from pytest 9.2, and each worker would start the processes that they are to share.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFunction(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, name = nodeid.split("::", 1)
            return _group_of(config.rootpath / file) or f"{file}::{name.split('[')[0]}"

        def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
            for scope in [scope for scope, done in workload.items() if all(done.values())]:
                del workload[scope]  # or each report would be a search through all tests before
            return super()._pending_of(workload)

    config.option.loadscopereorder = False
    return ByFunction(config, log)


@functools.cache
def _group_of(file: Path) -> str | None:
    found = re.search(r'xdist_group\("(\w+)"\)', file.read_text())
    return found and found[1]


@pytest.fixture(params=["cuda"])
def cuda(request: pytest.FixtureRequest) -> str:
    """In the names of tests that need a GPU, for those who choose by device."""
    return request.param


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device type there is."""
    return request.param


@pytest.fixture
def cast_products() -> Iterator[None]:
    """Has Apex's table cast matrix products on every CPU."""
    with products_in_low_precision():
        yield


@pytest.fixture
def apex(device: str, cast_products: None) -> Iterator[str]:
    """Casts on for the test, with bfloat16 and Apex's table; everything as before afterwards."""
    handle = amp.init(device_type=device, dtype=torch.bfloat16, loss_scale=1.0)
    yield device
    handle._deactivate()
    amp.casting.uninstall()


@pytest.fixture
def start(device: str) -> Iterator[Callable[..., Any]]:
    """amp.init on the device; what it switched on is switched off after the test."""
    handles = []

    def init(**arguments: Any) -> Any:
        handles.append(amp.init(device_type=device, **arguments))
        return handles[-1]

    yield init
    for handle in reversed(handles):
        handle._deactivate()


@pytest.fixture(autouse=True)
def _delayed_in_an_order_of_its_own(request: pytest.FixtureRequest) -> None:
    """The order of delayed kernels follows from AMP_MP_DELAYED_STREAMS and the test's name.

    So a test that is run alone has the order that it had among the others.
    """
    if PRETEND_GPU:
        from pretend_gpu.device import delay_as_asked

        delay_as_asked(request.node.nodeid)


@pytest.fixture(autouse=True)
def _on_a_side_stream() -> Iterator[None]:
    if not SIDE_STREAM:
        yield
        return
    before, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(before)
    with torch.cuda.stream(beside):
        yield
    before.wait_stream(beside)


@pytest.fixture(autouse=True, scope="module")
def _the_collector_passes_over_what_stays() -> None:
    """Modules, thousands of tests and their reports: a million objects.

    Without it each gc.collect() of a test takes .1 s, and the collector comes by itself as slowly.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _threads_are_left_as_they_were() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _autocast_is_left_as_it_was() -> Iterator[None]:
    before = global_state()
    yield
    after = restore(before)  # one test's fault is not the next one's
    assert after.autocast == before.autocast


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Ends a pytest-xdist process whose device a kernel has made unusable: another takes over.

    It would fail every test after that one. What the test said goes to the file
    AMP_MP_LOST_DEVICE, which `make gpu` sets.
    """
    report = yield
    log = os.environ.get("AMP_MP_LOST_DEVICE")
    if report.failed and log and "PYTEST_XDIST_WORKER" in os.environ and _device_is_lost():
        with Path(log).open("a") as file:
            file.write(f"{item.nodeid}\n{report.longreprtext}\n")
        os._exit(1)
    return report


def _device_is_lost() -> bool:
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
