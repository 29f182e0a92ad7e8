"""Gradients of embeddings in low precision on a CPU: float32's sum over the batch, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_mp as amp

LOW = [torch.float16, torch.bfloat16]
MANY = 16_384


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", ["embedding", "bag", "mean"])
def test_a_token_that_occurs_16384_times_has_a_gradient_of_16384(
    kind: str, dtype: torch.dtype
) -> None:
    layer: Any = nn.Embedding(4, 3) if kind == "embedding" else nn.EmbeddingBag(4, 3, mode="sum")
    if kind == "mean":
        layer.mode = "mean"
    amp.prepare(layer, dtype)
    tokens = torch.zeros(MANY, 1, dtype=torch.long)
    layer(tokens).sum().backward()
    assert layer.weight.grad.dtype == dtype
    assert layer.weight.grad.tolist() == [[MANY] * 3] + [[0] * 3] * 3


@pytest.mark.parametrize("dtype", LOW)
def test_a_tied_embeddings_gradient_is_the_sum_of_both(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4, bias=False))
    model[1].weight = model[0].weight
    amp.prepare(model, dtype)
    with torch.no_grad():
        model[0].weight.zero_()
    x: Tensor = model[0](torch.zeros(MANY, dtype=torch.long))
    (x.sum() + model[1](torch.ones(1, 8, dtype=dtype)).sum()).backward()
    assert model[0].weight.grad[0].tolist() == [torch.tensor(MANY + 1.0).to(dtype)] * 8
    assert model[0].weight.grad[1:].tolist() == [[1.0] * 8] * 3


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_every_option_gives_float32s_gradient_rounded_once(
    dtype: torch.dtype, scaled: bool, padding: int | None, index: torch.dtype
) -> None:
    amp.prepare(nn.Linear(2, 2), dtype)
    tokens = torch.randint(0, 50, (7, 1000), dtype=index)
    weight = torch.randn(60, 33).to(dtype).requires_grad_()
    twin = weight.detach().float().requires_grad_()
    grad = torch.randn(7, 1000, 33).to(dtype)
    for each in (weight, twin):
        found = functional.embedding(tokens, each, padding, scale_grad_by_freq=scaled)
        found.backward(grad.to(each.dtype))
    assert weight.grad is not None
    assert twin.grad is not None
    wanted = twin.grad.to(dtype)
    # torch adds in another order and multiplies by a reciprocal: a unit in the last place at most
    close = torch.isclose(weight.grad.float(), wanted.float(), rtol=0.008, atol=1e-5)
    assert bool(close.all())
    assert float((weight.grad != wanted).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", LOW)
def test_empty_transposed_and_vectorised_gradients(dtype: torch.dtype) -> None:
    layer: Any = amp.prepare(nn.Embedding(5, 4), dtype)
    layer(torch.zeros(0, 3, dtype=torch.long)).sum().backward()
    assert not layer.weight.grad.any()
    tokens = torch.tensor([[1, 2, 1]])
    layer.weight.grad = None
    weights = torch.arange(12.0).view(4, 3).t().to(dtype)
    (layer(tokens)[0] * weights).sum().backward()
    assert layer.weight.grad[1].tolist() == (weights[0] + weights[2]).tolist()

    def loss(weight: Tensor, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, weight).float().sum()

    rows = torch.randint(0, 5, (6, 9))
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(layer.weight.detach(), rows)
    assert each[:, :, 0].tolist() == [torch.bincount(row, minlength=5).tolist() for row in rows]
