"""amp.checkpoint on several ranks: saved on some, loaded on others, and training goes on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import (
    Bag,
    differences,
    digests,
    disagreements,
    local,
    placed_as,
    shard,
    train,
)
from ranks import LARGE, on_ranks
from rules import is_allowed
from tiers import full, tiered
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

LOW = torch.bfloat16
SHAPES = [(96, 64), (33, 96), (1, 33), (33,), (3, 64), (64, 8, 2, 2), (1,)]
HALF = torch.float16
FLOAT = torch.float32
PRESETS = ("float32", "exact", "lean", "micro", "nano")
if LARGE:
    PRESETS += ("tiny",)
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


@pytest.mark.parametrize(("saved", "loaded"), PAIRS if LARGE else tiered(FEW, FEW[-2:]), ids=str)
def test_training_goes_on_with_the_same_bits_on_other_ranks(
    saved: tuple[str, int], loaded: tuple[str, int], tmp_path: Path
) -> None:
    for preset in PRESETS:
        path = str(tmp_path / preset)
        on_ranks(saved[1], save, saved[0], preset, path)
        found = on_ranks(loaded[1], load, loaded[0], preset, path)
        assert found == [[]] * loaded[1], preset


def save_kind(path: str, preset: str, dtype: torch.dtype) -> None:
    amp.checkpoint.save(path, *trained("fsdp", preset, 3, dtype))


def convert(path: str, preset: str, dtype: torch.dtype, saved: str, of: torch.dtype) -> Any:
    """Loads a file of another format; returns what is wrong with the masters, and digests."""
    model, optimizer = trained("fsdp", preset, 0, dtype)
    amp.checkpoint.load(path, model, optimizer)
    plain, plain_optimizer = trained(None, saved, 3, of)
    short = [
        p in ("lean", "tiny", "micro", "nano")
        for p, d in ((saved, of), (preset, dtype))
        if d != FLOAT
    ]
    # Half a unit; a whole one where a split would have rounded to another weight than the file's.
    converts = (saved, of) != (preset, dtype)
    bound, least = (2.0 ** -(16 - converts) if any(short) else 0.0), 1e-38
    if preset == "nano" and dtype == LOW and converts:
        bound = 2.0**-11
    if HALF in (of, dtype) and converts:
        # Below 2^-14 float16 has places of 2^-24, which a remainder divides by 2^16 or 2^8.
        least = 2.0 ** -(24 + (8 if any(short) else 16))
    wanted = amp.float32_state_dict(plain, plain_optimizer)
    found = []
    masters = amp.float32_state_dict(model, optimizer)
    for (name, values), param in zip(wanted.items(), model.parameters(), strict=True):
        own = local(placed_as(param, values.detach()))
        error = (local(masters[name]).float() - own).abs()
        if not bool((error <= own.abs() * bound + least).all()):
            found.append(f"{saved} {of} to {preset} {dtype}: {name} is {float(error.max())} off")
    return found, digests(list(model.parameters()), optimizer)


KINDS = [(preset, LOW) for preset in PRESETS] + [("exact", FLOAT), ("micro", FLOAT)]
KINDS += [
    (preset, HALF) for preset in PRESETS if (LARGE or preset == "lean") and is_allowed(preset, HALF)
]


ALL, SOME = range(len(KINDS)), (1,)  # how far a kind is behind another one in KINDS


@pytest.mark.parametrize(
    ("world", "ahead"), [(1, ALL), (2, ALL), (4, ALL)] if LARGE else [(2, SOME), full((2, ALL))]
)
def test_any_format_is_read_into_any_other_with_the_same_bits_on_all_ranks(
    world: int, ahead: Sequence[int], tmp_path: Path
) -> None:
    for number, saved in enumerate(KINDS):
        path = str(tmp_path / str(number))
        on_ranks(2, save_kind, path, *saved)
        for kind in (KINDS[(number + n) % len(KINDS)] for n in ahead):
            ranks = on_ranks(world, convert, path, *kind, *saved)
            assert [found for found, _ in ranks] == [[]] * world
            assert disagreements([digest for _, digest in ranks]) == []


def save_theirs(layout: str | None, path: str, full: bool) -> None:
    """What a script around torch.optim.AdamW and torch's own checkpoints writes.

    full: rank 0 alone writes whole tensors.
    """
    model: Any = Bag(SHAPES, FLOAT)
    model = model if layout is None else shard(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    state = {
        "model": get_model_state_dict(model, options=options),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if not full or dist.get_rank() == 0:
        dcp.save(state, checkpoint_id=path, no_dist=full)


def read_theirs(layout: str, preset: str, path: str) -> list[str]:
    model, optimizer = trained(layout, preset, 0)
    amp.checkpoint.load(path, model, optimizer)
    plain = Bag(SHAPES, torch.float32)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), range(3))
    found = []
    masters = amp.float32_state_dict(model, optimizer)
    exact = preset in ("float32", "exact")
    for (name, values), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        own = local(placed_as(param, values.detach()))
        error = (local(masters[name]).float() - own).abs()
        bound = 1e-38 if exact else own.abs() * 2.0 ** -(11 if preset == "nano" else 16) + 1e-38
        state = optimizer.state[param]
        if not bool((error <= bound).all()):
            found.append(f"{name} is {float(error.max())} off")
        if float(state["step"]) != 3:
            found.append(f"{name} has step {state['step']}")
    return found


@pytest.mark.parametrize("full", [False, True] if LARGE else [False])
@pytest.mark.parametrize(("theirs", "ours"), [(None, 2), full((1, 1)), (2, 4), full((4, 2))])
def test_what_torch_wrote_is_read_into_every_preset(
    theirs: int | None, ours: int, full: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "c")
    on_ranks(theirs or 1, save_theirs, "fsdp" if theirs else None, path, full)
    for preset in PRESETS:
        assert on_ranks(ours, read_theirs, "fsdp", preset, path) == [[]] * ours


def in_ddp(path: str, saving: bool) -> Any:
    """A DistributedDataParallel on one side, the plain model of one process on the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 3))
    amp.prepare(model, LOW)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = amp.optim.AdamW(wrapped.parameters(), lr=1e-2, memory="tiny")
    if not saving:
        amp.checkpoint.load(path, wrapped, optimizer)
        amp.checkpoint.load(path, wrapped)
        return digests(list(model.parameters()), optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(torch.ones(4, 64, dtype=LOW)).float().square().mean().backward()
        optimizer.step()
    amp.checkpoint.save(path, wrapped, optimizer)
    return digests(list(model.parameters()), optimizer)


def test_ddp_on_either_side(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    saved = on_ranks(2, in_ddp, path, True)
    assert on_ranks(2, in_ddp, path, False) == saved
    assert on_ranks(1, in_ddp, path, False) == saved[:1]
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 3))
    amp.prepare(model, LOW)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, memory="tiny")
    amp.checkpoint.load(path, model, optimizer)
    assert digests(list(model.parameters()), optimizer) == saved[0]
