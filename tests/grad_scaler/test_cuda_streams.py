"""A scaler and an optimizer among CUDA graphs and streams, in the loops of torch's documentation.

On a GPU every replay and step is held up first; the pretend GPU runs kernels as late as their
streams permit. So a number that is read without waiting for the right stream is an old one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from streams import hold_up, late_in
from torch import Tensor, nn

import amp_mp as amp

DEVICE = "cuda"
STEPS = 12
OVERFLOWS = (3, 4, 9)
pytestmark = pytest.mark.usefixtures("cuda")
cuda = late_in(["cuda-order0"])
on_every_stream = pytest.mark.parametrize("side", [False, True], ids=["default", "side"])
for_every_scale = pytest.mark.parametrize("loss_scale", [None, "Backoff", "LogMax"])


def stream(side: bool) -> Any:
    """A block whose work goes to the default stream, or to one beside it."""
    if not side:
        return nullcontext()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(beside)


class Loop:
    """A user's script: a model, its optimizer and scaler, a static input and what is captured."""

    def __init__(self, loss_scale: Any = None, optimizer: Callable[..., Any] | None = None) -> None:
        torch.manual_seed(7)
        self.model = nn.Linear(8, 4).to(DEVICE)
        make = optimizer or amp.optim.AdamW
        more = {} if optimizer else {"max_grad_norm": 1.0}
        self.optimizer = make(self.model.parameters(), lr=torch.tensor(1e-2, device=DEVICE), **more)
        self.scaler = amp.GradScaler(
            DEVICE, init_scale=2.0**10, growth_interval=3, loss_scale=loss_scale
        )
        self.input = torch.zeros(6, 8, device=DEVICE)
        self.graph = torch.cuda.CUDAGraph()

    def backward(self) -> None:
        loss = self.model(self.input).square().mean()
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def read(self, step: int) -> None:
        """Copies the step's batch; in some there is an inf."""
        source = torch.Generator().manual_seed(step)
        batch = torch.randn(6, 8, generator=source)
        if step in OVERFLOWS:
            batch[0, 0] = float("inf")
        self.input.copy_(batch)

    def warm_up(self) -> None:
        """Three iterations on a stream beside this one, as torch's documentation has it."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for step in range(100, 103):
                self.read(step)
                self.optimizer.zero_grad()
                self.backward()
                self.step()
        torch.cuda.current_stream().wait_stream(beside)
        self.optimizer.zero_grad()

    def capture(self, *parts: Callable[[], None]) -> None:
        with torch.cuda.graph(self.graph):
            for part in parts:
                part()

    def replay(self) -> None:
        hold_up()
        self.graph.replay()

    def told(self) -> tuple[Any, ...]:
        """What the host learns of the last step, each number asked for as the first."""
        return (
            self.optimizer.step_was_skipped,
            self.optimizer.grad_norm,
            self.optimizer.last_report(wait=True),
            self.scaler.get_scale(),
        )

    def weights(self) -> list[Tensor]:
        return [p.detach().cpu() for p in self.model.parameters()]


def eager(steps: int, **arguments: Any) -> tuple[list[tuple[Any, ...]], list[Tensor]]:
    """The same loop without graphs, the host waiting for the whole device after every step."""
    loop, told = Loop(**arguments), []
    loop.warm_up()
    for step in range(steps):
        loop.read(step)
        loop.optimizer.zero_grad()
        loop.backward()
        loop.step()
        torch.cuda.synchronize()
        told.append(loop.told())
    return told, loop.weights()


@on_every_stream
@for_every_scale
@pytest.mark.parametrize("replayed", ["iteration", "iteration beside", "backward", "two of three"])
def test_reports_after_a_replay_are_of_that_replay(
    side: bool, loss_scale: Any, replayed: str
) -> None:
    """Of an iteration, which goes on from the scale that eager ones have left, on any stream.

    Or of torch's documented loop: step and update are not in the graph.
    """
    told, weights = eager(STEPS, loss_scale=loss_scale)
    loop = Loop(loss_scale)
    with stream(side):
        loop.warm_up()
        loop.capture(loop.backward, *[loop.step] * (replayed != "backward"))
        for step in range(STEPS):
            loop.read(step)
            eager_now = replayed.startswith("two") and step % 3 == 1
            if eager_now:
                for p in loop.model.parameters():
                    p.grad.zero_()
                loop.backward()
            else:
                with stream(replayed.endswith("beside")):
                    loop.replay()
            if eager_now or replayed == "backward":
                loop.step()
            assert loop.told() == told[step]
        for found, wanted in zip(loop.weights(), weights, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("asked", range(4), ids=["skipped", "norm", "report", "scale"])
def test_each_report_alone_waits_for_the_replay(asked: int) -> None:
    told, _ = eager(STEPS)
    loop = Loop()
    loop.warm_up()
    loop.capture(loop.backward, loop.step)
    ask = [
        lambda: loop.optimizer.step_was_skipped,
        lambda: loop.optimizer.grad_norm,
        lambda: loop.optimizer.last_report(wait=True),
        loop.scaler.get_scale,
    ][asked]
    for step in range(STEPS):
        loop.read(step)
        loop.replay()
        assert ask() == told[step][asked]


def test_a_captured_backward_with_another_optimizer_and_unscale() -> None:
    """As above with an optimizer of torch, whose gradients are unscaled between the two."""

    def trained(captures: bool) -> tuple[float, list[Tensor]]:
        loop = Loop(optimizer=torch.optim.SGD)
        loop.warm_up()
        if captures:
            loop.capture(loop.backward)
        for step in range(STEPS):
            loop.read(step)
            if captures:
                loop.replay()
            else:
                loop.optimizer.zero_grad()
                loop.backward()
            loop.scaler.unscale_(loop.optimizer)
            loop.step()
        return loop.scaler.get_scale(), loop.weights()

    (scale, found), (wanted_scale, wanted) = trained(True), trained(False)
    assert scale == wanted_scale
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_a_captured_backward_after_the_step_of_an_optimizer_before_update() -> None:
    """Captured between step and update; the scale must not be exchanged even then."""
    loop = Loop()
    loop.warm_up()
    loop.read(0)
    loop.backward()
    loop.scaler.step(loop.optimizer)
    scaled = torch.ones((), device=DEVICE)
    with torch.cuda.graph(loop.graph):
        out = loop.scaler.scale(scaled)
    loop.scaler.update()
    for step in range(1, STEPS):
        loop.replay()
        assert out.item() == loop.scaler.get_scale()
        loop.read(step)
        loop.optimizer.zero_grad()
        loop.backward()
        loop.step()
    loop.replay()
    assert out.item() == loop.scaler.get_scale() == eager(STEPS)[0][-1][-1]


def test_everything_on_a_side_stream() -> None:
    """Without graphs: the host waits for the stream of the step, whichever is current."""
    told, _ = eager(STEPS)
    loop, beside = Loop(), torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        loop.warm_up()
    for step in range(STEPS):
        with torch.cuda.stream(beside):
            loop.read(step)
            loop.optimizer.zero_grad()
            loop.backward()
            hold_up()
            loop.step()
        assert loop.told() == told[step]
