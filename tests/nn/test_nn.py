"""Norms and softmax of amp_mp.nn: float32 between low-precision layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import gradcheck

import amp_mp as amp
from amp_mp import nn as amp_nn

LOW = [torch.float16, torch.bfloat16]
OPS = "layer_norm group_norm rms_norm softmax _softmax log_softmax _log_softmax"


@pytest.fixture(params=["torch.autocast", "all policies low"])
def casting(device: str, request: pytest.FixtureRequest) -> Iterator[torch.autocast]:
    """A region that casts: as torch's lists say, or everything this file is about."""
    if request.param == "all policies low":
        for name in OPS.split():
            amp.set_policy(f"aten::{name}", "low_precision", device)
    yield torch.autocast(device, torch.bfloat16)
    amp.casting.uninstall()


# Norms: the class's name without Fp32, arguments, and the shape of an input.

NORMS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "LayerNorm": ("LayerNorm", {"normalized_shape": (3, 8), "eps": 1e4}, (4, 3, 8)),
    "LayerNorm without bias": ("LayerNorm", {"normalized_shape": 8, "bias": False}, (4, 8)),
    "plain LayerNorm": ("LayerNorm", {"normalized_shape": 8, "elementwise_affine": False}, (4, 8)),
    "RMSNorm": ("RMSNorm", {"normalized_shape": 8, "eps": 1e4}, (4, 8)),
    "plain RMSNorm": ("RMSNorm", {"normalized_shape": 8, "elementwise_affine": False}, (4, 8)),
    "GroupNorm": ("GroupNorm", {"num_groups": 2, "num_channels": 8, "eps": 1e4}, (4, 8, 5)),
    "plain GroupNorm": (
        "GroupNorm",
        {"num_groups": 2, "num_channels": 8, "affine": False},
        (4, 8, 5),
    ),
}
norms = pytest.mark.parametrize("name", NORMS)


def make_norm(name: str, device: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Tensor]:
    """Ours with weights of the dtype, torch's in float32 with the same, and float32 inputs.

    The inputs' squares are beyond float16; so large an eps makes a difference to them.
    """
    kind, kwargs, shape = NORMS[name]
    norm = getattr(amp_nn, f"Fp32{kind}")(**kwargs).to(device, dtype)
    twin = getattr(nn, kind)(**kwargs).to(device)
    with torch.no_grad():
        for param in norm.parameters():
            param.copy_(torch.rand_like(param) + 0.5)
    twin.load_state_dict(norm.state_dict())
    return norm, twin, torch.randn(shape, device=device) * 300 + 500


def assert_like_float32(norm: nn.Module, twin: nn.Module, x: Tensor, y: Tensor) -> None:
    """y = norm(x) and its gradients are torch's of float32, rounded once.

    No bit differs, but on a CPU of an RMS norm, and of a layer norm of low precision, whose sums
    have another order: a sum of 64 numbers is off by 64 * 2^-24 of the largest at most, so a few
    are rounded to the neighbour.
    """
    x32 = x.detach().float().requires_grad_()
    y32 = twin(x32)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    y32.backward(upstream.float())
    assert y.dtype == x.dtype
    is_layer = isinstance(norm, nn.LayerNorm) and x.dtype in LOW
    fused = not x.is_cuda and (is_layer or isinstance(norm, nn.RMSNorm))

    def assert_rounded(found: Tensor, exact: Tensor) -> None:
        if not fused:
            assert torch.equal(found, exact.to(found.dtype))
            return
        half_ulp = torch.finfo(found.dtype).eps / 2
        bound = 1.001 * half_ulp * exact.abs() + 64 * 2.0**-24 * exact.abs().max()
        bound += 2.0**-25  # half a step of float16's subnormal numbers
        assert ((found.double() - exact).abs() <= bound).all()

    assert_rounded(y, y32)
    assert_rounded(x.grad, x32.grad)
    for param, wanted in zip(norm.parameters(), twin.parameters(), strict=True):
        assert param.grad.dtype == param.dtype
        assert_rounded(param.grad, wanted.grad)


@norms
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("weights_low", [False, True])
def test_norms_compute_in_float32_and_return_the_dtypes_they_were_given(
    device: str, name: str, dtype: torch.dtype, weights_low: bool
) -> None:
    norm, twin, inputs = make_norm(name, device, dtype if weights_low else torch.float32)
    x = inputs.to(dtype).requires_grad_()
    assert_like_float32(norm, twin, x, norm(x))


@norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_compute_in_float32_where_casts_are_on(
    device: str, casting: torch.autocast, name: str, dtype: torch.dtype
) -> None:
    norm, twin, inputs = make_norm(name, device, torch.float32)
    x = inputs.to(dtype).requires_grad_()
    with casting:
        y = norm(x)
    assert_like_float32(norm, twin, x, y)


def test_layer_norm_is_the_formula(device: str) -> None:
    norm, _, x = make_norm("LayerNorm", device, torch.float32)
    wide = x.double().flatten(1)
    mean, var = wide.mean(1, keepdim=True), wide.var(1, unbiased=False, keepdim=True)
    y = ((wide - mean) / (var + 1e4).sqrt()).reshape(x.shape)
    wanted = y * norm.weight.double() + norm.bias.double()
    # The mean of 24 numbers up to 2000 is off by 24 * 2000 * 2^-24 at most, of a deviation near 300
    # and weights up to 1.5; the variance and the division add less.
    torch.testing.assert_close(norm(x).double(), wanted, rtol=0, atol=2.0**-24 * 24 * 2000 / 150)


@norms
def test_norms_leave_float64_in_float64(device: str, name: str) -> None:
    norm, _, x = make_norm(name, device, torch.float64)
    assert gradcheck(norm, ((x.double() / 300).requires_grad_(),))


@norms
def test_prepare_keeps_the_norms_weights_in_float32(device: str, name: str) -> None:
    norm, twin, inputs = make_norm(name, device, torch.float32)
    amp.prepare(nn.Sequential(norm), torch.bfloat16)
    x = inputs.bfloat16().requires_grad_()
    assert_like_float32(norm, twin, x, norm(x))


@pytest.mark.parametrize(
    ("norm", "shape", "message"),
    [
        (amp_nn.Fp32LayerNorm((3, 8)), (3, 7), r"^input must have shape \(\*, 3, 8\), .*\(3, 7\)"),
        (amp_nn.Fp32LayerNorm(8), (), r"^input must have shape \(\*, 8\), found \(\)"),
        (amp_nn.Fp32RMSNorm(8), (8, 4), r"^x must have shape \(\*, 8\), found \(8, 4\)"),
        (amp_nn.Fp32GroupNorm(2, 8), (8,), r"^input must have shape \(N, 8, \*\), found \(8,\)"),
        (amp_nn.Fp32GroupNorm(2, 8), (4, 6), r"^input must have shape \(N, 8, \*\), .*\(4, 6\)"),
    ],
)
def test_norms_refuse_other_shapes_and_integers_by_name(
    norm: nn.Module, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        norm(torch.zeros(shape))
    with pytest.raises(TypeError, match=r"must be a floating-point tensor, found torch.int64"):
        norm(torch.zeros(4, 8, dtype=torch.int64))


# Softmax.


def softmax64(x: NDArray[np.float64], dim: int) -> NDArray[np.float64]:
    powers = np.exp(x - x.max(dim, keepdims=True))
    return powers / powers.sum(dim, keepdims=True)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_is_float32s_rounded_once(device: str, dtype: torch.dtype, dim: int) -> None:
    x = (torch.randn(7, 9, 5, device=device) * 8).to(dtype)
    wanted = softmax64(x.double().cpu().numpy(), dim)
    # x - max is at most 64 and off by 2^-24 of it, which exp makes relative; exp itself, the sum of
    # at most 9 terms and the division add some 16 of 2^-24. Then one rounding, of half a step, or
    # of half a quantum where float16 is subnormal.
    rtol = 80 * 2.0**-24 + torch.finfo(dtype).eps / 2
    atol = 2.0**-25 if dtype == torch.float16 else 0.0
    found = amp_nn.fp32_softmax(x, dim)
    assert found.dtype == amp_nn.fp32_log_softmax(x, dim).dtype == dtype
    np.testing.assert_allclose(found.double().cpu(), wanted, rtol, atol)
    logs = amp_nn.fp32_log_softmax(x, dim).double().cpu()
    np.testing.assert_allclose(logs, np.log(wanted), rtol, 80 * 2.0**-24)


@pytest.mark.parametrize("dtype", LOW)
def test_softmax_sums_more_terms_than_low_precision_can_count(
    device: str, dtype: torch.dtype
) -> None:
    x = torch.full((2, 4096), 60000.0, device=device).to(dtype)
    assert (amp_nn.fp32_softmax(x) == 2.0**-12).all()
    wanted = torch.tensor(-12 * math.log(2)).to(dtype).item()
    assert (amp_nn.fp32_log_softmax(x) == wanted).all()


@pytest.mark.parametrize("function", [amp_nn.fp32_softmax, amp_nn.fp32_log_softmax])
def test_softmax_computes_in_float32_where_casts_are_on(
    device: str, casting: torch.autocast, function: Any
) -> None:
    x = torch.randn(4, 9, device=device)
    outside, outside_low = function(x), function(x.bfloat16())
    with casting:
        assert torch.equal(function(x), outside)
        assert torch.equal(function(x.bfloat16()), outside_low)


@pytest.mark.parametrize("function", [amp_nn.fp32_softmax, amp_nn.fp32_log_softmax])
def test_softmax_gradients_and_errors(device: str, function: Any) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(function, (x, 0))
    low = x.detach().half().requires_grad_()
    function(low)[0, 0].backward()
    assert low.grad.dtype == torch.float16
    with pytest.raises(ValueError, match=r"^dim must be a dimension of x, .*\(3, 4\), found 2"):
        function(x, 2)
    with pytest.raises(TypeError, match=r"^x must be a floating-point tensor, found torch.bool"):
        function(x > 0)
