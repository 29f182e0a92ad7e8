"""A parameter whose entry in optimizer.state is deleted or replaced starts anew."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp


def deleted(state: Any, param: nn.Parameter) -> None:
    del state[param]


def emptied(state: Any, param: nn.Parameter) -> None:
    state[param] = {}


def cleared(state: Any, _: nn.Parameter) -> None:
    state.clear()


@pytest.mark.parametrize("take", [deleted, emptied, cleared])
@pytest.mark.parametrize("memory", ["float32", "tiny", "nano"])
@pytest.mark.parametrize("released", [False, True])
def test_the_next_step_is_a_first_step(
    device: str, take: Callable[..., None], memory: Any, released: bool
) -> None:
    model = nn.ParameterList([torch.randn(5, 32, device=device) for _ in range(2)])
    fresh = nn.Parameter(torch.zeros(5, 32, device=device))
    optimizer = amp.optim.AdamW(model.parameters(), lr=0.1, memory=memory)
    if released:
        optimizer.attach(model)
    for step in range(2):
        if step == 1:
            take(optimizer.state, model[0])
            fresh.data.copy_(model[0])
        ((1.0 + step) * (model[0] + model[1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh.grad = torch.full_like(fresh, 2.0)
    amp.optim.AdamW([fresh], lr=0.1, memory=memory).step()
    assert float(optimizer.state[model[0]]["step"]) == 1
    assert torch.equal(model[0], fresh)


def test_a_number_whose_memory_was_made_smaller_is_refused() -> None:
    """As FSDP frees parameters. Nothing beyond the memory is read, in loading or in a step."""
    param = nn.Parameter(torch.ones(3))
    optimizer = amp.optim.AdamW([param])
    param.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    number = saved["state"][0]["step"].clone()
    number.untyped_storage().resize_(number.untyped_storage().nbytes() // 2)
    saved["state"][0]["step"] = number
    before = param.detach().clone()
    with pytest.raises(ValueError, match="no memory for its elements"):
        amp.optim.AdamW([nn.Parameter(torch.ones(3))]).load_state_dict(saved)
    optimizer.state[param] = {**optimizer.state[param], "step": number}
    with pytest.raises(ValueError, match="no memory for its elements"):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.fixture
def _swaps() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_swaps")
def test_after_forget_a_model_is_loaded_and_converted(device: str) -> None:
    model, plain = (nn.Linear(4, 4, device=device) for _ in range(2))
    optimizer = amp.optim.SGD(model.parameters(), lr=0.5)
    weights = copy.deepcopy(plain.state_dict())
    for load in (False, True):
        if load:
            amp.optim.forget(optimizer)
            model.load_state_dict(weights)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
    for param, loaded in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, loaded - 0.5)
    amp.optim.forget(optimizer)
    model.to(torch.bfloat16)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda model: model.to(model.weight.device),
    "half": lambda model: model.half(),
    "float": lambda model: model.float(),
    "load": lambda model: model.load_state_dict({"weight": torch.full((8, 8), 1.001)}),
}


def changed(device: str, change: str, before: str, prepares: bool, swaps: bool) -> list[Tensor]:
    """Float32 values and weights after a model was changed, and after two steps more."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False, device=device)
    model = amp.prepare(model, torch.bfloat16) if prepares else model.bfloat16()
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-4) if before else None
    found = []

    def step() -> None:
        assert optimizer is not None
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        optimizer.zero_grad()

    if before == "step":
        step()
    if optimizer is not None:
        amp.optim.forget(optimizer)
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        CHANGES[change](model)
        found += [amp.float32_of(model.weight), model.weight.detach().float().clone()]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    optimizer = optimizer or amp.optim.AdamW(model.parameters(), lr=1e-4)
    step()
    step()
    return [*found, amp.float32_of(model.weight), copy.deepcopy(model.weight.detach().float())]


@pytest.mark.parametrize("prepares", [True, False], ids=["prepared", "converted"])
@pytest.mark.parametrize("before", ["", "forget", "step"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("_swaps")
def test_models_are_changed_as_without_swap_tensors(
    device: str, change: str, before: str, prepares: bool
) -> None:
    """Also before any optimizer has stepped: values that stay the same keep their bits."""
    wanted = changed(device, change, before, prepares, swaps=False)
    torch.__future__.set_swap_module_params_on_conversion(True)
    found = changed(device, change, before, prepares, swaps=True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_parameter_that_was_exchanged_has_no_bits_of_the_other(device: str) -> None:
    model = amp.prepare(nn.Linear(8, 8, bias=False, device=device), torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters())
    amp.optim.forget(optimizer)
    other = nn.Parameter((model.weight * 0.5).detach())
    torch.utils.swap_tensors(model.weight, other)
    assert torch.equal(amp.float32_of(model.weight), model.weight.float())


def test_a_released_parameter_is_freed_with_its_bits(device: str) -> None:
    """At the latest when the next parameter gets bits."""
    model = amp.prepare(nn.Linear(8, 8, bias=False, device=device), torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters())
    amp.optim.forget(optimizer)
    weight = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    amp.prepare(nn.Linear(2, 2, device=device), torch.bfloat16)
    assert weight() is None


@pytest.mark.parametrize("memory", ["float32", "exact", "micro"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_forget_frees_what_a_script_has_moved_away(
    device: str, dtype: torch.dtype, memory: Any
) -> None:
    """As trainers do that lend the GPU to a sampler: states go to the CPU, and come back."""
    model = nn.Sequential(nn.Linear(64, 64, device=device))
    if dtype != torch.float32:
        amp.prepare(model, dtype)
    optimizer = amp.optim.AdamW(model.parameters(), 0.1, (0.9, 0.99), memory=memory)
    stays, other = copy.deepcopy((model, optimizer))
    for step in range(3):
        for param, twin in zip(model.parameters(), stays.parameters(), strict=True):
            param.grad = torch.full_like(param, 2.0**-step)
            twin.grad = param.grad.clone()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        for to in ("cpu", device):
            were = []
            for state in optimizer.state.values():
                were += [weakref.ref(value) for value in state.values()]
                state.update({key: value.to(to, copy=True) for key, value in state.items()})
            amp.optim.forget(optimizer)
            assert not any(ref() is not None for ref in were)
    assert raw_bytes(optimizer.state_dict()) == raw_bytes(other.state_dict())
    assert raw_bytes(model.state_dict()) == raw_bytes(stays.state_dict())


def test_a_record_that_forget_has_released_is_not_another_parameters(device: str) -> None:
    """Parameters that come and go get each other's addresses."""
    for number in range(50):
        param = nn.Parameter(torch.full((4,), 1.0 + number, device=device).bfloat16())
        assert torch.equal(amp.float32_of(param), param.detach().float())
        optimizer = amp.optim.SGD([param], lr=2.0**-12)
        param.grad = torch.ones_like(param)
        optimizer.step()
        wanted = amp.float32_of(param)
        for _ in range(2):
            amp.optim.forget(optimizer)
        assert torch.equal(amp.float32_of(param), wanted)
        del optimizer
