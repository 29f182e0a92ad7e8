"""Layers whose operators refuse low precision, and parameters that are kept without their layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import amp_mp as amp

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


def qat_modules() -> dict[str, Any]:
    """A function for each class of torch.ao.nn.qat and torch.ao.nn.intrinsic.qat, by its name."""
    quantization: Any = pytest.importorskip("torch.ao.quantization")
    qconfig = quantization.get_default_qat_qconfig("fbgemm")
    tables = quantization.default_embedding_qat_qconfig
    found = {}
    for package in (torch.ao.nn.qat, torch.ao.nn.intrinsic.qat):
        for name, kind in vars(package).items():
            if not isinstance(kind, type):
                continue
            if issubclass(kind, nn.Embedding | nn.EmbeddingBag):
                found[name] = lambda kind=kind: kind(8, 4, qconfig=tables)
            else:
                sizes = (4, 4) if "Linear" in name else (4, 4, 3)
                found[name] = lambda kind=kind, sizes=sizes: kind(*sizes, qconfig=qconfig)
    return found


@pytest.mark.parametrize("dtype", LOW)
def test_modules_that_fake_quantise_their_weights_are_kept_whole(dtype: torch.dtype) -> None:
    kinds = qat_modules()
    assert {"ConvBnReLU2d", "LinearBn1d", "ConvReLU1d", "Conv3d", "EmbeddingBag"} <= set(kinds)
    for name, make in kinds.items():
        model = nn.Sequential(make())
        for param in model.parameters():  # torch leaves LinearBn1d's bias as the memory was
            nn.init.uniform_(param)
        dims = int(name[-2]) if name.endswith("d") and "Conv" in name else 0
        x = torch.randn((6, 4) + dims * (5,))
        x = torch.randint(0, 8, (6, 3)) if "Embedding" in name else x.to(dtype)
        twin = copy.deepcopy(model)
        amp.prepare(nn.ModuleList([model, nn.Linear(2, 2)]), dtype)
        assert all(p.dtype == F32 for p in model.parameters()), name
        wanted = twin(x.float() if x.is_floating_point() else x).to(dtype)
        found = model(x)
        assert found.dtype == dtype, name
        assert torch.equal(found, wanted), name


class Quantised(nn.Module):
    """A network of everything that torch fuses, as its tutorial of QAT has it, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        quantization: Any = torch.ao.quantization
        self.enter, self.leave = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.same = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
        self.more = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())
        self.flat = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.lstm = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 4)
        self.rest = nn.Linear(4, 2)
        self.rest.qconfig = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.more(self.same(self.conv(self.enter(x)))).mean((2, 3))
        x = self.lstm(self.flat(x)[None])[0][0]
        x = self.leave(self.head(x))
        return self.rest(x.to(self.rest.weight.dtype))


def qat_model() -> Any:
    quantization: Any = pytest.importorskip("torch.ao.quantization")
    model = Quantised().train()
    fused = [["conv.0", "conv.1", "conv.2"], ["same.0", "same.1"], ["more.0", "more.1"]]
    model = quantization.fuse_modules_qat(model, [*fused, ["flat.0", "flat.1"]])
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model)


@pytest.mark.parametrize("dtype", LOW)
def test_a_model_of_qat_trains_and_becomes_what_torch_makes_of_float32(dtype: torch.dtype) -> None:
    quantization: Any = pytest.importorskip("torch.ao.quantization")
    model, twin, x = qat_model(), qat_model(), torch.randn(8, 3, 10, 10)
    amp.prepare(model, dtype)
    for _ in range(3):
        trains(model, dtype, x)
    twin.load_state_dict(amp.float32_state_dict(model))
    twin.rest = model.rest
    int8, wanted = (quantization.convert(each.eval()) for each in (model, twin))
    assert int8(x).dtype == dtype
    assert torch.equal(int8(x), wanted(x))


def test_a_kept_layer_may_be_quantised_afterwards() -> None:
    """torch's functions copy the layer's hooks to what they put in its place."""
    quantization: Any = pytest.importorskip("torch.ao.quantization")
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8).bfloat16()
    wanted = quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})(x.float())
    amp.prepare(model, BF16, keep_fp32="0")
    assert torch.equal(quantization.quantize_dynamic(model, {nn.Linear})(x), wanted.bfloat16())


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
