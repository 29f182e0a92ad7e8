"""What the fused optimizers refuse to step, to take and to load."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import raw_bytes
from torch import nn

import amp_mp as amp


def errors() -> dict[str, tuple[Callable[[str], None], type, str]]:
    def step_with(
        make: Callable[[str], tuple[torch.Tensor, torch.Tensor]],
    ) -> Callable[[str], None]:
        def act(device: str) -> None:
            data, grad = make(device)
            param = nn.Parameter(data)
            optimizer = amp.optim.AdamW([("layer.weight", param)], max_grad_norm=1.0)
            param.grad_dtype = None
            param.grad = grad
            before = raw_bytes([data])
            try:
                optimizer.step()
            finally:
                assert raw_bytes([data]) == before

        return act

    def shared(device: str) -> None:
        storage = torch.zeros(10, device=device)
        params = [nn.Parameter(storage[:6]), nn.Parameter(storage[5:])]
        for p in params:
            p.grad = torch.ones_like(p)
        amp.optim.SGD(params, lr=0.1).step()

    def gaps(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(4, 4, device=device)[:, ::2], torch.ones(4, 2, device=device)

    def sparse(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3, 2, device=device), torch.ones(3, 2, device=device).to_sparse()

    def double(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.zeros(3, dtype=torch.float64, device=device),) * 2

    def double_grad(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3, device=device), torch.zeros(3, dtype=torch.float64, device=device)

    name = r"parameter 0 of group 0 \('layer.weight'\)"
    return {
        "sparse gradient": (step_with(sparse), TypeError, f"gradient of {name}.*sparse=False"),
        "float64 parameter": (step_with(double), TypeError, f"{name} has dtype torch.float64"),
        "float64 gradient": (step_with(double_grad), TypeError, f"gradient of {name}.*Double"),
        "weight with gaps": (step_with(gaps), ValueError, f"weight of {name}.*contiguous tensor"),
        "shared memory": (shared, ValueError, "parameter 0 of group 0 and .*parameter 1.*share"),
    }


@pytest.mark.parametrize("case", errors())
def test_what_cannot_be_stepped_is_refused_by_name(device: str, case: str) -> None:
    act, kind, message = errors()[case]
    with pytest.raises(kind, match=message):
        act(device)


ARGUMENTS = {
    "lr": -1.0,
    "eps": -1e-8,
    "weight_decay": -0.1,
    "max_grad_norm": 0.0,
    "betas": (0.9, 1.0),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_arguments_out_of_range_are_refused_by_name(argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        amp.optim.AdamW([nn.Parameter(torch.ones(1))], **{argument: ARGUMENTS[argument]})


def test_a_state_dict_that_does_not_fit_changes_nothing(device: str) -> None:
    param = nn.Parameter(torch.ones(3, device=device))
    other = nn.Parameter(torch.ones(4, device=device))
    optimizers = [amp.optim.AdamW([p]) for p in (param, other)]
    for optimizer, p in zip(optimizers, (param, other), strict=True):
        p.grad = torch.ones_like(p)
        optimizer.step()
    before = raw_bytes(optimizers[0].state_dict())
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 0 has shape \(4,\).*\(3,\)"):
        optimizers[0].load_state_dict(optimizers[1].state_dict())
    assert raw_bytes(optimizers[0].state_dict()) == before
