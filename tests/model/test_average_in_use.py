"""AveragedModel: the model with its averages for a while; copies, files and devices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from averages import LOW, STORAGES, make, rounded_weights, train
from helpers import LOSES_UPDATES, raw_bytes, through_a_file, warns
from interrupting import interrupted, lines_of
from rules import cases
from torch import nn

import amp_mp as amp


def bytes_of(model: nn.Module, optimizer: Any) -> Any:
    names = [name for name, _ in model.named_parameters()]
    states = [optimizer.state.get(p, {}) for p in model.parameters()]
    return raw_bytes([dict(model.state_dict()), dict(zip(names, states, strict=True))])


# The averages in the model for a while.


@pytest.mark.parametrize(("storage", "dtype"), cases(STORAGES, [torch.float32, *LOW]))
def test_training_goes_on_bit_for_bit_after_a_swap(
    device: str, storage: str, dtype: torch.dtype
) -> None:
    """Also before the first step, where the masters are still to be made of prepare's originals."""
    options = STORAGES[storage] if dtype != torch.float32 else {}
    results = []
    for swaps in (False, True):
        torch.manual_seed(1)
        model, optimizer = make(device, dtype, **options)
        averaged = amp.AveragedModel(model, optimizer, decay=0.7)
        for seed in range(4):
            averaged.update()
            before = bytes_of(model, optimizer)
            if swaps:
                with averaged.swap() as inside, torch.no_grad():
                    assert inside is model
                    inside(torch.arange(11, device=device))  # moves the norm's statistics
                assert bytes_of(model, optimizer) == before
            train(model, optimizer, seed=seed)
        averaged.update()
        results.append([bytes_of(model, optimizer), raw_bytes(averaged.state_dict())])
    assert results[0] == results[1]


@pytest.mark.parametrize("use_buffers", [False, True])
def test_the_model_is_the_average_inside(device: str, use_buffers: bool) -> None:
    model, optimizer = make(device, memory="tiny")
    averaged = amp.AveragedModel(model, optimizer, decay=0.5, use_buffers=use_buffers)
    for seed in range(3):
        train(model, optimizer, seed=seed)
        averaged.update()
    train(model, optimizer)
    tokens = torch.arange(11, device=device)
    model.eval()
    averaged.eval()
    weights = [p.data_ptr() for p in model.parameters()]
    with torch.inference_mode():
        outside, wanted = model(tokens).clone(), averaged(tokens).clone()
        with averaged.swap():
            assert torch.equal(model(tokens), wanted)
            assert raw_bytes(model.state_dict()) == raw_bytes(averaged.module.state_dict())
        assert torch.equal(model(tokens), outside)
    assert not torch.equal(outside, wanted)
    assert [p.data_ptr() for p in model.parameters()] == weights


def test_casts_see_the_average_inside(apex: str) -> None:
    model = nn.Linear(32, 32, bias=False).to(apex)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.5)
    averaged = amp.AveragedModel(model, optimizer, decay=0.5)
    averaged.update()
    x = torch.randn(64, 32, device=apex)
    before = model(x).detach().clone()
    model(x).float().square().sum().backward()
    optimizer.step()
    after = model(x).detach().clone()
    with averaged.swap():
        assert torch.equal(model(x), before)
    assert torch.equal(model(x), after)
    assert not torch.equal(before, after)


def step_of_torch(model: nn.Module) -> None:
    with warns(LOSES_UPDATES):
        torch.optim.SGD(model.parameters(), lr=1.0).step()


# By what the message names: what would go on from averages as if they were weights.
INSIDE: dict[str, list[Callable[[nn.Module, Any, Any], Any]]] = {
    "optimizer's step inside": [
        lambda model, optimizer, averaged: optimizer.step(),
        lambda model, optimizer, averaged: step_of_torch(model),
    ],
    "an update inside": [
        lambda model, optimizer, averaged: averaged.update(),
        lambda model, optimizer, averaged: amp.AveragedModel(model).update(),
    ],
    "swap.. inside": [lambda model, optimizer, averaged: averaged.swap().__enter__()],
}


@pytest.mark.parametrize(("message", "action"), [(m, a) for m in INSIDE for a in INSIDE[m]])
def test_what_must_not_happen_inside_is_refused(
    device: str, message: str, action: Callable[..., Any]
) -> None:
    model, optimizer = make(device, memory="exact")
    averaged = amp.AveragedModel(model, optimizer, decay=0.5)
    train(model, optimizer, 2)
    before = [bytes_of(model, optimizer), raw_bytes(averaged.state_dict())]
    with averaged.swap():
        with pytest.raises(RuntimeError, match=message):
            action(model, optimizer, averaged)
        assert raw_bytes(model.inner.weight) == raw_bytes(averaged.module.inner.weight)
    assert [bytes_of(model, optimizer), raw_bytes(averaged.state_dict())] == before
    train(model, optimizer)
    averaged.update()


def test_a_weight_that_is_written_inside_is_restored_and_reported(device: str) -> None:
    model, optimizer = make(device)
    averaged = amp.AveragedModel(model, optimizer, decay=0.5)
    train(model, optimizer, 2)
    before = bytes_of(model, optimizer)
    with pytest.raises(RuntimeError, match=r"inner\.weight was written inside"), averaged.swap():
        nn.init.zeros_(model.inner.weight)
    assert bytes_of(model, optimizer) == before


# Saving, copying, moving.


def test_a_state_dict_continues_bit_for_bit(device: str) -> None:
    model, optimizer = make(device, memory="lean")
    averaged = amp.AveragedModel(model, optimizer, decay=0.9, use_buffers=True)
    train(model, optimizer, 3)
    averaged.update()
    averaged.update()
    again = amp.AveragedModel(model, optimizer, decay=0.9, use_buffers=True)
    again.load_state_dict(through_a_file(averaged.state_dict(), weights_only=True))
    train(model, optimizer, 3)
    averaged.update()
    again.update()
    assert raw_bytes(again.state_dict()) == raw_bytes(averaged.state_dict())
    assert again.n_averaged == 3


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_the_averages_and_follows_when_it_is_told_to(device: str, how: str) -> None:
    model, optimizer = make(device)
    averaged = amp.AveragedModel(model, optimizer, decay=0.9)
    train(model, optimizer, 2)
    averaged.update()
    if how == "deepcopy":
        again = copy.deepcopy(averaged)
    else:
        data = pickle.dumps(averaged)
        assert len(data) < 40_000  # neither the model nor the optimizer is in it
        again = pickle.loads(data)
    assert raw_bytes(again.state_dict()) == raw_bytes(averaged.state_dict())
    for call in (again.update, again.swap().__enter__):
        with pytest.raises(RuntimeError, match=r"has no model; call its follow"):
            call()
    again.follow(model, optimizer)
    train(model, optimizer)
    averaged.update()
    again.update()
    assert raw_bytes(again.state_dict()) == raw_bytes(averaged.state_dict())
    averaged.update()  # the original lives on its own
    assert again.n_averaged == 2


def test_a_cast_is_refused_and_names_the_way(device: str) -> None:
    model, optimizer = make(device)
    averaged = amp.AveragedModel(model, optimizer)
    before = raw_bytes(averaged.state_dict())
    for cast in (averaged.float, averaged.half, lambda: averaged.to(torch.float64)):
        with pytest.raises(TypeError, match=r"embed.weight cannot be cast from torch.bfloat16 to"):
            cast()
    assert raw_bytes(averaged.state_dict()) == before
    assert averaged.to(device).bfloat16 is not None


def test_averages_may_be_on_another_device(device: str) -> None:
    model, optimizer = make(device, memory="exact")
    here = amp.AveragedModel(model, optimizer, decay=0.5)
    there = amp.AveragedModel(model, optimizer, decay=0.5, device="cpu")
    for seed in range(3):
        train(model, optimizer, seed=seed)
        here.update()
        there.update()
    assert raw_bytes(there.state_dict()) == raw_bytes(here.state_dict())
    assert {t.device.type for t in there.state_dict().values()} == {"cpu"}
    moved = copy.deepcopy(here).cpu()
    assert raw_bytes(moved.state_dict()) == raw_bytes(here.state_dict())
    assert here.n_averaged.device.type == "cpu"
    with there.swap():
        assert raw_bytes(model.inner.weight) == raw_bytes(there.module.inner.weight)


def test_a_model_may_lie_on_several_devices(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    rounded_weights(amp.prepare(model, torch.bfloat16))
    model[1].to(device)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.1)
    averaged = amp.AveragedModel(model, optimizer, decay=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    averaged.update()
    first = amp.float32_state_dict(model, optimizer)
    optimizer.step()
    averaged.update()
    second = amp.float32_state_dict(model, optimizer)
    for name, value in averaged.float32_state_dict().items():
        assert value.device == second[name].device
        torch.testing.assert_close(value, (first[name] + second[name]) / 2)


def trained(dtype: torch.dtype, steps: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(3, 2, bias=False))
    if dtype != torch.float32:
        amp.prepare(model, dtype)
    optimizer = amp.optim.AdamW(model.parameters(), lr=3e-3)
    averaged = amp.AveragedModel(model, optimizer, decay=0.5)
    averaged.update()
    for seed in range(steps):
        step(model, optimizer, seed)
        averaged.update()
    return model, optimizer, averaged


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()).dtype)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("fails", [False, True], ids=["", "and the block raises"])
@pytest.mark.parametrize("steps", [0, 2])  # 0: the masters are still to be made
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupt_leaves_the_weights_and_training_goes_on(
    dtype: torch.dtype, steps: int, fails: bool
) -> None:
    if dtype == torch.float32 and steps == 0:
        pytest.skip("there the average is the weights")
    model, optimizer, averaged = trained(dtype, steps)
    twin, its, _ = trained(dtype, steps)
    with torch.no_grad():
        for average in averaged.module.parameters():
            average.mul_(0.5)

    def evaluate() -> None:
        try:
            with averaged.swap():
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            return
        assert not fails

    before = bytes_of(model, optimizer)
    lines = lines_of(evaluate)
    assert lines > 30
    for line in range(lines):
        interrupted(evaluate, line)
        assert bytes_of(model, optimizer) == before, line
        with averaged.swap():  # is not inside of one
            pass
        assert bytes_of(model, optimizer) == before, line
    for seed in (7, 8):
        step(model, optimizer, seed)
        step(twin, its, seed)
    assert bytes_of(model, optimizer) == bytes_of(twin, its)


CALLS: dict[str, Callable[[Path, nn.Module, Any, Any], Any]] = {
    "checkpoint.save()": lambda path, m, o, _: amp.checkpoint.save(path / "new", m, o),
    "checkpoint.save() of the model": lambda path, m, o, _: amp.checkpoint.save(path / "new", m),
    "checkpoint.save(more)": lambda path, m, o, _: amp.checkpoint.save(
        path / "new", nn.Linear(2, 2), more=m
    ),
    "checkpoint.load()": lambda path, m, o, _: amp.checkpoint.load(path / "old", m, o),
    "float32_of()": lambda path, m, o, _: amp.float32_of(m[0].weight, o),
    "float32_state_dict()": lambda path, m, o, _: amp.float32_state_dict(m, o),
    "load_float32_state_dict()": lambda path, m, o, values: amp.load_float32_state_dict(
        m, o, values
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_would_mix_averages_and_training_is_refused(tmp_path: Path, call: str) -> None:
    model, optimizer, averaged = trained(torch.bfloat16, 2)
    values = amp.float32_state_dict(model, optimizer)
    amp.checkpoint.save(tmp_path / "old", model, optimizer)
    before = bytes_of(model, optimizer)
    what = call.partition("(")[0]
    with averaged.swap():
        inside = bytes_of(model, optimizer)
        with pytest.raises(RuntimeError, match=rf"{what}.* inside of AveragedModel.swap\(\)"):
            CALLS[call](tmp_path, model, optimizer, values)
        assert bytes_of(model, optimizer) == inside
        assert not (tmp_path / "new").exists()
    assert bytes_of(model, optimizer) == before
    CALLS[call](tmp_path, model, optimizer, values)
