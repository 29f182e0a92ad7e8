"""An iteration of which CUDA graphs capture some parts: right, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from cuda_training import refused_capture
from helpers import PRETEND_GPU
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.optim.base import stepper_of
from amp_mp.scaling import NormSpike

PARTS = ("zero_grad", "backward", "unscale_", "clip", "step", "update")
STEPS, WARM = 9, 2
REFUSED = (
    r"capture unscale_, step and update together, or none of them|"
    r"unscale_\(\) (has already been|is being) called|step\(\) has already been called|"
    r"No inf checks were recorded|was added to gradients that unscale_ had divided"
)
pytestmark = pytest.mark.usefixtures("cuda")


def ours(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return amp.optim.AdamW(params, lr=0.01)


def torchs(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True, capturable=True)


class Iteration:
    """A training whose iteration is these parts, each of which may be captured."""

    def __init__(
        self,
        unscales: bool,
        make: Callable[[Any], Any] = ours,
        dtype: torch.dtype = torch.float16,
        loss_scale: Any = None,
    ) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(16, 8).to("cuda", dtype)
        self.inputs = torch.zeros(4, 16, dtype=dtype, device="cuda")
        self.optimizer = make(self.model.parameters())
        self.scaler = amp.GradScaler(
            "cuda", init_scale=2.0**8, growth_interval=3, loss_scale=loss_scale
        )
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
        # Torch's clipping and optimizers need them where they were.
        own = isinstance(self.optimizer, amp.optim.AdamW)
        self.keeps = not own or (clip and not backward)
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
@pytest.mark.parametrize(
    "kind",
    [
        (ours, torch.float16),
        (torchs, torch.float64),  # which torch's scaler unscales
        pytest.param((torchs, torch.float32), marks=pytest.mark.full),
        pytest.param((ours, torch.float16, "LogMax"), marks=pytest.mark.full),
        pytest.param((torchs, torch.float32, "LogMax"), marks=pytest.mark.full),
    ],
    ids=["ours", "torchs64", "torchs", "ours-LogMax", "torchs-LogMax"],
)
def test_every_split_is_right_or_refused(kind: tuple[Any, ...], unscales: bool) -> None:
    wanted = Iteration(unscales, *kind).trained((False,) * len(PARTS))
    right = []
    for split in SPLITS:
        name = ", ".join(p for p, captures in zip(PARTS, split, strict=True) if captures)
        try:
            found = Iteration(unscales, *kind).trained(split)
        except (RuntimeError, AssertionError) as error:
            if not re.search(REFUSED, str(error)):
                raise
        else:
            assert all(map(torch.equal, found, wanted)), f"wrong with a captured {name}"
            right.append(name)
    assert {"", "zero_grad, backward", ", ".join(PARTS)} <= set(right)
    assert ({"step", "clip"} if unscales else {"step, update"}) <= set(right)


def test_a_second_graph_has_gradients_of_its_own() -> None:
    """zero_grad, then capture, once for each length of the input; replays of both in turn."""

    def trained(captures: bool) -> list[Tensor]:
        training = Iteration(unscales=False)
        inputs = {
            rows: torch.zeros(rows, 16, dtype=torch.float16, device="cuda") for rows in (4, 6)
        }
        graphs, parts = {}, ["backward", "step", "update"]
        source = torch.Generator().manual_seed(4)
        for step in range(8):
            training.inputs = inputs[rows := 4 + step % 2 * 2]
            training.inputs.copy_(torch.randn(rows, 16, generator=source))
            if step < WARM or not captures:
                training.call(["zero_grad", *parts])
                continue
            if rows not in graphs:
                graphs[rows] = torch.cuda.CUDAGraph()
                training.zero_grad()
                with torch.cuda.graph(graphs[rows]):
                    training.call(parts)
            graphs[rows].replay()
        return [*(p.detach().clone() for p in training.model.parameters()), training.scaler._scale]

    assert all(map(torch.equal, trained(True), trained(False)))


OTHER_TENSORS: dict[str, Callable[[nn.Module, Any], object]] = {
    "load": lambda model, optimizer: optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    ),
    "add": lambda model, optimizer: optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(4, device="cuda"))]}
    ),
    "move": lambda model, optimizer: model.to("cpu").to("cuda"),
    "format": lambda model, optimizer: optimizer.param_groups[0].update(exp_avg="bfloat16"),
    "history": lambda model, optimizer: setattr(
        stepper_of(optimizer).native, "norm_history", (4.0, 1.0, 0.5, 0.0)
    ),
}


@pytest.mark.parametrize("change", OTHER_TENSORS)
def test_tensors_that_a_graph_keeps_are_not_left_in_silence(change: str) -> None:
    training = Iteration(unscales=False)
    training.optimizer.skip_norm_above = NormSpike()
    training.inputs.normal_()
    for captures in (False, True):
        training.call(["zero_grad", "backward"])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph) if captures else contextlib.nullcontext():
            training.call(["step", "update"])
    graph.replay()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        OTHER_TENSORS[change](training.model, training.optimizer)
        for _ in range(2):
            training.call(["zero_grad", "backward", "step", "update"])
    (said,) = [str(each.message) for each in found]
    assert re.search(r"its tensors are others now .* Capture the step again", said)


def of_host(training: Iteration, what: str, start: Callable[..., Any]) -> Callable[[], None]:
    """An iteration in which the host asks whether gradients overflow."""
    if what == "scaler":
        training.optimizer = torch.optim.AdamW(training.model.parameters(), capturable=True)
        return lambda: training.call(["backward", "step", "update"])
    inner: Any = ours if what.endswith("fused") else torchs
    if what.startswith("FP16_Optimizer"):
        wrapper = amp.FP16_Optimizer(inner(training.model.parameters()), dynamic_loss_scale=True)

        def whole() -> None:
            wrapper.backward(training.model(training.inputs).float().square().sum())
            wrapper.step()

        return whole
    handle, optimizer = start(), inner(training.model.parameters())

    def block() -> None:
        loss = training.model(training.inputs).float().square().sum()
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    return block


@pytest.mark.parametrize(
    "what",
    ["scaler", "FP16_Optimizer", "FP16_Optimizer fused", "scale_loss", "scale_loss fused"],
)
@pytest.mark.parametrize("device", ["cuda"])  # of `start`, whose handle scales on that device
def test_what_asks_on_the_host_is_refused_in_a_capture(
    what: str, start: Callable[..., Any]
) -> None:
    halves = what.startswith("FP16_Optimizer")
    training = Iteration(unscales=False, dtype=torch.float16 if halves else torch.float32)
    iteration = of_host(training, what, start)
    iteration()
    before = [p.detach().clone() for p in training.model.parameters()]
    with refused_capture(RuntimeError, r"asks on the host.*a CUDA graph cannot capture"):
        iteration()
    assert all(map(torch.equal, before, training.model.parameters()))
