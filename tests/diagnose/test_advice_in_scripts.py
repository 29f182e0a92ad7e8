"""What a script is told while its steps are skipped, and what `python -m amp_mp.diagnose` adds."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_mp as amp
from amp_mp.diagnose.__main__ import main

SCRIPT = """
import torch
from torch import nn
import amp_mp as amp


class Logarithm(nn.Module):
    def forward(self, x):
        return x.log()  # of a negative number


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.log, self.out = nn.Linear(4, 4), Logarithm(), nn.Linear(4, 1)

    def forward(self, x, bad):
        x = self.inner(x)
        return self.out(self.log(-x.abs() if bad else x.abs() + 1))


model = Model()
optimizer = MAKE(model.parameters())
scaler = SCALER("cpu", init_scale=2.0**7)
for step in range(5):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4), step in (1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def skipped(model: nn.Module, optimizer: Any, scaler: Any, steps: int = 30) -> str:
    """What a loop whose gradients are infinite is told; the one warning, at this file's line."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            for param in model.parameters():
                param.grad = torch.full_like(param, torch.inf)
            scaler.scale(torch.zeros((), requires_grad=True))  # makes the scale
            scaler.step(optimizer)
            scaler.update()
    (only,) = [each for each in found if "in a row" in str(each.message)]
    assert only.filename == __file__
    return str(only.message)


@pytest.mark.parametrize("kind", [torch.optim.SGD, amp.optim.SGD])
def test_a_grad_scaler_is_not_told_that_there_is_no_loss_scale(kind: Any) -> None:
    model = nn.Linear(3, 2)
    message = skipped(model, kind(model.parameters(), lr=0.1), amp.GradScaler("cpu"))
    assert "without a loss scale" not in message
    assert "at loss scale 2^-" in message


def test_parameters_of_a_prepared_model_are_named_by_their_path() -> None:
    model = amp.prepare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters())
    message = skipped(model, optimizer, amp.GradScaler("cpu"))
    assert {"0.weight", "1.bias"} <= {line.split()[0] for line in message.splitlines()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", None])
@pytest.mark.parametrize("make", ["torch.optim.SGD", "amp.optim.SGD"])
@pytest.mark.parametrize("scaler", ["torch.amp.GradScaler", "amp.GradScaler"])
def test_the_command_line_counts_skipped_steps_and_finds_the_module(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: str,
    scaler: str,
    dtype: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take a second each
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.replace("MAKE(", f"{make}(lr=0.1, params=").replace("SCALER", scaler))
    main([*(["--dtype", dtype] if dtype else []), str(script)])
    out = capsys.readouterr().out
    assert f"what becomes of them in {dtype or 'float16'} at loss scale" in out
    assert "Steps skipped because of inf or NaN: 2" in out
    assert "The first output with inf or NaN was that of Model.log." in out
