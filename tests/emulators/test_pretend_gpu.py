"""The library's whole CUDA path, from Python to the kernels, on a pretend GPU in host memory.

Every test that takes a `device` runs as it is, with device="cuda": see pretend_gpu. By hand:

    AMP_MP_PRETEND_GPU=1 python -m pytest tests/optim/test_optim.py
"""

from __future__ import annotations

import pytest
from pretend_gpu.build import build, why_unavailable
from pretend_gpu.suite import DELAYED, FILES, pass_in_numbers, passed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pretend_gpu")]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if reason := why_unavailable():
        pytest.skip(f"no pretend GPU: {reason}")
    build()


def test_the_pretend_gpu_itself() -> None:
    folder = "tests/emulators/pretend_gpu"
    found = passed(f"{folder}/of_device.py", f"{folder}/of_streams.py")
    assert found["of_device"] > 15
    assert found["of_streams"] > 12


@pytest.mark.parametrize("part", range(3))
def test_the_suite_passes_on_it(part: int) -> None:
    pass_in_numbers([name for number, name in enumerate(FILES) if number % 3 == part])


@pytest.mark.parametrize("side", ["0", "1"])
def test_what_reports_or_is_captured_passes_with_delayed_streams(side: str) -> None:
    """The host waits where it has to, whatever order the streams permit.

    Once on the default stream and once on another. `make test-streams` runs everything so.
    """
    pass_in_numbers(DELAYED, AMP_MP_DELAYED_STREAMS="17", AMP_MP_SIDE_STREAM=side)
