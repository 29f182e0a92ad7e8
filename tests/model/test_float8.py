"""Weights as float8 for samplers: the rule bit for bit, what is left, and what is refused."""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from float8_reference import FORMS, float8, numpy_of
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_tests import random_runs
from torch import Tensor, nn
from torch.nn.utils import parametrize

import amp_mp as amp
from amp_mp import _C

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GOLDEN = json.loads((Path(__file__).parent / "golden_float8.json").read_text())["cases"]
MULTIPLIERS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1)


@pytest.fixture(params=[False, True], ids=["", "flushed"])
def flushed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Also where a script has the processor make zeros of subnormal numbers."""
    torch.set_flush_denormal(request.param)
    yield
    torch.set_flush_denormal(False)


def of_base64(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype).copy()


def golden_weights(case: dict[str, Any]) -> Tensor:
    """The weights of a case of golden_float8.json, whose note has the rule."""
    shape = case["shape"]
    if "weights" in case:
        return torch.from_numpy(of_base64(case["weights"], "<f4").reshape(shape))
    i = case["rule"] * 2**32 + np.arange(np.prod(shape), dtype=np.uint64)
    for multiplier in MULTIPLIERS:
        i ^= i >> np.uint64(33)
        i *= np.uint64(multiplier)
    halves = (i % np.uint64(7)).astype(np.float64)
    made = ((i >> np.uint64(40)) * 2.0**-24 - 0.5) * 2.0**-halves * 0.125
    weights = torch.from_numpy(made.astype(np.float32).reshape(shape))
    if "then" in case:
        assert case["then"] == "[:, :128] = 0; [5, 7] = -0.0"
        weights[:, :128] = 0
        weights[5, 7] = -0.0
    return weights.bfloat16().float() if case["name"] == "of bfloat16" else weights


def same(found: amp.Float8, codes: NDArray[np.uint8], scales: NDArray[Any]) -> None:
    """Whether codes and scales have these bits."""
    own = numpy_of(found.scales)
    assert own.dtype == scales.dtype
    np.testing.assert_array_equal(own, scales)
    np.testing.assert_array_equal(numpy_of(found.codes), codes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_codes_and_scales_are_those_of_the_golden_file(
    case: dict[str, Any], form: str, device: str, flushed: None
) -> None:
    weights, wanted = golden_weights(case), case[form]
    found = amp.float8_of(weights.to(device), form)
    codes = numpy_of(found.codes)
    assert found.codes.dtype == torch.float8_e4m3fn
    assert found.codes.device.type == device
    assert list(found.scales.shape) == wanted["scales_shape"]
    assert numpy_of(found.scales).tobytes() == base64.b64decode(wanted["scales"])
    if "codes" in wanted:
        assert codes.tobytes() == base64.b64decode(wanted["codes"])
    else:
        assert hashlib.sha256(codes.tobytes()).hexdigest() == wanted["sha256_of_codes"]
        for row, text in wanted["rows"].items():
            assert codes[int(row)].tobytes() == base64.b64decode(text)
    torch.set_flush_denormal(False)  # or comparisons would not see these numbers
    for low in (BF16, FP16):  # where the weights are such numbers, the source's dtype is no matter
        if torch.equal(weights.to(low).float().nan_to_num(), weights.nan_to_num()):
            same(amp.float8_of(weights.to(device, low), form), codes, numpy_of(found.scales))


KINDS = ("normal", "tiny", "subnormal", "huge", "ties", "any bits", "zeros")


def drawn(shape: tuple[int, ...], kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Weights of one kind; of "any bits" some are NaN or inf."""
    source = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=source)
    if kind == "any bits":
        word = torch.int32 if dtype == FP32 else torch.int16
        bits = torch.randint(-(2**31), 2**31, shape, generator=source)
        return bits.to(word).view(dtype)
    powers = {"normal": -6, "tiny": -118, "subnormal": -133, "huge": 125, "ties": 0, "zeros": 0}
    power = {FP16: {"tiny": -14, "subnormal": -22, "huge": 13}}.get(dtype, {}).get(kind)
    normal *= 2.0 ** (powers[kind] if power is None else power)
    if kind == "ties":  # with 448 in each block the scale is 1, and halves of steps are ties
        normal = (normal * 16).round() / 16
        normal[..., ::32] = 448
    if kind == "zeros":
        normal = torch.zeros(shape).copysign(normal)
    return normal.to(dtype)


@given(
    matrices=st.lists(st.integers(1, 3), max_size=2),
    out=st.integers(1, 300),
    groups=st.integers(1, 10),
    odd=st.integers(0, 31),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 2**32),
    bad=st.booleans(),
)
@random_runs(60)
def test_any_weights_are_those_of_the_reference(
    matrices: list[int],
    out: int,
    groups: int,
    odd: int,
    kind: str,
    dtype: torch.dtype,
    form: str,
    seed: int,
    bad: bool,
    device: str,
) -> None:
    """And what codes stand for is code times scale, rounded once."""
    if matrices:
        out = out % 140 + 1
    width = 32 * groups + (odd if form != "mxfp8" else 0)
    weights = drawn((*matrices, out, width), kind, dtype, seed)
    if bad:
        for value in (float("nan"), -float("nan"), float("inf"), -float("inf")):
            weights.view(-1)[torch.randint(0, weights.numel(), (3,))] = value
    before = weights.clone()
    found = amp.float8_of(weights.to(device), form)
    codes, scales = float8(weights.float().numpy(), form)
    same(found, codes, scales)
    assert torch.equal(weights.view(torch.uint8), before.view(torch.uint8))
    back = amp.float32_of_float8(found, form)
    numbers = numpy_of(found.codes.float())
    powers = scales if scales.dtype == np.float32 else 2.0 ** (scales.astype(np.float64) - 127)
    block = 32 if form == "mxfp8" else 128
    each = np.repeat(powers, block, -1)[..., :width].astype(np.float64)
    if form != "mxfp8":
        each = np.repeat(each, 128, -2)[..., :out, :]
    with np.errstate(over="ignore"):
        wanted = (numbers * each).astype(np.float32)  # a product of 28 bits is exact in float64
    np.testing.assert_array_equal(numpy_of(back), wanted)
    assert back.dtype == FP32
    assert back.shape == weights.shape


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_number_in_low_precision_beside_every_scale_of_it(
    dtype: torch.dtype, device: str
) -> None:
    """All 2^16 bit patterns, in blocks whose amax is another in each."""
    everything = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    weights = everything.view(256, 256).to(device)
    for form, moved in itertools.product(FORMS, (False, True)):
        each = weights.T if moved else weights  # in a block side by side, or under one another
        same(amp.float8_of(each, form), *float8(each.cpu().float().numpy(), form))


def test_codes_are_those_of_torchs_cast_where_both_have_one(device: str) -> None:
    """Below 448: above, torch saturates from 2.13 on, and inf too."""
    every = torch.arange(0, 448 * 2**12) / 2**12  # 448 first: the scale is 1
    weights = torch.cat([every.flip(0), -every])[: 4096 * 128].view(-1, 128)
    weights[::128, 0] = 448
    found = amp.float8_of(weights.to(device), "float8_128x128")
    assert (found.scales == 1).all()
    cast = weights.to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(numpy_of(found.codes), numpy_of(cast))


def test_codes_by_scales_that_are_too_small_saturate(device: str) -> None:
    """Native: float8_weights gives a shard scales of all processes, which are never too small."""
    for dtype in (FP32, BF16):
        beyond = torch.tensor([[448.0, 463, 464, 480, 1e4, 1e20, 3e38, -1e5, -3e38]], dtype=dtype)
        for scale in (1.0, 2.0**-70, 2.0**-126):
            scales = torch.full((1, 1), scale, device=device)
            codes, _ = _C.float8_encode(beyond.to(device), False, False, scales)
            assert numpy_of(codes).tolist() == [[0x7E] * 7 + [0xFE] * 2]


@pytest.mark.parametrize("form", FORMS)
def test_layouts_and_gradients_of_the_source_are_no_matter(form: str, device: str) -> None:
    weight = nn.Parameter(torch.randn(160, 192, device=device).bfloat16())
    wanted = amp.float8_of(weight.detach(), form)
    assert not wanted.codes.requires_grad
    assert wanted.codes.is_contiguous()
    for other in (
        weight,
        weight.detach().T.contiguous().T,
        torch.cat([weight, weight], 1)[:, :192],
    ):
        same(amp.float8_of(other, form), *map(numpy_of, wanted))
    # Addresses that are no multiple of 16 bytes.
    shifted = torch.empty(160 * 192 + 1, dtype=BF16, device=device)[1:].view(160, 192)
    shifted.copy_(weight.detach())
    same(amp.float8_of(shifted, form), *map(numpy_of, wanted))
    empty = amp.float8_of(torch.empty(3, 0, 64, device=device), form)
    assert empty.codes.shape == (3, 0, 64)
    assert empty.scales.numel() == 0
    with torch.inference_mode():
        same(amp.float8_of(weight.detach().clone(), form), *map(numpy_of, wanted))


def test_results_are_the_same_with_any_number_of_threads() -> None:
    weight, threads = torch.randn(700, 900).bfloat16(), torch.get_num_threads()
    for form in FORMS:
        part = weight[:, :896]
        try:
            torch.set_num_threads(1)
            alone = amp.float8_of(part, form)
            torch.set_num_threads(3)
            same(amp.float8_of(part, form), *map(numpy_of, alone))
        finally:
            torch.set_num_threads(threads)


# ---- whole models --------------------------------------------------------------------------------


class Layer(nn.Module):
    """Names of which one is the beginning of another, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp = nn.ModuleDict({"gate": nn.Linear(64, 8), "gate_up_proj": nn.Linear(64, 160)})
        self.experts = nn.Parameter(torch.randn(3, 130, 64))


class Model(nn.Module):
    """An embedding tied to the head, a convolution, buffers, and what is not a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.patches = nn.Conv2d(3, 64, 32)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(4, 64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("gone", torch.randn(4, 64), persistent=False)

    def get_extra_state(self) -> str:
        return "no tensor"

    def set_extra_state(self, state: str) -> None: ...


def model_of(device: str = "cpu", dtype: torch.dtype = BF16) -> Model:
    torch.manual_seed(0)
    return Model().to(device, dtype)


def quantised(found: dict[str, Any]) -> set[str]:
    return {name for name, value in found.items() if isinstance(value, amp.Float8)}


MATRICES = {
    f"layers.{i}.{name}"
    for i in range(2)
    for name in ("mlp.gate.weight", "mlp.gate_up_proj.weight", "experts")
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_a_models_matrices_are_float8_and_the_rest_is_as_it_is(
    form: str, dtype: torch.dtype, device: str
) -> None:
    model = model_of(device, dtype)
    before = copy.deepcopy(model.state_dict())
    found = dict(amp.float8_weights(model, form, dtype=FP16))
    state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    assert list(found) == list(state)
    assert quantised(found) == MATRICES
    for name, value in found.items():
        sent = state[name].to(FP16) if dtype == FP32 and name != "count" else state[name]
        if isinstance(value, amp.Float8):
            same(value, *map(numpy_of, amp.float8_of(sent, form)))
        else:
            assert torch.equal(value, sent)
            assert value.dtype == sent.dtype
            assert not value.requires_grad
    assert all(torch.equal(before[name], value) for name, value in state.items())


def test_weights_are_made_one_after_the_other() -> None:
    model = model_of()
    weights = iter(amp.float8_weights(model, "float8_128x128"))
    seen = [next(weights)[0] for _ in range(3)]
    assert seen == [name for name, v in model.state_dict().items() if isinstance(v, Tensor)][:3]
    with torch.no_grad():
        model.layers[1].experts.mul_(2)
    rest = []
    with pytest.raises(RuntimeError, match=r"layers\.1\.experts was written since float8_weights"):
        rest += [name for name, _ in weights]
    again = dict(amp.float8_weights(model, "float8_128x128"))
    same(
        again["layers.1.experts"],
        *map(numpy_of, amp.float8_of(model.layers[1].experts, "float8_128x128")),
    )


def test_models_of_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        model = model_of()
        found = dict(amp.float8_weights(model, "mxfp8"))
    assert quantised(found) == MATRICES == quantised(dict(amp.float8_weights(model, "mxfp8")))


def test_weights_are_those_that_the_model_has_and_not_the_masters(device: str) -> None:
    torch.manual_seed(0)
    model = amp.prepare(nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96)), BF16).to(device)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-2)
    optimizer.step()
    found = dict(amp.float8_weights(model, "mxfp8"))
    same(found["0.weight"], *map(numpy_of, amp.float8_of(model[0].weight, "mxfp8")))
    assert found["1.weight"].dtype == BF16  # prepare's float32 norm
    with amp.AveragedModel(model, decay=0.5).swap(), pytest.raises(RuntimeError, match="swap"):
        amp.float8_weights(model, "mxfp8")


def test_names_are_those_of_the_plain_model() -> None:
    model = model_of()
    plain = list(dict(amp.float8_weights(model, "mxfp8")))
    model.layers[0] = torch.compile(model.layers[0])
    wrapped = nn.DataParallel(model)
    found = dict(amp.float8_weights(wrapped, "mxfp8", keep=["layers.0.mlp"]))
    assert list(found) == plain
    assert MATRICES - quantised(found) == {n for n in MATRICES if n.startswith("layers.0.mlp")}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (["mlp.gate"], ["mlp.gate.weight"]),
        (["gate_up_proj", "experts"], ["mlp.gate_up_proj.weight", "experts"]),
        ("mlp", ["mlp.gate.weight", "mlp.gate_up_proj.weight"]),
        (iter(["gate.weight"]), ["mlp.gate.weight"]),
        (lambda name, tensor: tensor.dim() == 3, ["experts"]),
        (lambda name, tensor: False, []),
    ],
    ids=["components", "two", "one string", "an iterator", "a function", "nothing"],
)
def test_keep_names_whole_components(keep: Any, kept: list[str]) -> None:
    found = dict(amp.float8_weights(model_of(), "float8_128x128_power", keep=keep))
    assert MATRICES - quantised(found) == {f"layers.{i}.{n}" for i in range(2) for n in kept}


@pytest.mark.parametrize("name", ["gate_up", "mlp.gat", "layers.2", "", "mlp.*", "ayers.0"])
def test_a_kept_name_that_fits_nothing_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"keep: .* is no name, or whole components of one"):
        amp.float8_weights(model_of(), "mxfp8", keep=["mlp", name])


def test_mxfp8_refuses_odd_rows_before_it_begins() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(40, 64))
    with pytest.raises(ValueError, match=r"1\.weight has rows of 40 weights.* multiple of 32"):
        amp.float8_weights(model, "mxfp8")  # at the call, not while it iterates
    assert quantised(dict(amp.float8_weights(model, "mxfp8", keep=["1"]))) == {"0.weight"}
    assert len(quantised(dict(amp.float8_weights(model, "float8_128x128")))) == 2


def test_a_parametrisation_computes_with_the_codes_and_passes_gradients_through(
    device: str,
) -> None:
    class InFloat8(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            value = amp.float32_of_float8(amp.float8_of(weight, "mxfp8"), "mxfp8")
            return weight + (value.to(weight.dtype) - weight).detach()

    layer = nn.Linear(64, 96).to(device, BF16)
    weight = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", InFloat8())
    wanted = amp.float32_of_float8(amp.float8_of(weight, "mxfp8"), "mxfp8")
    assert torch.equal(layer.weight.float(), wanted)
    layer.weight.sum().backward()
    assert (layer.parametrizations.weight.original.grad == 1).all()


def test_compiled_code_calls_it_as_it_is() -> None:
    def there_and_back(weight: Tensor) -> Tensor:
        return amp.float32_of_float8(amp.float8_of(weight * 2, "mxfp8"), "mxfp8") + 1

    weight = torch.randn(8, 64)
    compiled = torch.compile(there_and_back, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(weight), there_and_back(weight))


def test_what_is_refused(device: str) -> None:
    weight = torch.ones(4, 64, device=device)
    for call in (amp.float8_of, amp.float8_weights):
        with pytest.raises(ValueError, match=r"form must be one of float8_128x128, .*found 'fp8'"):
            call(weight if call is amp.float8_of else nn.Linear(2, 2), "fp8")  # type: ignore
    with pytest.raises(TypeError, match="weight must be a tensor, found a list"):
        amp.float8_of([1.0], "mxfp8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"found torch\.float64"):
        amp.float8_of(weight.double(), "mxfp8")
    with pytest.raises(ValueError, match=r"\[\.\.\., out, in\], found the shape \(64,\)"):
        amp.float8_of(weight[0], "float8_128x128")
    with pytest.raises(ValueError, match="weight has rows of 40 weights"):
        amp.float8_of(weight[:, :40], "mxfp8")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        amp.float8_weights([weight], "mxfp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype must be torch\.float16 or torch\.bfloat16"):
        amp.float8_weights(nn.Linear(2, 2), "float8_128x128", dtype=FP32)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        amp.float8_weights(nn.Linear(32, 2, device="meta"), "mxfp8")
    value = amp.float8_of(weight, "float8_128x128")
    for other in ("float8_128x128_power", "mxfp8"):
        with pytest.raises(
            ValueError, match=r"scales must be torch\.uint8 .* found torch\.float32"
        ):
            amp.float32_of_float8(value, other)
    with pytest.raises(ValueError, match=r"scales must be torch\.float32 \[1, 1\]"):
        amp.float32_of_float8(amp.Float8(value.codes, value.scales[0]), "float8_128x128")
    bytes_ = amp.Float8(value.codes.view(torch.uint8), value.scales)
    with pytest.raises(ValueError, match=r"codes must be torch\.float8_e4m3fn, found torch\.uint8"):
        amp.float32_of_float8(bytes_, "float8_128x128")
    with pytest.raises(ValueError, match="form must be one of"):
        amp.float32_of_float8(value, "fp8")  # type: ignore[arg-type]
