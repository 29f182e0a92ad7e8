"""amp.checkpoint on several ranks: saved on some, loaded on others, and training goes on."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import Bag, differences, digests, disagreements, local, placed_as, set_grads, shard
from ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]
LARGE = "AMP_MP_DISTRIBUTED" in os.environ  # make test-distributed

LOW = torch.bfloat16
SHAPES = [(96, 64), (33, 96), (1, 33), (33,), (3, 64), (64, 8, 2, 2), (1,)]
PRESETS = ("float32", "exact", "lean", "tiny")
PLACES = [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("columns fsdp", 4), ("hsdp", 4)]
PAIRS = [*itertools.product(PLACES, repeat=2)]
FEW = [((a, n), (b, m)) for (a, n), (b, m) in PAIRS if a == b == "fsdp" and n != m]
FEW += [(PLACES[1], PLACES[3]), (PLACES[3], PLACES[0]), (PLACES[4], PLACES[1])]


def trained(layout: str | None, preset: str, steps: int, dtype: torch.dtype = LOW) -> Any:
    model = Bag(SHAPES, dtype)
    model = model if layout is None else shard(model, layout)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, memory=preset, max_grad_norm=1e9)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        set_grads(list(model.parameters()), 100 * step)
        optimizer.step()


def save(layout: str, preset: str, path: str) -> None:
    amp.checkpoint.save(path, *trained(layout, preset, 3), epoch=7)


def load(layout: str, preset: str, path: str) -> list[str]:
    """Where this rank is not, bit for bit, what one process that never stopped is."""
    model, optimizer = trained(layout, preset, 1)
    assert amp.checkpoint.load(path, model, optimizer) == {"epoch": 7}
    plain, plain_optimizer = trained(None, preset, 3)
    params, whole = list(model.parameters()), list(plain.parameters())
    found = [f"loaded: {d}" for d in differences(params, optimizer, whole, plain_optimizer)]
    for each in ((model, optimizer), (plain, plain_optimizer)):
        train(*each, range(3, 5))
    return found + [f"after: {d}" for d in differences(params, optimizer, whole, plain_optimizer)]


@pytest.mark.parametrize(("saved", "loaded"), PAIRS if LARGE else FEW, ids=str)
def test_training_goes_on_with_the_same_bits_on_other_ranks(
    saved: tuple[str, int], loaded: tuple[str, int], tmp_path: Path
) -> None:
    for preset in PRESETS:
        path = str(tmp_path / preset)
        on_ranks(saved[1], save, saved[0], preset, path)
        found = on_ranks(loaded[1], load, loaded[0], preset, path)
        assert found == [[]] * loaded[1], preset


def convert(layout: str, preset: str, path: str, saved: str) -> Any:
    """Loads a file of another format; returns what is wrong with the masters, and digests."""
    model, optimizer = trained(layout, preset, 0)
    amp.checkpoint.load(path, model, optimizer)
    plain, plain_optimizer = trained(None, saved, 3)
    bits = 16 if {saved, preset} & {"lean", "tiny"} else 24
    wanted = amp.float32_state_dict(plain, plain_optimizer)
    found = []
    masters = amp.float32_state_dict(model, optimizer)
    for (name, values), param in zip(wanted.items(), model.parameters(), strict=True):
        own = local(placed_as(param, values.detach()))
        error = (local(masters[name]).float() - own).abs()
        if not bool((error <= own.abs() * (2.0**-bits if bits < 24 else 0) + 1e-38).all()):
            found.append(f"{saved} to {preset}: {name} is {float(error.max())} off")
    return found, digests(list(model.parameters()), optimizer)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_format_is_read_into_any_other_with_the_same_bits_on_all_ranks(
    world: int, tmp_path: Path
) -> None:
    for saved in PRESETS:
        path = str(tmp_path / saved)
        on_ranks(2, save, "fsdp", saved, path)
        for preset in PRESETS:
            ranks = on_ranks(world, convert, "fsdp", preset, path, saved)
            assert [found for found, _ in ranks] == [[]] * world
            assert disagreements([digest for _, digest in ranks]) == []


def save_theirs(layout: str | None, path: str) -> None:
    """What a script around torch.optim.AdamW and torch's own checkpoints writes."""
    model: Any = Bag(SHAPES, torch.float32)
    model = model if layout is None else shard(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        set_grads(list(model.parameters()), 100 * step)
        optimizer.step()
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=path)


def read_theirs(layout: str, preset: str, path: str) -> list[str]:
    model, optimizer = trained(layout, preset, 0)
    amp.checkpoint.load(path, model, optimizer)
    plain = Bag(SHAPES, torch.float32)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        set_grads(list(plain.parameters()), 100 * step)
        theirs.step()
    found = []
    masters = amp.float32_state_dict(model, optimizer)
    exact = preset in ("float32", "exact")
    for (name, values), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        own = local(placed_as(param, values.detach()))
        error = (local(masters[name]).float() - own).abs()
        bound = 1e-38 if exact else own.abs() * 2.0**-16 + 1e-38
        state = optimizer.state[param]
        powers = [0.9**3, 0.999**3]
        if not bool((error <= bound).all()):
            found.append(f"{name} is {float(error.max())} off")
        if float(state["step"]) != 3 or state["beta_powers"].tolist() != pytest.approx(powers):
            found.append(f"{name} has step {state['step']}, {state['beta_powers']}")
    return found


@pytest.mark.parametrize(("theirs", "ours"), [(None, 2), (1, 1), (2, 4), (4, 2)])
def test_what_torch_wrote_is_read_into_every_preset(
    theirs: int | None, ours: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "c")
    if theirs is None:
        save_theirs(None, path)
    else:
        on_ranks(theirs, save_theirs, "fsdp", path)
    for preset in PRESETS:
        assert on_ranks(ours, read_theirs, "fsdp", preset, path) == [[]] * ours
