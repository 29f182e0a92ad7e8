"""Recurrent layers in low precision where products are computed in float32: rounded once."""

from __future__ import annotations

import pytest
import torch
from forked import Script, run_each
from torch import Tensor, nn
from torch.nn.utils import rnn

from amp_mp.casting import products

DTYPES = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half an ulp of 1
KINDS = {
    "lstm": lambda **more: nn.LSTM(8, 6, 2, **more),
    "projected": lambda **more: nn.LSTM(8, 6, 2, proj_size=4, **more),
    "gru": lambda **more: nn.GRU(8, 6, 2, **more),
    "tanh": lambda **more: nn.RNN(8, 6, 2, **more),
    "relu": lambda **more: nn.RNN(8, 6, 2, nonlinearity="relu", bias=False, **more),
}
CELLS = {
    "lstm": lambda: nn.LSTMCell(8, 6),
    "gru": lambda: nn.GRUCell(8, 6),
    "tanh": lambda: nn.RNNCell(8, 6),
    "relu": lambda: nn.RNNCell(8, 6, bias=False, nonlinearity="relu"),
}


@pytest.fixture(params=DTYPES, ids=str)
def low(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.delenv(products.VARIABLE, raising=False)
    products.choose_products("float32", request.param)
    torch.manual_seed(0)
    return request.param


def tensors(found: object) -> list[Tensor]:
    """All tensors with gradients of a layer's result."""
    if isinstance(found, Tensor):
        return [found] if found.is_floating_point() else []
    return [t for part in found or () for t in tensors(part)]  # type: ignore[attr-defined]


def results(
    layer: nn.Module, x: Tensor, lengths: list[int] | None, low: torch.dtype
) -> list[Tensor]:
    """Results, and gradients of input and weights for random gradients of the results."""
    x = x.detach().requires_grad_()
    given = x if lengths is None else rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    found = tensors(layer(given))
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator).to(low).to(x.dtype) for t in found]
    inputs = [x, *layer.parameters()]
    return [t.detach() for t in found] + list(torch.autograd.grad(found, inputs, grads))


def expect_near(low: torch.dtype, layer: nn.Module, x: Tensor, lengths: list[int] | None,
                roundings: float) -> None:  # fmt: skip
    layer, x = layer.to(low), x.to(low)
    found = results(layer, x, lengths, low)
    exact = results(layer.double(), x.double(), lengths, low)
    for own, right in zip(found, exact, strict=True):
        assert own.dtype == low
        assert own.shape == right.shape
        # One rounding of each number; float32's own errors are far smaller.
        assert (own.double() - right).abs().max() <= roundings * UNIT[low] * right.abs().max()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_round_each_result_once(low: torch.dtype, kind: str, packed: bool) -> None:
    layer = KINDS[kind](bidirectional=kind != "tanh")
    lengths = [5, 20, 11] if packed else None
    expect_near(low, layer, torch.randn(20, 3, 8), lengths, roundings=1.01)


@pytest.mark.parametrize("shape", [(3, 8), (8,)])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_round_products_and_results(
    low: torch.dtype, kind: str, shape: tuple[int, ...]
) -> None:
    expect_near(low, CELLS[kind](), torch.randn(shape), None, roundings=4)


def test_inference_computes_the_same(low: torch.dtype) -> None:
    for make in KINDS.values():
        layer, x = make().to(low), torch.randn(5, 3, 8).to(low)
        with torch.inference_mode():
            inferred = tensors(layer(x))
        assert all(map(torch.equal, inferred, tensors(layer(x))))


def test_an_lstm_under_torchs_autocast_runs_without_avx512() -> None:
    """torch's autocast casts it to bfloat16 for oneDNN, which has none for such a processor."""
    code = """
import torch, amp_mp as amp
amp.prepare(torch.nn.Linear(2, 2), torch.bfloat16, products="float32")
layer, x = torch.nn.LSTM(8, 6, 2), torch.randn(5, 3, 8)
wanted = layer(x)[0]
with torch.autocast("cpu", torch.bfloat16):
    found = layer(x)[0]
found.float().sum().backward()
assert (found - wanted).abs().max() < 2.0**-6, found - wanted
assert all(p.grad.abs().sum() > 0 for p in layer.parameters())
"""
    (done,) = run_each([Script(["-c", code], {"DNNL_MAX_CPU_ISA": "AVX2"})])
    assert done.returncode == 0, done.stderr
