"""What masters and loss scaling are for: a problem that float16 solves only with both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrapping import wrap

SIZE = 64
STEPS = 700
LEARNING_RATE = 2.0**15


def hadamard(size: int) -> Tensor:
    """A matrix of +-1 with H'H = size I."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return matrix


def test_four_arms(device: str) -> None:
    """float16 with masters and scaling trains as float32 does; without either it does not train.

    The task is the regression mean((X w - X w*)^2) with X = 2^-13 H, H'H = 64 I. Its gradient is
    g = (2 / 64) X'X (w - w*) = 2^-25 (w - w*), and |w - w*| starts in [0.3, 0.9], hence

    - without scaling: |g| < 2^-25, half of the smallest float16 number, so every gradient rounds
      to 0 (and so do no weights: they are ordinary numbers);
    - without masters: w is in [2, 4), where ulp(w) = 2^-9, and lr |g| = 2^15 2^-25 |w - w*| is
      below 2^-10 = ulp(w) / 2, so every w - lr g rounds back to w, however exact g is;
    - with both: each step takes w - w* to (1 - 2^-10) of itself, 700 of them to half, and so the
      loss to 1/4. A scale of 128 lifts g to 2^-18, where float16's spacing, 2^-24, is 2^-6 of it
      and rounding to nearest mostly averages out. The rest of the 1 % allows for weights rounded
      to 2^-10 of a difference of 0.2 or more, and for steps that the dynamic scale skips, 0.2 %
      each: from 2^32 it takes two or three until 2^32 X (w - w*) / 32 is below 65504.
    """
    x = 2.0**-13 * hadamard(SIZE).to(device)
    start = (2.01 + 1.97 * torch.rand(SIZE, device=device)).half().float()
    sign = torch.where(torch.rand(SIZE, device=device) < 0.5, -1.0, 1.0)
    target = x @ (start - sign * (0.3 + 0.6 * torch.rand(SIZE, device=device)))

    def model_in(dtype: torch.dtype) -> nn.Linear:
        model = nn.Linear(SIZE, 1, bias=False, device=device)
        with torch.no_grad():
            model.weight.copy_(start)
        return model.to(dtype)

    def loss_of(model: nn.Linear) -> Tensor:
        return (model(x.to(model.weight.dtype)).float().squeeze(1) - target).square().mean()

    def final(model: nn.Linear) -> float:
        residual = x.double() @ model.weight.detach().double().squeeze(0) - target.double()
        return float(residual.square().mean())

    def sgd(model: nn.Linear, lr: float = LEARNING_RATE) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=lr)

    def with_torch(dtype: torch.dtype, scale: float) -> float:
        """The scaled loss and a learning rate divided by the scale: only masters are missing."""
        model = model_in(dtype)
        optimizer = sgd(model, LEARNING_RATE / scale)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (loss_of(model) * scale).backward()
            optimizer.step()
        return final(model)

    def with_masters(**arguments: Any) -> float:
        model = model_in(torch.float16)
        optimizer = wrap(sgd(model), **arguments)
        for _ in range(STEPS):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model))
            optimizer.step()
        return final(model)

    losses = {
        "at the start": final(model_in(torch.float32)),
        "float32": with_torch(torch.float32, 1.0),
        "masters, static 128": with_masters(static_loss_scale=128.0),
        "masters, dynamic": with_masters(dynamic_loss_scale=True),
        "no masters, scale 128": with_torch(torch.float16, 128.0),
        "masters, no scale": with_masters(static_loss_scale=1.0),
    }
    float32 = losses["float32"]
    assert float32 < losses["at the start"] / 3, losses
    assert losses["masters, static 128"] == pytest.approx(float32, rel=0.01), losses
    assert losses["masters, dynamic"] == pytest.approx(float32, rel=0.01), losses
    assert losses["no masters, scale 128"] > 2 * float32, losses
    assert losses["masters, no scale"] > 2 * float32, losses
