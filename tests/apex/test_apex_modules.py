"""apex's norms, fp16_utils, contrib, and what is missing of its tree."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DTYPES
from tiers import paired
from torch import Tensor, nn

from amp_mp.apex import fp16_utils, normalization
from amp_mp.apex.contrib.clip_grad import clip_grad_norm_
from amp_mp.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from amp_mp.apex.missing import MISSING

EPS = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def doubles(x: Tensor) -> Any:
    return x.detach().double().cpu().numpy()


def normalized(kind: str, x: Any, w: Any, b: Any, eps: float) -> Any:
    """Layer norm or RMS norm over the last two dimensions, in float64."""
    axes = (-2, -1)
    centre = x.mean(axes, keepdims=True) if "Layer" in kind else 0.0
    x = x - centre
    return x / np.sqrt((x * x).mean(axes, keepdims=True) + eps) * w + b


@pytest.mark.parametrize(
    ("kind", "dtype", "weights", "memory_efficient"),
    paired(
        ("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"),
        *(DTYPES, DTYPES, (False, True)),
    ),
)
def test_norms(device: str, kind: str, dtype: str, weights: str, memory_efficient: bool) -> None:
    made = getattr(normalization, kind)((3, 8), eps=1e-3, memory_efficient=memory_efficient)
    for param in made.parameters():
        nn.init.uniform_(param, 0.5, 1.5)
    made = made.to(device, DTYPES[weights])
    x = (torch.randn(5, 3, 8) * 100).to(device, DTYPES[dtype]).requires_grad_()
    for autocast in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            found = made(x)
        assert found.dtype == DTYPES[weights if "Mixed" in kind else dtype]
        b = doubles(made.bias) if "Layer" in kind else 0.0
        wanted = normalized(kind, doubles(x), doubles(made.weight), b, 1e-3)
        eps = EPS[weights if "Mixed" in kind else dtype]
        np.testing.assert_allclose(doubles(found), wanted, rtol=eps, atol=eps)
    found.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == x.dtype
    assert made.weight.grad.dtype == made.weight.dtype
    torchs = nn.LayerNorm((3, 8)) if "Layer" in kind else nn.RMSNorm((3, 8))
    torchs.load_state_dict(made.state_dict())


def test_gradients_of_norms() -> None:
    """float64 inputs are computed in float64, so that differences of them can be taken."""
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    w, b = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(
        lambda x, w, b: normalization.fused_layer_norm_affine(x, w, b, (6,)), (x, w, b)
    )
    assert torch.autograd.gradcheck(
        lambda x, w: normalization.mixed_dtype_fused_rms_norm_affine(x, w, 6), (x, w)
    )


def test_functions_of_norms() -> None:
    x, w, b = torch.randn(4, 6).bfloat16(), torch.rand(6), torch.rand(6)
    n = normalization
    assert n.fused_layer_norm(x, 6).dtype == torch.bfloat16
    assert n.fused_rms_norm(x, (6,), 1e-5).dtype == torch.bfloat16
    assert n.fused_layer_norm_affine(x, w, b, [6]).dtype == torch.bfloat16
    mixed = n.mixed_dtype_fused_layer_norm_affine(x, w, b, (6,), 1e-5)
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, nn.functional.layer_norm(x.float(), (6,), w, b, 1e-5))
    manual = n.manual_rms_norm(x, (6,), w, 1e-5)
    torch.testing.assert_close(manual, nn.functional.rms_norm(x.float(), (6,), w, 1e-5))
    assert n.manual_rms_norm(x.float(), (6,), w.half(), 1e-5).dtype == torch.float16
    assert n.manual_rms_norm(x, (6,), None, 1e-5).dtype == torch.float32
    with pytest.raises(ValueError, match=r"input must have shape \(\*, \(5,\)\), found \(4, 6\)"):
        n.fused_layer_norm(x, 5)
    with pytest.raises(RuntimeError, match="elementwise_affine must be True, found False"):
        n.MixedFusedRMSNorm(6, elementwise_affine=False)
    assert list(n.FusedLayerNorm(6, elementwise_affine=False).state_dict()) == []
    assert n.FusedRMSNorm(6).eps == n.FusedLayerNorm(6).eps == 1e-5


def test_a_model_that_casts_what_it_is_given() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = fp16_utils.FP16Model(net)
    assert model.network is net
    assert (net[0].weight.dtype, net[1].weight.dtype) == (torch.float16, torch.float32)
    assert set(model.state_dict()) == {f"network.{name}" for name in net.state_dict()}
    x = torch.randn(5, 3)
    assert torch.equal(model(x), net(x.half()))
    assert fp16_utils.FP16Model(net, torch.bfloat16)(x).dtype == torch.bfloat16


CONVERSIONS: dict[str, Any] = {
    "FP16Model": lambda net: fp16_utils.FP16Model(net),
    "network_to_half": lambda net: fp16_utils.network_to_half(net),
    "convert_network": lambda net: fp16_utils.convert_network(net, torch.float16),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_batch_norms_with_weights_alone_stay_float32(device: str, name: str) -> None:
    """As in Apex; without weights their statistics are converted, too."""
    affine, plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)
    net = nn.Sequential(nn.Linear(3, 4), affine, plain, nn.LayerNorm(4)).to(device)
    model = CONVERSIONS[name](net)
    kept = {id(t) for t in (*affine.parameters(), *affine.buffers())}
    found = {t: id(t) in kept for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()}
    assert {t.dtype for t in found if found[t]} == {torch.float32}
    assert {t.dtype for t in found if not found[t]} == {torch.float16}
    x = torch.randn(5, 3, device=device)
    assert model(x.half() if model is net else x).dtype == torch.float16
    assert fp16_utils.BN_convert_float(net.half()) is net
    assert (affine.running_var.dtype, plain.running_var.dtype) == (torch.float32, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_convert_module_leaves_the_modules_below(dtype: str) -> None:
    lstm = nn.LSTM(2, 3)
    lstm.below, lstm.steps = nn.Linear(2, 2), nn.Buffer(torch.arange(2))
    params, grads = list(lstm.parameters(recurse=False)), torch.ones(12, 2)
    params[0].grad = grads
    fp16_utils.convert_module(lstm, DTYPES[dtype])
    assert list(map(id, lstm.parameters(recurse=False))) == list(map(id, params))
    assert {p.dtype for p in params} == {params[0].grad.dtype} == {DTYPES[dtype]}
    assert (lstm.below.weight.dtype, lstm.steps.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("dynamic", [False, True])
def test_loss_scalers_of_a_loop_by_hand(dynamic: bool) -> None:
    """The example of Apex's file: scale, look for overflow, divide, step or not, update."""
    weight = nn.Parameter(torch.zeros(2))
    made = fp16_utils.DynamicLossScaler(16.0, 4.0, 3) if dynamic else fp16_utils.LossScaler(16.0)
    wanted, last, skipped = 16.0, -1, 0
    for i in range(40):
        overflow = i in (3, 4, 5, 6, 20)
        assert made.loss_scale == made.cur_scale == wanted
        weight.grad = None
        made.backward((weight * torch.inf).sum() if overflow else weight.sum(), retain_graph=True)
        found = made.has_overflow(iter([weight, nn.Parameter(torch.zeros(1))]))
        assert found == (overflow and dynamic)
        assert overflow or weight.grad.tolist() == [wanted, wanted]
        made.update_scale(found)
        if found:
            wanted, last, skipped = max(wanted / 4, 1), i, skipped + 1
        elif dynamic and (i - last) % 3 == 0:
            wanted *= 4
    assert skipped == (5 if dynamic else 0)
    assert fp16_utils.DynamicLossScaler().loss_scale == 2.0**32
    assert fp16_utils.LossScaler().loss_scale == 1


def test_small_functions_of_fp16_utils() -> None:
    assert fp16_utils.to_python_float(torch.tensor([1.5])) == 1.5
    assert fp16_utils.clip_grad_norm is nn.utils.clip_grad_norm_


@pytest.mark.parametrize(
    ("dtypes", "max_norm"), paired((("float32",), ("float16", "bfloat16"), DTYPES), (0.1, 1e9))
)
def test_clip_grad_norm(device: str, dtypes: Any, max_norm: float) -> None:
    params = [nn.Parameter(torch.zeros(7, 3, device=device, dtype=DTYPES[d])) for d in dtypes]
    params.append(nn.Parameter(torch.zeros(0, device=device)))
    for p in params:
        p.grad = torch.randn_like(p) * 100
    before = [doubles(p.grad) for p in params]
    norm = np.sqrt(sum((g * g).sum() for g in before))
    params.append(nn.Parameter(torch.zeros(2, device=device)))  # without a gradient
    found = clip_grad_norm_(iter(params), max_norm)
    assert isinstance(found, Tensor)
    np.testing.assert_allclose(found.item(), norm, rtol=1e-6)
    for p, g in zip(params, before, strict=False):
        wanted = g * min(1.0, max_norm / (norm + 1e-6))
        np.testing.assert_allclose(doubles(p.grad), wanted, rtol=8e-3, atol=1e-7)


def test_clip_grad_norm_beside_torchs() -> None:
    param, twin = (nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
    for grad in (
        torch.arange(16.0).view(4, 4),
        torch.arange(16.0).view(4, 4).t(),
        torch.arange(32.0).view(4, 8)[:, ::2],
        torch.full((4, 4), torch.inf),
    ):
        for norm_type in (2, 1.0, torch.inf):
            param.grad, twin.grad = grad, grad.clone()
            found = clip_grad_norm_(param, 1.0, norm_type)
            wanted = nn.utils.clip_grad_norm_(twin, 1.0, norm_type)
            torch.testing.assert_close(found, wanted, equal_nan=True)
            torch.testing.assert_close(param.grad, twin.grad, equal_nan=True)
            grad = grad.clone()
    param.grad = torch.full((4, 4), torch.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(param, 1.0, error_if_nonfinite=True)
    half = nn.Parameter(torch.zeros(4).half())
    half.grad = torch.full((4,), 6e4).half()
    assert clip_grad_norm_(half, 1.0).item() == pytest.approx(1.2e5, rel=1e-3)
    assert clip_grad_norm_([], 1.0) == 0


@pytest.mark.parametrize(
    ("dtype", "smoothing", "half_to_float"), paired(DTYPES, (0.0, 0.1), (False, True))
)
def test_xentropy(device: str, dtype: str, smoothing: float, half_to_float: bool) -> None:
    logits = (torch.randn(9, 11) * 5).to(device, DTYPES[dtype]).requires_grad_()
    labels = torch.randint(0, 11, (9,), device=device)
    labels[2] = 3
    found = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 3, half_to_float)
    assert found.dtype == (torch.float32 if half_to_float else logits.dtype)
    x, rows = doubles(logits), np.arange(9)
    x = x - x.max(1, keepdims=True)
    log = x - np.log(np.exp(x).sum(1, keepdims=True))
    q = np.full((9, 11), smoothing / 11)
    kept = (labels != 3).cpu().numpy()
    q[rows, labels.cpu().numpy()] += 1 - smoothing
    eps = EPS["float32" if half_to_float else dtype]
    np.testing.assert_allclose(doubles(found), -(q * log).sum(1) * kept, rtol=eps, atol=eps)
    found.float().sum().backward()
    assert logits.grad is not None
    wanted = (np.exp(log) - q) * kept[:, None]
    np.testing.assert_allclose(doubles(logits.grad), wanted, rtol=EPS[dtype], atol=EPS[dtype])


def test_what_is_missing_says_what_to_use() -> None:
    for name in sorted(MISSING):
        folder, _, last = name.rpartition(".")
        package = importlib.import_module(f"amp_mp.apex.{folder}".rstrip("."))
        with pytest.raises(AttributeError, match=f"no attribute '{last}': .*use"):
            getattr(package, last)
        with pytest.raises(ImportError, match=f"amp_mp.apex.{name} is not there: .*use"):
            importlib.import_module(f"amp_mp.apex.{name}.anything")
        with pytest.raises(ImportError, match=r"is not there: .*use"):
            exec(f"from {package.__name__} import {last}")
        assert not hasattr(package, last)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'amp_mp\.apex\.nothing'"):
        importlib.import_module("amp_mp.apex.nothing")
