"""State follows its parameter: to another dtype, layout or device, or one error says why not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import array, assert_same, on, random, raw_bytes, state_names, through_a_file
from rules import ADAM, RULES, STORAGES, Expected, found_master, found_state, is_allowed
from torch import Tensor, nn

import amp_mp as amp

SHAPE = (32, 64, 3, 1)
COUNT = 32 * 64 * 3


def weight_of(dtype: torch.dtype, device: str) -> nn.Conv2d:
    conv = nn.Conv2d(64, 32, (3, 1), bias=False)
    conv.weight.data = on("cpu", random(COUNT, 1), torch.float32).view(SHAPE)
    return conv.to(device, dtype)


def grad_of(param: Tensor, seed: int) -> Tensor:
    return on(str(param.device), random(COUNT, seed, 1e-2), param.dtype).view(SHAPE)


def assign(dtype: torch.dtype) -> Callable[[nn.Module], object]:
    def change(model: nn.Module) -> None:
        for param in model.parameters():
            param.grad = None
            param.data = param.data.to(dtype)

    return change


DTYPE_CHANGES: dict[str, tuple[torch.dtype, Callable[[nn.Module], object]]] = {
    "float32, bfloat16()": (torch.float32, lambda m: m.bfloat16()),
    "float32, half()": (torch.float32, lambda m: m.half()),
    "float32, .data": (torch.float32, assign(torch.bfloat16)),
    "bfloat16, half()": (torch.bfloat16, lambda m: m.half()),
    "bfloat16, .data": (torch.bfloat16, assign(torch.float16)),
    "float16, bfloat16()": (torch.float16, lambda m: m.bfloat16()),
    "bfloat16, float()": (torch.bfloat16, lambda m: m.float()),
    "float16, float()": (torch.float16, lambda m: m.float()),
}


ENDS_IN_HALF = ("float32, half()", "bfloat16, half()", "bfloat16, .data")


def takes(storage: str, change: str) -> bool:
    """Whether the preset takes the weights before and after the change."""
    after = torch.float16 if change in ENDS_IN_HALF else torch.bfloat16
    return is_allowed(storage, DTYPE_CHANGES[change][0], after)


@pytest.mark.parametrize(
    ("storage", "change"), [c for c in itertools.product(STORAGES, DTYPE_CHANGES) if takes(*c)]
)
@pytest.mark.parametrize("rule", ["adamw", "lion", "lamb"])
def test_training_goes_on_in_another_dtype(
    device: str, rule: str, storage: str, change: str
) -> None:
    """With the moments of before, bit for bit, and a master of the converted weight.

    A float32 master stays where the converted weight is what it rounds to.
    """
    start, act = DTYPE_CHANGES[change]
    model = weight_of(start, device)
    param = model.weight
    kind, numbers = RULES[rule]
    optimizer = kind(model.parameters(), **numbers, **STORAGES[storage])
    want = Expected(rule, param.flatten(1), 0, state_names(optimizer), **STORAGES[storage])
    for step in range(4):
        if step == 2:
            act(model)
            want.dtype = str(param.dtype).removeprefix("torch.")
            if start == torch.float32 or want.formats["master"] != "float32":
                want.stored = array(param).reshape(-1)
            want.visible = want.master = array(param).reshape(-1)
            if want.formats["master"] == "float32":
                want.write(array(param))
        param.grad = grad_of(param, step)
        want.step(array(param.grad), np.float32(1))
        optimizer.step()
        assert_same(array(param).reshape(-1), want.visible, f"weight after step {step}")
    state = optimizer.state[param]
    assert_same(found_master(state, param, want.formats["master"]), want.master, "master")
    for name, values in want.states.items():
        assert_same(found_state(state, name, want.formats[name]), values, name)
    if param.dtype == torch.float32:
        assert not [name for name in state if name.startswith(("master", "remainder"))]


@pytest.mark.parametrize("change", ["bfloat16, half()", "bfloat16, .data"])
def test_half_a_byte_beside_float16_is_refused_by_name(device: str, change: str) -> None:
    """Nothing changes, and with another master the same optimizer goes on."""
    model = weight_of(torch.bfloat16, device)
    optimizer = amp.optim.AdamW(model.named_parameters(), **ADAM, **STORAGES["nano"])
    model.weight.grad = grad_of(model.weight, 0)
    optimizer.step()
    DTYPE_CHANGES[change][1](model)
    model.weight.grad = grad_of(model.weight, 1)
    before = raw_bytes([model.weight.detach(), *optimizer.state[model.weight].values()])
    with pytest.raises(ValueError, match=r"weight.*torch.float16.*split20"):
        optimizer.step()
    state = optimizer.state[model.weight]
    assert raw_bytes([model.weight.detach(), *state.values()]) == before
    optimizer.param_groups[0]["master"] = "split24"
    optimizer.step()
    assert "remainder8_float16" in state
    assert "remainder4" not in state


@pytest.mark.parametrize("storage", ["exact", "lean", "tiny", "micro"])
def test_remainders_of_a_file_are_for_weights_of_their_dtype(device: str, storage: str) -> None:
    """A bfloat16 run's optimizer, loaded beside float16 weights."""
    model = weight_of(torch.bfloat16, device)
    optimizer = amp.optim.AdamW(model.parameters(), **ADAM, **STORAGES[storage])
    model.weight.grad = grad_of(model.weight, 0)
    optimizer.step()
    other = copy.deepcopy(model).half()
    again = amp.optim.AdamW(other.parameters(), **ADAM, **STORAGES[storage])
    again.load_state_dict(through_a_file(optimizer.state_dict(), True, device))
    wanted = array(amp.float32_state_dict(other, again)["weight"])
    assert_same(wanted, array(other.weight), "master")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", ["float32", "exact"])
def test_a_transposed_memory_changes_no_number(
    device: str, storage: str, dtype: torch.dtype
) -> None:
    """channels_last is in test_any_order_of_calls.py, with the formats whose groups change."""
    model = weight_of(dtype, device)
    optimizer = amp.optim.AdamW(model.parameters(), **ADAM, **STORAGES[storage])
    runs = [(model, optimizer)]
    for step in range(5):
        if step == 3:
            runs.append(copy.deepcopy((model, optimizer)))
            turned = model.weight.data.transpose(0, 1).contiguous().transpose(0, 1)
            model.weight.data = turned
        for own, each in runs:
            own.weight.grad = grad_of(own.weight, step)
            each.step()
    (moved, plain) = (each.state[own.weight] for own, each in runs)
    assert torch.equal(model.weight, runs[1][0].weight)
    for name, value in plain.items():
        assert torch.equal(moved[name], value), name
        assert value.shape != SHAPE or moved[name].stride() == turned.stride()


def test_another_shape_is_refused_by_name_and_nothing_changes(device: str) -> None:
    model = nn.Linear(8, 4, device=device).bfloat16()
    optimizer = amp.optim.AdamW(model.named_parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    model.weight.grad = None
    model.weight.data = torch.cat([model.weight.data, model.weight.data])
    model.weight.grad = torch.ones_like(model.weight)
    before = [p.clone() for p in model.parameters()]
    message = (
        r"'weight'.* has shape \(8, 8\), but its remainder16 has shape \(4, 8\).*del optimizer"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    del optimizer.state[model.weight]
    optimizer.step()
    assert not torch.equal(model.weight, before[0])


def test_a_dtype_that_is_none_of_ours_is_refused_by_name(device: str) -> None:
    model = nn.Linear(8, 4, device=device).bfloat16()
    optimizer = amp.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    model.double()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 has dtype torch\.float64"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def take_step(optimizer: Any, loss: Tensor, set_to_none: bool = True) -> None:
    if isinstance(optimizer, amp.FP16_Optimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none)


REPLACED: dict[str, Callable[[nn.Module], object]] = {
    "AdamW": lambda model: amp.optim.AdamW(model.parameters(), lr=0.1),
    "Muon": lambda model: amp.optim.Muon(model, lr=0.1),
    "FP16_Optimizer": lambda model: amp.FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), verbose=False
    ),
    "FP16_Optimizer around AdamW": lambda model: amp.FP16_Optimizer(
        amp.optim.AdamW(model.parameters(), lr=0.1), verbose=False
    ),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", REPLACED)
def test_parameters_that_load_state_dict_has_replaced_are_reported_once(
    device: str, kind: str, steps: int
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(device)
    amp.prepare(model, torch.bfloat16)
    optimizer = REPLACED[kind](model)
    x = torch.randn(5, 4, device=device).bfloat16()
    for _ in range(steps):
        take_step(optimizer, model(x).float().square().sum())
    checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(checkpoint)  # this one trains on
    take_step(optimizer, model(x).float().square().sum())
    assert not all(torch.equal(v, checkpoint[n]) for n, v in model.state_dict().items())
    model.load_state_dict(checkpoint, assign=True)
    words = r"and 3 more\) is no longer the module's: load_state_dict\(assign=True\) has put"
    with pytest.warns(UserWarning, match=words):
        take_step(optimizer, model(x).float().square().sum())
    again = REPLACED[kind](model)
    take_step(optimizer, model(x).float().square().sum())
    take_step(again, model(x).float().square().sum())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_one_replaced_parameter_is_reported_too(set_to_none: bool) -> None:
    model = amp.prepare(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(5, 4).bfloat16()
    take_step(optimizer, model(x).float().square().sum(), set_to_none)
    bias = {"1.bias": model[1].bias.detach().clone()}
    model.load_state_dict(bias, strict=False, assign=True)
    with pytest.warns(UserWarning, match=r"parameter 3 of group 0 is no longer the module's"):
        take_step(optimizer, model(x).float().square().sum(), set_to_none)


def test_a_step_without_any_gradient_so_far_is_reported_once(device: str) -> None:
    model, other = nn.Linear(4, 8, device=device), nn.Linear(4, 8, device=device)
    optimizer = amp.optim.AdamW(model.parameters(), lr=0.1)
    words = r"nor had one before.* the first is parameter 0 of group 0, of shape \(8, 4\)"
    with pytest.warns(UserWarning, match=words):
        take_step(optimizer, other(torch.ones(2, 4, device=device)).sum())
    optimizer.step()
    take_step(optimizer, model(torch.ones(2, 4, device=device)).sum())
    optimizer.step()


def test_steps_without_gradients_that_are_no_mistake(device: str) -> None:
    """After one with gradients, skipped for an overflow, or stepped during the backward pass."""
    model = nn.Linear(4, 8, device=device)
    optimizer = amp.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.init_state()
    take_step(optimizer, model(torch.ones(2, 4, device=device)).sum())
    optimizer.step()

    skipped = amp.optim.SGD(model.parameters(), lr=0.1)
    with amp.init(loss_scale=4.0, device_type=torch.device(device).type) as handle:
        with handle.scale_loss(model(torch.ones(2, 4, device=device)).sum(), skipped) as loss:
            (loss * torch.inf).backward()
        skipped.step()
        take_step(skipped, model(torch.ones(2, 4, device=device)).sum())
        skipped.step()

    released = amp.optim.AdamW(model.parameters(), lr=0.1)
    with released.attach(model):
        for _ in range(2):
            take_step(released, model(torch.ones(2, 4, device=device)).sum())

    frozen = amp.optim.SGD(nn.Linear(2, 2, device=device).requires_grad_(False).parameters())
    frozen.step()
