"""How much of the package's Python a step runs, and how often native code calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import amp_mp as amp

PACKAGE = str(Path(amp.__file__).parent)


class Calls(NamedTuple):
    """Functions of the package, native calls of it, and its functions inside of these."""

    python: int
    native: int
    back: int


def calls_in(function: Callable[[], Any]) -> Calls:
    python = native = back = depth = 0

    def watch(frame: Any, event: str, what: Any) -> None:
        nonlocal python, native, back, depth
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            python, back = python + 1, back + (depth > 0)
        elif event.startswith("c_") and getattr(what, "__module__", None) == "amp_mp._C":
            native += event == "c_call" and depth == 0
            depth += 1 if event == "c_call" else -1

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return Calls(python, native, back)


def counted() -> tuple[Calls, Calls]:
    """Of a prepared model's first step, and of one after it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    amp.prepare(model, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    first = calls_in(optimizer.step)
    optimizer.step()
    return first, calls_in(optimizer.step)


def test_a_step_is_one_native_call_and_gathering_calls_little_back() -> None:
    # In a process of its own: other tests leave hooks and what waits for the next step.
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    first, later = (Calls(*numbers) for numbers in json.loads(done.stdout))
    assert first.native == 1
    assert 0 < first.back <= 50
    assert (later.native, later.back) == (1, 0)
    assert later.python <= 9


if __name__ == "__main__":
    print(json.dumps(counted()))
