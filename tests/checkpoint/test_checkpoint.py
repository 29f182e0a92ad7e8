"""amp.checkpoint: what one script saves another loads, in whatever format that one stores."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LOW, MASTER_BITS, PRESETS, make, masters, network, snapshot, train
from tiers import tiered
from torch import nn

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
