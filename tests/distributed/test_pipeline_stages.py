"""process_groups: ranks that hold different parameters, as pipeline stages do, decide together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import NORM_ERROR, Bag, digests, made_once, noise, placed_as, set_grads
from ranks import on_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

STAGES: list[list[tuple[int, ...]]] = [[(33,), (96, 64)], [(3, 64), (5, 32), (7,)]]
INF = float("inf")


def stage() -> tuple[int, list[Any], Any]:
    """This rank's stage, its parameters, and the group that connects it to the other stage.

    Two ranks have a plain stage each. Of four, two share a stage, split by FSDP.
    """
    if dist.get_world_size() == 2:
        index, model = dist.get_rank(), Bag(STAGES[dist.get_rank()], torch.bfloat16)
        return index, list(model.parameters()), dist.group.WORLD
    mesh = made_once((2, 2), ("pp", "dp"))
    index = mesh.get_local_rank("pp")
    model = Bag(STAGES[index], torch.bfloat16)
    fully_shard(model, mesh=mesh["dp"])
    return index, list(model.parameters()), mesh.get_group("pp")


def whole_norm(seed: int, stages: list[list[tuple[int, ...]]] = STAGES) -> float:
    """The norm of these stages' gradients."""
    grads = [
        noise(shape, seed + i).bfloat16().double().reshape(-1)
        for shapes in stages
        for i, shape in enumerate(shapes)
    ]
    return float(torch.cat(grads).norm())


def clipped() -> tuple[list[Any], list[Any], int]:
    """What each clipped step reports and should; collectives of the last one."""
    _, params, group = stage()
    optimizer = amp.optim.AdamW(params, lr=0.01, max_grad_norm=1.0, process_groups=(group,))
    found, expected = [], []
    for step in range(3):
        set_grads(params, 10 * step)
        with CommDebugMode() as mode:
            optimizer.step()
        found.append(optimizer.grad_norm)
        expected.append(whole_norm(10 * step))
    return found, expected, sum(mode.get_comm_counts().values())


@pytest.mark.parametrize(("world", "collectives"), [(2, 1), (4, 2)])
def test_the_norm_is_that_of_all_stages(world: int, collectives: int) -> None:
    ranks = on_ranks(world, clipped)
    for found, expected, count in ranks:
        assert found == pytest.approx(expected, rel=NORM_ERROR)
        assert found == ranks[0][0], "the ranks have different norms"
        assert count == collectives


def one_idle_stage() -> list[Any]:
    """The norms where the first stage has no gradients, in its first step and in a later one."""
    index, params, group = stage()
    optimizer = amp.optim.AdamW(params, lr=0.01, max_grad_norm=1.0, process_groups=(group,))
    found = []
    for idle in (True, False, True):
        set_grads(params, 0)
        if idle and index == 0:
            optimizer.zero_grad()
        optimizer.step()
        found.append(optimizer.grad_norm)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_stage_without_gradients_takes_part(world: int) -> None:
    ranks = on_ranks(world, one_idle_stage)
    idle, all_stages = whole_norm(0, STAGES[1:]), whole_norm(0)
    assert ranks[0] == pytest.approx([idle, all_stages, idle], rel=NORM_ERROR)
    assert all(found == ranks[0] for found in ranks)


def overflows(scaled: bool) -> list[tuple[bool, float, bool]]:
    """For an overflow in each parameter of each stage, and then none: skipped, scale, changed."""
    index, params, group = stage()
    more = {} if scaled else {"check_overflow": True}
    optimizer = amp.optim.AdamW(params, lr=0.01, process_groups=(group,), **more)
    scaler = amp.GradScaler("cpu", init_scale=2.0**20, enabled=scaled)
    set_grads(params, 0)
    optimizer.step()
    cases = [(s, i) for s, shapes in enumerate(STAGES) for i in range(len(shapes))]
    found = []
    for where in [*cases, None]:
        set_grads(params, 5)
        if where is not None and where[0] == index:
            grad = noise(STAGES[index][where[1]], 5).bfloat16()
            grad.view(-1)[-1] = INF
            params[where[1]].grad = placed_as(params[where[1]], grad)
        before = digests(params, optimizer)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        changed = digests(params, optimizer) != before
        found.append((optimizer.step_was_skipped, scaler.get_scale(), changed))
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scaled", [False, True], ids=["check_overflow", "GradScaler"])
def test_an_overflow_in_one_stage_skips_the_step_of_all(world: int, scaled: bool) -> None:
    cases = sum(map(len, STAGES))
    scales = [2.0 ** (19 - i) if scaled else 1.0 for i in range(cases)]
    for found in on_ranks(world, overflows, scaled):
        assert found[:-1] == [(True, scale, False) for scale in scales]
        assert found[-1] == (False, scales[-1], True)


def without_groups() -> tuple[float | None, float]:
    """Stages that are told of no group clip by their own norm."""
    _, params, _ = stage()
    optimizer = amp.optim.AdamW(params, lr=0.01, max_grad_norm=1.0)
    wholes = set_grads(params, 0)
    optimizer.step()
    return optimizer.grad_norm, float(torch.cat([g.double().reshape(-1) for g in wholes]).norm())


def test_without_process_groups_each_stage_has_its_own_norm() -> None:
    ranks = on_ranks(2, without_groups)
    for found, expected in ranks:
        assert found == pytest.approx(expected, rel=NORM_ERROR)
    assert ranks[0] != ranks[1]


def unusable() -> str:
    params = list(Bag([(3,)], torch.float32).parameters())
    with pytest.raises((TypeError, ValueError)) as caught:
        amp.optim.AdamW(params, lr=0.01, process_groups=("pp",))
    return str(caught.value)


def test_a_group_that_is_none_is_refused_by_name() -> None:
    assert all("process_groups" in message for message in on_ranks(2, unusable))
