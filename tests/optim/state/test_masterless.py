"""memory="masterless": weights without masters that round at random, and 8-bit states."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import raw_bytes, through_a_file
from rules import OF_MATRICES, RULES, STORAGES
from torch import Tensor, nn

import amp_mp as amp

LOW = [torch.bfloat16, torch.float16]
IN_FULL = {"memory": "micro", "master": "none", "rounding": "stochastic"}
PRESET = {"memory": "masterless"}
SHORT = {"lr": 1e-2, "betas": (0.9, 0.95)}


def params_of(device: str, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(1)
    shapes = ((48, 64), (33, 31), (64, 1))
    return [
        nn.Parameter(torch.randn(shape, generator=source).to(device, dtype)) for shape in shapes
    ]


def train(params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        source = torch.Generator().manual_seed(10 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=source).to(param)
        optimizer.step()


def trained(kind: Any, device: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    params = params_of(device, dtype)
    optimizer = kind(params, **options)
    train(params, optimizer, range(3))
    return params, optimizer


def bits(params: list[nn.Parameter], optimizer: Any) -> bytes:
    return raw_bytes([[p.detach() for p in params], optimizer.state_dict()["state"]])


@pytest.mark.parametrize("rule", RULES | OF_MATRICES)
def test_it_is_what_three_arguments_say(device: str, rule: str) -> None:
    kind, numbers = (RULES | OF_MATRICES)[rule]
    for dtype in LOW:
        found = trained(kind, device, dtype, **numbers, **PRESET, seed=5)
        assert bits(*found) == bits(*trained(kind, device, dtype, **numbers, **IN_FULL, seed=5))
        assert bits(*found) != bits(*trained(kind, device, dtype, **numbers, **PRESET, seed=6))
        # Centered RMSprop takes its squares' format, float32, as an argument.
        assert ("memory='masterless'" in repr(found[1])) != rule.startswith("centered")
        entries = {name for state in found[1].state.values() for name in state}
        assert not any(name.startswith(("master", "remainder")) for name in entries)


@pytest.mark.parametrize("rule", RULES)
def test_float32_parameters_step_as_with_micro(device: str, rule: str) -> None:
    kind, numbers = RULES[rule]
    pair = [
        trained(kind, device, torch.float32, **numbers, memory=memory)
        for memory in ("masterless", "micro")
    ]
    assert bits(*pair[0]) == bits(*pair[1])


# What else is said, and the master and rounding that come of it.
SAID: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "nothing": ({}, ("none", "stochastic")),
    "nearest": ({"rounding": "nearest"}, ("none", "nearest")),
    "a master": ({"master": "split24"}, ("split24", "stochastic")),
    "both": ({"master": "float32", "rounding": "nearest"}, ("float32", "nearest")),
    "a state": ({"exp_avg_sq": "ue8m8"}, ("none", "stochastic")),
}


@pytest.mark.parametrize("of_group", [False, True])
@pytest.mark.parametrize("said", SAID)
def test_what_is_said_besides_it_counts(said: str, of_group: bool) -> None:
    own, wanted = SAID[said]
    params = params_of("cpu")
    if of_group:
        optimizer = amp.optim.AdamW([{"params": params, **PRESET, **own}], **SHORT)
        assert optimizer.defaults["rounding"] == "nearest"
    else:
        optimizer = amp.optim.AdamW(params, **SHORT, **PRESET, **own)
    (group,) = optimizer.param_groups
    assert (group["master"], group["rounding"]) == wanted
    assert group["exp_avg_sq"] == own.get("exp_avg_sq", "log8")
    assert ("memory='masterless'" in repr(optimizer)) == (said == "nothing")


def test_a_group_may_have_masters_beside_it_and_the_reverse(device: str) -> None:
    """The first group steps as it would alone."""
    for outer, inner in itertools.permutations(STORAGES, 2):
        if "masterless" not in (outer, inner):
            continue
        first, second = params_of(device), params_of(device)
        optimizer = amp.optim.AdamW(first, **SHORT, memory=outer)
        optimizer.add_param_group({"params": second, "memory": inner, "seed": 3})
        alone = params_of(device)
        twin = amp.optim.AdamW(alone, **SHORT, memory=outer)
        train([*first, *second], optimizer, range(3))
        train(alone, twin, range(3))  # draws the gradients of `first` first
        assert raw_bytes([p.detach() for p in first]) == raw_bytes([p.detach() for p in alone])
        names = {name for p in second for name in optimizer.state[p]}
        masters = [name for name in names if name.startswith(("master", "remainder"))]
        assert bool(masters) == (inner != "masterless")


@pytest.mark.parametrize("dtype", LOW)
def test_updates_below_a_last_place_count_on_average_down_to_a_512th(
    device: str, dtype: torch.dtype
) -> None:
    """To nearest no weight ever moves. Eight random bits know nothing below a 512th."""
    last, steps = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10, 200

    def moved(part: float, **rounding: str) -> Tensor:
        weight = nn.Parameter(torch.full((200, 160), 1.5, dtype=dtype, device=device))
        optimizer = amp.optim.SGD([weight], lr=part * last, **PRESET, **rounding)
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return (1.5 - weight.detach().double()) / last

    for part in (1 / 64, 1 / 256):  # what eight bits express
        # Each of 32,000 weights moves a binomial number of places: 200 draws at `part`.
        deviation = (steps * part * (1 - part) / 32_000) ** 0.5
        assert float(moved(part).mean()) == pytest.approx(steps * part, abs=5 * deviation)
        assert not moved(part, rounding="nearest").any()
    assert not moved(1 / 600).any()


@pytest.mark.parametrize("source", ["torch", *STORAGES, "nearest"])
def test_a_loaded_file_leaves_the_rounding_to_the_optimizer(device: str, source: str) -> None:
    """A file of an optimizer with masters says "nearest", and torch's says nothing."""
    if source == "torch":
        saved = trained(torch.optim.AdamW, device, **SHORT)[1].state_dict()
    else:
        stored = {**PRESET, "rounding": "nearest"} if source == "nearest" else STORAGES[source]
        saved = trained(amp.optim.AdamW, device, **SHORT, **stored)[1].state_dict()
    params, optimizer = trained(amp.optim.AdamW, device, **SHORT, **PRESET)
    optimizer.load_state_dict(through_a_file(saved))
    assert optimizer.param_groups[0]["rounding"] == "stochastic"
    train(params, optimizer, range(3, 5))
    params, masters = trained(amp.optim.AdamW, device, **SHORT, memory="exact")
    masters.load_state_dict(optimizer.state_dict())
    assert masters.param_groups[0]["rounding"] == "nearest"
    train(params, masters, range(3, 5))


def test_what_prepare_kept_ends_with_the_first_step(device: str) -> None:
    torch.manual_seed(0)
    model = amp.prepare(nn.Linear(64, 48).to(device), torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), **SHORT, **PRESET)
    assert "original" in optimizer.memory_report().bytes
    before = [p.detach().clone() for p in model.parameters()]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert raw_bytes(before) == raw_bytes([p.detach() for p in model.parameters()])
    assert "original" not in optimizer.memory_report().bytes
    assert torch.equal(amp.float32_of(model.weight), model.weight.float())


def written(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(0.125)


@pytest.mark.parametrize("wrap", ["FP16_Optimizer", "apex", "scaler"])
def test_wrappers_step_the_weights_themselves(device: str, wrap: str) -> None:
    """Of a fused optimizer they take masters from the optimizer, which has none here."""
    torch.manual_seed(0)
    model = amp.prepare(nn.Linear(64, 48).to(device), torch.float16)
    kind = amp.apex.optimizers.FusedAdam if wrap == "apex" else amp.optim.AdamW
    optimizer: Any = kind(model.parameters(), **SHORT, **PRESET)
    inner = optimizer
    scaler = amp.GradScaler(device, init_scale=8.0)
    if wrap == "FP16_Optimizer":
        optimizer = amp.FP16_Optimizer(optimizer, static_loss_scale=8.0, verbose=False)
    for _ in range(2):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64, device=device, dtype=torch.float16)).float().square().mean()
        if wrap == "FP16_Optimizer":
            optimizer.backward(loss)
            optimizer.step()
        elif wrap == "apex":
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert not torch.equal(model.weight, before)
        written(model.weight)  # what a script writes counts
    entries = {name for state in inner.state.values() for name in state}
    assert {"exp_avg_m8", "exp_avg_sq_log8"} <= entries
    assert not any(name.startswith(("master", "remainder")) for name in entries)
