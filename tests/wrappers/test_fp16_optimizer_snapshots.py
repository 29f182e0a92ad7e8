"""FP16_Optimizer's state dicts; around a fused optimizer the same results without copies."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import raw_bytes, through_a_file
from torch import Tensor, nn
from wrapping import INNER, LOW, Mixed, everything, masters_of, train_step, wrap

import amp_mp as amp
from amp_mp.scaling import Backoff

# Snapshots.


def assert_plain(value: Any) -> None:
    """Made of nothing but what weights_only=True loads and any format can hold."""
    assert type(value) in (dict, list, tuple, int, float, bool, str, type(None), Tensor), value
    if isinstance(value, dict):
        assert_plain(list(value))
        assert_plain(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            assert_plain(item)


@pytest.mark.parametrize("name", INNER)
def test_a_snapshot_is_plain_and_keeps_apex_names(device: str, name: str) -> None:
    model = Mixed(torch.float16).to(device)
    optimizer = wrap(INNER[name](model.parameters()), dynamic_loss_scale=True)
    train_step(model, optimizer, torch.randn(3, 4, device=device))
    saved = optimizer.state_dict()
    assert_plain(saved)
    assert set(saved) == {
        "loss_scaler",
        "dynamic_loss_scale",
        "overflow",
        "first_closure_call_this_step",
        "optimizer_state_dict",
        "fp32_from_fp16",
    }
    assert raw_bytes(through_a_file(saved, weights_only=True)) == raw_bytes(saved)


@pytest.mark.parametrize("name", INNER)
def test_a_snapshot_follows_neither_the_optimizer_it_came_from_nor_the_one_it_went_to(
    device: str, name: str
) -> None:
    x = torch.randn(3, 4, device=device)
    model, other = (Mixed(torch.float16).to(device) for _ in range(2))
    optimizer = wrap(INNER[name](model.parameters()))
    train_step(model, optimizer, x)
    saved = optimizer.state_dict()
    before = raw_bytes(saved)
    train_step(model, optimizer, x)
    assert raw_bytes(saved) == before
    second = wrap(INNER[name](other.parameters()))
    second.load_state_dict(saved)
    train_step(other, second, x)
    assert raw_bytes(saved) == before


@pytest.mark.parametrize("scale", ["static", "dynamic"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", INNER)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(
    device: str, name: str, dtype: torch.dtype, scale: str
) -> None:
    inputs = [torch.randn(3, 4, device=device) for _ in range(8)]
    inputs[1][0] = inputs[5][0] = float("inf")  # skipped under a dynamic scale, else left out
    if scale == "static":
        inputs = [x for x in inputs if x.isfinite().all()]

    def start() -> tuple[nn.Module, amp.FP16_Optimizer]:
        model = Mixed(dtype).to(device)
        policy: Any = Backoff(init_scale=64.0, step_window=2) if scale == "dynamic" else 64.0
        return model, wrap(INNER[name](model.parameters()), loss_scale=policy)

    model, optimizer = start()
    for x in inputs[:4]:
        train_step(model, optimizer, x)
    saved = through_a_file(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, weights_only=True
    )
    resumed_model, resumed = start()
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for x in inputs[4:]:
        train_step(model, optimizer, x)
        train_step(resumed_model, resumed, x)
    assert everything(resumed_model, resumed) == everything(model, optimizer)
    assert resumed.loss_scaler.state_dict() == optimizer.loss_scaler.state_dict()


def loader(sizes: tuple[int, ...], **arguments: Any) -> amp.FP16_Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(size).half())]} for size in sizes]
    return wrap(torch.optim.SGD(groups, lr=1.0, momentum=0.9), **arguments)


def without(key: str) -> dict[str, Any]:
    saved = loader((2, 3)).state_dict()
    del saved[key]
    return saved


def with_one_group_less_inside() -> dict[str, Any]:
    saved = loader((2, 3), static_loss_scale=4.0).state_dict()
    saved["optimizer_state_dict"]["param_groups"].pop()
    return saved


BAD_SNAPSHOTS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "another shape": (lambda: loader((2, 4)).state_dict(), r"fp32_from_fp16 .*\(4,\).*\(3,\)"),
    "another number of groups": (lambda: loader((2,)).state_dict(), "fp32_from_fp16"),
    "no scale there is": (
        lambda: {**loader((2, 3)).state_dict(), "loss_scaler": {"policy": "Best"}},
        "policy must be one of",
    ),
    "torch's part does not fit": (with_one_group_less_inside, "parameter groups"),
    "no overflow": (lambda: without("overflow"), "overflow"),
    "no masters": (lambda: without("fp32_from_fp16"), "fp32_from_fp16"),
    "no scale": (lambda: without("loss_scaler"), "loss_scaler"),
}


@pytest.mark.parametrize("name", BAD_SNAPSHOTS)
def test_a_snapshot_that_does_not_fit_is_refused_before_anything_is_changed(name: str) -> None:
    make, words = BAD_SNAPSHOTS[name]
    optimizer = loader((2, 3), static_loss_scale=16.0)
    before = raw_bytes(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(make())
    assert raw_bytes(optimizer.state_dict()) == before


def test_the_snapshots_kind_of_scale_counts(device: str) -> None:
    """As in Apex: a run that was dynamic stays so, however the new optimizer was made."""

    def fresh(**arguments: Any) -> amp.FP16_Optimizer:
        param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
        return amp.FP16_Optimizer(torch.optim.SGD([param], lr=1.0), verbose=False, **arguments)

    source, target = fresh(dynamic_loss_scale=True), fresh(static_loss_scale=8.0)
    source.backward((source.fp16_groups[0][0] * float("inf")).sum())
    source.step()
    target.load_state_dict(source.state_dict())
    assert target.loss_scaler.state_dict() == source.loss_scaler.state_dict()
    assert target.dynamic_loss_scale
    target.backward((target.fp16_groups[0][0] * float("inf")).sum())
    assert target.overflow


def test_a_weight_that_trains_since_it_was_wrapped_has_its_master_in_a_snapshot() -> None:
    """It gets one with the next loss; a snapshot from before is refused as a whole."""

    def start() -> tuple[Mixed, amp.FP16_Optimizer]:
        torch.manual_seed(0)
        model = Mixed(torch.bfloat16)
        model.low.weight.requires_grad_(False)
        return model, wrap(INNER["torch Adam"](model.parameters()))

    x = torch.randn(3, 4)
    model, optimizer = start()
    train_step(model, optimizer, x)
    before = optimizer.state_dict()
    model.low.weight.requires_grad_(True)
    found = everything(model, optimizer)
    with pytest.raises(ValueError, match="nothing was loaded"):
        optimizer.load_state_dict(before)
    assert everything(model, optimizer) == found
    twin, other = start()
    twin.low.weight.requires_grad_(True)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    for pair in (model, optimizer), (twin, other):
        train_step(*pair, x)
    assert everything(twin, other) == everything(model, optimizer)


@pytest.mark.parametrize("copier", [pickle.dumps, copy.deepcopy, copy.copy])
def test_it_cannot_be_pickled_or_copied(copier: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match="state_dict"):
        copier(loader((2,)))


def test_it_cannot_be_unpickled() -> None:
    with pytest.raises(RuntimeError, match="load_state_dict"):
        amp.FP16_Optimizer.__new__(amp.FP16_Optimizer).__setstate__({})


# Around amp_mp's own optimizers: the same results, and no copies.

FUSED: dict[str, dict[str, float]] = {"AdamW": {"lr": 1e-2}, "SGD": {"lr": 0.1, "momentum": 0.9}}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", FUSED)
def test_the_folded_path_equals_the_one_with_copies(
    device: str, name: str, clip: float | None
) -> None:
    ours, torchs = (Mixed(torch.float16).to(device) for _ in range(2))
    torchs.load_state_dict(ours.state_dict())
    inner = getattr(amp.optim, name)(ours.parameters(), **FUSED[name], master="float32")
    other = getattr(torch.optim, name)(torchs.parameters(), **FUSED[name], fused=True)
    folded, copied = (wrap(each, dynamic_loss_scale=True) for each in (inner, other))
    for optimizer in (folded, copied):
        optimizer.loss_scale = 256.0
    for step in range(8):
        x = torch.randn(5, 4, device=device) * (math.inf if step == 3 else 1.0)
        for optimizer, model in ((folded, ours), (copied, torchs)):
            optimizer.zero_grad()
            optimizer.backward(model(x).float().square().mean())
            if clip is not None:
                norm = optimizer.clip_master_grads(clip)
                assert (norm == -1) == (step == 3)
            optimizer.step()
        assert folded.loss_scale == copied.loss_scale
        for a, b in zip(masters_of(folded), masters_of(copied), strict=True):
            # float32 updates in another order of operations: a few roundings of 2^-24 a step
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)


def test_the_folded_path_makes_no_second_copy(device: str) -> None:
    model = Mixed(torch.bfloat16).to(device)
    inner = amp.optim.AdamW(model.parameters(), lr=1e-2, master="float32")
    optimizer = wrap(inner, static_loss_scale=8.0)
    params = list(model.parameters())
    assert [p for group in optimizer.param_groups for p in group["params"]] == params
    optimizer.backward(model(torch.randn(5, 4, device=device)).float().sum())
    low = optimizer.fp16_groups[0][0]
    (inspected, *_), *_ = optimizer.inspect_master_grad_data() or [[None]]
    assert inspected is not None
    assert low.grad.dtype == torch.float32
    assert inspected.data_ptr() == low.grad.data_ptr()
    assert all(master.grad is None for _, master in optimizer._masters.pairs())
    optimizer.step()
    snapshot = optimizer.state_dict()
    saved = [t for group in snapshot["fp32_from_fp16"] for t in group]
    inside = [s["master"] for s in snapshot["optimizer_state_dict"]["state"].values()
              if "master" in s]  # fmt: skip
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in inside], "in a file once"


@pytest.mark.parametrize("arguments", [{"dynamic_loss_scale": True}, {"static_loss_scale": 8.0}])
def test_the_folded_path_reads_gradients_once_clipping_included(
    device: str, arguments: dict[str, Any]
) -> None:
    model = Mixed(torch.bfloat16).to(device)
    optimizer = wrap(amp.optim.SGD(model.parameters(), lr=0.1), **arguments)
    optimizer.loss_scale = 8.0
    train_step(model, optimizer, torch.randn(5, 4, device=device))
    optimizer.zero_grad()
    optimizer.backward(model(torch.randn(5, 4, device=device)).float().sum())
    norm = optimizer.clip_master_grads(0.5)
    for p in model.parameters():
        p.grad.data.mul_(4)  # which no version counter sees
    optimizer.step()
    assert optimizer.optimizer.grad_norm == pytest.approx(float(norm), rel=1e-6)


def test_snapshots_go_from_one_path_to_the_other(device: str) -> None:
    first, second = (Mixed(torch.float16).to(device) for _ in range(2))
    copied = wrap(torch.optim.AdamW(first.parameters(), lr=1e-2), static_loss_scale=8.0)
    for _ in range(3):
        train_step(first, copied, torch.randn(5, 4, device=device))
    second.load_state_dict(first.state_dict())
    inner = amp.optim.AdamW(second.parameters(), lr=1e-2, master="float32")
    folded = wrap(inner, static_loss_scale=8.0)
    folded.load_state_dict(copied.state_dict())
    for a, b in zip(masters_of(folded), masters_of(copied), strict=True):
        assert torch.equal(a, b)
    third = Mixed(torch.float16).to(device)
    again = wrap(amp.optim.AdamW(third.parameters(), lr=1e-2, master="float32"))
    again.load_state_dict(folded.state_dict())
    assert raw_bytes(again.state_dict()) == raw_bytes(folded.state_dict())
