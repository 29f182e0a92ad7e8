"""LARC with DTensors: the norms are those of whole tensors, on every process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import Bag, Net, local, placed_as, set_grads, shard
from ranks import on_ranks
from tiers import tiered
from torch.distributed.tensor import DTensor

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

SHAPES = [(96, 64), (33, 96), (33,), (3, 64), (1,)]
LAYOUTS = [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("rows", 2), ("columns fsdp", 4)]


def make(params: Any, inner: str) -> amp.apex.parallel.LARC:
    kind = torch.optim.SGD if inner == "torch" else amp.optim.SGD
    return amp.apex.parallel.LARC(kind(params, lr=0.1, momentum=0.9, weight_decay=0.1), 0.05)


def steps(layout: str, inner: str) -> float:
    """The largest relative difference from one process, after three steps."""
    params = list(shard(Bag(SHAPES, torch.float32), layout).parameters())
    plain = list(Bag(SHAPES, torch.float32).parameters())
    ours, theirs = make(params, inner), make(plain, inner)
    worst = 0.0
    for step in range(3):
        set_grads(plain, 5 * step)
        set_grads(params, 5 * step)
        ours.step()
        theirs.step()
    for param, whole in zip(params, plain, strict=True):
        wanted = local(placed_as(param, whole.detach()))
        if wanted.numel():
            error = (local(param) - wanted).abs().max() / whole.detach().abs().max()
            worst = max(worst, float(error))
    return worst


@pytest.mark.parametrize(
    ("layout", "world", "inner"),
    tiered(
        [(*each, inner) for inner in ("torch", "amp_mp") for each in LAYOUTS],
        [(*each, ("torch", "amp_mp")[n % 2]) for n, each in enumerate(LAYOUTS)],
    ),
)
def test_the_steps_are_those_of_one_process(layout: str, world: int, inner: str) -> None:
    """Norms add the same squares in another order, in float64; ratios are rounded to float32."""
    assert max(on_ranks(world, steps, layout, inner)) <= 4 * 2.0**-24


def gradients_still_to_be_added(world: int) -> bool:
    """A norm under sequence parallelism: each rank has the sum over its part of the sequence."""
    net = shard(Net(), "sp")
    larc = make(net.parameters(), "torch")
    torch.manual_seed(3)
    net(torch.randn(2, 4, 32)).square().mean().backward()
    unplaced = [p for p in net.parameters() if p.grad.placements != p.placements]
    before = [p.full_tensor().clone() for p in unplaced]
    larc.step()
    moved = [not torch.equal(p.full_tensor(), b) for p, b in zip(unplaced, before, strict=True)]
    return bool(moved) and all(moved) and all(isinstance(p, DTensor) for p in unplaced)


def test_gradients_that_are_sums_to_be_made_are_scaled_too() -> None:
    assert all(on_ranks(2, gradients_still_to_be_added, 2))
