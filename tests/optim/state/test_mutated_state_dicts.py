"""Mutated state dicts load and step, or are refused clearly with every byte as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from everything import error_of, everything
from mutations import mutated
from tiers import full
from torch import nn

import amp_mp as amp

KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("Adam", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {}),
    ("LARS", {}),
    ("Adadelta", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adagrad", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adamax", {}),
    ("Lion", {}),
    ("LAMB", {}),
    ("NovoGrad", {}),
    ("Muon", {}),
)
PRESETS = ("float32", "exact", "lean", "tiny", "micro")
IN_A_CASE, CASES = 20, 100


def stepped(kind: str, options: dict[str, Any], memory: str, steps: int) -> tuple[Any, Any]:
    torch.manual_seed(steps)
    shapes = ((4, 32), (2, 64), (8, 8)) if kind == "Muon" else ((4, 32), (5,), (2, 64))
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    params = nn.ParameterList(
        [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    )
    groups = [{"params": list(params[:2])}, {"params": [params[2]]}]
    optimizer = getattr(amp.optim, kind)(groups, lr=1e-3, memory=memory, **options)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("case", [c if c < 15 else full(c) for c in range(CASES)])
@pytest.mark.filterwarnings("ignore")
def test_mutated_state_dicts(case: int) -> None:
    """300 in `make test`, 2,000 in `make test-all`."""
    refused = 0
    for seed in range(case * IN_A_CASE, (case + 1) * IN_A_CASE):
        choose = random.Random(seed)
        kind, options = KINDS[seed % len(KINDS)]
        source, target = choose.choice(PRESETS), choose.choice(PRESETS)
        saved = mutated(choose, stepped(kind, options, source, 2)[1].state_dict())
        params, optimizer = stepped(kind, options, target, 1)
        before = everything(params, optimizer)
        error = error_of(optimizer.load_state_dict, saved)
        if error is not None:
            refused += 1
            wrong = (seed, kind, source, target, error)
            assert isinstance(error, ValueError | TypeError), wrong
            assert str(error).startswith("state_dict: "), wrong
            assert "nothing was loaded" in str(error), wrong
            assert everything(params, optimizer) == before, wrong
        for param in params:
            param.grad = torch.ones_like(param)
        assert error_of(optimizer.step) is None, (seed, kind, source, target, error)
    assert refused > IN_A_CASE // 4
