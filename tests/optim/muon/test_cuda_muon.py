"""Muon on a GPU: launches are counted, the host does not wait, and CUDA graphs replay the step.

Runs where there is a GPU, and in any case on the pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_training import DEVICE, Training, captured
from helpers import PRETEND_GPU
from tiers import full
from watching import watching

import amp_mp as amp

MATRICES = [(32, 64), (64, 32), (32, 64), (3, 16, 32)]
VECTORS = [(64,), (7,), (40, 32)]
pytestmark = pytest.mark.usefixtures("cuda")


class Matrices(Training):
    """Matrices and others."""

    def __init__(self, with_others: bool, memory: str | None, lr: Any = 0.02) -> None:
        super().__init__(memory=memory, lr=lr, shapes=MATRICES + VECTORS * with_others, seed=5)

    def optimizer_of(self, lr: Any, **arguments: Any) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": self.params[: len(MATRICES)]}]
        if others := self.params[len(MATRICES) :]:
            groups += [{"params": others, "use_muon": False, "lr": lr}]
        return amp.optim.Muon(groups, lr=lr, **arguments)


# Three shapes: the largest element, its power of two and a division by it; a norm, its least value
# and a division; five times three products, and a copy. Of the products of stacks two copy what
# they add to; one matrix alone needs none. A GPU may cut a product into two kernels.
OF_TORCH = 3 * (4 + 3 + 1) + 5 * (2 * (3 + 2) + 3)
# The directions' memory lives for one step. Where the allocator has it elsewhere than in the last
# step, one launch uploads the new addresses.
UPLOADS = (0, 1)


@pytest.mark.parametrize("memory", ["float32", "exact", "tiny"])
@pytest.mark.parametrize("with_others", [False, True])
def test_a_step_is_few_launches_and_the_products(with_others: bool, memory: str) -> None:
    """Measure, decide, directions, apply.

    With others a measure and a sum for each list, the decision, then three passes and two.
    """
    training = Matrices(with_others, memory)
    for step in range(3):
        training.fill(step, step == 1)
        training.step()
    training.fill(3, False)
    with watching() as seen:
        training.step()
    assert seen.waits == 0
    assert seen.kernels - (2 * 2 + 1 + 3 + 2 if with_others else 4) in UPLOADS
    # Of others the two lists' totals become one.
    assert seen.others == OF_TORCH + 5 * with_others or not PRETEND_GPU


@pytest.mark.parametrize(
    ("with_others", "memory"),
    [(True, "exact"), (False, "lean"), full((False, "exact")), full((True, "lean"))],
)
def test_a_captured_step_replayed_is_the_eager_one(with_others: bool, memory: str) -> None:
    rates = [torch.full((), 0.02, device=DEVICE) for _ in range(2)]
    graphed, eager = (Matrices(with_others, memory, rate) for rate in rates)
    graph = captured(graphed, eager)
    skipped = 0
    for step in range(2, 40):
        overflows = step % 7 == 3
        for rate in rates:
            rate.fill_(0.02 / (1 + step))
        for training in (graphed, eager):
            training.fill(step, overflows)
        graph.replay()
        eager.step()
        if PRETEND_GPU or step < 4:
            assert graphed.state() == eager.state(), step
        report = graphed.optimizer.last_report(wait=True)
        assert report == eager.optimizer.last_report(wait=True)
        assert report is not None
        assert report.skipped == overflows
        skipped += report.skipped
    assert skipped == 6


def test_the_step_follows_its_stream() -> None:
    one, two = Matrices(True, "lean"), Matrices(True, "lean")
    for step in range(4):
        for training in (one, two):
            training.fill(step, step == 2)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            one.step()
        torch.cuda.current_stream().wait_stream(stream)
        two.step()
    assert one.state() == two.state()
