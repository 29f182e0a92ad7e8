"""Muon on a GPU: launches are counted, the host does not wait, and CUDA graphs replay the step.

Runs where there is a GPU, and in any case on the pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import PRETEND_GPU, raw_bytes
from tiers import full
from torch import nn
from watching import watching

import amp_mp as amp

DEVICE = "cuda"
MATRICES = [(32, 64), (64, 32), (32, 64), (3, 16, 32)]
VECTORS = [(64,), (7,), (40, 32)]
pytestmark = pytest.mark.usefixtures("cuda")


@pytest.fixture(params=["cuda"])
def cuda(request: pytest.FixtureRequest) -> str:
    """In the names of all tests here, for those who choose by device."""
    return request.param


class Training:
    """Matrices and others, an optimizer and a scaler; gradients are written where they are."""

    def __init__(self, with_others: bool, memory: str | None, lr: Any = 0.02) -> None:
        source = torch.Generator().manual_seed(3)
        self.params = [
            nn.Parameter(torch.randn(s, generator=source).to(DEVICE, torch.bfloat16))
            for s in MATRICES + VECTORS * with_others
        ]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        groups: list[dict[str, Any]] = [{"params": self.params[: len(MATRICES)]}]
        if with_others:
            groups += [{"params": self.params[len(MATRICES) :], "use_muon": False, "lr": lr}]
        self.optimizer = amp.optim.Muon(groups, lr=lr, memory=memory, max_grad_norm=1.0, seed=5)
        self.scaler = amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=3)
        self.scaler.scale(torch.ones((), device=DEVICE))

    def fill(self, step: int, overflows: bool) -> None:
        """Scaled gradients, the same for every training at that step and scale."""
        source = torch.Generator().manual_seed(100 + step)
        for p in self.params:
            values = torch.randn(p.shape, generator=source).to(DEVICE)
            p.grad.copy_(values * self.scaler._scale * 2.0 ** -(step % 5))
        if overflows:
            self.params[step % len(self.params)].grad.view(-1)[-1] = float("inf")

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> Any:
        state = self.optimizer.state_dict()["state"]
        return raw_bytes([[p.detach() for p in self.params], state, self.scaler.state_dict()])


# Three shapes: the largest element, its power of two and a division by it; a norm, its least value
# and a division; five times three products, and a copy. Of the products of stacks two copy what
# they add to; one matrix alone needs none. A GPU may cut a product into two kernels.
OF_TORCH = 3 * (4 + 3 + 1) + 5 * (2 * (3 + 2) + 3)
# The directions' memory lives for one step. Where the allocator has it elsewhere than in the last
# step, one launch uploads the new addresses.
UPLOADS = (0, 1)


@pytest.mark.parametrize("memory", ["float32", "exact", "tiny"])
def test_a_step_is_four_launches_and_the_products(memory: str) -> None:
    training = Training(False, memory)
    for step in range(3):
        training.fill(step, step == 1)
        training.step()
    training.fill(3, False)
    with watching() as seen:
        training.step()
    assert seen.waits == 0
    assert seen.kernels - 4 in UPLOADS  # measure, decide, directions, apply
    assert seen.others == OF_TORCH or not PRETEND_GPU


def test_with_others_there_are_six_launches_more() -> None:
    training = Training(True, "exact")
    for step in range(3):
        training.fill(step, False)
        training.step()
    training.fill(3, False)
    with watching() as seen:
        training.step()
    assert seen.waits == 0
    # A measure and a sum for each list, the decision, then three passes and two.
    assert seen.kernels - (2 * 2 + 1 + 3 + 2) in UPLOADS
    assert seen.others == OF_TORCH + 5 or not PRETEND_GPU  # two lists' totals become one


@pytest.mark.parametrize(
    ("with_others", "memory"),
    [(True, "exact"), (False, "lean"), full((False, "exact")), full((True, "lean"))],
)
def test_a_captured_step_replayed_is_the_eager_one(with_others: bool, memory: str) -> None:
    rates = [torch.full((), 0.02, device=DEVICE) for _ in range(2)]
    graphed, eager = (Training(with_others, memory, rate) for rate in rates)
    for step in range(2):
        for training in (graphed, eager):
            training.fill(step, False)
            training.step()
    assert graphed.state() == eager.state()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
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
    one, two = Training(True, "lean"), Training(True, "lean")
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
