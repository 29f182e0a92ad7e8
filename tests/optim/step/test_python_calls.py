"""How much of the package's Python a step runs, and how often native code calls it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import amp_mp as amp

pytestmark = pytest.mark.xdist_group("python_calls")  # one process counts for all
PACKAGE = str(Path(amp.__file__).parent)
KINDS = ("AdamW", "SGD", "LAMB", "RMSprop", "Muon")


class Calls(NamedTuple):
    """Functions of the package, native calls of it, and functions and native calls inside these."""

    python: int
    native: int
    back: int
    nested: int


def calls_in(function: Callable[[], Any]) -> Calls:
    python = native = back = nested = depth = 0

    def watch(frame: Any, event: str, what: Any) -> None:
        nonlocal python, native, back, nested, depth
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            python, back = python + 1, back + (depth > 0)
        elif event.startswith("c_") and getattr(what, "__module__", None) == "amp_mp._C":
            native += event == "c_call" and depth == 0
            nested += event == "c_call" and depth > 0
            depth += 1 if event == "c_call" else -1

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return Calls(python, native, back, nested)


def network() -> nn.Module:
    """Of six parameters."""
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def made() -> tuple[nn.Module, amp.optim.AdamW]:
    """A prepared model with gradients."""
    model = network()
    amp.prepare(model, torch.bfloat16)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model, amp.optim.AdamW(model.parameters())


def block(handle: Any, loss: torch.Tensor, optimizer: Any) -> None:
    """A loss of amp.init."""
    with handle.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


def counted() -> dict[str, Calls]:
    """Of an optimizer that is made, a first step and a later one, Changes.take, checkpoint.load.

    Also of an iteration with a loss scale, and of a later step of each of KINDS.
    """
    model, optimizer = made()
    found = {"made": calls_in(lambda: amp.optim.AdamW(model.parameters()))}
    found["first"] = calls_in(optimizer.step)
    optimizer.step()
    found["later"] = calls_in(optimizer.step)
    changes = amp.Changes(model)
    optimizer.step()
    found["take"] = calls_in(changes.take)
    with tempfile.TemporaryDirectory() as folder:
        amp.checkpoint.save(f"{folder}/c", model, optimizer)
        for _ in range(2):
            found["load"] = calls_in(partial(amp.checkpoint.load, f"{folder}/c", *made()))
    model = network().half()
    inner = torch.optim.AdamW(model.parameters())
    around = amp.FP16_Optimizer(inner, loss_scale=amp.scaling.Backoff(1.0, 8.0), verbose=False)
    for _ in range(3):
        loss = model(torch.ones(2, 8).half()).float().sum()
        found["around"] = calls_in(lambda loss=loss: (around.backward(loss), around.step()))
        around.zero_grad()
    assert not around.overflow
    for kind in KINDS:
        params = [nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(6)]
        for param in params:
            param.grad = torch.randn(64, 64).bfloat16()
        optimizer = getattr(amp.optim, kind)(params, lr=1e-3)
        for _ in range(3):
            found[kind] = calls_in(optimizer.step)
    # Last: amp.init leaves hooks on all steps.
    model = network().half()
    own = amp.optim.AdamW(model.parameters())
    policy = amp.scaling.Backoff(init_scale=8.0)
    with amp.init(device_type="cpu", dtype=torch.float16, loss_scale=policy) as handle:
        for _ in range(3):
            loss = model(torch.ones(2, 8).half()).float().sum()
            found["block"] = calls_in(partial(block, handle, loss, own))
            own.step()
            own.zero_grad()
    return found


@pytest.fixture(scope="module")
def calls() -> dict[str, Calls]:
    """What `counted` found in a process of its own.

    Other tests leave hooks and what waits for the next step.
    """
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {name: Calls(*numbers) for name, numbers in json.loads(done.stdout).items()}


def test_a_parameter_is_asked_seldom_where_things_are_made_or_loaded(
    calls: dict[str, Calls],
) -> None:
    """Of six parameters."""
    assert calls["made"].python <= 80
    assert calls["load"].python <= 303
    assert calls["take"].python <= 80


def test_an_iteration_of_fp16_optimizer_looks_at_a_parameter_seldom(
    calls: dict[str, Calls],
) -> None:
    assert calls["around"].python <= 130
    assert calls["around"].native <= 11
    assert calls["block"].python <= 98


def test_a_step_asks_and_then_steps_and_native_code_calls_nothing_back(
    calls: dict[str, Calls],
) -> None:
    """Gathering asks Python once, whether there are modules of fully_shard."""
    first, later = calls["first"], calls["later"]
    assert (first.native, first.back) == (3, 1)
    assert (later.native, later.back) == (2, 0)
    assert later.python <= 9


@pytest.mark.parametrize("kind", KINDS)
def test_the_native_calls_of_every_rule_are_near(calls: dict[str, Calls], kind: str) -> None:
    assert calls[kind].native == 2
    assert calls[kind].python <= 12
    assert calls[kind].nested <= (2 if kind == "Muon" else 0)


if __name__ == "__main__":
    print(json.dumps(counted()))
