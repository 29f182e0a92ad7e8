"""amp.checkpoint: what one script saves another loads, in whatever format that one stores."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import LOW, MASTER_BITS, PRESETS, make, masters, network, snapshot, train
from tiers import tiered
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import amp_mp as amp


@pytest.mark.parametrize("preset", PRESETS)
def test_training_goes_on_as_if_it_had_never_stopped(preset: str, tmp_path: Path) -> None:
    model, optimizer = make(preset)
    train(model, optimizer, 3)
    amp.checkpoint.save(tmp_path / "c", model, optimizer, step=3)
    other, another = make(preset)
    train(other, another, 1, seed=9)
    assert amp.checkpoint.load(tmp_path / "c", other, another) == {"step": 3}
    assert snapshot(other, another) == snapshot(model, optimizer)
    train(model, optimizer, 2, seed=3)
    train(other, another, 2, seed=3)
    assert snapshot(other, another) == snapshot(model, optimizer)


KINDS = [(preset, dtype) for preset in PRESETS for dtype in (LOW, torch.float16)]
KINDS += [("exact", None), ("micro", None)]  # float32 parameters, whose moments are formats' too
NAMES = [f"{preset} {str(dtype).removeprefix('torch.')}" for preset, dtype in KINDS]


# Of the 12 kinds each is read into two others and from two.
READ = [(a, NAMES[(n + m) % len(KINDS)]) for n, a in enumerate(NAMES) for m in (1, 4)]


@pytest.mark.parametrize(("before", "after"), tiered(itertools.product(NAMES, NAMES), READ))
def test_every_format_is_read_into_every_other(before: str, after: str, tmp_path: Path) -> None:
    saved, wanted = (KINDS[NAMES.index(name)] for name in (before, after))
    """The masters are as near as the coarser of the two formats allows, all parameters included."""
    model, optimizer = make(*saved)
    train(model, optimizer, 3)
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    other, another = make(*wanted)
    amp.checkpoint.load(tmp_path / "c", other, another)
    before, after = masters(model, optimizer), masters(other, another)
    for name, values in before.items():
        # Norms are float32 in all of these models.
        low = [MASTER_BITS[p] for p, dtype in (saved, wanted) if dtype is not None]
        bits = 24 if name.startswith("1.") else min(low, default=24)
        bound, least = (0.0, 1e-38) if bits == 24 else (2.0**-bits, 1e-38)
        if torch.float16 in (saved[1], wanted[1]) and saved != wanted:
            # A remainder adds 16 or 8 bits to float16's 11, but none below its last place: 2^-24
            # of numbers below 2^-14.
            least = 2.0 ** -(24 + (16 if bits == 24 else 8))
        torch.testing.assert_close(after[name].float(), values.float(), rtol=bound, atol=least)
    steps = {float(state["step"]) for state in another.state.values()}
    assert steps == {3.0}
    found, wished = another.torch_state_dict()["state"], optimizer.torch_state_dict()["state"]
    for number, state in wished.items():
        # m8: 3/64 of the largest of 32, and bfloat16 2^-7. log8: an eighth of the number, and a
        # floor of 2^-26 of the scale, which is at most 64/31 of the largest.
        largest, most = (float(state[n].abs().max()) for n in ("exp_avg", "exp_avg_sq"))
        torch.testing.assert_close(
            found[number]["exp_avg"], state["exp_avg"], rtol=2.0**-7, atol=3 * largest / 64
        )
        compact = wanted[0] == "micro" and saved != wanted
        rtol, atol = (1 / 8, 2.0**-26 * 64 / 31 * most) if compact else (2.0**-7, 1e-30)
        torch.testing.assert_close(
            found[number]["exp_avg_sq"], state["exp_avg_sq"], rtol=rtol, atol=atol
        )
    train(other, another, 1)


@pytest.mark.parametrize("wanted", ["contiguous", "channels_last"])
@pytest.mark.parametrize("saved", ["contiguous", "channels_last"])
def test_groups_follow_the_layout_of_the_parameter(saved: str, wanted: str, tmp_path: Path) -> None:
    """32 neighbours in memory share a scale; in another layout they are other elements."""

    def made(layout: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(32, 4, 2), nn.Conv2d(4, 4, 4), nn.Linear(32, 64))
        if layout == "channels_last":
            model.to(memory_format=torch.channels_last)
            model[2].weight = nn.Parameter(model[2].weight.detach().clone().t().clone().t())
        amp.prepare(model, LOW)
        optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, memory="micro")
        for param in model.parameters():
            rows = torch.arange(param.shape[0]).view(-1, *[1] * (param.dim() - 1))
            param.grad = (torch.randn(param.shape) * 4.0 ** (rows % 16)).to(LOW)
        optimizer.step()
        return model, optimizer

    model, optimizer = made(saved)
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    other, another = made(wanted)
    amp.checkpoint.load(tmp_path / "c", other, another)
    assert snapshot(other) == snapshot(model)
    assert saved != wanted or snapshot(other, another) == snapshot(model, optimizer)
    found, wished = another.torch_state_dict()["state"], optimizer.torch_state_dict()["state"]
    for number, state in wished.items():
        for name in ("exp_avg", "exp_avg_sq"):
            values = state[name]
            off = (found[number][name] - values).abs()
            largest = values.flatten(1).abs().amax(1) if values.dim() > 1 else values.abs()
            if wanted == "channels_last" and values.dim() == 2:
                largest = values.abs().max()[None].expand(len(values))  # groups are of columns
            largest = largest.view(-1, *[1] * (values.dim() - 1))
            # m8: a step of the largest. log8: a step of the number itself, and the floor.
            floor = 2.0**-26 * 64 / 31 * largest
            bound = 3 / 64 * largest if name == "exp_avg" else values / 8 + floor
            assert bool((off <= bound).all()), (number, name)


def test_the_example_of_the_docstring(tmp_path: Path) -> None:
    model, optimizer = make("exact")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 1)
    scheduler.step()
    path = tmp_path / "step_1000"
    amp.checkpoint.save(path, model, optimizer, scheduler=scheduler, step=1000)
    other = amp.prepare(network(), LOW)
    another = amp.optim.AdamW(other.parameters(), lr=1.0)
    fresh = torch.optim.lr_scheduler.StepLR(another, 1)
    found = amp.checkpoint.load(path, other, another, scheduler=fresh)
    assert found["step"] == 1000
    assert fresh.last_epoch == 1
    assert another.param_groups[0]["lr"] == pytest.approx(1e-3)


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
