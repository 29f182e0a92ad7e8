"""The norm of sharded gradients is that of the whole model, and costs one collective a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import NORM_ERROR, Bag, Net, differences, noise, scaled, set_grads, shard
from ranks import on_ranks
from tiers import tiered
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

import amp_mp as amp
from amp_mp.sharding.shards import split_groups

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

SHAPES = [(96, 64), (33, 96), (33,), (3, 64), (1,)]
NETS = [("fsdp", 2), ("hsdp", 4), ("tp", 2), ("tp fsdp", 4), ("sp fsdp", 4)]
# Collectives of a step that measures: one for each set of ranks over which a parameter is split.
COLLECTIVES = [
    *[("fsdp", 2, 1), ("fsdp", 4, 1), ("hsdp", 4, 1), ("rows", 2, 1), ("columns", 2, 1)],
    *[("columns fsdp", 4, 2), ("rows fsdp", 4, 2)],
]


def norms(layout: str, max_grad_norm: float) -> tuple[list[Any], float, float]:
    """What a step reports, what torch finds for the whole gradients, and the last gradient alone.

    The last parameter is plain or split over fewer ranks than the others in some layouts.
    """
    params = list(shard(Bag(SHAPES, torch.float32), layout).parameters())
    optimizer = amp.optim.SGD(params, lr=0.0, max_grad_norm=max_grad_norm)
    wholes = set_grads(params, 5)
    optimizer.step()
    report = optimizer.last_report()
    assert report is not None
    found = [optimizer.grad_norm, report.grad_norm, report.max_abs, optimizer.step_was_skipped]
    for param in params[:-1]:
        param.grad = None
    optimizer.step()
    alone = optimizer.grad_norm
    expected = float(torch.cat([g.double().reshape(-1) for g in wholes]).norm())
    assert alone == pytest.approx(float(wholes[-1].double().norm()), rel=NORM_ERROR)
    return found, expected, max(float(g.abs().max()) for g in wholes)


@pytest.mark.parametrize(("layout", "world"), [(name, n) for name, n, _ in COLLECTIVES])
def test_the_norm_is_that_of_the_whole_model(layout: str, world: int) -> None:
    ranks = on_ranks(world, norms, layout, 1.0)
    assert all(found == ranks[0][0] for found, *_ in ranks)
    (norm, reported, max_abs, skipped), expected, largest = ranks[0]
    assert norm == pytest.approx(expected, rel=NORM_ERROR)
    assert (reported, max_abs, skipped) == (norm, largest, False)


def adamw(params: list[Any], **options: Any) -> Any:
    return amp.optim.AdamW(params, lr=1e-3, **options).step


# A step of each, and its collectives for each set of ranks over which a parameter is split.
STEPS: dict[str, tuple[Callable[[list[Any]], Any], int]] = {
    "neither": (partial(adamw, check_overflow=False), 0),
    "clips": (partial(adamw, max_grad_norm=1.0), 1),
    "checks": (adamw, 1),
    "scaled": (scaled(amp.optim.AdamW), 1),
    "scaled and clips": (scaled(partial(amp.optim.AdamW, max_grad_norm=1.0)), 1),
    "scaled, torch's": (scaled(partial(torch.optim.AdamW, foreach=False)), 1),
    "LARS": (lambda params: amp.optim.LARS(params, lr=0.1).step, 1),
    "LARS clips": (lambda params: amp.optim.LARS(params, lr=0.1, max_grad_norm=1.0).step, 1),
    "NovoGrad": (lambda params: amp.optim.NovoGrad(params, lr=0.1).step, 1),
    "LAMB": (lambda params: amp.optim.LAMB(params, lr=0.1).step, 2),
    "LARC": (lambda params: amp.apex.parallel.LARC(amp.optim.SGD(params, lr=0.1)).step, 2),
}


def collectives(layout: str) -> dict[str, list[int]]:
    """The collectives of each kind of step, by the gradients that the second half of ranks lacks.

    These are: none, the first parameter's, and those of all that are split but the last.
    """
    found = {}
    for name, (make, _) in STEPS.items():
        params = list(shard(Bag(SHAPES, torch.bfloat16), layout).parameters())
        step = make(params)
        counts = []
        parts = [param for param in params if split_groups(param)]
        for lacking in ([], params[:1], parts[:-1]):
            set_grads(params, 5)
            step()
            if dist.get_rank() >= dist.get_world_size() // 2:
                for param in lacking:
                    param.grad = None
            with CommDebugMode() as mode:
                step()
            counts.append(sum(mode.get_comm_counts().values()))
        found[name] = counts
    return found


@pytest.mark.parametrize(("layout", "world", "expected"), tiered(COLLECTIVES, COLLECTIVES[4:6]))
def test_collectives_of_a_step(layout: str, world: int, expected: int) -> None:
    """They do not depend on which gradients a rank has, or it would wait for ever."""
    wanted = {name: [expected * each] * 3 for name, (_, each) in STEPS.items()}
    assert on_ranks(world, collectives, layout) == [wanted] * world


def norms_without(layout: str) -> list[Any]:
    """Norm and largest |g| where only half of the ranks have the first gradients, and none has."""
    params = list(shard(Bag(SHAPES, torch.bfloat16), layout).parameters())
    optimizer = amp.optim.AdamW(params, lr=1e-3, max_grad_norm=1.0)
    found = []
    for lacking in ([], params[:2], params):
        set_grads(params, 5)
        optimizer.step()
        if dist.get_rank() % 2 or len(lacking) == len(params):
            for param in lacking:
                param.grad = None
        optimizer.step()
        report = optimizer.last_report(wait=True)
        assert report is not None
        found.append((report.grad_norm, report.max_abs, report.skipped))
    return found


@pytest.mark.parametrize(("layout", "world"), [("fsdp", 2), ("hsdp", 4), ("columns fsdp", 4)])
def test_every_rank_has_the_same_norm_whatever_gradients_it_has(layout: str, world: int) -> None:
    first, *others = on_ranks(world, norms_without, layout)
    assert all(found == first for found in others)
    whole, part, nothing = (norm for norm, *_ in first)
    assert nothing == 0.0
    assert 0.0 < part < whole


def trained(layout: str) -> list[tuple[list[float], list[Tensor]]]:
    """Norms and whole weights after five clipped steps of a sharded net, and of a plain one."""
    runs = []
    for net in (shard(Net(), layout), Net()):
        optimizer = amp.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, max_grad_norm=0.01)
        found = []
        for step in range(5):
            optimizer.zero_grad()
            net(noise((4, 8, 32), step)).square().mean().backward()
            optimizer.step()
            assert optimizer.grad_norm is not None
            found.append(optimizer.grad_norm)
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
        runs.append((found, [w.detach() for w in weights]))
    return runs


@pytest.mark.parametrize(("layout", "world"), [*NETS, ("sp", 2)])
def test_a_sharded_net_trains_with_the_norms_of_a_plain_one(layout: str, world: int) -> None:
    ranks = on_ranks(world, trained, layout)
    for (found, weights), (expected, plain) in ranks:
        # Matrix products of parts of the numbers add up in another order.
        assert found == pytest.approx(expected, rel=1e-5)
        for own, whole in zip(weights, plain, strict=True):
            torch.testing.assert_close(own, whole, rtol=1e-5, atol=1e-6)
        assert found == ranks[0][0][0], "the ranks have different norms"


def partial_gradients(preset: str) -> tuple[list[str], float, float]:
    """Steps of a sequence-parallel norm, whose gradient is a sum that no rank has yet.

    Returns where the rank parts from one process that is given the summed gradient, and the norms.
    """
    net, norm = shard(Net(torch.bfloat16), "sp"), nn.LayerNorm(32, dtype=torch.bfloat16)
    split, plain = list(net.norm.parameters()), list(norm.parameters())
    optimizers = [
        amp.optim.AdamW(params, lr=0.01, max_grad_norm=0.5, memory=preset)
        for params in (split, plain)
    ]
    for step in range(3):
        net.zero_grad()
        net(noise((4, 8, 32), step).bfloat16()).float().square().mean().backward()
        for param, whole in zip(split, plain, strict=True):
            assert isinstance(param.grad, DTensor)
            assert param.grad.placements == (Partial(),)
            whole.grad = param.grad.full_tensor().clone()
        for optimizer in optimizers:
            optimizer.step()
    found, expected = (float(optimizer.grad_norm or 0.0) for optimizer in optimizers)
    return differences(split, optimizers[0], plain, optimizers[1]), found, expected


@pytest.mark.parametrize("preset", ["exact", "tiny"])
def test_a_partial_gradient_is_summed_before_it_is_used(preset: str) -> None:
    for parts, found, expected in on_ranks(2, partial_gradients, preset):
        assert parts == []
        assert found == expected  # replicated: every rank has all of it, and counts it once
