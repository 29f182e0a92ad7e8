"""How much of the package's Python a step runs, and how often native code calls it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

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


def test_a_step_is_one_native_call_and_gathering_calls_little_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(optimizers, name, OrderedDict())  # other tests leave amp.init's
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    amp.prepare(model, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    first = calls_in(optimizer.step)
    assert first.native == 1
    assert 0 < first.back <= 50
    optimizer.step()
    found = calls_in(optimizer.step)
    assert (found.native, found.back) == (1, 0)
    assert found.python <= 9
