"""Layer norms of low-precision tensors on a CPU: each number rounded once, sums in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's name)

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


def test_a_thousand_ones_add_up_in_a_prepared_norms_gradient() -> None:
    """torch's kernel adds them up to 256 in bfloat16."""
    prepared = nn.LayerNorm(8)
    amp.prepare(nn.Sequential(prepared, nn.Linear(8, 8)), torch.bfloat16)
    x = torch.randn(1000, 8).bfloat16()
    for norm in (prepared, nn.LayerNorm(8).bfloat16(), amp.nn.Fp32LayerNorm(8).bfloat16()):
        y = norm(x)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert torch.equal(norm.bias.grad.bfloat16(), torch.full((8,), 1000.0).bfloat16())


def test_norms_of_prepared_models_convert_no_activation() -> None:
    prepared = nn.LayerNorm(8)
    amp.prepare(nn.Sequential(prepared, nn.Linear(8, 8)), torch.bfloat16)
    x = torch.randn(10, 8).bfloat16()
    for norm in (prepared, amp.nn.Fp32LayerNorm(8), amp_mp.apex.normalization.FusedLayerNorm(8)):
        kept: list[Tensor] = []

        def pack(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            norm.to(torch.bfloat16 if norm is not prepared else torch.float32)(x)
        assert [t.dtype for t in kept if t.numel() == x.numel()] == [torch.bfloat16]


@pytest.mark.parametrize("weights", ["low", "float32", "none"])
@pytest.mark.parametrize(
    ("shape", "normalized"),
    [((3, 5), (5,)), ((7, 300), (300,)), ((2, 4, 33, 2), (33, 2)), ((4096, 64), (64,))],
)
@pytest.mark.parametrize("strided", [False, True])
def test_results_and_gradients_are_rounded_once(
    low: torch.dtype,
    shape: tuple[int, ...],
    normalized: tuple[int, ...],
    weights: str,
    strided: bool,
) -> None:
    x = (3 * torch.randn(shape) + 1).to(low)
    x = x.mT.contiguous().mT if strided else x
    of_weights = low if weights == "low" else torch.float32
    given = [] if weights == "none" else [torch.randn(normalized).to(of_weights) for _ in "wb"]
    grad = torch.randn(shape).to(low)

    def results(dtype: torch.dtype | None) -> list[Tensor]:
        own = [t.to(dtype or t.dtype).detach().requires_grad_() for t in (x, *given)]
        y = F.layer_norm(own[0], normalized, *own[1:])
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
