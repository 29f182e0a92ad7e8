"""process_groups= that name the wrong processes."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from around_sharding import adamw, apart, error, fsdp, loss_of, net, tensor_parallel, train, whole
from around_sharding import even as even_net
from layouts import made_once
from ranks import on_ranks
from tiers import tiered
from torch.nn.parallel import DistributedDataParallel

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]


def named_again(kind: str, through: str) -> tuple[str, float]:
    """The user names the processes over which the model is split or copied already."""
    if kind == "hsdp":
        model: Any = fsdp(net(), mesh=made_once((1, 2), ("replicas", "dp")))
    else:
        model = tensor_parallel(even_net()) if kind == "tp" else fsdp(net())
    groups = {"world": dist.group.WORLD, "mesh": next(model.parameters()).device_mesh}[through]
    optimizer = adamw(model.parameters(), max_grad_norm=1.0, process_groups=groups)
    before = whole(model)
    return error(train, model, optimizer, 1), apart(before, whole(model))


@pytest.mark.parametrize(
    ("kind", "through"),
    tiered(
        itertools.product(["fsdp", "tp", "hsdp"], ["world", "mesh"]),
        [("fsdp", "world"), ("hsdp", "mesh")],
    ),
)
def test_processes_that_share_the_parameters_are_refused(kind: str, through: str) -> None:
    for rank, (raised, moved) in enumerate(on_ranks(2, named_again, kind, through)):
        assert f"same parameters, [{1 - rank}]" in raised
        assert moved == 0


def scaler_with_the_mesh() -> str:
    model = fsdp(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp.GradScaler("cpu", process_groups=dist.group.WORLD)
    scaler.scale(loss_of(model)).backward()
    return error(scaler.step, optimizer)


def test_a_scaler_refuses_them_too() -> None:
    assert "counted twice" in on_ranks(2, scaler_with_the_mesh)[0]


def copies() -> list[str]:
    model = DistributedDataParallel(net())
    optimizer = adamw(model.parameters(), max_grad_norm=1.0, process_groups=dist.group.WORLD)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(model, optimizer, 2)
    return [str(each.message) for each in found if "amp_mp" in str(each.message)]


def test_copies_of_a_model_give_a_warning_once() -> None:
    for found in on_ranks(2, copies):
        assert len(found) == 1
        assert "counted 2 times" in found[0]
