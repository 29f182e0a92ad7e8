"""torch.distributed.checkpoint without amp.checkpoint: every option of torch's, every preset."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import Bag, differences, shard, train
from ranks import LARGE, on_ranks
from tiers import in_turn
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]
LOW = torch.bfloat16
PRESETS = ("float32", "exact", "lean", "micro", "nano")
if LARGE:
    PRESETS += ("tiny",)
SHAPES = [(96, 64), (33, 96), (1, 33), (33,), (64, 8, 2, 2), (1,)]
OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "cpu_offload": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full, cpu_offload": {"full_state_dict": True, "cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
}


def made(layout: str | None, preset: str, steps: int) -> Any:
    model: Any = Bag(SHAPES, LOW)
    model = model if layout is None else shard(model, layout)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, memory=preset)
    train(model, optimizer, range(steps))
    optimizer.zero_grad()
    return model, optimizer


def compared(model: Any, optimizer: Any, preset: str) -> list[str]:
    """Where weights and state are not those of one process after 3 steps, and after 2 more."""
    plain, plain_optimizer = made(None, preset, 3)
    pairs = [*model.parameters()], [*plain.parameters()]
    found = differences(pairs[0], optimizer, pairs[1], plain_optimizer)
    for each in ((model, optimizer), (plain, plain_optimizer)):
        train(*each, range(3, 5))
    after = differences(pairs[0], optimizer, pairs[1], plain_optimizer)
    return [*found, *(f"after 2 steps: {each}" for each in after)]


def in_memory(way: str, preset: str) -> list[str]:
    """State dicts with torch's options, straight into a fresh model and optimizer."""
    model, optimizer = made("fsdp", preset, 3)
    options = OPTIONS[way]
    saving = StateDictOptions(
        **{k: v for k, v in options.items() if k != "broadcast_from_rank0"},
        **({"cpu_offload": True} if way == "broadcast" else {}),
    )
    weights, state = get_state_dict(model, optimizer, options=saving)
    fresh, sink = made("fsdp", preset, 0)
    sink.init_state()
    assert {float(each["step"]) for each in sink.state.values()} == {0.0}
    loading = StateDictOptions(**options)
    if way == "full, cpu_offload":  # only rank 0 has anything
        loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, weights, options=loading)
    set_optimizer_state_dict(fresh, sink, state, options=loading)
    return compared(fresh, sink, preset)


@pytest.mark.parametrize(
    ("way", "preset"),
    itertools.product(OPTIONS, PRESETS) if LARGE else in_turn(OPTIONS, ("exact", "micro", "nano")),
)
def test_state_dicts_with_any_of_torchs_options(way: str, preset: str) -> None:
    assert on_ranks(2, in_memory, way, preset) == [[], []]


def save(layout: str, preset: str, path: str, way: str) -> None:
    model, optimizer = made(layout, preset, 3)
    optimizer.init_state()
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**OPTIONS[way]))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def load(layout: str, preset: str, path: str, way: str) -> list[str]:
    model, optimizer = made(layout, preset, 0)
    optimizer.init_state()
    options = StateDictOptions(**OPTIONS[way])
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options
    )
    return compared(model, optimizer, preset)


ROUTES = [(("fsdp", 2), ("fsdp", 1)), (("fsdp", 1), ("fsdp", 2)), (("fsdp", 2), ("fsdp", 4))]
ROUTES += [(("columns fsdp", 4), ("fsdp", 1)), (("fsdp", 1), ("columns fsdp", 4))]


@pytest.mark.parametrize("way", ["sharded", "cpu_offload", "flat"] if LARGE else ["flat"])
@pytest.mark.parametrize(("saved", "loaded"), ROUTES if LARGE else ROUTES[::2], ids=str)
def test_directories_between_numbers_of_processes(
    saved: tuple[str, int], loaded: tuple[str, int], way: str, tmp_path: Path
) -> None:
    for preset in PRESETS if LARGE else ("nano",):
        path = str(tmp_path / preset)
        on_ranks(saved[1], save, saved[0], preset, path, way)
        assert on_ranks(loaded[1], load, loaded[0], preset, path, way) == [[]] * loaded[1], preset


def load_other(preset: str, path: str) -> tuple[str, bool]:
    """The error, and whether the optimizer has its state of before."""
    model, optimizer = made("fsdp", preset, 0)
    optimizer.init_state()
    weights, state = get_state_dict(model, optimizer)
    message = ""
    try:
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    except BaseException as error:  # CheckpointException is none of Exception's
        message = str(error)
    return message, {float(each["step"]) for each in optimizer.state.values()} == {0.0}


def test_the_file_of_one_format_is_no_file_of_another(tmp_path: Path) -> None:
    for saved in PRESETS:
        on_ranks(2, save, "fsdp", saved, str(tmp_path / saved), "sharded")
    ways = itertools.permutations(PRESETS, 2) if LARGE else itertools.pairwise(PRESETS)
    for saved, loaded in ways:
        for message, same in on_ranks(2, load_other, loaded, str(tmp_path / saved)):
            assert "Missing key in checkpoint state_dict: optimizer.state.p" in message
            assert same


def float32_grads(initialised: bool) -> str:
    """What torch's helper says of parameters whose gradients are float32."""
    model: Any = nn.Linear(8, 8, dtype=LOW)
    if dist.get_world_size() > 1:
        model = shard(model, "fsdp")
    for param in model.parameters():
        param.grad_dtype = torch.float32
    optimizer = amp.optim.AdamW(model.parameters(), memory="tiny")
    if initialised:
        optimizer.init_state()
    try:
        state = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, state)
    except RuntimeError as error:
        return str(error)
    assert sorted(get_model_state_dict(model)) == ["bias", "weight"]
    assert {float(each["step"]) for each in optimizer.state.values()} == {0.0}
    return ""


@pytest.mark.parametrize("world", [1, 2])
def test_with_init_state_torchs_helpers_take_parameters_with_float32_gradients(
    world: int,
) -> None:
    assert on_ranks(world, float32_grads, True) == [""] * world
    assert all("dtype" in message for message in on_ranks(world, float32_grads, False))
