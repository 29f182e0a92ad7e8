"""torch may exchange parameters for others of the same identity (torch.utils.swap_tensors)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import amp_mp as amp


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
