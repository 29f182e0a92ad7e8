"""Warnings before training where updates or averages would be lost: once, at the user's line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import nn

import amp_mp as amp

NAMES = {"RMSprop": "alpha", "Adadelta": "rho"}  # of the decay; of the others it is betas[1]
# Optimizers with a state stored as log8 under memory="micro", by their decay.
DECAYS: dict[str, Callable[[Any, float], Any]] = {
    "AdamW": lambda p, d: amp.optim.AdamW(p, betas=(0.9, d), memory="micro"),
    "Adam": lambda p, d: amp.optim.Adam(p, betas=(0.9, d), memory="micro"),
    "NAdam": lambda p, d: amp.optim.NAdam(p, betas=(0.9, d), memory="micro"),
    "LAMB": lambda p, d: amp.optim.LAMB(p, betas=(0.9, d), memory="micro"),
    "RMSprop": lambda p, d: amp.optim.RMSprop(p, alpha=d, memory="micro"),
    "Adadelta": lambda p, d: amp.optim.Adadelta(p, rho=d, memory="micro"),
    "AdamW, exp_avg_sq": lambda p, d: amp.optim.AdamW(p, betas=(0.9, d), exp_avg_sq="log8"),
}


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(40, dtype=torch.bfloat16))


def caught(run: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [each for each in found if str(each.message).startswith("amp_mp")]


@pytest.mark.parametrize("name", DECAYS)
def test_log8_with_a_slow_decay(name: str) -> None:
    for decay in (0.5, 0.99):
        assert caught(lambda decay=decay: DECAYS[name]([weight()], decay)) == []
    (found,) = caught(lambda: DECAYS[name]([weight()], 0.999))
    argument = NAMES.get(name, "betas[1]")
    assert f"{argument}=0.999 scatter: by 14 %" in str(found.message)
    assert found.filename == __file__
    for decay in (0.9999, 0.99999):
        with pytest.raises(ValueError, match=r"log8.* would stand still; take"):
            DECAYS[name]([weight()], decay)


def test_an_added_group_with_log8() -> None:
    optimizer = amp.optim.AdamW([weight()])
    group = {"params": [weight()], "memory": "micro", "betas": (0.9, 0.9999)}
    with pytest.raises(ValueError, match="would stand still"):
        optimizer.add_param_group(dict(group))
    assert len(optimizer.param_groups) == 1
    (found,) = caught(lambda: optimizer.add_param_group({**group, "betas": (0.9, 0.995)}))
    assert found.filename == __file__


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adam", "RMSprop", "Adagrad"])
def test_a_torch_optimizer_over_prepared_weights_warns_at_its_first_step(name: str) -> None:
    def train(wrap: Callable[[Any], Any], prepares: bool = True) -> tuple[list[Any], Any]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        amp.prepare(model if prepares else nn.Linear(2, 2), torch.bfloat16)
        optimizer = wrap(getattr(torch.optim, name)(model.parameters(), lr=0.1))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        found = [each for _ in range(3) for each in caught(optimizer.step)]
        return found, raw_bytes(model.state_dict())

    (found,), _ = train(lambda optimizer: optimizer)
    assert found.filename == __file__
    assert f"torch.optim.{name} updates low-precision weights" in str(found.message)
    assert "FP16_Optimizer" in str(found.message)
    assert train(lambda optimizer: optimizer, prepares=False)[0] == []
    model = amp.prepare(nn.Linear(3, 2), torch.bfloat16)
    inner = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    fp16 = amp.FP16_Optimizer(inner, verbose=False)
    fp16.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    assert caught(fp16.step) == []
    if hasattr(amp.optim, name):
        model = amp.prepare(nn.Linear(3, 2), torch.bfloat16)
        ours = getattr(amp.optim, name)(model.parameters(), lr=0.1)
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        assert caught(ours.step) == []
