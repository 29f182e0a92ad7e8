"""What is saved beside the model and the optimizer: it is loaded as it was."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import LOW, make, network, snapshot, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import amp_mp as amp


def optimizer_of(model: nn.Module) -> Any:
    return amp.optim.SGD(model.parameters(), lr=1.0)


lr_scheduler = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 5]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.MultiStepLR(o, [1, 2])], [3]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1.0] if "Plateau" in type(scheduler).__name__ else []))
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR's own
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_where_they_were(kind: str, tmp_path: Path) -> None:
    model = network()
    optimizer = optimizer_of(model)
    scheduler = SCHEDULERS[kind](optimizer)
    rates(optimizer, scheduler, 2)
    amp.checkpoint.save(tmp_path / "c", model, optimizer, scheduler=scheduler)
    wanted = rates(optimizer, scheduler, 5)
    other = network()
    another = optimizer_of(other)
    fresh = SCHEDULERS[kind](another)
    amp.checkpoint.load(tmp_path / "c", other, another, scheduler=fresh)
    assert rates(another, fresh, 5) == wanted
    assert len(set(wanted)) > 1


def test_containers_keep_their_keys_and_kinds(tmp_path: Path) -> None:
    counts = {1: "one", "two": {2.5: [torch.arange(3), {}]}, (3, 4): [1, [2, {"x": None}]]}
    more = {"counts": counts, "none": None, "empty": {}, "order": OrderedDict(b=1, a=(1, 2))}
    amp.checkpoint.save(tmp_path / "c", network(), **more)
    found = amp.checkpoint.load(tmp_path / "c", network())
    numbers = found["counts"]["two"][2.5].pop(0)
    assert numbers.tolist() == [0, 1, 2]
    counts["two"][2.5].pop(0)  # type: ignore[index]
    assert found == more
    assert type(found["order"]) is OrderedDict


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", [amp.GradScaler, torch.amp.GradScaler])
def test_a_grad_scaler_goes_on_also_where_it_is_off(
    kind: Any, enabled: bool, tmp_path: Path
) -> None:
    model, optimizer = make("exact", torch.float16)
    scaler = kind("cpu", init_scale=8.0, growth_interval=2, enabled=enabled)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 64).half()).float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    amp.checkpoint.save(tmp_path / "c", model, optimizer, scaler=scaler)
    fresh = kind("cpu", init_scale=2.0, enabled=enabled)
    amp.checkpoint.load(tmp_path / "c", *make("exact", torch.float16), scaler=fresh)
    assert fresh.state_dict() == scaler.state_dict()
    assert not enabled or fresh.get_scale() == 16.0


def test_a_second_model_and_its_optimizer_are_loaded_whatever_their_order(tmp_path: Path) -> None:
    pair, second = make("tiny"), make("lean")
    for each in (pair, second):
        train(*each, 2)
    amp.checkpoint.save(tmp_path / "c", *pair, critic=second[0], opt_critic=second[1])
    other, another = make("tiny"), make("lean")
    amp.checkpoint.load(tmp_path / "c", *other, opt_critic=another[1], critic=another[0])
    assert snapshot(*other) == snapshot(*pair)
    assert snapshot(*another) == snapshot(*second)
    assert len(another[1].state) == 6


def test_a_copy_of_the_model_is_not_taken_for_the_model(tmp_path: Path) -> None:
    model, optimizer = make("exact")
    ema = copy.deepcopy(model)
    train(model, optimizer, 1)
    amp.checkpoint.save(tmp_path / "c", model, optimizer, ema=ema, a=ema.state_dict())
    other, another = make("exact")
    train(other, another, 3, seed=7)
    found = amp.checkpoint.load(tmp_path / "c", other, another, ema=copy.deepcopy(ema))
    assert snapshot(other, another) == snapshot(model, optimizer)
    assert torch.equal(found["a"]["0.weight"], ema[0].weight)
    dcp.save(
        {"net": get_model_state_dict(model), "ema": get_model_state_dict(ema)},
        checkpoint_id=tmp_path / "d",
    )
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"under 'ema\.', 'net\.', and none of them is named 'mod"):
        amp.checkpoint.load(tmp_path / "d", other)
    assert snapshot(other) == before


class Counts(nn.Module):
    """A module with a buffer of integers, one of low precision, and extra state of any kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.tensor([0, 0]))
        self.register_buffer("mean", torch.zeros(3, dtype=LOW))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [torch.arange(4), "text", {"a": {1: 2}}, {}, [1, {}], None])
def test_buffers_and_extra_state_of_modules_are_loaded(extra: Any, tmp_path: Path) -> None:
    model = nn.Sequential(Counts(extra))
    model[0].seen += 5
    model[0].mean += 0.1
    amp.checkpoint.save(tmp_path / "c", model)
    other = nn.Sequential(Counts(torch.zeros(2)))
    amp.checkpoint.load(tmp_path / "c", other)
    assert other[0].seen.tolist() == [5, 5]
    assert torch.equal(other[0].mean, model[0].mean)
    same = torch.equal(other[0].extra, extra) if isinstance(extra, torch.Tensor) else None
    assert other[0].extra == extra if same is None else same


def test_a_part_with_more_of_the_models_names_is_not_taken_for_the_model(tmp_path: Path) -> None:
    small, large = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    amp.checkpoint.save(tmp_path / "c", small, teacher=large.state_dict())
    last = copy.deepcopy(large[1].weight)
    amp.checkpoint.load(tmp_path / "c", large, strict=False)
    assert torch.equal(large[0].weight, small[0].weight)
    assert torch.equal(large[1].weight, last)
