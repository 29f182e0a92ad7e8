"""process_groups=: ZeroRedundancyOptimizer, the stages of a pipeline, and wrong processes."""

from __future__ import annotations

import io
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from around_sharding import adamw, apart, error, fsdp, loss_of, net, tensor_parallel, train, whole
from around_sharding import even as even_net
from helpers import NO_GRADIENT, raw_bytes, warns
from layouts import NORM_ERROR, Bag, digests, made_once, noise, placed_as, set_grads
from ranks import on_ranks
from tiers import tiered
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

LOW = torch.bfloat16
SHAPES = [(96, 64), (33, 96), (1, 33), (33,), (64, 8, 2, 2), (1,)]
STEPS = 4
NAN_AT = 2  # the step that overflows


def weights(optimizer_class: Any, zero: bool, **options: Any) -> list[Any]:
    """Bits of the weights after each step, one of which has a NaN in the first parameter."""
    model = Bag(SHAPES, LOW)
    params = list(model.parameters())
    if zero:
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class, **options)
        torch.save(optimizer.param_groups, io.BytesIO())  # which no process group allows
    else:
        optimizer = optimizer_class(params, **options)
    found = []
    for step in range(STEPS):
        set_grads(params, 100 * step)
        if step == NAN_AT:
            params[0].grad[0] = float("nan")
        optimizer.step()
        found.append([raw_bytes(p) for p in params])
    return found


def compare(name: str, preset: str, more: dict[str, float]) -> list[bool]:
    kind, options = getattr(amp.optim, name), {"lr": 1e-2, "memory": preset, **more}
    plain, zero = weights(kind, False, **options), weights(kind, True, **options)
    assert plain[NAN_AT] == plain[NAN_AT - 1], "the step with the NaN was not skipped"
    return [a == b for a, b in zip(plain, zero, strict=True)]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "LAMB"])
@pytest.mark.parametrize("preset", ["float32", "exact"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=["checks", "clips"])
def test_zero_clips_and_skips_as_one_process(
    name: str, preset: str, options: dict[str, float]
) -> None:
    """It takes the group of the ZeroRedundancyOptimizer that makes it."""
    assert on_ranks(2, compare, name, preset, options) == [[True] * STEPS] * 2


def prepared(zero: bool, **options: Any) -> list[Any]:
    """Bits of a prepared model's weights after each step, in DistributedDataParallel."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 3))
    amp.prepare(model, LOW, keep_fp32_only=[])
    ddp = DistributedDataParallel(model)
    own: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 0.5}
    if zero:
        own |= options
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), amp.optim.AdamW, **own)
    else:
        optimizer = amp.optim.AdamW(model.parameters(), **own)
    torch.manual_seed(100 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        ddp(torch.randn(8, 48, dtype=LOW)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([raw_bytes(p) for p in model.parameters()])
    return found


@pytest.mark.parametrize("views", [False, True])
def test_a_prepared_model_of_one_dtype_trains_as_in_ddp(views: bool) -> None:
    """torch's ZeroRedundancyOptimizer takes one dtype, hence keep_fp32_only=[]."""
    plain = on_ranks(2, prepared, False)
    assert on_ranks(2, prepared, True, parameters_as_bucket_view=views) == plain
    assert plain[0] == plain[1]
    assert plain[0][0] != plain[0][-1]


def two_dtypes() -> str:
    model = amp.prepare(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), LOW)
    return error(ZeroRedundancyOptimizer, model.parameters(), amp.optim.AdamW)


def test_what_torch_says_of_two_dtypes_is_in_the_docs() -> None:
    """torch raises it before it makes the optimizer of amp_mp."""
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    for text in on_ranks(2, two_dtypes):
        said = text.removeprefix("ValueError: ").partition(" but got")[0]
        assert said
        assert said in page


def scaled(kind: Any, **options: Any) -> tuple[float, bool]:
    """The scale after an iteration in which one stage overflows, and whether weights changed."""
    stage = torch.nn.Parameter(torch.ones(4))
    groups = {"process_groups": dist.group.WORLD}
    own = groups if kind.__module__.startswith("amp_mp") else {}
    optimizer = kind([stage], lr=0.1, **own, **options)
    scaler = amp.GradScaler("cpu", init_scale=8.0, **groups)
    scaler.scale((stage * (float("inf") if dist.get_rank() == 0 else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), bool((stage != 1).any())


@pytest.mark.parametrize("kind", [amp.optim.SGD, torch.optim.SGD, torch.optim.AdamW])
def test_a_scaler_backs_off_on_every_stage(kind: Any) -> None:
    assert on_ranks(2, scaled, kind) == [(4.0, False)] * 2


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
    for step, idle in enumerate((True, False, True)):
        set_grads(params, 0)
        if idle and index == 0:
            optimizer.zero_grad()
        with warns(NO_GRADIENT, step == index == 0):
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


def named_again(kind: str, through: str) -> tuple[str, float]:
    """The user names the processes over which the model is split or copied already."""
    if kind == "hsdp":
        model: Any = fsdp(net(), mesh=made_once((1, 2), ("replicas", "dp")))
    else:
        model = tensor_parallel(even_net()) if kind == "tp" else fsdp(net())
    groups = {"world": dist.group.WORLD, "mesh": next(model.parameters()).device_mesh}[through]
    optimizer = adamw(model.parameters(), max_grad_norm=1.0, process_groups=groups)
    before = whole(model)
    return error(train, model, optimizer, 1), apart(before, whole(model))


@pytest.mark.parametrize(
    ("kind", "through"),
    tiered(
        itertools.product(["fsdp", "tp", "hsdp"], ["world", "mesh"]),
        [("fsdp", "world"), ("hsdp", "mesh")],
    ),
)
def test_processes_that_share_the_parameters_are_refused(kind: str, through: str) -> None:
    for rank, (raised, moved) in enumerate(on_ranks(2, named_again, kind, through)):
        assert f"same parameters, [{1 - rank}]" in raised
        assert moved == 0


def scaler_with_the_mesh() -> str:
    model = fsdp(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp.GradScaler("cpu", process_groups=dist.group.WORLD)
    scaler.scale(loss_of(model)).backward()
    return error(scaler.step, optimizer)


def test_a_scaler_refuses_them_too() -> None:
    assert "counted twice" in on_ranks(2, scaler_with_the_mesh)[0]


def copies() -> list[str]:
    model = DistributedDataParallel(net())
    optimizer = adamw(model.parameters(), max_grad_norm=1.0, process_groups=dist.group.WORLD)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(model, optimizer, 2)
    return [str(each.message) for each in found if "amp_mp" in str(each.message)]


def test_copies_of_a_model_give_a_warning_once() -> None:
    for found in on_ranks(2, copies):
        assert len(found) == 1
        assert "counted 2 times" in found[0]
