"""Layers whose operators refuse low precision, and parameters that are kept without their layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import amp_mp as amp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao.quantization's
BF16, F32 = torch.bfloat16, torch.float32
LOW = [torch.float16, torch.bfloat16]


def trains(model: nn.Module, dtype: torch.dtype, x: Tensor) -> None:
    """A step of training gives finite gradients, and results in low precision."""
    optimizer = amp.optim.SGD(model.parameters(), lr=0.5)
    result = model(x.to(dtype))
    assert result.dtype == dtype
    result.float().square().sum().backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert grads
    assert all(bool(grad.isfinite().all()) for grad in grads)
    optimizer.step()
    model(x.to(dtype))


@pytest.mark.parametrize("only", [None, []], ids=["default", "keep_fp32_only"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", ["weights", "fused", "per channel", "qat"])
def test_fake_quantisation_trains(kind: str, dtype: torch.dtype, only: Any) -> None:
    quantization: Any = pytest.importorskip("torch.ao.quantization")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    if kind == "qat":
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        model = quantization.prepare_qat(model.train())
    elif kind == "fused":
        model.append(quantization.FusedMovingAvgObsFakeQuantize())
    elif kind == "per channel":
        model.append(quantization.default_per_channel_weight_fake_quant())
    else:
        model.append(quantization.FakeQuantize())
    trains(amp.prepare(model, dtype, keep_fp32_only=only), dtype, torch.randn(8, 8))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", [(8, 8), (8, 6)])
@pytest.mark.parametrize("kind", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_weights_stay_orthogonal(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    layer = parametrizations.orthogonal(nn.Linear(*shape), orthogonal_map=kind)
    trains(model := amp.prepare(nn.Sequential(layer), dtype), dtype, torch.randn(4, 8))
    weight: Any = model[0].weight
    assert weight.dtype == dtype
    assert torch.allclose(weight.float() @ weight.float().T, torch.eye(shape[1]), atol=0.03)


class Exponential(nn.Module):
    """A product with the exponential of a matrix, as in flows and state-space models."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(0.1 * torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.matrix_exp(self.p)


@pytest.mark.parametrize("dtype", LOW)
def test_a_kept_module_may_use_matrix_exp(dtype: torch.dtype) -> None:
    """docs/prepare.md says so as long as torch's kernel has no bits right in low precision."""
    matrix, x = 0.1 * torch.randn(8, 8), torch.randn(4, 8)
    wanted = torch.linalg.matrix_exp(matrix.double()).float()
    error = (torch.linalg.matrix_exp(matrix.to(dtype)).float() - wanted).abs().max()
    assert not error < 1, "torch computes it; drop the row of prepare.md's table"
    model = nn.Sequential(Exponential())
    exact = x.to(dtype).float() @ torch.linalg.matrix_exp(model[0].p.detach())
    amp.prepare(model, dtype, keep_fp32=Exponential)
    assert torch.equal(model(x.to(dtype)), exact.to(dtype))
    trains(model, dtype, x)


class Scaled(nn.Module):
    """A product with a parameter of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.p


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("keep", [["1.p"], ["0.weight"], "*.bias", ["2.weight", "1.p"]])
def test_a_parameter_kept_without_its_layer_keeps_the_layer(keep: Any, marked: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scaled(), nn.Linear(8, 8))
    if marked:
        amp.keep_fp32(model, keep)
    trains(amp.prepare(model, BF16, None if marked else keep), BF16, torch.randn(4, 8))
    kept = {name.split(".")[0] for name, p in model.named_parameters() if p.dtype == F32}
    wanted = {"*.bias": {"0", "2"}}.get(str(keep)) or {name.split(".")[0] for name in keep}
    assert kept == wanted


def test_a_parameter_stays_alone_in_a_layer_that_mixes_dtypes_itself() -> None:
    class Mixing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.gain = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * self.gain).to(x.dtype)

    model = amp.prepare(nn.Sequential(Mixing()), BF16, "*.gain")
    assert {name for name, p in model.named_parameters() if p.dtype == F32} == {"0.gain"}
    trains(model, BF16, torch.randn(4, 8))
