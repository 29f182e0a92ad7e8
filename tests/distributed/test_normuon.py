"""NorMuon on sharded matrices: the bits of one process, and state that is split as the rows are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import Bag, differences, local, set_grads, shard
from ranks import on_ranks
from torch.distributed.tensor import DTensor

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

SHAPES = [(96, 64), (33, 96), (1, 32), (3, 64), (3, 32, 64), (64, 8, 2, 2)]
OPTIONS: Any = {"lr": 0.02, "normalize": "rows"}


def groups_of(model: Any) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": params[1:-1]},
        {"params": params[:1], "split": 3},
        {"params": params[-1:], "flatten": True},
    ]


def compare(layout: str) -> tuple[list[str], list[str]]:
    """Differences to one process, and parameters whose rows are placed otherwise than they are."""
    runs: list[Any] = []
    for model in (shard(Bag(SHAPES, torch.bfloat16), layout), Bag(SHAPES, torch.bfloat16)):
        optimizer = amp.optim.Muon(groups_of(model), **OPTIONS)
        params = list(model.parameters())
        for step in range(4):
            set_grads(params, 100 * step)
            optimizer.step()
        runs += [params, optimizer]
    params, optimizer = runs[:2]
    moments = [optimizer.state[param]["second_momentum_buffer"] for param in params]
    wrong = [
        str(tuple(param.shape))
        for param, moment in zip(params, moments, strict=True)
        if isinstance(param, DTensor)
        and (moment.placements != param.placements or len(local(moment)) != len(local(param)))
    ]
    found = differences(*runs)
    again = amp.optim.Muon(groups_of(model), **OPTIONS)  # one process takes over
    again.load_state_dict(optimizer.state_dict())
    for param in runs[2]:
        name = "second_momentum_buffer"
        if not torch.equal(again.state[param][name], runs[3].state[param][name]):
            found.append(f"{tuple(param.shape)}: {name} was loaded otherwise")
    return found, wrong


@pytest.mark.parametrize(("layout", "world"), [("fsdp", 2), ("hsdp", 4), ("columns", 2)])
def test_rows_have_the_bits_of_one_process(layout: str, world: int) -> None:
    for found, wrong in on_ranks(world, compare, layout):
        assert found == []
        assert wrong == []


def refused(layout: str) -> str:
    model = shard(Bag([(64, 32)] * 2, torch.float32), layout)
    optimizer = amp.optim.Muon(model.parameters(), **OPTIONS)
    set_grads(list(model.parameters()), 1)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def test_columns_on_several_processes_are_refused() -> None:
    for text in on_ranks(2, refused, "rows"):
        assert "split along its columns over processes" in text
