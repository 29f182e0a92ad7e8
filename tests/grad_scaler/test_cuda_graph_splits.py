"""An iteration of which CUDA graphs capture some parts: right, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import PRETEND_GPU
from torch import Tensor, nn

import amp_mp as amp

PARTS = ("zero_grad", "backward", "unscale_", "clip", "step", "update")
STEPS, WARM = 9, 2
REFUSED = (
    r"capture unscale_, step and update together, or none of them|"
    r"unscale_\(\) (has already been|is being) called|step\(\) has already been called|"
    r"No inf checks were recorded|was added to gradients that unscale_ had divided"
)
pytestmark = pytest.mark.usefixtures("cuda")


class Iteration:
    """A training whose iteration is these parts, each of which may be captured."""

    def __init__(self, unscales: bool) -> None:
        torch.manual_seed(1)
        self.model = amp.prepare(nn.Linear(16, 8).to("cuda"), torch.float16)
        self.inputs = torch.zeros(4, 16, dtype=torch.float16, device="cuda")
        self.optimizer = amp.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=3)
        self.unscales, self.keeps = unscales, False

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.keeps)

    def backward(self) -> None:
        loss = self.model(self.inputs).float().square().sum()
        self.scaler.scale(loss).backward()

    def unscale_(self) -> None:
        if self.unscales:
            self.scaler.unscale_(self.optimizer)

    def clip(self) -> None:
        if self.unscales:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=False)

    def step(self) -> None:
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        self.scaler.update()

    def trained(self, captured: tuple[bool, ...]) -> list[Tensor]:
        """Weights and scale. Captured parts that follow one another are one graph."""
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        _, backward, _, clip, _, _ = captured
        self.keeps = clip and not backward  # torch's clipping needs them where they were
        source = torch.Generator().manual_seed(4)
        for step in range(STEPS):
            self.inputs.copy_(torch.randn(4, 16, generator=source))
            self.inputs[0, 0] = float("inf") if step % 4 == 3 else 0.0
            for captures, run in runs_of(captured if step >= WARM else (False,) * len(PARTS)):
                if captures and run[0] not in graphs:
                    graphs[run[0]] = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graphs[run[0]]):
                        self.call(run)
                if captures:
                    graphs[run[0]].replay()
                else:
                    self.call(run)
        return [*(p.detach().clone() for p in self.model.parameters()), self.scaler._scale]

    def call(self, parts: list[str]) -> None:
        for part in parts:
            function: Callable[[], None] = getattr(self, part)
            function()


def runs_of(captured: tuple[bool, ...]) -> Iterator[tuple[bool, list[str]]]:
    for captures, run in itertools.groupby(zip(captured, PARTS, strict=True), lambda p: p[0]):
        yield captures, [part for _, part in run]


# Captured by itself, zero_grad() drops gradients once and then does nothing: torch's, too.
SPLITS = [s for s in itertools.product([False, True], repeat=len(PARTS)) if s[0] <= s[1]]


@pytest.mark.skipif(not PRETEND_GPU, reason="bits of a GPU's products may depend on the stream")
@pytest.mark.parametrize("unscales", [True, False])
def test_every_split_is_right_or_refused(unscales: bool) -> None:
    wanted = Iteration(unscales).trained((False,) * len(PARTS))
    right = []
    for split in SPLITS:
        name = ", ".join(p for p, captures in zip(PARTS, split, strict=True) if captures)
        try:
            found = Iteration(unscales).trained(split)
        except (RuntimeError, AssertionError) as error:
            if not re.search(REFUSED, str(error)):
                raise
        else:
            assert all(map(torch.equal, found, wanted)), f"wrong with a captured {name}"
            right.append(name)
    assert {"", "zero_grad, backward", ", ".join(PARTS)} <= set(right)
    assert {"step", "clip"} <= set(right) or not unscales


def load(training: Iteration) -> None:
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def add(training: Iteration) -> None:
    other = nn.Parameter(torch.ones(4, device="cuda"))
    training.optimizer.add_param_group({"params": [other]})


def move(training: Iteration) -> None:
    training.model.to("cpu")
    training.model.to("cuda")


def change_format(training: Iteration) -> None:
    training.optimizer.param_groups[0]["exp_avg"] = "bfloat16"


@pytest.mark.parametrize("change", [load, add, move, change_format])
def test_tensors_that_a_graph_keeps_are_not_left_in_silence(
    change: Callable[[Iteration], None],
) -> None:
    training = Iteration(unscales=False)
    training.inputs.normal_()
    for captures in (False, True):
        training.call(["zero_grad", "backward"])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph) if captures else contextlib.nullcontext():
            training.call(["step", "update"])
    graph.replay()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        change(training)
        for _ in range(2):
            training.call(["zero_grad", "backward", "step", "update"])
    (said,) = [str(each.message) for each in found]
    assert re.search(r"its tensors are others now .* Capture the step again", said)
