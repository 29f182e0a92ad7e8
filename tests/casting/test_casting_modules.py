"""Every layer of torch.nn that has parameters: forward and plain backward, casts on throughout."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers import is_gpu
from tiers import paired
from torch import Tensor, nn

import amp_mp as amp

pytestmark = pytest.mark.filterwarnings("ignore:(?!amp_mp)")  # torch has many for layers


def images(dimensions: int) -> Tensor:
    return torch.randn(2, 4, *(6,) * dimensions)


def sequence(*features: int) -> list[Tensor]:
    return [torch.randn(5, 3, each) for each in features]


def packed() -> nn.utils.rnn.PackedSequence:
    return nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 8), [5, 4, 2])


Make = Callable[[], tuple[nn.Module, list[Any]]]
LAYERS: dict[str, Make] = {
    "Linear": lambda: (nn.Linear(256, 256), [torch.randn(64, 256)]),
    "Linear, small": lambda: (nn.Linear(4, 3), [torch.randn(2, 4)]),
    "LazyLinear": lambda: (nn.LazyLinear(3), [torch.randn(2, 4)]),
    "Bilinear": lambda: (nn.Bilinear(8, 8, 4), [torch.randn(5, 8), torch.randn(5, 8)]),
    "LayerNorm": lambda: (nn.LayerNorm(8), sequence(8)),
    "RMSNorm": lambda: (nn.RMSNorm(8), sequence(8)),
    "GroupNorm": lambda: (nn.GroupNorm(2, 4), [images(2)]),
    "PReLU": lambda: (nn.PReLU(4), [images(1)]),
    "Embedding": lambda: (nn.Embedding(10, 8), [torch.arange(6)]),
    "Embedding, max_norm": lambda: (nn.Embedding(10, 8, max_norm=1.0), [torch.arange(6)]),
    "EmbeddingBag": lambda: (nn.EmbeddingBag(10, 8), [torch.arange(6).view(2, 3)]),
    "EmbeddingBag, weighted": lambda: (
        nn.EmbeddingBag(10, 8, mode="sum"),
        [torch.arange(6).view(2, 3), None, torch.randn(2, 3)],
    ),
    "MultiheadAttention": lambda: (
        nn.MultiheadAttention(16, 4, add_bias_kv=True, kdim=8, vdim=6),
        sequence(16, 8, 6),
    ),
    "TransformerEncoderLayer": lambda: (
        nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0),
        sequence(16),
    ),
    "TransformerEncoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0), 2),
        sequence(16),
    ),
    "TransformerDecoderLayer": lambda: (
        nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0),
        sequence(16, 16),
    ),
    "TransformerDecoder": lambda: (
        nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0), 2),
        sequence(16, 16),
    ),
    "Transformer": lambda: (nn.Transformer(16, 4, 1, 1, 32, dropout=0.0), sequence(16, 16)),
    "AdaptiveLogSoftmaxWithLoss": lambda: (
        nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10]),
        [torch.randn(6, 8), 3 * torch.arange(6)],
    ),
}


def made(name: str, *sizes: Any, given: Callable[[], list[Any]], **options: Any) -> Make:
    """A layer by its name, and what it is given."""
    return lambda: (getattr(nn, name)(*sizes, **options), given())


for dim in (1, 2, 3):
    image = partial(lambda dim: [images(dim)], dim)
    for kind in ("Conv", "ConvTranspose"):
        LAYERS[f"{kind}{dim}d"] = made(f"{kind}{dim}d", 4, 8, 3, given=image)
        LAYERS[f"Lazy{kind}{dim}d"] = made(f"Lazy{kind}{dim}d", 8, 3, given=image)
    options = {"groups": 2, "padding": "same", "padding_mode": "reflect"}
    LAYERS[f"Conv{dim}d, grouped"] = made(f"Conv{dim}d", 4, 8, 3, given=image, **options)
    for kind in ("BatchNorm", "InstanceNorm"):
        LAYERS[f"{kind}{dim}d"] = made(f"{kind}{dim}d", 4, given=image, affine=True)
        LAYERS[f"Lazy{kind}{dim}d"] = made(f"Lazy{kind}{dim}d", given=image, affine=True)
for kind in ("RNN", "LSTM", "GRU"):
    row, two = partial(sequence, 8), {"num_layers": 2, "batch_first": True}
    LAYERS[kind] = made(kind, 8, 16, given=row)
    LAYERS[f"{kind}, deep"] = made(kind, 8, 16, given=row, bidirectional=True, **two)
    LAYERS[f"{kind}, packed"] = made(kind, 8, 16, given=lambda: [packed()], bidirectional=True)
    LAYERS[f"{kind}, large"] = made(kind, 256, 256, given=lambda: [torch.randn(3, 64, 256)])
    LAYERS[f"{kind}Cell"] = made(f"{kind}Cell", 8, 16, given=lambda: [torch.randn(3, 8)])
LAYERS["RNN, relu"] = made("RNN", 8, 16, given=partial(sequence, 8), nonlinearity="relu")
LAYERS["LSTM, projected"] = made("LSTM", 8, 16, given=partial(sequence, 8), proj_size=4)
RECURRENT = [name for name in LAYERS if name.startswith(("RNN", "LSTM", "GRU"))]
# Of one process they need several, or nothing at all.
NOT_HERE = {"Module", "ParameterList", "ParameterDict", "SyncBatchNorm", "RNNBase", "RNNCellBase",
            "CrossMapLRN2d"}  # fmt: skip


def test_every_layer_with_parameters_is_here() -> None:
    @cache
    def that_make_one(module: str) -> list[str]:
        source = inspect.getsource(sys.modules[module])
        lines = source.splitlines()
        classes = [c for c in ast.parse(source).body if isinstance(c, ast.ClassDef)]
        texts = {c.name: "\n".join(lines[c.lineno - 1 : c.end_lineno]) for c in classes}
        return [name for name, text in texts.items() if "Parameter(" in text]

    def has_parameters(layer: type) -> bool:
        parts = [c for c in layer.__mro__ if c.__module__.startswith("torch.nn.modules.")]
        return any(c.__name__ in that_make_one(c.__module__) for c in parts if c is not nn.Module)

    layers = {n for n, c in vars(nn).items() if inspect.isclass(c) and issubclass(c, nn.Module)}
    missing = {n for n in layers if has_parameters(getattr(nn, n))} - {
        name.split(",")[0] for name in LAYERS
    }
    assert missing <= NOT_HERE


def tensors_of(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, nn.utils.rnn.PackedSequence):
        return [outputs.data]
    if isinstance(outputs, list | tuple):
        return [each for item in outputs for each in tensors_of(item)]
    return [outputs] if isinstance(outputs, Tensor) and outputs.is_floating_point() else []


def run(name: str, device: str, low: torch.dtype | None = None) -> tuple[list[Tensor], ...]:
    """A layer's outputs and gradients, with the layer and its inputs in low precision if given."""
    torch.manual_seed(0)
    layer, inputs = LAYERS[name]()
    if "Lazy" in name:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            layer(*inputs)
    layer.to(device, low)
    moved = []
    for each in inputs:
        wide = each is not None and (not isinstance(each, Tensor) or each.is_floating_point())
        each = each if each is None else each.to(device)
        moved.append(each.to(low) if wide and low else each)
    outputs = tensors_of(layer(*moved))
    sum(output.float().square().sum() for output in outputs).backward()  # type: ignore[union-attr]
    for param in layer.parameters():
        assert param.grad is not None
        assert param.grad.dtype == param.dtype
    return outputs, [param.grad.float() for param in layer.parameters()]


def relative(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The distance of all tensors together, relative to the wanted ones' norm."""
    difference = sum(
        float((a.float() - b).square().sum()) for a, b in zip(found, wanted, strict=True)
    )
    return (difference / (1e-12 + sum(float(b.square().sum()) for b in wanted))) ** 0.5


@pytest.fixture(autouse=True)
def _one_thread(_threads_are_left_as_they_were: None) -> None:
    torch.set_num_threads(1)  # the layers are small


@pytest.mark.parametrize(
    ("table", "parameters", "dtype", "onednn"),
    paired(
        ["apex", "torch", "stock"],
        ["float32", "low"],
        [torch.bfloat16, torch.float16],
        [True, False],
    ),
    ids=str,
)
def test_forward_and_plain_backward(
    device: str, table: str, parameters: str, dtype: torch.dtype, onednn: bool
) -> None:
    low = dtype if parameters == "low" else None
    raised, errors = [], {}
    with torch.backends.mkldnn.flags(enabled=onednn):
        wanted = {name: run(name, device) for name in LAYERS}
        with amp.init(device_type=device, dtype=dtype, loss_scale=1.0, policies=table):
            for name in LAYERS:
                try:
                    found = run(name, device, low)
                except RuntimeError:
                    if table == "apex":
                        raise
                    raised.append(name)
                else:
                    errors[name] = max(map(relative, found, wanted[name]))
        amp.casting.uninstall()
        for name in raised:  # torch's own lists raise where torch alone does
            with pytest.raises(RuntimeError), torch.autocast(device, dtype):
                run(name, device, low)
    # 2^-8 a rounding: of inputs, weights, states and outputs
    assert {name: error for name, error in errors.items() if error > 0.05} == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_of_any_size_give_low_precision(
    device: str, name: str, dtype: torch.dtype
) -> None:
    with amp.init(device_type=device, dtype=dtype, loss_scale=1.0):
        outputs, _ = run(name, device)
    # torch casts cuDNN's block of weights to float16, whatever dtype its autocast has.
    of_cudnn = is_gpu(device) and "Cell" not in name
    wanted = torch.float16 if of_cudnn else dtype
    assert {output.dtype for output in outputs} == {wanted}
