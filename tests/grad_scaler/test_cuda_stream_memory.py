"""Backward and unscaling on one stream, the step on another, and the first one's memory is reused.

Each script waits where torch's documentation says. Its side stream reads the next batch while the
step may not have run yet, so that what amp_mp freed on the side stream is written over: what the
step reads of it has to be recorded for the step's stream.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from stream_scripts import DEVICE, SCRIPTS, Script
from streams import hold_up, late_in, take_memory
from tiers import tiered
from torch import Tensor

STEPS = 5
OVERFLOW = 3  # the step in which there is one
pytestmark = pytest.mark.usefixtures("cuda")
cuda = late_in(["cuda-order0", "cuda-order3"])


def trained(
    script: Script, first: Any, steps: list[Any], third: Any, early: bool = False
) -> list[Tensor]:
    """The script with its three parts on streams; steps take turns on theirs.

    early: the third part is behind the first one alone.
    """
    source = torch.Generator().manual_seed(1)
    batches = torch.randn(STEPS, 6, 8, generator=source)
    batches[OVERFLOW, 0, 0] = float("inf")
    batches = batches.to(DEVICE)
    first.wait_stream(torch.cuda.current_stream())
    for number, batch in enumerate(batches):
        with torch.cuda.stream(first):
            script.zero_grad()
            script.first(batch)
        second = steps[number % len(steps)]
        second.wait_stream(first)
        with torch.cuda.stream(second):
            hold_up()
            script.second()
        third.wait_stream(first if early else second)
        with torch.cuda.stream(third):
            script.third()
        for stream in (first, *steps, third):
            with torch.cuda.stream(stream):
                take_memory()
        for stream in (second, third):
            first.wait_stream(stream)
    torch.cuda.synchronize()
    return script.result()


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


STREAMS = ["two", "three", "turns"]
UNSCALED = [name for name in SCRIPTS if name.startswith("unscaled")]


@pytest.mark.parametrize(
    ("name", "streams"),
    tiered(itertools.product(SCRIPTS, STREAMS), list(zip(SCRIPTS, itertools.cycle(STREAMS)))[::2]),
)
def test_a_step_on_another_stream_than_its_backward_reads_its_own_statistics(
    name: str, streams: str
) -> None:
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    wanted = trained(SCRIPTS[name](), here, [here], here)
    third = torch.cuda.Stream() if streams == "three" else here
    steps = [torch.cuda.Stream(), torch.cuda.Stream()] if streams == "turns" else [here]
    assert_same(trained(SCRIPTS[name](), beside, steps, third), wanted)


@pytest.mark.parametrize("name", tiered(UNSCALED, UNSCALED[::2]))
def test_an_update_before_the_step_has_run(name: str) -> None:
    """After unscale_ the update needs nothing of the step, and drops what the step reads."""
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    wanted = trained(SCRIPTS[name](), here, [here], here)
    assert_same(trained(SCRIPTS[name](), beside, [here], beside, early=True), wanted)
