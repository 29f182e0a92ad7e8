"""AveragedModel: averages of masters, in any precision and at any pace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from averages import LOW, STORAGES, Model, make, rounded_weights, train
from helpers import array, raw_bytes, warns
from numpy.typing import NDArray
from rules import cases
from torch import Tensor, nn
from torch.optim import swa_utils

import amp_mp as amp


def masters(model: nn.Module, optimizer: Any) -> dict[str, NDArray[np.float64]]:
    """The parameters' float32 values after a step, by name, in float64."""
    names = [name for name, _ in model.named_parameters()]
    values = amp.float32_state_dict(model, optimizer)
    return {name: array(values[name]).astype(np.float64) for name in names}


def way(found: Tensor, start: Tensor, end: Tensor) -> float:
    """How far from start to end it is, as a share."""
    a, b, c = (t.detach().double() for t in (found, start, end))
    return float(((a - b) * (c - b)).sum() / ((c - b) ** 2).sum())


def test_an_average_of_bfloat16_weights_moves_where_torchs_stands_still(device: str) -> None:
    model = nn.Linear(64, 64, bias=False).to(device)
    rounded_weights(amp.prepare(model, torch.bfloat16))
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    theirs = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9999))
    ours = amp.AveragedModel(model, optimizer, decay=0.9999)
    theirs.update_parameters(model)
    ours.update_parameters(model)
    start = model.weight.detach().float()
    exact = array(start).astype(np.float64)
    model.weight.grad = torch.randn_like(model.weight)
    for _ in range(346):
        optimizer.step()
        theirs.update_parameters(model)
        ours.update_parameters(model)
        exact = 0.9999 * exact + 1e-4 * masters(model, optimizer)["weight"]
    end = amp.float32_state_dict(model, optimizer)["weight"]
    found = ours.float32_state_dict()["weight"]
    assert way(theirs.module.weight, start, end) < 0.004
    assert 0.017 < way(found, start, end) < 0.018
    assert np.abs(array(found) - exact).max() < 346 * 2.0**-25 * np.abs(exact).max()


@pytest.mark.parametrize(("storage", "dtype"), cases(STORAGES, [torch.float32, *LOW]))
def test_it_is_the_float64_average_of_the_masters(
    device: str, storage: str, dtype: torch.dtype
) -> None:
    """From before the first step on, with a frozen parameter and one that comes later."""
    options = STORAGES[storage] if dtype != torch.float32 else {}
    model, _ = make(device, dtype)
    rounded_weights(model)
    model.inner.bias.requires_grad_(False)
    model.inner.weight.requires_grad_(False)
    first = [p for p in model.parameters() if p is not model.inner.weight]
    optimizer = amp.optim.AdamW(first, lr=3e-3, **options)
    averaged = amp.AveragedModel(model, optimizer, decay=0.9)
    exact: dict[str, NDArray[np.float64]] = {}
    for update in range(40):
        if update == 10:
            model.inner.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [model.inner.weight]})
        if update == 20:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if update:
            train(model, optimizer, seed=update)
        averaged.update()
        for name, value in masters(model, optimizer).items():
            keep = 0.9 if update else 0.0
            exact[name] = keep * exact.get(name, 0.0) + (1 - keep) * value
    found = averaged.float32_state_dict()
    for name, value in exact.items():
        bound = 40 * 2.0**-24 * max(1e-3, np.abs(value).max())
        assert np.abs(array(found[name]) - value).max() <= bound, name
    assert torch.equal(averaged.module.inner.bias, model.inner.bias)
    assert averaged.module.head.weight is averaged.module.embed.weight
    assert averaged.n_averaged == 40


def test_the_first_average_is_the_model_before_prepare(device: str) -> None:
    model = nn.Linear(40, 30).to(device)
    original = copy.deepcopy(model.state_dict())
    amp.prepare(model, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters())
    averaged = amp.AveragedModel(model, optimizer)
    for _ in range(2):
        found = averaged.float32_state_dict()
        assert all(torch.equal(found[name], value) for name, value in original.items())
        averaged.update()
    model.weight.grad = torch.ones_like(model.weight)
    model.bias.grad = torch.ones_like(model.bias)
    optimizer.step()  # the masters are still made of the originals
    moved = amp.float32_state_dict(model, optimizer)["weight"]
    assert not torch.equal(moved, moved.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_the_module_holds_the_rounded_average_and_runs(device: str, dtype: torch.dtype) -> None:
    model, optimizer = make(device, dtype)
    averaged = amp.AveragedModel(model, optimizer, decay=0.5)
    for seed in range(3):
        train(model, optimizer, seed=seed)
        averaged.update()
    exact = averaged.float32_state_dict()
    for name, value in averaged.module.named_parameters():
        unit = torch.finfo(value.dtype).eps
        assert not value.requires_grad
        assert value.dtype == dict(model.named_parameters())[name].dtype
        torch.testing.assert_close(value.float(), exact[name], rtol=unit / 2, atol=1e-7)
    tokens = torch.arange(11, device=device)
    assert averaged.eval()(tokens).dtype == model(tokens).dtype
    float32 = Model().to(device)
    float32.load_state_dict(exact)
    with torch.no_grad():
        torch.testing.assert_close(
            averaged(tokens).float(), float32.eval()(tokens), rtol=0.1, atol=0.1
        )


# How fast it forgets.

SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "a number": ({"decay": 0.9}, lambda n: 0.9),
    "0": ({"decay": 0}, lambda n: 0.0),
    "1": ({"decay": 1.0}, lambda n: 1.0),
    "the mean": ({}, lambda n: n / (n + 1)),
    "a function": ({"decay": lambda n: 1 - 1 / (2 + n)}, lambda n: 1 - 1 / (2 + n)),
    "warm-up": ({"decay": 0.4, "warmup": True}, lambda n: min(0.4, (1 + n) / (10 + n))),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(device: str, name: str) -> None:
    given, expected = SCHEDULES[name]
    model = nn.Linear(64, 64, bias=False, device=device).bfloat16()
    averaged = amp.AveragedModel(model, **given)
    exact = np.zeros(1)
    for n in range(12):
        with torch.no_grad():
            model.weight.normal_()
        averaged.update()
        decay = expected(n) if n else 0.0
        exact = decay * exact + (1 - decay) * array(model.weight).astype(np.float64)
    found = array(averaged.float32_state_dict()["weight"])
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6)


def test_a_decay_that_is_none_is_refused(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    for decay, error in ((1.5, ValueError), (float("nan"), ValueError), ("0.9", TypeError)):
        with pytest.raises(error, match="decay must be"):
            amp.AveragedModel(model, decay=decay)  # type: ignore[arg-type]
    for decay in (None, lambda n: 0.5):
        with pytest.raises(ValueError, match="warmup=True needs a number as decay"):
            amp.AveragedModel(model, decay=decay, warmup=True)
    with pytest.raises(TypeError, match=r"optimizer must be an optimizer .* found 'cpu'; decay, "):
        amp.AveragedModel(model, "cpu")
    averaged = amp.AveragedModel(model, decay=lambda n: 2.0)
    averaged.update()
    before = raw_bytes(averaged.state_dict())
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], found 2.0"):
        averaged.update()
    assert raw_bytes(averaged.state_dict()) == before


def test_on_a_float32_model_it_is_torchs(device: str) -> None:
    model, optimizer = make(device, torch.float32)
    ours = amp.AveragedModel(model, optimizer, decay=0.9)
    theirs = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    mean, their_mean = amp.AveragedModel(model), swa_utils.AveragedModel(model)
    for seed in range(5):
        train(model, optimizer, seed=seed)
        for each in (ours, theirs, mean, their_mean):
            each.update_parameters(model)
    for found, wanted in ((ours, theirs), (mean, their_mean)):
        found_state, wanted_state = found.state_dict(), wanted.state_dict()
        assert found_state.keys() == wanted_state.keys()
        for name, value in wanted_state.items():
            torch.testing.assert_close(found_state[name], value, rtol=1e-6, atol=1e-7)
    found.load_state_dict(their_mean.state_dict())


# Buffers.


@pytest.mark.parametrize("use_buffers", [False, True])
def test_buffers_are_copied_or_averaged(device: str, use_buffers: bool) -> None:
    model, optimizer = make(device)
    averaged = amp.AveragedModel(model, optimizer, decay=0.5, use_buffers=use_buffers)
    exact: dict[str, NDArray[np.float64]] = {}
    names = ("table", "norm.running_mean", "norm.running_var")
    assert model.table.dtype == torch.bfloat16
    with warns("something moves bfloat16 buffers in small steps: table"):
        for update in range(6):
            train(model, optimizer, seed=update)
            model.table += 0.25
            averaged.update()
            for name in names:
                value = array(model.get_buffer(name)).astype(np.float64)
                decay = 0.5 if use_buffers and update else 0.0
                exact[name] = decay * exact.get(name, 0.0) + (1 - decay) * value
    found = averaged.float32_state_dict()
    for name in names:
        np.testing.assert_allclose(array(found[name]), exact[name], rtol=1e-5, atol=1e-6)
    assert averaged.module.norm.num_batches_tracked == 6


def test_update_bn_measures_the_averages_statistics(device: str) -> None:
    model, optimizer = make(device)
    averaged = amp.AveragedModel(model, optimizer)
    train(model, optimizer, 3)
    averaged.update()
    batches = [torch.randint(11, (64,)).to(device) for _ in range(4)]
    swa_utils.update_bn(batches, averaged)
    hidden = torch.cat([averaged.module.embed(b).float() for b in batches])
    torch.testing.assert_close(
        averaged.module.norm.running_mean, hidden.mean(0), rtol=1e-2, atol=1e-2
    )


def test_a_layout_that_changes_is_followed(device: str) -> None:
    model = nn.Conv2d(3, 4, 3, device=device).bfloat16()
    averaged = amp.AveragedModel(model, decay=0.5)
    averaged.update()
    first = model.weight.detach().float()
    model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        model.weight.normal_()
    averaged.update()
    wanted = (first + model.weight.detach().float()) / 2
    torch.testing.assert_close(averaged.float32_state_dict()["weight"], wanted)
    before = raw_bytes(model.weight)
    with averaged.swap():
        assert torch.equal(model.weight, averaged.module.weight)
    assert raw_bytes(model.weight) == before


def test_a_model_that_has_changed_is_refused_by_name(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    averaged = amp.AveragedModel(model)
    amp.prepare(model, torch.bfloat16)
    message = r"0.weight is torch.bfloat16 of shape \(4, 4\), its average torch.float32 .* after "
    for call in (averaged.update, averaged.swap().__enter__):
        with pytest.raises(ValueError, match=message):
            call()
    averaged = amp.AveragedModel(model)
    model.append(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="model has 6 parameters and buffers, its average 4"):
        averaged.update()


def test_other_dtypes_are_averaged_in_their_own(device: str) -> None:
    model = nn.Linear(4, 4, bias=False, dtype=torch.float64, device=device)
    model.register_parameter("count", nn.Parameter(torch.tensor([3]), requires_grad=False))
    averaged = amp.AveragedModel(model, decay=0.75)
    averaged.update()
    first = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.normal_()
        model.count += 4
    averaged.update()
    torch.testing.assert_close(averaged.module.weight, first + (model.weight - first) / 4)
    assert averaged.module.count.tolist() == [7]


# Other optimizers.


@pytest.mark.parametrize("kind", ["torch", "fused"])
@pytest.mark.parametrize("dtype", LOW)
def test_an_fp16_optimizers_masters_are_averaged(
    device: str, dtype: torch.dtype, kind: str
) -> None:
    torch.manual_seed(3)
    model = nn.Linear(32, 32, bias=False).to(device)
    amp.prepare(model, dtype)
    inner: Any = torch.optim.AdamW if kind == "torch" else amp.optim.AdamW
    optimizer = amp.FP16_Optimizer(inner(model.parameters(), lr=1e-5), verbose=False)
    averaged = amp.AveragedModel(model, optimizer, decay=0.5)
    exact = np.zeros(1)
    for update in range(10):
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(4, 32, device=device, dtype=dtype)).float().sum())
        optimizer.step()
        averaged.update()
        master = array(optimizer.fp32_from_fp16_groups[0][0]).astype(np.float64)
        decay = 0.5 if update else 0.0
        exact = decay * exact + (1 - decay) * master
    found = array(averaged.float32_state_dict()["weight"])
    assert np.abs(found - exact).max() < 10 * 2.0**-25
    with averaged.swap(), pytest.raises(RuntimeError, match=r"optimizer's step.* inside"):
        optimizer.step()


def test_a_model_may_have_several_optimizers(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    rounded_weights(amp.prepare(model, torch.bfloat16))
    optimizers = [
        amp.optim.SGD(model[0].parameters(), lr=1e-4),
        amp.optim.Lion(model[1].parameters(), lr=1e-4, memory="lean"),
    ]
    averaged = amp.AveragedModel(model, optimizers, decay=0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    averaged.update()
    wanted = amp.float32_state_dict(model[0], optimizers[0])
    found = averaged.float32_state_dict()
    assert all(torch.equal(found[f"0.{name}"], value) for name, value in wanted.items())
    assert not torch.equal(found["1.weight"], found["1.weight"].bfloat16().float())
    with averaged.swap():
        for optimizer in optimizers:
            with pytest.raises(RuntimeError, match=r"optimizer's step.* inside"):
                optimizer.step()


def test_tensors_without_memory_of_their_own_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"the weight of 1\.weight .* is neither on a CPU nor on a"):
        amp.AveragedModel(nn.Sequential(nn.ReLU(), nn.Linear(3, 3).to_empty(device="meta")))


def test_gradients_are_not_released_inside(device: str) -> None:
    model, optimizer = make(device)
    averaged = amp.AveragedModel(model, optimizer, decay=0.5)
    train(model, optimizer, 2)
    weights = raw_bytes(dict(model.named_parameters()))
    with optimizer.attach(model):
        refused = pytest.raises(RuntimeError, match=r"attach\) inside of AveragedModel.swap")
        with refused, averaged.swap():
            model(torch.arange(11, device=device)).float().sum().backward()
        assert raw_bytes(dict(model.named_parameters())) == weights


def test_main_grads_stay_the_models(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    amp.prepare(model, torch.bfloat16)
    amp.attach_main_grads(model)
    averaged = amp.AveragedModel(model)
    x = torch.randn(4, 8, device=device).bfloat16()
    assert torch.equal(averaged(x), model(x))
    averaged(x)
    assert all(p.grad is None for p in averaged.parameters())
    model(x).float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
