"""Layer norms, RMS norms and recurrent layers on a CPU: each number is rounded once."""

from __future__ import annotations

import pytest
import torch
from forked import Script, run_each
from tiers import paired
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's name)
from torch.nn.utils import rnn

import amp_mp as amp
import amp_mp.apex.normalization
from amp_mp.casting import products

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half an ulp of 1


@pytest.fixture(params=UNIT, ids=str)
def low(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.delenv(products.VARIABLE, raising=False)
    products.choose_products("native", request.param)
    torch.manual_seed(0)
    return request.param


@pytest.fixture
def low_float32(low: torch.dtype) -> torch.dtype:
    """A dtype whose products are computed in float32."""
    products.choose_products("float32", low)
    return low


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_of_prepared_models_convert_no_activation(kind: str) -> None:
    prepared, in_float32 = getattr(nn, kind)(8), getattr(amp.nn, f"Fp32{kind}")(8)
    amp.prepare(nn.Sequential(prepared, in_float32, nn.Linear(8, 8)), torch.bfloat16)
    x = torch.randn(10, 8).bfloat16()
    of_apex = getattr(amp_mp.apex.normalization, f"Fused{kind}")(8).bfloat16()
    for norm in (prepared, in_float32, getattr(amp.nn, f"Fp32{kind}")(8).bfloat16(), of_apex):
        kept: list[Tensor] = []

        def pack(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            assert norm(x).dtype == torch.bfloat16
        assert [t.dtype for t in kept if t.numel() == x.numel()] == [torch.bfloat16]


def test_rms_norms_of_float32_keep_their_input_alone_and_can_be_differentiated_twice() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 64, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        amp.nn.Fp32RMSNorm(64)(x)
    assert len([t for t in kept if t.numel() == x.numel()]) == 1

    def penalty(dtype: torch.dtype) -> Tensor:
        own = x.detach().to(dtype).requires_grad_()
        y = amp.nn.Fp32RMSNorm(64, eps=1e-5).to(dtype)(own)
        (first,) = torch.autograd.grad(y.pow(3).sum(), own, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), own)[0]

    # Each number is a sum over 64; those of float32 are off by a few units of the largest.
    exact = penalty(torch.float64)
    assert (penalty(torch.float32) - exact).abs().max() <= 64 * 2.0**-24 * exact.abs().max()


def test_the_fused_rms_norm_of_float64_is_the_formula() -> None:
    products.choose_products("native", torch.bfloat16)
    x, weight = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2, 4), (2, 4))
    )

    def fused(*given: Tensor) -> Tensor:
        return torch.ops.aten._fused_rms_norm(given[0], [2, 4], *given[1:], 1e-6)[0]

    assert torch.autograd.gradcheck(fused, (x, weight))
    assert torch.autograd.gradgradcheck(fused, (x, weight))
    expected = F.rms_norm(x, (2, 4), weight, 1e-6)
    torch.testing.assert_close(fused(x, weight), expected, rtol=1e-14, atol=0)


# Of the input, and what of it is normalized.
SHAPES = [((3, 5), (5,)), ((7, 300), (300,)), ((2, 4, 33, 2), (33, 2)), ((4096, 64), (64,))]


@pytest.mark.parametrize(
    ("kind", "weights", "shapes", "strided"),
    paired(["layer_norm", "rms_norm"], ["low", "float32", "none"], SHAPES, [False, True]),
)
def test_results_and_gradients_are_rounded_once(
    low: torch.dtype,
    kind: str,
    weights: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    strided: bool,
) -> None:
    shape, normalized = shapes
    x = (3 * torch.randn(shape) + 1).to(low)
    x = x.mT.contiguous().mT if strided else x
    of_weights = low if weights == "low" else torch.float32
    given = [] if weights == "none" else [torch.randn(normalized).to(of_weights) for _ in "wb"]
    given = given[:1] if kind == "rms_norm" else given
    grad = torch.randn(shape).to(low)

    def results(dtype: torch.dtype | None) -> list[Tensor]:
        own = [t.to(dtype or t.dtype).detach().requires_grad_() for t in (x, *given)]
        y = getattr(F, kind)(own[0], normalized, *own[1:])
        return [y, *torch.autograd.grad(y, own, grad.to(y.dtype))]

    for found, exact in zip(results(None), results(torch.float64), strict=True):
        assert found.shape == exact.shape
        error = (found.double() - exact).abs().max()
        assert error <= 1.01 * UNIT[low] * exact.abs().max()


def test_what_torch_refuses_or_leaves_empty_it_does_too(low: torch.dtype) -> None:
    empty = torch.empty(0, 8, dtype=low, requires_grad=True)
    F.layer_norm(empty, (8,)).sum().backward()
    assert empty.grad is not None
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(torch.ones(3, 4, dtype=low), (3,))


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


def tensors(found: object) -> list[Tensor]:
    """All tensors with gradients of a layer's result."""
    if isinstance(found, Tensor):
        return [found] if found.is_floating_point() else []
    return [t for part in found or () for t in tensors(part)]  # type: ignore[attr-defined]


def results(
    layer: nn.Module, x: Tensor, lengths: list[int] | None, low_float32: torch.dtype
) -> list[Tensor]:
    """Results, and gradients of input and weights for random gradients of the results."""
    x = x.detach().requires_grad_()
    given = x if lengths is None else rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    found = tensors(layer(given))
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator).to(low_float32).to(x.dtype) for t in found]
    inputs = [x, *layer.parameters()]
    return [t.detach() for t in found] + list(torch.autograd.grad(found, inputs, grads))


def expect_near(low_float32: torch.dtype, layer: nn.Module, x: Tensor, lengths: list[int] | None,
                roundings: float) -> None:  # fmt: skip
    layer, x = layer.to(low_float32), x.to(low_float32)
    found = results(layer, x, lengths, low_float32)
    exact = results(layer.double(), x.double(), lengths, low_float32)
    for own, right in zip(found, exact, strict=True):
        assert own.dtype == low_float32
        assert own.shape == right.shape
        # One rounding of each number; float32's own errors are far smaller.
        assert (own.double() - right).abs().max() <= roundings * UNIT[
            low_float32
        ] * right.abs().max()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_round_each_result_once(low_float32: torch.dtype, kind: str, packed: bool) -> None:
    layer = KINDS[kind](bidirectional=kind != "tanh")
    lengths = [5, 20, 11] if packed else None
    expect_near(low_float32, layer, torch.randn(20, 3, 8), lengths, roundings=1.01)


@pytest.mark.parametrize("shape", [(3, 8), (8,)])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_round_products_and_results(
    low_float32: torch.dtype, kind: str, shape: tuple[int, ...]
) -> None:
    expect_near(low_float32, CELLS[kind](), torch.randn(shape), None, roundings=4)


def test_inference_computes_the_same(low_float32: torch.dtype) -> None:
    for make in KINDS.values():
        layer, x = make().to(low_float32), torch.randn(5, 3, 8).to(low_float32)
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
    environment = {"DNNL_MAX_CPU_ISA": "AVX2", products.VARIABLE: "float32"}
    (done,) = run_each([Script(["-c", code], environment)])
    assert done.returncode == 0, done.stderr
