"""A sharded run has the bits of one process: weights and every state, on any number of ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from layouts import (
    NORM_ERROR,
    Bag,
    differences,
    digests,
    disagreements,
    local,
    misplaced,
    same_elements,
    set_grads,
    shard,
)
from ranks import LARGE, on_ranks
from rules import OF_MATRICES, RULES, STORAGES, is_allowed
from tiers import pairs, tiered
from torch import Tensor
from torch.distributed.tensor import DTensor

from amp_mp import _C
from amp_mp.optim.base import rules_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

LOW = torch.bfloat16
# The last one stays plain under tensor parallelism. Some shards are empty.
SHAPES = [(96, 64), (33, 96), (1, 33), (33,), (3, 64), (1, 32), (64, 8, 2, 2), (1,)]
STEPS = 6
SPLITS = [
    *[("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("rows", 2), ("columns", 2)],
    *[("columns fsdp", 4), ("rows fsdp", 4)],
]
if LARGE:
    SPLITS += [("fsdp", 1), ("rows", 4), ("columns", 4)]
LAYERWISE = [name for name, (kind, _) in RULES.items() if rules_of(kind)[0].is_layerwise]
# LAMB sums in double, so its norms are the same however a tensor is split.
BY_ELEMENT = [name for name in RULES if name not in LAYERWISE or name.startswith("lamb")]
BY_LAYER = LAYERWISE if LARGE else LAYERWISE[::2]
SOME_RULES = BY_ELEMENT if LARGE else BY_ELEMENT[::2]
SOME_PRESETS = list(STORAGES) if LARGE else ["exact", "micro", "nano", "masterless"]
UNGROUPED = {"moment": "bfloat16", "square": "ue8m8"}
DTYPES = (LOW, torch.float16, torch.float32) if LARGE else (LOW, torch.float32)
combined = itertools.product if LARGE else pairs


def has_groups(param: Tensor, group: int = 32) -> bool:
    """Whether each group of neighbours lies in one row, and in one shard of it.

    A state of 8 bits has groups of 32, and split20's remainders are in pairs.
    """
    rows = [n for n in param.shape if n > 1]
    if len(rows) < 2:
        return False
    cut = [1] * param.dim()
    if isinstance(param, DTensor):
        for size, at in zip(param.device_mesh.shape, param.placements, strict=True):
            if not at.is_replicate():
                cut[at.dim] *= size
    if param.shape[-1] % (group * cut[-1]) == 0:
        return True
    return math.prod(param.shape[1:]) % group == 0 and not any(n > 1 for n in cut[1:])


def both(layout: str, dtype: torch.dtype, rule: str, preset: str, **more: Any) -> tuple[Any, ...]:
    """A sharded run and one of a single process after the same steps.

    Returns the optimizer and the parameters of each, and the norm that each step found.
    """
    kind, numbers = (RULES | OF_MATRICES)[rule]
    split, whole = list(shard(Bag(SHAPES, dtype), layout).parameters()), Bag(SHAPES, dtype)
    groups = [{"params": [p]} for p in split]
    kinds = _C.kinds_of(rules_of(kind))
    if rule.startswith("centered"):  # its squares are float32
        kinds.pop("square_avg")
    plain_groups: list[dict[str, Any]] = [{"params": [p]} for p in whole.parameters()]
    for group, param in zip(plain_groups, split, strict=True):
        if preset in ("tiny", "micro", "nano", "masterless") and not has_groups(param):
            group.update({name: UNGROUPED[k] for name, k in kinds.items() if k in UNGROUPED})
        if preset == "nano" and not has_groups(param, 2):
            group["master"] = "split24"
    for group in (*groups, *plain_groups) if rule == "hyperball" else ():
        group["hyperball"] = group["params"][0].dim() > 1
    found: list[Any] = []
    for made in (groups, plain_groups):
        optimizer = kind(made, **numbers, **STORAGES[preset], **more)
        params, norms = [group["params"][0] for group in made], []
        for step in range(STEPS):
            set_grads(params, 100 * step)
            optimizer.step()
            norms.append(optimizer.grad_norm)
        found += [optimizer, params, norms]
    return tuple(found)


def compare(layout: str, rules: list[str], presets: list[str], **more: Any) -> list[str]:
    found = []
    for dtype, rule, preset in combined(DTYPES, rules, presets):
        if not is_allowed(preset, dtype):
            continue
        optimizer, split, _, plain, whole, _ = both(layout, dtype, rule, preset, **more)
        label = f"{rule}, {preset}, {dtype}: "
        found += [label + text for text in differences(split, optimizer, whole, plain)]
        found += [label + text for text in misplaced(optimizer)]
    return found


@pytest.mark.parametrize(("layout", "world"), tiered(SPLITS, SPLITS[1:2] + SPLITS[3:6]))
def test_adamw_has_the_bits_of_one_process(layout: str, world: int) -> None:
    for rank in on_ranks(world, compare, layout, ["adamw"], list(STORAGES)):
        assert rank == []


@pytest.mark.parametrize(
    ("layout", "world"),
    SPLITS if LARGE else tiered([("fsdp", 2), ("rows fsdp", 4)], [("rows fsdp", 4)]),
)
def test_every_rule_has_the_bits_of_one_process(layout: str, world: int) -> None:
    for rank in on_ranks(world, compare, layout, SOME_RULES, SOME_PRESETS, limit_s=250):
        assert rank == []


@pytest.mark.parametrize(
    ("layout", "world"), [*SPLITS, ("fsdp", 1)] if LARGE else [("fsdp", n) for n in (1, 2, 4)]
)
def test_hyperball_has_the_bits_of_one_process(layout: str, world: int) -> None:
    for rank in on_ranks(world, compare, layout, ["hyperball"], list(STORAGES), limit_s=200):
        assert rank == []


def offloaded(layout: str) -> list[str]:
    return compare(layout, ["adamw", "sgd"], SOME_PRESETS, offload="state")


@pytest.mark.parametrize(("layout", "world"), SPLITS if LARGE else [("fsdp", 2)])
def test_offload_leaves_a_cpus_states_where_they_are(layout: str, world: int) -> None:
    for rank in on_ranks(world, offloaded, layout):
        assert rank == []


def clipped(layout: str, rules: list[str], max_grad_norm: float | None) -> list[Any]:
    """For each rule and preset: norms of both runs, digests, and how far the weights are apart."""
    found = []
    for rule, preset, dtype in combined(rules, SOME_PRESETS, (LOW, torch.float32)):
        optimizer, split, norms, _, whole, plain_norms = both(
            layout, dtype, rule, preset, max_grad_norm=max_grad_norm
        )
        for param, single in zip(split, whole, strict=True):
            if preset in ("float32", "exact"):  # others may round a state the other way
                own, expected = local(param), same_elements("weight", param, single)
                torch.testing.assert_close(own.view(-1), expected, **tolerances(dtype))
        found.append((norms, plain_norms, digests(split, optimizer)))
    return found


def tolerances(dtype: torch.dtype) -> dict[str, float]:
    """How far a weight may be from that of a run whose norm differs by NORM_ERROR of itself.

    The float32 multiplier may then be its neighbour, 2^-23 of itself away, and so may each of the
    STEPS updates, of at most lr = 0.05 times a gradient of less than 8; a few roundings more add as
    much again. A bfloat16 weight may be rounded to the neighbour.
    """
    away = 2 * STEPS * 0.05 * 8 * 2.0**-23
    return {"rtol": 2.0**-7 if dtype == LOW else 2.0**-22, "atol": away}


@pytest.mark.parametrize(
    ("layout", "world"),
    SPLITS
    if LARGE
    else tiered([("fsdp", 2), ("hsdp", 4), ("columns fsdp", 4)], [("columns fsdp", 4)]),
)
@pytest.mark.parametrize(
    ("rules", "max_grad_norm"), [(["adamw", "sgd"], 0.5), (BY_LAYER, None)], ids=["clip", "layers"]
)
def test_norms_are_those_of_one_process(
    layout: str, world: int, rules: list[str], max_grad_norm: float | None
) -> None:
    ranks = on_ranks(world, clipped, layout, rules, max_grad_norm, limit_s=250)
    for runs in zip(*ranks, strict=True):
        norms, plain, _ = runs[0]
        assert norms == pytest.approx(plain, rel=NORM_ERROR, abs=0)
        assert all(own == norms for own, _, _ in runs), "ranks have different norms"
        assert disagreements([held for *_, held in runs]) == []
