"""An interrupt at any line of a call leaves all as before it, or as after it, and work goes on.

Calls: optimizer.step, the first one too, scaler.step, scale_loss, state_dict, load_state_dict.
Interrupts come before any line of the package's Python; the native passes, and what Muon makes of
its matrices between them, cannot be interrupted. (Where matrices are split over processes Python
sends them in the middle of a step, which ends before the interrupt is raised.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from interrupting import interrupted, lines_of
from tiers import full
from torch import nn

import amp_mp as amp


class Training:
    """A prepared model with gradients, its optimizer, and what scales its losses."""

    def __init__(
        self, dtype: torch.dtype, make: Callable[..., Any], scaler: bool, steps: int = 1
    ) -> None:
        torch.manual_seed(3)
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 2, bias=False))
        amp.prepare(self.model, dtype)
        self.dtype, self.optimizer = dtype, make(self.model.parameters())
        self.scaler = amp.GradScaler("cpu", init_scale=64.0) if scaler else None
        if steps:
            self.backward(1)
            self.step()
            if self.scaler:
                self.scaler.update()
            self.optimizer.zero_grad()
        self.backward(7)

    def backward(self, seed: int) -> None:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        loss = self.model(x.to(self.dtype)).float().square().sum()
        if self.scaler:
            self.scaler.scale(loss).backward()
        elif isinstance(self.optimizer, amp.FP16_Optimizer):
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def step(self) -> None:
        if self.scaler:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()

    def held(self) -> Any:
        wrapped = isinstance(self.optimizer, amp.FP16_Optimizer)
        state = self.optimizer.state_dict()
        return raw_bytes([dict(self.model.state_dict()), state if wrapped else state["state"]])


KINDS: dict[str, tuple[torch.dtype, Callable[..., Any], bool]] = {
    "AdamW": (torch.bfloat16, lambda p: amp.optim.AdamW(p, lr=0.1, max_grad_norm=1.0), False),
    "SGD, tiny": (
        torch.bfloat16,
        lambda p: amp.optim.SGD(p, lr=0.1, momentum=0.9, memory="tiny"),
        False,
    ),
    "LAMB": (torch.bfloat16, lambda p: amp.optim.LAMB(p, lr=0.1), False),
    "Muon": (torch.bfloat16, lambda p: amp.optim.Muon(p, lr=0.1), False),
    "GradScaler": (torch.float16, lambda p: amp.optim.AdamW(p, lr=0.1), True),
    "FP16_Optimizer": (
        torch.bfloat16,
        lambda p: amp.FP16_Optimizer(torch.optim.Adam(p, lr=0.1), verbose=False),
        False,
    ),
    "FP16_Optimizer around AdamW": (
        torch.bfloat16,
        lambda p: amp.FP16_Optimizer(amp.optim.AdamW(p, lr=0.1), verbose=False),
        False,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_taken_or_not(kind: str) -> None:
    after = Training(*KINDS[kind])
    before = after.held()
    after.step()
    lines = lines_of(Training(*KINDS[kind]).step)
    assert lines > 10
    outcomes = set()
    for line in range(lines):
        training = Training(*KINDS[kind])
        interrupted(training.step, line)
        training.optimizer.zero_grad()  # brings a model up to date with its masters
        held = training.held()
        assert held in (before, after.held()), line
        if line % 10 and (held == before) in outcomes:
            continue
        outcomes.add(held == before)
        twin = Training(*KINDS[kind])
        if held != before:
            twin.step()
        twin.optimizer.zero_grad()
        for each in (training, twin):
            if each.scaler:  # a new iteration, whether the last one had its update or not
                each.scaler = amp.GradScaler("cpu", init_scale=64.0)
            each.backward(8)
            each.step()
        assert training.held() == twin.held(), line
    assert outcomes == {True, False}


@pytest.mark.parametrize("kind", [full("AdamW"), "SGD, tiny"])
def test_a_state_dict_is_loaded_or_not(kind: str) -> None:
    source = Training(*KINDS[kind])
    source.step()
    saved = copy.deepcopy(source.optimizer.state_dict())

    def load(training: Training) -> Callable[[], None]:
        return lambda: training.optimizer.load_state_dict(copy.deepcopy(saved))

    training = Training(*KINDS[kind])
    before = training.held()
    lines = lines_of(load(Training(*KINDS[kind])))
    assert lines > 30
    load(training)()
    after = training.held()
    assert after != before
    outcomes = set()
    for line in range(lines):
        training = Training(*KINDS[kind])
        interrupted(load(training), line)
        held = training.held()
        assert held in (before, after), line
        outcomes.add(held == before)
        load(training)()  # no later one ends in an error, or differs
        assert training.held() == after, line
    assert outcomes == {True, False}
    training.optimizer.zero_grad()
    training.backward(8)
    training.step()


def test_a_state_dict_is_the_same_after_an_interrupted_one() -> None:
    training = Training(*KINDS["AdamW"])
    before = training.held()
    lines = lines_of(training.optimizer.state_dict)
    assert lines > 10
    for line in range(lines):
        interrupted(training.optimizer.state_dict, line)
        assert training.held() == before, line
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    assert training.held() == before


@pytest.mark.parametrize("kind", ["AdamW", "SGD, tiny", "Muon", "GradScaler"])
def test_masters_begin_with_float32s_bits_after_an_interrupted_first_step(kind: str) -> None:
    def weights(training: Training) -> Any:
        return raw_bytes(dict(training.model.state_dict()))

    after = Training(*KINDS[kind], steps=0)
    start, outcomes = weights(after), set()
    after.step()
    lines = lines_of(Training(*KINDS[kind], steps=0).step)
    for line in range(lines):
        training = Training(*KINDS[kind], steps=0)
        interrupted(training.step, line)
        taken = weights(training) != start
        outcomes.add(taken)
        if not taken:
            if training.scaler:  # a new iteration
                training.scaler = amp.GradScaler("cpu", init_scale=64.0)
                training.optimizer.zero_grad()
                training.backward(7)
            training.step()
        assert training.held() == after.held(), line
    assert outcomes == {True, False}


def test_a_block_of_masters_ends_and_stores_nothing() -> None:
    training = Training(*KINDS["AdamW"])

    def edit() -> None:
        with training.optimizer.masters() as masters:
            masters[0].mul_(0.5)

    for line in range(lines_of(edit)):
        before = training.held()
        interrupted(edit, line)
        assert training.held() == before, line
        training.step()


@pytest.mark.parametrize("overflows", [False, True])
def test_scale_loss_ends_with_casts_on_and_a_true_scale(overflows: bool) -> None:
    """And with zero_grad the next iteration is as if the interrupted one had not begun, or had."""
    model = nn.Linear(3, 2, bias=False)
    weight = model.weight.detach().clone()
    with amp.init(device_type="cpu", dtype=torch.float16, loss_scale="dynamic") as handle:

        def run() -> None:
            loss = model(torch.ones(2, 3)).float().sum()
            with handle.scale_loss(loss * (torch.inf if overflows else 1.0), optimizer) as scaled:
                scaled.backward()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run()
        optimizer.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        lines, with_lines = lines_of(run), []
        assert lines > 30
        for line in range(lines):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            before = handle.state_dict()
            interrupted(run, line)
            if not handle.is_active():  # between a with block's end and torch's __exit__
                with_lines.append(line)
                torch.set_autocast_enabled("cpu", True)
                torch.autocast_decrement_nesting()
            scales = {float(handle.loss_scaler.scale), before["loss_scalers"][0]["scale"]}
            assert len(scales) == 1 or scales == {max(scales), max(scales) / 2}, line
            optimizer.zero_grad()
            with torch.no_grad():
                model.weight.copy_(weight)
            loss = model(torch.ones(2, 3)).float().sum()
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            assert model.weight.grad is not None
            assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0)), line
            optimizer.step()
            assert torch.equal(model.weight, weight - 1.0), line
            optimizer.zero_grad()
    assert len(with_lines) <= 4
