"""Damaged checkpoint directories are read, or refused clearly with every byte as it was."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make, network, train
from everything import error_of, everything
from mutations import mutated_directory
from tiers import full
from torch import nn

import amp_mp as amp

PRESETS = ("float32", "exact", "lean", "tiny", "micro")
IN_A_CASE, CASES = 20, 50
CLEAR = ("nothing was loaded", "it is not a checkpoint")


def pair_of(name: str) -> tuple[nn.Module, Any]:
    if name != "torch":
        return make(name)
    model = network()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("case", [c if c < 10 else full(c) for c in range(CASES)])
@pytest.mark.filterwarnings("ignore")
def test_mutated_directories(case: int, tmp_path: Path) -> None:
    """200 in `make test`, 1,000 in `make test-all`."""
    source, target = ("torch", *PRESETS)[case % 6], ("torch", *PRESETS)[case // 6 % 6]
    target = "torch" if source == "torch" and case % 12 else target
    saved = pair_of(source)
    train(*saved, 2)
    plan = torch.optim.lr_scheduler.MultiStepLR(saved[1], [2, 5])
    amp.checkpoint.save(tmp_path / "c", *saved, plan=plan, step=3)
    model, optimizer = pair_of(target)
    train(model, optimizer, 1, seed=9)
    own = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 4])
    refused = 0
    for seed in range(case * IN_A_CASE, (case + 1) * IN_A_CASE):
        path = mutated_directory(random.Random(seed), tmp_path / "c", tmp_path / str(seed))
        before = everything(model, optimizer, own)
        error = error_of(amp.checkpoint.load, path, model, optimizer, plan=own)
        if error is not None:
            refused += 1
            assert any(words in str(error) for words in CLEAR), (seed, source, target, error)
            assert everything(model, optimizer, own) == before, (seed, source, target, error)
        else:
            model, optimizer = pair_of(target)
            own = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 4])
        train(model, optimizer, 1)
        shutil.rmtree(path)
    assert refused > IN_A_CASE // 4
