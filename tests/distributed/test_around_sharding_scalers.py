"""Loss scalers around sharded models: torch's, amp_mp's, FP16_Optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from around_sharding import (
    CLOSE,
    adamw,
    apart,
    error,
    even,
    file_of,
    fsdp,
    loss_of,
    net,
    poison,
    steps_of,
    tensor_parallel,
    train,
    whole,
)
from helpers import raw_bytes
from ranks import on_ranks
from tiers import in_turn
from torch import nn

import amp_mp as amp
from amp_mp.sharding.shards import local_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

INF = float("inf")


def scaled(model: Any, optimizer: Any, scaler: Any, poisoned: int | None = None) -> None:
    """Three iterations; in the second one rank's gradient overflows."""
    for step in range(3):
        scaler.scale(loss_of(model)).backward()
        if step == 1 and poisoned is not None:
            poison(model, poisoned)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def stock_scaler_on_fsdp(poisoned: int | None) -> tuple[Any, ...]:
    model = fsdp(net())
    optimizer, scaler = adamw(model.parameters()), torch.amp.GradScaler("cpu", init_scale=256.0)
    scaled(model, optimizer, scaler, poisoned)
    return scaler.get_scale(), steps_of(optimizer)


@pytest.mark.parametrize(("poisoned", "expected"), [(None, (256, 3)), (0, (128, 2)), (1, (128, 2))])
def test_torchs_scaler_agrees_on_all_ranks_of_fsdp(poisoned: Any, expected: Any) -> None:
    scale, steps = expected
    assert on_ranks(2, stock_scaler_on_fsdp, poisoned) == [(scale, [steps] * 8)] * 2


def stock_scaler_elsewhere(kind: str, unscales: bool) -> tuple[str, float]:
    model = tensor_parallel(even()) if kind == "tp" else even()
    groups = None if kind == "tp" else dist.group.WORLD
    optimizer = adamw(reversed(list(model.parameters())), process_groups=groups)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = whole(model)
    scaler.scale(loss_of(model)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    return error(scaler.step, optimizer), apart(before, whole(model))


@pytest.mark.parametrize("kind", ["tp", "process_groups"])
@pytest.mark.parametrize("unscales", [False, True])
def test_torchs_scaler_is_refused_where_it_would_miss_overflows(kind: str, unscales: bool) -> None:
    for raised, moved in on_ranks(2, stock_scaler_elsewhere, kind, unscales):
        assert "Use amp_mp.GradScaler in its place" in raised
        assert moved == 0


def clipped_by_hand(model: Any) -> list[torch.Tensor]:
    optimizer, scaler = adamw(model.parameters()), amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(3):
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return whole(model)


def clipped_by_hand_on_shards() -> float:
    return apart(clipped_by_hand(fsdp(net())), clipped_by_hand(net()))


def test_unscale_and_clip_by_hand() -> None:
    assert max(on_ranks(2, clipped_by_hand_on_shards)) < CLOSE


def with_fp16_optimizer(
    model: Any, kind: Any, norm: float, steps: int = 3, optimizer: Any = None
) -> tuple[Any, list[float]]:
    optimizer = optimizer or amp.FP16_Optimizer(
        kind(model.parameters(), lr=0.1), static_loss_scale=16.0, verbose=False
    )
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        norms.append(optimizer.clip_master_grads(0.1, norm))
        optimizer.step()
    return optimizer, norms


def clips_masters(kind: Any, dtype: torch.dtype, norm: float) -> tuple[list[float], ...]:
    sharded, plain = fsdp(net(dtype)), net(dtype)
    found = with_fp16_optimizer(sharded, kind, norm)[1]
    expected = with_fp16_optimizer(plain, kind, norm)[1]
    return found, expected, [apart(whole(sharded), whole(plain))]


@pytest.mark.parametrize(
    ("norm", "kind"), in_turn([1, 2, 3, INF], [amp.optim.SGD, torch.optim.SGD, torch.optim.AdamW])
)
def test_fp16_optimizer_clips_by_the_norm_of_the_whole(kind: Any, norm: float) -> None:
    results = on_ranks(2, clips_masters, kind, torch.bfloat16, norm)
    for found, expected, differences in results:
        assert found == results[0][0]
        assert found == pytest.approx(expected, rel=1e-2)  # torch rounds norms to bfloat16
        assert max(differences) <= 2.0**-6


def held(model: Any, optimizer: Any) -> list[Any]:
    """Bits of a rank's weights, masters and states."""
    tensors = [*model.parameters()]
    tensors += [master for group in optimizer.fp32_from_fp16_groups for master in group]
    for state in optimizer.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [raw_bytes(local_of(tensor).detach().clone()) for tensor in tensors]


def resumed(kind: Any, dtype: torch.dtype) -> tuple[bool, str, bool]:
    """Whether the own file gives all bits back; what loading the other rank's file raises."""
    model = fsdp(even().to(dtype))
    optimizer, _ = with_fp16_optimizer(model, kind, 2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    own = file_of(state, dist.get_rank())
    other = file_of(state, 1 - dist.get_rank())
    before = held(model, optimizer)
    again = fsdp(even().to(dtype))
    again.load_state_dict(own["model"])
    new, _ = with_fp16_optimizer(again, kind, 2, 0)
    refused = error(new.load_state_dict, other["optimizer"])
    new.load_state_dict(own["optimizer"])
    same = held(again, new) == before
    with_fp16_optimizer(again, kind, 2, 2, new)  # and goes on
    masters = [type(p).__name__ for p in amp.apex.amp.master_params(new)]
    return same, refused, set(masters) == {"DTensor"}


@pytest.mark.parametrize("kind", [amp.optim.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp16_optimizer_resumes_from_the_same_ranks_file(kind: Any, dtype: torch.dtype) -> None:
    for rank, (same, refused, all_dtensors) in enumerate(on_ranks(2, resumed, kind, dtype)):
        assert same
        assert f"part of rank {1 - rank}" in refused
        assert all_dtensors or kind is amp.optim.AdamW


def scale_loss_of_the_handle(make: Any) -> float:
    handle = amp.init(device_type="cpu", dtype=torch.bfloat16)
    try:
        model = fsdp(net())
        optimizer = make(model.parameters(), lr=0.1)
        for _ in range(3):
            with handle.scale_loss(loss_of(model), optimizer) as loss:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        handle._deactivate()
        amp.casting.uninstall()
    plain = net()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    return apart(whole(model), whole(plain))


@pytest.mark.parametrize("make", [amp.optim.AdamW, torch.optim.AdamW])
def test_scale_loss_of_amp_init(make: Any) -> None:
    assert max(on_ranks(2, scale_loss_of_the_handle, make)) < 0.05  # casts to bfloat16
