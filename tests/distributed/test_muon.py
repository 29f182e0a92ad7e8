"""Muon on matrices that are split over processes: each is orthogonalised whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from around_sharding import error
from layouts import (
    Bag,
    Net,
    differences,
    digests,
    disagreements,
    local,
    mesh_of,
    misplaced,
    set_grads,
    shard,
    train,
)
from ranks import LARGE, on_ranks
from tiers import tiered
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import amp_mp as amp
from amp_mp.optim.muon import matrices

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

LOW = torch.bfloat16
# Uneven rows, fewer rows than ranks, two of one shape, a stack of three experts and one that is
# split between two, more columns than rows; the last one stays plain under tensor parallelism.
SHAPES = [(96, 64), (33, 96), (1, 32), (3, 64), (3, 32, 64), (5, 32, 32), (96, 64), (64, 8, 2, 2)]
SPLITS = [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("rows", 2), ("columns", 2), ("rows fsdp", 4)]
if LARGE:
    SPLITS += [("fsdp", 1), ("columns fsdp", 4)]


# Numbers of each of the three groups below.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "": ({}, {"split": 3}, {}),
    "unequal blocks": (
        {"ns_coefficients": "polar_express", "adjust_lr_fn": "sqrt"},
        {"split": (50, 30, 8, 8), "adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "cans"},
        {"split": (16, 48), "ns_coefficients": [(3.0, -3.0, 1.0), (1.5, -0.5, 0.0)]},
    ),
    "normalised blocks": (
        {"normalize": "rows", "ns_coefficients": "polar_express"},
        {"normalize": "rows", "split": (50, 30, 8, 8), "adjust_lr_fn": "match_rms_adamw"},
        {"normalize": "rows", "split": (16, 48), "cautious": True},
    ),
    "other dtypes": (
        {"ns_dtype": torch.float32, "ns_coefficients": "deepseek", "ns_gram": "auto"},
        {"ns_dtype": torch.float16, "split": (32, 16, 16, 32), "adjust_lr_fn": "sqrt"},
        {"ns_dtype": torch.float32, "ns_steps": 2, "eps": 1e-7, "ns_gram": True},
    ),
    "hyperball": (
        {"hyperball": True},
        {"hyperball": True, "split": 3},
        {"hyperball": True, "momentum": 0.5},
    ),
}


def groups_of(model: Any, options: str) -> list[dict[str, Any]]:
    params = list(model.parameters())
    matrices, blocks, flat = OPTIONS[options]
    return [
        {"params": [p for p in params if p.dim() < 4 and p.shape[-2] != 96], **matrices},
        {"params": [p for p in params if p.shape[-2] == 96], **blocks},
        {"params": [p for p in params if p.dim() == 4], "flatten": True, "lr": 0.01, **flat},
    ]


def compare(layout: str, memories: list[str], options: str = "") -> list[str]:
    found = []
    for dtype in (LOW, torch.float32):
        for memory in memories:
            runs: list[Any] = []
            for model in (shard(Bag(SHAPES, dtype), layout), Bag(SHAPES, dtype)):
                groups = groups_of(model, options)
                optimizer = amp.optim.Muon(groups, lr=0.02, memory=memory, seed=3)
                train(model, optimizer, range(4))
                runs += [list(model.parameters()), optimizer]
            wrong = differences(*runs) + misplaced(runs[1])
            found += [f"{memory}, {dtype}, {options}: {text}" for text in wrong]
    return found


@pytest.mark.parametrize(
    ("layout", "world"), SPLITS if LARGE else tiered(SPLITS, [SPLITS[0], SPLITS[3], SPLITS[5]])
)
def test_matrices_have_the_bits_of_one_process(layout: str, world: int) -> None:
    memories = ["float32", "exact"] if layout != "fsdp" else ["exact", "lean"]
    for rank in on_ranks(world, compare, layout, memories, limit_s=200):
        assert rank == []


OTHERS = [o for o in OPTIONS if o]
LAYOUTS = [("fsdp", 2), ("fsdp", 4), ("rows", 2), ("rows fsdp", 4), ("fsdp", 1)]
CASES = [  # NorMuon needs whole rows
    (*layout, options)
    for layout in LAYOUTS
    for options in OTHERS
    if "rows" not in layout[0] or options != "normalised blocks"
]
ALWAYS = [("hsdp", 4, "normalised blocks"), ("columns", 2, "normalised blocks")]
ALWAYS += [("fsdp", world, "hyperball") for world in (1, 2, 4)]


@pytest.mark.parametrize(
    ("layout", "world", "options"),
    [*(CASES if LARGE else tiered(CASES, [CASES[1], CASES[4], CASES[9]])), *ALWAYS],
)
def test_every_option_has_the_bits_of_one_process(layout: str, world: int, options: str) -> None:
    for rank in on_ranks(world, compare, layout, ["exact"], options, limit_s=200):
        assert rank == []


def products(layout: str) -> list[list[int]]:
    """The shapes of the stacks that this rank makes orthogonal in a step."""
    seen: list[list[int]] = []
    kept, whole = matrices.orthogonalise_, matrices.WholeMatrices

    def watched(stack: Tensor, *rest: Any) -> None:
        seen.append(list(stack.shape))
        kept(stack, *rest)

    def gathered(tensors: list[Tensor], *rest: Any) -> Any:
        if len(tensors) == 1:
            seen.append(list(tensors[0].shape))
        return whole(tensors, *rest)

    model = shard(Bag([(32, 64)] * 8 + [(4, 16, 16)], torch.float32), layout)
    optimizer = amp.optim.Muon(model.parameters())
    set_grads(list(model.parameters()), 1)
    matrices.orthogonalise_, matrices.WholeMatrices = watched, gathered
    try:
        optimizer.step()
    finally:
        matrices.orthogonalise_, matrices.WholeMatrices = kept, whole
    return seen


def test_each_matrix_is_one_process_s_and_experts_stay_where_they_are() -> None:
    for seen in on_ranks(4, products, "fsdp"):
        assert sorted(seen) == [[1, 16, 16], [2, 32, 64]]
    # Columns cannot go to one process; all of them gather.
    for seen in on_ranks(2, products, "rows"):
        assert len(seen) == 8


def clipped(layout: str) -> list[Any]:
    """Norms, skips and digests of a model that Muon and AdamW share, with overflow on one rank."""
    model = shard(Net(torch.bfloat16), layout)
    params = list(model.parameters())
    optimizer = amp.optim.Muon(model, lr=0.02, max_grad_norm=0.5, memory="lean")
    found = []
    for step in range(5):
        set_grads(params, 100 * step)
        bad = local(params[2].grad)
        if step == 3 and dist.get_rank() == 1:
            bad.view(-1)[:1] = math.inf
        optimizer.step()
        found.append((optimizer.step_was_skipped, optimizer.grad_norm))
    return [found, digests(params, optimizer), [g["use_muon"] for g in optimizer.param_groups]]


@pytest.mark.parametrize(("layout", "world"), [("fsdp", 2), ("tp fsdp", 4)])
def test_all_processes_skip_and_clip_together(layout: str, world: int) -> None:
    ranks = on_ranks(world, clipped, layout)
    reports, _, flags = ranks[0]
    assert [skipped for skipped, _ in reports] == [False, False, False, True, False]
    assert flags == [True, False]
    assert all(own[0][:3] == reports[:3] for own in ranks)
    assert disagreements([held for _, held, _ in ranks]) == []


class Mixed(Bag):
    """The second and the fourth are not sharded, and the shapes are in no order."""

    def __init__(self) -> None:
        super().__init__([(64, 32), (16, 8), (8, 64), (32, 8)], torch.float32)


def norms_of_mixed() -> tuple[float, float]:
    """The norm where two gradients are whole on each of two ranks, and that of one process."""
    model, whole = Mixed(), Mixed()
    fully_shard(model, mesh=mesh_of("fsdp"), ignored_params={model.p1, model.p3})
    found = []
    for own in (model, whole):
        optimizer = amp.optim.Muon(own.parameters(), max_grad_norm=0.5)
        set_grads(list(own.parameters()), 3)
        optimizer.step()
        found.append(optimizer.grad_norm)
    return found[0], found[1]


def test_gradients_that_are_whole_count_once() -> None:
    for found, wanted in on_ranks(2, norms_of_mixed):
        assert found == pytest.approx(wanted, rel=1e-6)


def resumed(layout: str, normalize: str | None) -> list[str]:
    """A sharded run whose state one process takes over."""
    model, whole = shard(Bag(SHAPES[:3], LOW), layout), Bag(SHAPES[:3], LOW)
    one, two = (amp.optim.Muon(each.parameters(), normalize=normalize) for each in (model, whole))
    for params, optimizer in ((model.parameters(), one), (whole.parameters(), two)):
        set_grads(list(params), 5)
        optimizer.step()
    again = amp.optim.Muon(whole.parameters(), lr=0.5)
    again.load_state_dict(one.state_dict())
    for params, optimizer in ((model.parameters(), one), (whole.parameters(), again)):
        set_grads(list(params), 6)
        optimizer.step()
    return differences(list(model.parameters()), one, list(whole.parameters()), again)


@pytest.mark.parametrize("normalize", [None, "rows"])
def test_one_process_takes_over_a_sharded_run(normalize: str | None) -> None:
    for rank in on_ranks(2, resumed, "fsdp", normalize):
        assert rank == []


def released(layout: str) -> str:
    model = shard(Bag(SHAPES[:2], torch.float32), layout)
    return error(amp.optim.Muon(model.parameters()).attach, model)


def test_shards_are_not_released() -> None:
    for text in on_ranks(2, released, "fsdp"):
        assert "whole matrices" in text


def split_by_columns() -> str:
    model = shard(Bag([(64, 32)] * 2, torch.float32), "rows")
    optimizer = amp.optim.Muon(model.parameters(), normalize="rows")
    set_grads(list(model.parameters()), 1)
    return error(optimizer.step)


def test_columns_on_several_processes_are_refused_by_normuon() -> None:
    for text in on_ranks(2, split_by_columns):
        assert "split along its columns over processes" in text
