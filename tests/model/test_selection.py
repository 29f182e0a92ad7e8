"""What stays float32 by default: norms of every library, rotary frequencies, single numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from converting import NORMS, TIED, Model, converters, float32_in, starting
from helpers import raw_bytes, through_a_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import amp_mp as amp
from amp_mp.model.selection import keep_fp32
from amp_mp.module_names import without_wrappers

BF16 = torch.bfloat16


class LlamaRMSNorm(nn.Module):
    """As transformers has it: squares in float32, the result in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden.dtype)


class T5LayerNorm(LlamaRMSNorm):
    """As transformers has it: the result has the weight's dtype if that is low."""


class LayerNorm2d(nn.LayerNorm):
    """As timm has it: over the channels of (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class FrozenBatchNorm2d(nn.Module):
    """As torchvision has it: four buffers of the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("mean", 0.0), ("var", 1.0)):
            self.register_buffer(name, torch.full((width, 1, 1), value))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / (self.var + 1e-5).sqrt() * self.weight + self.bias


class PreNorm(nn.Module):
    """A whole block behind a norm, not a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.block = nn.Linear(width, width)


class AdaLayerNorm(nn.Module):
    """As diffusers has it: a Linear makes the scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.linear = nn.Linear(width, width)


class LogNormal(nn.Module):
    """A distribution; its name has the word for another reason."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(width))


NAMED = (
    "GemmaRMSNorm",
    "Qwen2RMSNorm",
    "RmsNorm",
    "rms_norm",
    "FusedLayerNorm",
    "MambaRMSNormGated",
    "GlobalResponseNorm",
    "ScaleNorm",
    "GraphNorm",
    "BatchNormAct2d",
    "LayerNormalization",
)


@converters
@pytest.mark.parametrize("name", NAMED)
def test_a_norm_is_known_by_its_name_and_its_vectors(convert: Any, name: str) -> None:
    kind = type(name, (LlamaRMSNorm,), {})
    assert float32_in(convert(nn.Sequential(nn.Linear(8, 8), kind(8)), BF16)) == {"1.weight"}


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm, LayerNorm2d, FrozenBatchNorm2d])
def test_other_libraries_norms_compute_in_float32(device: str, kind: type[nn.Module]) -> None:
    norm = kind(16).to(device)
    with torch.no_grad():
        for tensor in norm.state_dict().values():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    shape = (4, 16) if issubclass(kind, LlamaRMSNorm) else (4, 16, 5, 5)
    x = torch.randn(shape, device=device).bfloat16()
    wanted = norm(x.float()).bfloat16()
    assert torch.equal(amp.prepare(norm, BF16)(x), wanted)
    assert float32_in(norm) == set(norm.state_dict())


@converters
def test_what_only_has_the_word_in_its_name_is_converted(convert: Any) -> None:
    model = nn.Sequential(PreNorm(8), AdaLayerNorm(8), LogNormal(8))
    assert float32_in(convert(model, BF16)) == {"0.norm.weight", "0.norm.bias"}


def test_a_module_of_the_model_is_kept_and_another_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"keep_fp32: this Sequential is not in the model"):
        amp.prepare(copy.deepcopy(model), BF16, model[1])
    for keep in (model[1], [model[1]]):
        assert float32_in(amp.prepare(model, BF16, keep)) == {"1.0.weight", "1.0.bias"}
    assert (
        amp.prepare(nn.Embedding(4, 4), BF16, keep_fp32=nn.Embedding).weight.dtype == torch.float32
    )


def test_keep_fp32_and_keep_fp32_only_add_up() -> None:
    model = nn.Sequential(nn.Linear(4, 4), LlamaRMSNorm(4), nn.Linear(4, 2, bias=False))
    with pytest.raises(ValueError, match="keep_fp32_only: '3' matches no module"):
        amp.prepare(model, BF16, "2", keep_fp32_only="3")
    amp.prepare(model, BF16, "2", keep_fp32_only="0")
    assert float32_in(model) == {"0.weight", "0.bias", "2.weight"}


def wrapped(model: nn.Module, whole: bool) -> nn.Module:
    """A part is checkpointed, and the model or another part compiled, as recipes do."""
    model.body[0] = checkpoint_wrapper(model.body[0])
    if whole:
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    model.body[2] = torch.compile(model.body[2], backend="eager")
    return model


@converters
@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("pattern", ["body.0", "body.?.bias", "norm", "body.2.*"])
def test_patterns_are_over_the_plain_models_names(
    convert: Any, pattern: str, whole: bool, marks: bool
) -> None:
    plain, model = Model(), wrapped(Model(), whole)
    for each in (plain, model):
        if marks:
            keep_fp32(each, pattern)
        convert(each, BF16, None if marks else pattern)
    found = {without_wrappers(name) for name in float32_in(model)}
    assert found == float32_in(plain)
    assert found > NORMS or pattern == "norm"
    tokens = torch.arange(8)
    plain.load_state_dict({without_wrappers(n): t for n, t in model.state_dict().items()})
    assert torch.equal(model(tokens), plain(tokens))


@converters
def test_patterns_may_have_what_wrappers_put_into_names(convert: Any) -> None:
    model = wrapped(Model(), True)
    convert(model, BF16, "_orig_mod.body.0._checkpoint_wrapped_module.*")
    found = {without_wrappers(name) for name in float32_in(model)}
    assert found == NORMS | starting("body.0")


@converters
@pytest.mark.parametrize("pattern", ["body.0", "body.?.bias", "norm", "body.2.*"])
def test_patterns_look_through_data_parallel(convert: Any, pattern: str) -> None:
    plain, model = Model(), Model()
    model.body[2] = nn.DataParallel(model.body[2])
    convert(plain, BF16, pattern)
    convert(nn.DataParallel(model), BF16, pattern)
    assert {name.replace("module.", "") for name in float32_in(model)} == float32_in(plain)


# Rotary positions.


class Rotary(nn.Module):
    """As in a model of one's own: no cast anywhere."""

    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        frequencies = 1 / base ** (torch.arange(0, width, 2).float() / width)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] * self.inv_freq
        return angles.cos(), angles.sin()


def test_rotary_frequencies_stay_float32_and_results_are_low(device: str) -> None:
    model = amp.prepare(nn.ModuleList([Rotary(32), nn.Linear(32, 32)]).to(device), BF16)
    assert model[0].inv_freq.dtype == torch.float32
    x, positions = torch.randn(6, 32, device=device).bfloat16(), torch.arange(6, device=device)
    assert [t.dtype for t in model[0](x, positions)] == [BF16, BF16]
    found = model[0](x, positions + 1000)[0]
    wanted = Rotary(32).to(device)(x, positions + 1000)[0]
    assert (found - wanted).abs().max() <= 2.0**-9  # .99 in place of .004 when converted


def test_angles_for_a_caller_without_activations_stay_float32(device: str) -> None:
    """vision models call for angles by the length, and take their cosine themselves."""
    model = amp.prepare(nn.Sequential(Rotary(32), nn.Linear(4, 4)).to(device), BF16)
    assert model[0](None, torch.arange(1000, device=device))[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("class_name", "buffer", "stays"),
    [
        ("RotaryEmbeddingCat", "bands", True),
        ("RotaryPositionalEmbeddings", "theta", True),
        ("DINOv3ViTRopePositionEmbedding", "periods", True),
        ("Gemma3RotaryEmbedding", "sliding_attention_inv_freq", True),
        ("Anything", "original_inv_freq", True),
        ("SineCosine", "bands", False),
        ("SinusoidalPositions", "table", False),
        ("RotaryEmbedding", "cos_cached", False),
    ],
)
def test_which_buffers_are_frequencies(class_name: str, buffer: str, stays: bool) -> None:
    module = type(class_name, (nn.Module,), {})()
    module.register_buffer(buffer, torch.rand(8))
    assert (float32_in(amp.prepare(module, BF16)) == {buffer}) is stays


# Single numbers.


class Contrast(nn.Module):
    """CLIP's logit scale; exp of a bfloat16 would be .3 % off."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.6592))
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.exp() * self.body(x)


def test_a_parameter_of_no_dimensions_stays_float32_and_results_are_low(device: str) -> None:
    model = amp.prepare(Contrast().to(device), BF16)
    assert model.scale.dtype == torch.float32
    y = model(torch.randn(5, 8, device=device).bfloat16())
    assert y.dtype == BF16
    y.float().sum().backward()
    assert model.scale.grad.dtype == torch.float32
    assert float32_in(amp.prepare(Contrast(), BF16, keep_fp32_only=[])) == set()


LOW = [torch.float16, torch.bfloat16]


@converters
@pytest.mark.parametrize(
    ("marks", "kept"),
    [
        ("body.0", starting("body.0")),
        ("body.*", starting("body")),
        (nn.Linear, TIED | starting("body.0", "body.2")),
        (["*.0.weight", "table"], {"table", "same"} | starting("body.0")),
        (["head.weight"], TIED),
        ([], set()),
    ],
)
def test_marks_add_to_what_both_conversions_keep(convert: Any, marks: Any, kept: set[str]) -> None:
    model = Model()
    before = raw_bytes(model.state_dict())
    assert keep_fp32(model, marks) is model
    assert raw_bytes(model.state_dict()) == before
    assert float32_in(convert(copy.deepcopy(model), torch.bfloat16)) == kept | NORMS
    assert float32_in(convert(model, torch.bfloat16, keep_fp32_only=[])) == kept


@converters
def test_marks_add_up_and_travel_with_copies_pickles_and_parts(convert: Any) -> None:
    model = Model()
    keep_fp32(keep_fp32(model, "body.0.weight"), ["body.0.bias", "body.2"])
    kept = starting("body.0", "body.2")
    for found in (copy.deepcopy(model), through_a_file(model)):
        assert float32_in(convert(found, torch.bfloat16, keep_fp32_only=[])) == kept
    whole = nn.Sequential(copy.deepcopy(model.body))
    convert(whole, torch.bfloat16, keep_fp32_only=[])
    assert float32_in(whole) == {name.replace("body.", "0.") for name in kept}
    convert(model.body, torch.bfloat16, keep_fp32_only=[])
    assert float32_in(model.body) == {name.removeprefix("body.") for name in kept}


@converters
@pytest.mark.parametrize("dtype", LOW)
def test_a_marked_module_computes_in_float32_and_returns_what_it_was_given(
    device: str, convert: Any, dtype: torch.dtype
) -> None:
    model = keep_fp32(nn.Sequential(nn.Linear(64, 4)).to(device), "0")
    twin = copy.deepcopy(model)
    convert(model, dtype)
    x = torch.randn(8, 64, device=device).to(dtype).requires_grad_()
    y = model(x)
    assert torch.equal(y, twin(x.float()).to(dtype))
    y.sum().backward()
    assert (x.grad.dtype, model[0].weight.grad.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("pattern", ["haed", "body.9", "", "*.wieght"])
def test_a_mark_that_matches_nothing_is_refused_and_nothing_is_marked(pattern: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"keep_fp32: .* matches no module or parameter") as error:
        keep_fp32(model, ["body", pattern])
    assert repr(pattern) in str(error.value)
    with pytest.raises(TypeError, match=r"takes nn.Module types, modules and strings, found None"):
        keep_fp32(model, ["body", None])  # type: ignore[list-item]
    assert float32_in(amp.prepare(model, torch.bfloat16, keep_fp32_only=[])) == set()
