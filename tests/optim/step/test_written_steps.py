"""state["step"] that a script writes: bias corrections are those of the count that is there."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import array, assert_same, on, random, state_names
from rules import RULES, Expected, found_state
from tiers import in_turn
from torch import Tensor, nn

import amp_mp as amp

CORRECTED = [rule for rule, (_, numbers) in RULES.items() if "betas" in numbers]
CORRECTED = [rule for rule in CORRECTED if not rule.startswith("lion")]
SIZE = 70


def in_place(optimizer: Any, state: dict[str, Any], count: int) -> None:
    state["step"].fill_(count)


def behind_the_counter(optimizer: Any, state: dict[str, Any], count: int) -> None:
    state["step"].data.copy_(torch.tensor(float(count)))


def as_torchs(optimizer: Any, state: dict[str, Any], count: int) -> None:
    state["step"] = torch.tensor(float(count))  # float32, on the CPU


def as_a_number(optimizer: Any, state: dict[str, Any], count: int) -> None:
    state["step"] = count


def in_a_state_dict(optimizer: Any, state: dict[str, Any], count: int) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.tensor(float(count))
    optimizer.load_state_dict(saved)


def in_a_file(optimizer: Any, state: dict[str, Any], count: int) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    saved["state"][0]["step"].fill_(count)
    optimizer.load_state_dict(saved)


WRITES: dict[str, Callable[[Any, dict[str, Any], int], None]] = {
    f.__name__: f
    for f in (in_place, behind_the_counter, as_torchs, as_a_number, in_a_state_dict, in_a_file)
}


def stepped(device: str, rule: str) -> tuple[nn.Parameter, Any, Expected]:
    kind, numbers = RULES[rule]
    param = nn.Parameter(on(device, random(SIZE, 1), torch.bfloat16))
    optimizer = kind([param], **numbers)
    return param, optimizer, Expected(rule, param, states=state_names(optimizer))


def step(param: nn.Parameter, optimizer: Any, want: Expected, seed: int) -> None:
    param.grad = on(param.device.type, random(SIZE, seed), torch.bfloat16)
    want.step(array(param.grad), np.float32(1))
    optimizer.step()


def check(param: nn.Parameter, optimizer: Any, want: Expected, what: str) -> None:
    assert_same(array(param), want.visible, f"{what}: weight")
    for name, values in want.states.items():
        found = found_state(optimizer.state[param], name, want.formats[name])
        assert_same(found, values, f"{what}: {name}")


@pytest.mark.parametrize(("rule", "write"), in_turn(CORRECTED, WRITES))
def test_a_written_step_is_the_count(device: str, rule: str, write: str) -> None:
    """ReLoRA's and warm restarts' 0, a run that goes on at 1,000, a step back and a step ahead."""
    param, optimizer, want = stepped(device, rule)
    for seed, count in enumerate([None, None, 0, None, 1000, None, 1, 7, None, 2**40]):
        if count is not None:
            WRITES[write](optimizer, optimizer.state[param], count)
            want.clock.step = count
        step(param, optimizer, want, seed)
        check(param, optimizer, want, f"{rule}, {count}")
        assert float(optimizer.state[param]["step"]) == want.clock.step


def muons_others(params: list[nn.Parameter], lr: float) -> Any:
    return amp.optim.Muon([{"params": params, "use_muon": False, "lr": lr}])


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Muon's others"])
def test_an_optimizer_whose_state_is_zeroed_starts_as_torchs(device: str, kind: str) -> None:
    """Every tensor of the state, as a script resets an optimizer, NAdam's mu_product with them."""
    moved = []
    pair = (muons_others, torch.optim.AdamW)
    for make in pair if "Muon" in kind else (getattr(amp.optim, kind), getattr(torch.optim, kind)):
        param = nn.Parameter(torch.ones(SIZE, device=device))
        optimizer = make([param], lr=0.01)
        for number in range(12):
            if number == 10:
                for value in optimizer.state[param].values():
                    value.zero_()
            before = param.detach().clone()
            param.grad = on(device, random(SIZE, number), torch.float32)
            optimizer.step()
        moved.append((param.detach() - before).double().cpu())
    assert bool(((moved[0] - moved[1]).abs() <= 1e-6).all())  # weights near 1 in float32
    assert float(moved[1].abs().max()) > 1e-3


def test_a_state_dict_of_version_02_has_products_of_betas_that_nobody_reads(device: str) -> None:
    """Files of 0.2 have them as `beta_powers`, for every rule; a saved SGD has nothing else."""
    for kind in (amp.optim.AdamW, amp.optim.SGD):
        param = nn.Parameter(torch.ones(3, device=device))
        optimizer: Any = kind([param], lr=0.1)
        param.grad = torch.ones_like(param)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["beta_powers"] = torch.tensor([0.5, 0.5], dtype=torch.float64)
        other = nn.Parameter(param.detach().clone())
        loaded: Any = kind([other], lr=0.1)
        loaded.load_state_dict(saved)
        assert "beta_powers" not in loaded.state[other]
        other.grad = torch.ones_like(param)
        for each in (optimizer, loaded):
            each.step()
        assert torch.equal(param, other)


def test_a_written_mu_product_is_read(device: str) -> None:
    """NAdam's other number, as a new tensor, against torch's NAdam."""
    found: list[Tensor] = []
    for lib in (amp.optim, torch.optim):
        param = nn.Parameter(torch.ones(SIZE, device=device))
        optimizer: Any = lib.NAdam([param], lr=0.01)
        for number in range(4):
            if number == 2:
                state = optimizer.state[param]
                state["mu_product"] = torch.full_like(state["mu_product"], 0.5)
            param.grad = on(device, random(SIZE, number), torch.float32)
            optimizer.step()
        found.append(param.detach().double().cpu())
    assert bool(((found[0] - found[1]).abs() <= 1e-6).all())
