"""The library's whole CUDA path, from Python to the kernels, on a pretend GPU in host memory.

Every test that takes a `device` runs as it is, with device="cuda": see pretend_gpu. `make test`
runs the files that need a GPU, with kernels as late as their streams permit. By hand:

    AMP_MP_PRETEND_GPU=1 python -m pytest tests/optim/test_optim.py
"""

from __future__ import annotations

import pytest
from pretend_gpu.build import build, why_unavailable
from pretend_gpu.suite import CHOSEN, DELAYED, FILES, ITSELF, ON_A_GPU, pass_in_numbers, passed

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]  # the first one builds the library
PARTS = 3


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if reason := why_unavailable():
        pytest.skip(f"no pretend GPU: {reason}")
    build()


def test_it_and_what_needs_a_gpu_pass_with_delayed_streams() -> None:
    """The host waits where it has to, whatever order the streams permit."""
    pass_in_numbers([*ITSELF, *ON_A_GPU], "not full", AMP_MP_DELAYED_STREAMS="17")


@pytest.mark.full
def test_it_passes_with_streams_that_wait_for_nothing() -> None:
    pass_in_numbers(ON_A_GPU, "not full")


@pytest.mark.full
def test_the_rest_of_it_does() -> None:
    paths = [f"tests/{name}.py" for name in ON_A_GPU]
    assert passed(*paths, "-k", CHOSEN, "-m", "full").total() > 200


@pytest.mark.full
@pytest.mark.parametrize("side", ["0", "1"])
def test_what_reports_or_is_captured_passes_with_delayed_streams(side: str) -> None:
    """Once on the default stream and once on another. `make test-streams` runs everything so."""
    pass_in_numbers(DELAYED, "not full", AMP_MP_DELAYED_STREAMS="17", AMP_MP_SIDE_STREAM=side)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_the_suite_passes_on_it(part: int) -> None:
    files = [name for name in FILES if name not in ON_A_GPU]
    pass_in_numbers(files[part::PARTS])
