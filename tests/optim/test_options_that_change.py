"""A group's options that a script changes between two steps: the next step follows them.

The oracle is a new optimizer that has the options from the start and loads the states so far.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp

CHANGES = [
    {"exp_avg": "m8"},
    {"exp_avg": "bfloat16", "exp_avg_sq": "float16_root"},
    {"master": "float32"},
    {"master": "split24", "exp_avg_sq": "ue8m8"},
    {"master": "none", "rounding": "stochastic"},
]


def param_of(device: str, values: Tensor | None = None) -> nn.Parameter:
    if values is None:
        values = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    return nn.Parameter(values.clone().to(device))


def fill(param: nn.Parameter, step: int) -> None:
    source = torch.Generator().manual_seed(10 + step)
    param.grad = torch.randn(param.shape, generator=source).to(param)


def train(param: nn.Parameter, optimizer: Any, steps: range) -> None:
    for step in steps:
        fill(param, step)
        optimizer.step()


def state_of(optimizer: Any, param: nn.Parameter) -> dict[str, Tensor]:
    return dict(optimizer.state[param])


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_formats_and_rounding_may_change_between_steps(device: str, change: dict[str, str]) -> None:
    param = param_of(device)
    optimizer = amp.optim.AdamW([param], lr=0.01)
    train(param, optimizer, range(3))
    other = param_of(device, param.detach())
    oracle = amp.optim.AdamW([other], lr=0.01, **change)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group |= change
    oracle.load_state_dict(saved)
    optimizer.param_groups[0] |= change
    train(param, optimizer, range(3, 6))
    train(other, oracle, range(3, 6))
    assert raw_bytes(param.detach()) == raw_bytes(other.detach())
    assert raw_bytes(state_of(optimizer, param)) == raw_bytes(state_of(oracle, other))


def test_offload_of_a_cpu_moves_nothing() -> None:
    param = param_of("cpu", torch.randn(64, 96).bfloat16())
    optimizer = amp.optim.AdamW([param], lr=0.01, memory="tiny", offload="state")
    train(param, optimizer, range(1))
    before = {name: t.data_ptr() for name, t in state_of(optimizer, param).items()}
    optimizer.param_groups[0]["offload"] = None
    train(param, optimizer, range(1, 2))
    assert {name: t.data_ptr() for name, t in state_of(optimizer, param).items()} == before
    assert optimizer.memory_report().host == {}


@pytest.mark.parametrize("release", [False, True])
def test_a_master_may_change_while_gradients_are_released(device: str, release: bool) -> None:
    model = nn.Linear(32, 4).to(device, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=0.01)
    if release:
        optimizer.attach(model, release=True)
    for step in range(3):
        if step == 2:
            optimizer.param_groups[0]["exp_avg"] = "m8"
        model(torch.ones(2, 32, device=device, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert "exp_avg_m8" in optimizer.state[model.weight]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounding": "up"}, "rounding must be one of"),
        ({"master": "half"}, "master"),
        ({"exp_avg": "int3"}, "exp_avg"),
        ({"memory": "tiny"}, "memory in a param_group is for new optimizers"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_an_option_that_cannot_be_changes_nothing(
    device: str, change: dict[str, Any], message: str
) -> None:
    params = [param_of(device) for _ in range(2)]
    optimizer = amp.optim.AdamW([{"params": [p]} for p in params], lr=0.01)
    for p in params:
        fill(p, 0)
    optimizer.step()
    before = raw_bytes([p.detach() for p in params]), raw_bytes(optimizer.state_dict()["state"])
    optimizer.param_groups[1] |= change
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert raw_bytes([p.detach() for p in params]) == before[0]
    assert raw_bytes(optimizer.state_dict()["state"]) == before[1]


@pytest.mark.parametrize("split", [2, 8])
def test_muons_blocks_may_change_between_steps(device: str, split: int) -> None:
    param = param_of(device)
    optimizer = amp.optim.Muon([param], lr=0.01)
    train(param, optimizer, range(2))
    other = param_of(device, param.detach())
    oracle = amp.optim.Muon([{"params": [other], "split": split}], lr=0.01)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["split"] = split
    oracle.load_state_dict(saved)
    optimizer.param_groups[0]["split"] = split
    train(param, optimizer, range(2, 4))
    train(other, oracle, range(2, 4))
    assert raw_bytes(param.detach()) == raw_bytes(other.detach())


def test_blocks_that_do_not_fit_change_nothing(device: str) -> None:
    param = param_of(device)
    optimizer = amp.optim.Muon([param], lr=0.01)
    train(param, optimizer, range(2))
    before = raw_bytes(param.detach()), raw_bytes(state_of(optimizer, param))
    optimizer.param_groups[0]["split"] = 3
    with pytest.raises(ValueError, match="8 rows, which do not fall into 3 equal blocks"):
        train(param, optimizer, range(2, 3))
    assert raw_bytes(param.detach()) == before[0]
    assert raw_bytes(state_of(optimizer, param)) == before[1]


def test_a_group_may_be_taken_away_between_steps(device: str) -> None:
    params = [param_of(device) for _ in range(2)]
    optimizer = amp.optim.AdamW([{"params": [p]} for p in params], lr=0.01)
    for step in range(2):
        for p in params:
            fill(p, step)
        optimizer.step()
        before = params[1].detach().clone()
        del optimizer.param_groups[1:]
    assert torch.equal(params[1], before)
