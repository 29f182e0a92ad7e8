"""process_groups= with ZeroRedundancyOptimizer, and GradScaler around stages of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from around_sharding import error
from helpers import raw_bytes
from layouts import Bag, set_grads
from ranks import on_ranks
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
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
        groups = {"process_groups": dist.group.WORLD}
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class, **groups, **options)
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


def compare(name: str, preset: str) -> list[bool]:
    kind, options = getattr(amp.optim, name), {"lr": 1e-2, "memory": preset, "max_grad_norm": 0.5}
    plain, zero = weights(kind, False, **options), weights(kind, True, **options)
    assert plain[NAN_AT] == plain[NAN_AT - 1], "the step with the NaN was not skipped"
    return [a == b for a, b in zip(plain, zero, strict=True)]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "LAMB"])
@pytest.mark.parametrize("preset", ["float32", "exact"])
def test_zero_clips_and_skips_as_one_process(name: str, preset: str) -> None:
    assert on_ranks(2, compare, name, preset) == [[True] * STEPS] * 2


def prepared(zero: bool, **options: Any) -> list[Any]:
    """Bits of a prepared model's weights after each step, in DistributedDataParallel."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 3))
    amp.prepare(model, LOW, keep_fp32_only=[])
    ddp = DistributedDataParallel(model)
    own: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 0.5}
    if zero:
        own |= {"process_groups": dist.group.WORLD, **options}
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


def refused(**options: Any) -> str:
    return error(ZeroRedundancyOptimizer, Bag(SHAPES, LOW).parameters(), amp.optim.AdamW, **options)


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"check_overflow": True}])
def test_zero_without_process_groups_is_refused(options: dict[str, Any]) -> None:
    assert all("process_groups" in text for text in on_ranks(2, refused, **options))
    assert on_ranks(2, refused) == ["", ""]  # without clipping each process may step alone


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
