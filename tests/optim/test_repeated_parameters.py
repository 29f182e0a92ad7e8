"""One Parameter twice in one list: torch's warning, and one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp

LOW = torch.bfloat16


def matrices(device: str, dtype: torch.dtype = LOW) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(8, 8, device=device).to(dtype)) for _ in range(2)]


def step(optimizer: Any, params: list[nn.Parameter], count: int = 2) -> None:
    for number in range(count):
        for param in params:
            param.grad = (param.detach() * (number + 1) / 4).clone()
        optimizer.step()
        optimizer.zero_grad()


def with_repeats(make: Any, listed: Any) -> Any:
    with pytest.warns(UserWarning, match="group with duplicate parameters"):
        return make(listed)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.SGD, amp.optim.Muon])
def test_it_is_stepped_once(device: str, kind: Any, named: bool) -> None:
    """And saved, loaded, counted and edited once."""
    params, twins = matrices(device), matrices(device)

    def make(listed: list[nn.Parameter]) -> Any:
        given: Any = [(f"p{i}", p) for i, p in enumerate(listed)] if named else listed
        return kind(given, lr=0.1, check_overflow=True)

    first, second = params
    optimizer = with_repeats(make, [first, second, first])
    ordinary = make(twins)
    step(optimizer, params)
    step(ordinary, twins)
    assert raw_bytes([params, optimizer.state_dict()]) == raw_bytes([twins, ordinary.state_dict()])
    assert optimizer.grad_norm == ordinary.grad_norm
    assert optimizer.memory_report() == ordinary.memory_report()
    with optimizer.masters() as masters:
        assert len(masters) == 2
    again = with_repeats(make, [first, second, first])
    again.load_state_dict(ordinary.state_dict())
    step(again, params)
    step(ordinary, twins)
    assert raw_bytes(params) == raw_bytes(twins)


def test_a_group_of_it_is_added_and_its_gradients_released(device: str) -> None:
    found = []
    for repeats in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
        optimizer = amp.optim.AdamW(net[0].parameters(), lr=0.1)
        late = net[1].weight
        if repeats:
            with_repeats(optimizer.add_param_group, {"params": [late, late]})
        else:
            optimizer.add_param_group({"params": [late]})
        optimizer.attach(net)
        for _ in range(2):
            net(torch.ones(2, 8, device=device)).square().sum().backward()
            optimizer.step()
        found.append(raw_bytes([dict(net.named_parameters()), optimizer.state_dict()]))
    assert found[0] == found[1]


@pytest.mark.parametrize("inner", [torch.optim.AdamW, amp.optim.AdamW])
def test_fp16_optimizer_has_one_master_of_it(device: str, inner: Any) -> None:
    """Also where the wrapped optimizer is torch's, which has taken it twice."""
    found = []
    for repeats in (True, False):
        params = matrices(device)
        first, second = params
        if repeats:
            optimizer = with_repeats(lambda p: inner(p, lr=0.1), [first, second, first])
        else:
            optimizer = inner(params, lr=0.1)
        wrapped = amp.FP16_Optimizer(optimizer, verbose=False)
        for _ in range(2):
            wrapped.zero_grad()
            wrapped.backward((first.float() @ second.float()).square().sum())
            wrapped.step()
        assert [len(masters) for masters in wrapped.fp32_from_fp16_groups] == [2]
        found.append(raw_bytes([params, wrapped.fp32_from_fp16_groups]))
    assert found[0] == found[1]


def test_torchs_file_of_it_is_loaded(device: str) -> None:
    """torch numbers such parameters 2, 1, 2."""
    params = matrices(device, torch.float32)
    first, second = params
    theirs = with_repeats(lambda p: torch.optim.AdamW(p, lr=0.1), [first, second, first])
    step(theirs, params, 1)
    saved = theirs.state_dict()
    assert saved["param_groups"][0]["params"] == [2, 1, 2]
    optimizer = with_repeats(lambda p: amp.optim.AdamW(p, lr=0.1), [first, second, first])
    optimizer.load_state_dict(saved)
    for param, number in ((first, 2), (second, 1)):
        state: dict[str, Tensor] = optimizer.state[param]
        assert torch.equal(state["exp_avg"], saved["state"][number]["exp_avg"])
        assert float(state["step"]) == float(saved["state"][number]["step"])


def test_one_that_a_script_adds_to_the_list_is_named(device: str) -> None:
    params = matrices(device)
    optimizer = amp.optim.SGD(params, lr=0.1)
    optimizer.param_groups[0]["params"].append(params[0])
    before = raw_bytes(params)
    with pytest.raises(ValueError, match=r"parameter 0 .*parameter 2 .*leave out one of them"):
        step(optimizer, params)
    assert raw_bytes(params) == before
