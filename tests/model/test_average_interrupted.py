"""AveragedModel.swap: interrupts at every line, and what would save or load in the middle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from interrupting import Interrupt, interrupted, lines_of
from torch import nn

import amp_mp as amp


def everything(model: nn.Module, optimizer: Any) -> Any:
    return raw_bytes(
        [dict(model.state_dict()), [optimizer.state.get(p) for p in model.parameters()]]
    )


def trained(dtype: torch.dtype, steps: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(3, 2, bias=False))
    if dtype != torch.float32:
        amp.prepare(model, dtype)
    optimizer = amp.optim.AdamW(model.parameters(), lr=3e-3)
    averaged = amp.AveragedModel(model, optimizer, decay=0.5)
    averaged.update()
    for seed in range(steps):
        step(model, optimizer, seed)
        averaged.update()
    return model, optimizer, averaged


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()).dtype)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("fails", [False, True], ids=["", "and the block raises"])
@pytest.mark.parametrize("steps", [0, 2])  # 0: the masters are still to be made
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupt_leaves_the_weights_and_training_goes_on(
    dtype: torch.dtype, steps: int, fails: bool
) -> None:
    if dtype == torch.float32 and steps == 0:
        pytest.skip("there the average is the weights")
    model, optimizer, averaged = trained(dtype, steps)
    twin, its, _ = trained(dtype, steps)
    with torch.no_grad():
        for average in averaged.module.parameters():
            average.mul_(0.5)

    def evaluate() -> None:
        try:
            with averaged.swap():
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            return

    before = everything(model, optimizer)
    lines = lines_of(evaluate)
    assert lines > 30
    for line in range(lines):
        interrupted(evaluate, line)
        assert everything(model, optimizer) == before, line
        with averaged.swap():  # is not inside of one
            pass
        assert everything(model, optimizer) == before, line
    for seed in (7, 8):
        step(model, optimizer, seed)
        step(twin, its, seed)
    assert everything(model, optimizer) == everything(twin, its)


def test_a_block_that_is_interrupted_itself() -> None:
    model, optimizer, averaged = trained(torch.bfloat16, 2)
    before = everything(model, optimizer)
    with pytest.raises(Interrupt), averaged.swap():
        raise Interrupt
    assert everything(model, optimizer) == before


CALLS: dict[str, Callable[[Path, nn.Module, Any, Any], Any]] = {
    "checkpoint.save()": lambda path, m, o, _: amp.checkpoint.save(path / "new", m, o),
    "checkpoint.save() of the model": lambda path, m, o, _: amp.checkpoint.save(path / "new", m),
    "checkpoint.save(more)": lambda path, m, o, _: amp.checkpoint.save(
        path / "new", nn.Linear(2, 2), more=m
    ),
    "checkpoint.load()": lambda path, m, o, _: amp.checkpoint.load(path / "old", m, o),
    "float32_state_dict()": lambda path, m, o, _: amp.float32_state_dict(m, o),
    "load_float32_state_dict()": lambda path, m, o, values: amp.load_float32_state_dict(
        m, o, values
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_would_mix_averages_and_training_is_refused(tmp_path: Path, call: str) -> None:
    model, optimizer, averaged = trained(torch.bfloat16, 2)
    values = amp.float32_state_dict(model, optimizer)
    amp.checkpoint.save(tmp_path / "old", model, optimizer)
    before = everything(model, optimizer)
    what = call.partition("(")[0]
    with averaged.swap():
        inside = everything(model, optimizer)
        with pytest.raises(RuntimeError, match=rf"{what}.* inside of AveragedModel.swap\(\)"):
            CALLS[call](tmp_path, model, optimizer, values)
        assert everything(model, optimizer) == inside
        assert not (tmp_path / "new").exists()
    assert everything(model, optimizer) == before
    CALLS[call](tmp_path, model, optimizer, values)
