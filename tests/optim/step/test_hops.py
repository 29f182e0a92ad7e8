"""How far it is from optimizer.step() to the native call, and how many native calls a step has."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

import amp_mp as amp
from amp_mp import _C

ROOT = str(Path(amp.__file__).parent)


class Calls:
    """Functions of the package that one step calls, and its calls of the native library."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()  # until the first native call
        self.native: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not self.native:
            self.functions.add((code.co_filename, code.co_qualname))
        elif event == "c_call" and getattr(argument, "__module__", None) == _C.__name__:
            self.native.append(argument.__name__)


@pytest.fixture(autouse=True)
def _hooks_of_prepare_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of a process that has called prepare; other tests leave amp.init's."""
    amp.prepare(nn.Linear(2, 2), torch.bfloat16)
    pre = optimizers._global_optimizer_pre_hooks.items()
    own = OrderedDict((n, hook) for n, hook in pre if hook.__module__ == amp.prepare.__module__)
    assert own
    monkeypatch.setattr(optimizers, "_global_optimizer_pre_hooks", own)
    monkeypatch.setattr(optimizers, "_global_optimizer_post_hooks", OrderedDict())


def one_step(optimizer: Any) -> Calls:
    calls = Calls()
    optimizer.step()
    optimizer.step()
    sys.setprofile(calls)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return calls


def params() -> list[nn.Parameter]:
    found = [nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(6)]
    for param in found:
        param.grad = torch.randn(64, 64).bfloat16()
    return found


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "LAMB", "RMSprop"])
def test_the_native_call_is_near(kind: str) -> None:
    calls = one_step(getattr(amp.optim, kind)(params(), lr=1e-3))
    assert calls.native == ["step"]
    assert len(calls.functions) <= 12
    assert len({file for file, _ in calls.functions}) <= 5


def test_muon_makes_at_most_three_native_calls() -> None:
    assert len(one_step(amp.optim.Muon(params(), lr=1e-3)).native) <= 3
