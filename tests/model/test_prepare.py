"""prepare: a float32 model in low precision, with nothing lost for the masters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp

LOW = [torch.float16, torch.bfloat16]


class Block(nn.Module):
    """Norms, a tied weight, and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("table", torch.full((3,), 1 / 3))
        self.register_buffer("exact", torch.ones(3, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.norm(self.embed(tokens))))


ALL = set(Block().state_dict())
NORMS = {"norm.weight", "norm.bias", "inner.1.weight", "inner.1.bias"}
NEVER = {"steps", "exact"}  # of other dtypes
TIED = {"embed.weight", "head.weight"}


def kept_in(model: nn.Module) -> set[str]:
    return {name for name, t in model.state_dict().items() if t.dtype == torch.float32}


def set_same_gradients(params: Iterable[Tensor], twins: Iterable[Tensor]) -> None:
    """Numbers of the first one's dtype; the second one gets them in its own."""
    for param, twin in zip(params, twins, strict=True):
        param.grad = torch.randn_like(param)
        twin.grad = param.grad.to(twin.dtype)


# Nothing is lost.

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: amp.optim.AdamW(params, lr=0.01, master="float32"),
    "Adam": lambda params: amp.optim.Adam(params, lr=0.01, master="float32"),
    "SGD": lambda params: amp.optim.SGD(params, lr=0.01, momentum=0.9, master="float32"),
}


@pytest.mark.parametrize("created", ["before", "after"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", FUSED)
def test_updates_of_a_prepared_model_are_float32s_bit_for_bit(
    device: str, name: str, dtype: torch.dtype, created: str
) -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 5)).to(device)
    twin = copy.deepcopy(model)
    if created == "before":
        optimizer = FUSED[name](model.parameters())
        amp.prepare(model, dtype)
    else:
        amp.prepare(model, dtype)
        optimizer = FUSED[name](model.parameters())
    float32 = FUSED[name](twin.parameters())
    for _ in range(3):
        set_same_gradients(model.parameters(), twin.parameters())
        optimizer.step()
        float32.step()
        for param, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(optimizer.state[param]["master"], wanted)
            assert torch.equal(param, wanted.to(dtype))


@pytest.mark.parametrize("dtype", LOW)
def test_fp16_optimizer_starts_from_the_originals(device: str, dtype: torch.dtype) -> None:
    model = nn.Linear(30, 20).to(device)
    twin = copy.deepcopy(model)
    amp.prepare(model, dtype)
    optimizer = amp.FP16_Optimizer(torch.optim.Adam(model.parameters(), lr=0.01), verbose=False)
    float32 = torch.optim.Adam(twin.parameters(), lr=0.01)
    masters = optimizer.param_groups[0]["params"]
    assert raw_bytes(masters) == raw_bytes(list(twin.parameters()))
    set_same_gradients(model.parameters(), twin.parameters())
    optimizer.update_master_grads()
    optimizer.step()
    float32.step()
    assert raw_bytes(masters) == raw_bytes(list(twin.parameters()))


@pytest.mark.parametrize("change", ["load_state_dict", "in place", "one element", "data"])
def test_a_weight_changed_after_prepare_is_what_the_master_starts_from(
    device: str, change: str
) -> None:
    model = amp.prepare(nn.Linear(30, 20, bias=False).to(device), torch.bfloat16)
    with torch.no_grad():
        if change == "load_state_dict":
            model.load_state_dict({"weight": torch.randn(20, 30).bfloat16()})
        elif change == "data":
            model.weight.data[3, 7] = 0.0
        elif change == "in place":
            model.weight.mul_(2)
        else:
            model.weight[3, 7] += 1
    changed = model.weight.detach().clone()
    optimizer = amp.optim.SGD(model.parameters(), lr=0.0, master="float32")
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert torch.equal(optimizer.state[model.weight]["master"], changed.float())
    assert torch.equal(model.weight, changed)


def test_channels_last_weights_keep_their_layout_and_their_bits(device: str) -> None:
    model = nn.Conv2d(4, 6, 3, bias=False).to(device, memory_format=torch.channels_last)
    original = model.weight.detach().clone()
    amp.prepare(model, torch.bfloat16)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.0, master="float32")
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert torch.equal(optimizer.state[model.weight]["master"], original)


def test_float16_weights_saturate_and_a_nan_stays_one(device: str) -> None:
    model = nn.Linear(6, 1, bias=False).to(device)
    values = [1e5, -1e5, 65519.0, float("inf"), float("nan"), 1.0]
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values]))
    amp.prepare(model, torch.float16)
    found = model.weight.flatten().tolist()
    assert found[:4] + found[5:] == [65504.0, -65504.0, 65504.0, 65504.0, 1.0]
    assert found[4] != found[4]


# What is converted, and what is not.


@pytest.mark.parametrize("dtype", LOW)
def test_parameters_and_buffers_are_converted_in_place(device: str, dtype: torch.dtype) -> None:
    model = Block().to(device)
    objects = {name: id(p) for name, p in model.named_parameters()}
    values = {name: t.clone() for name, t in model.state_dict().items()}
    assert amp.prepare(model, dtype) is model
    assert {name: id(p) for name, p in model.named_parameters()} == objects
    assert kept_in(model) == NORMS
    for name, tensor in model.state_dict().items():
        if name in NEVER | NORMS:
            assert raw_bytes(tensor) == raw_bytes(values[name])
        else:
            assert raw_bytes(tensor) == raw_bytes(values[name].to(dtype))


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (None, NORMS),
        ([], set()),
        (nn.LayerNorm, {"norm.weight", "norm.bias"}),
        ([nn.GroupNorm], {"inner.1.weight", "inner.1.bias"}),
        ([nn.LayerNorm, nn.GroupNorm], NORMS),
        ("norm", {"norm.weight", "norm.bias"}),
        (["inner.2"], {"inner.2.weight", "inner.2.bias"}),
        (["inner"], {name for name in ALL if name.startswith("inner.")}),
        (["inner.*"], {name for name in ALL if name.startswith("inner.")}),
        (["*.bias"], {name for name in ALL if name.startswith(("inner.", "norm."))}),
        (["*.0.weight", nn.LayerNorm],
            {name for name in ALL if name.startswith(("inner.0", "norm."))}),
        (["table"], {"table"}),
        (["head"], TIED),
        (["embed"], TIED),
        (["head.weight"], TIED),
        (["embed.weight"], TIED),
        (["*"], ALL - NEVER),
        (("nor?", "inner.[02]"), {n for n in ALL if n[:7] in ("norm.we", "norm.bi")}
            | {n for n in ALL if n.startswith(("inner.0", "inner.2"))}),
    ],
)  # fmt: skip
def test_keep_fp32_adds_types_and_patterns_and_keep_fp32_only_has_no_others(
    keep: Any, kept: set[str]
) -> None:
    assert kept_in(amp.prepare(Block(), torch.bfloat16, keep_fp32_only=keep)) == kept
    assert kept_in(amp.prepare(Block(), torch.bfloat16, keep_fp32=keep)) == kept | NORMS


@pytest.mark.parametrize("pattern", ["haed", "*.wieght", "", "norm.", "Norm"])
def test_a_pattern_that_matches_nothing_is_refused_and_nothing_converted(pattern: str) -> None:
    model = Block()
    with pytest.raises(ValueError, match=r"keep_fp32.*matches no") as error:
        amp.prepare(model, torch.bfloat16, keep_fp32=["norm", pattern])
    assert repr(pattern) in str(error.value)
    assert kept_in(model) == ALL - NEVER


@pytest.mark.parametrize("wrong", [3, None, int, torch.float32])
def test_what_is_neither_type_nor_pattern_is_refused_by_name(wrong: Any) -> None:
    model = Block()
    with pytest.raises(TypeError, match="keep_fp32"):
        amp.prepare(model, torch.bfloat16, keep_fp32=[wrong])
    assert kept_in(model) == ALL - NEVER


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, None, "bfloat16"])
def test_another_dtype_is_refused_by_name(dtype: Any) -> None:
    model = Block()
    with pytest.raises(ValueError, match=r"^dtype must"):
        amp.prepare(model, dtype)
    assert kept_in(model) == ALL - NEVER


@pytest.mark.parametrize("call", [
    lambda dtype: amp.prepare(nn.Linear(2, 2), dtype),
    lambda dtype: amp.apex.fp16_utils.convert_network(nn.Linear(2, 2), dtype),
    lambda dtype: amp.apex.fp16_utils.network_to_half(nn.Linear(2, 2), dtype),
    lambda dtype: amp.init(dtype=dtype),
    lambda dtype: amp.autocast(dtype=dtype),
])  # fmt: skip
def test_a_dtype_given_as_a_string_is_told_from_the_dtype(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"found the string 'bfloat16': write torch\.bfloat16"):
        call("bfloat16")
    with pytest.raises(ValueError, match=r"^dtype must be .*, found the string 'bf16'$"):
        call("bf16")


def test_frozen_parameters_are_converted_and_stay_frozen(device: str) -> None:
    model = nn.Linear(4, 3).to(device)
    model.weight.requires_grad_(False)
    amp.prepare(model, torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16
    assert not model.weight.requires_grad
    assert model.bias.requires_grad
    model(torch.ones(2, 4, dtype=torch.bfloat16, device=device)).sum().backward()
    optimizer = amp.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.clone()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert model.weight not in optimizer.state


def test_gradients_of_the_float32_model_are_dropped(device: str) -> None:
    model = nn.Linear(4, 3).to(device)
    model(torch.ones(2, 4, device=device)).sum().backward()
    amp.prepare(model, torch.bfloat16)
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(2, 4, dtype=torch.bfloat16, device=device)).sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_tied_weights_stay_tied_and_are_stepped_once(device: str) -> None:
    model = Block().to(device)
    original = model.head.weight.detach().clone()
    amp.prepare(model, torch.bfloat16)
    assert model.head.weight is model.embed.weight
    optimizer = amp.optim.SGD(model.parameters(), lr=0.5, master="float32")
    model.head.weight.grad = torch.ones_like(model.head.weight)
    optimizer.step()
    assert torch.equal(optimizer.state[model.embed.weight]["master"], original - 0.5)


# Kept modules compute in float32 and return what they were given.

NORM_MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(8), (4, 8)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(8, bias=False), (4, 8)),
    "LayerNorm without weights": (lambda: nn.LayerNorm(8, elementwise_affine=False), (4, 8)),
    "RMSNorm": (lambda: nn.RMSNorm(8), (4, 8)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (4, 8, 5)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), (6, 8)),
    "BatchNorm1d without weights": (lambda: nn.BatchNorm1d(8, affine=False), (6, 8)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), (4, 8, 3, 3)),
    "BatchNorm2d without statistics": (
        lambda: nn.BatchNorm2d(8, track_running_stats=False),
        (4, 8, 3, 3),
    ),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(8), (2, 8, 3, 3, 2)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8, affine=True), (4, 8, 3, 3)),
}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", NORM_MODULES)
def test_normalisations_work_forward_and_backward_as_in_float32(
    device: str, name: str, dtype: torch.dtype, training: bool
) -> None:
    make, shape = NORM_MODULES[name]
    norm = make().to(device).train(training)
    with torch.no_grad():
        for param in norm.parameters():
            param.copy_(torch.rand_like(param) + 0.5)
    twin = copy.deepcopy(norm)
    amp.prepare(norm, dtype)
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    x32 = x.detach().float().requires_grad_()
    upstream = torch.randn(shape, device=device).to(dtype)
    y, y32 = norm(x), twin(x32)
    y.backward(upstream)
    y32.backward(upstream.float())
    assert y.dtype == x.grad.dtype == dtype
    # One rounding of a float32 result, u = 2^-11 or 2^-8 of it, and float32's own differences, of
    # sums in another order: some 2^-20 of numbers up to 10.
    u, small = torch.finfo(dtype).eps / 2, 10 * 2.0**-20
    torch.testing.assert_close(y.float(), y32, rtol=1.01 * u, atol=small)
    # A gradient is rounded once at the end; kernels that read low precision keep float32 between.
    torch.testing.assert_close(x.grad.float(), x32.grad, rtol=1.01 * u, atol=small)
    for (key, found), wanted in zip(norm.named_parameters(), twin.parameters(), strict=True):
        assert found.grad.dtype == torch.float32, key
        torch.testing.assert_close(found.grad, wanted.grad, rtol=2.0**-18, atol=8 * small)
    for found, wanted in zip(norm.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2.0**-18, atol=small)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LayerNorm(8), (8192, 8)),
        (lambda: nn.GroupNorm(2, 8), (1024, 8, 8)),
        (lambda: nn.BatchNorm1d(8), (8192, 8)),
        (lambda: nn.BatchNorm2d(8), (128, 8, 8, 8)),
    ],
)
def test_gradients_of_kept_weights_are_summed_in_float32(
    device: str, make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """8192 ones; low precision cannot count beyond 256 or 2048."""
    norm = amp.prepare(make().to(device), dtype)
    norm(torch.randn(shape, device=device).to(dtype)).backward(
        torch.ones(shape, dtype=dtype, device=device)
    )
    assert norm.bias.grad.tolist() == [8192.0] * 8


class TwoInputs(nn.Module):
    """Any module of one's own; float32 shows in a sum that low precision cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, count: int, *, other: Tensor) -> Tensor:
        self.seen = [x.dtype, other.dtype]
        return (x + count * 2.0**-12 * self.weight - other) * 2.0**10


@pytest.mark.parametrize("dtype", LOW)
def test_a_kept_module_computes_in_float32_and_returns_what_it_was_given(
    device: str, dtype: torch.dtype
) -> None:
    model = amp.prepare(nn.Sequential(TwoInputs()).to(device), dtype, keep_fp32=[TwoInputs])
    x = torch.ones(3, dtype=dtype, device=device, requires_grad=True)
    for given in (x, x.float()):
        y = model[0](given, 2, other=torch.ones(3, dtype=dtype, device=device))
        assert model[0].seen == [torch.float32, torch.float32]
        assert y.tolist() == [0.5, 0.5, 0.5]
    assert model[0](x, 1, other=x).dtype == dtype
    model[0](x, 1, other=x.detach()).sum().backward()
    assert x.grad.dtype == dtype
    assert model[0].weight.grad.dtype == torch.float32


def test_an_error_in_a_kept_module_does_not_change_what_the_next_call_returns(device: str) -> None:
    model = amp.prepare(nn.Sequential(nn.Linear(4, 3)).to(device), torch.bfloat16, keep_fp32="0")
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5, dtype=torch.bfloat16, device=device))
    assert model(torch.ones(1, 4, device=device)).dtype == torch.float32


@pytest.mark.parametrize("keep", [None, ["norm", "inner.*"]])
@pytest.mark.parametrize("dtype", LOW)
def test_preparing_twice_is_preparing_once(device: str, dtype: torch.dtype, keep: Any) -> None:
    tokens = torch.arange(6, device=device)
    once = amp.prepare(Block().to(device), dtype, keep)
    twice = amp.prepare(copy.deepcopy(once), dtype, keep)
    assert raw_bytes(once.state_dict()) == raw_bytes(twice.state_dict())
    found, wanted = twice(tokens), once(tokens)
    assert raw_bytes(found) == raw_bytes(wanted)


# A prepared model is a model like any other.


@pytest.mark.parametrize("dtype", LOW)
def test_a_prepared_model_trains(device: str, dtype: torch.dtype) -> None:
    model = amp.prepare(Block().to(device), dtype)
    optimizer = amp.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(11, device=device)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_a_copy_is_a_model_of_its_own(device: str) -> None:
    model = amp.prepare(Block().to(device), torch.bfloat16)
    tokens = torch.arange(6, device=device)
    copied = copy.deepcopy(model)
    assert raw_bytes(copied.state_dict()) == raw_bytes(model.state_dict())
    assert raw_bytes(copied(tokens)) == raw_bytes(model(tokens))
    assert copied.head.weight is copied.embed.weight
    before = raw_bytes(model.state_dict())
    optimizer = amp.optim.SGD(copied.parameters(), lr=1.0)
    copied(tokens).float().sum().backward()
    optimizer.step()
    assert raw_bytes(model.state_dict()) == before != raw_bytes(copied.state_dict())


def test_a_state_dict_has_the_models_own_names_and_loads(device: str) -> None:
    model, other = (amp.prepare(Block().to(device), torch.bfloat16) for _ in range(2))
    saved = model.state_dict()
    assert set(saved) == ALL
    assert other.load_state_dict(saved) == ([], [])
    assert raw_bytes(other.state_dict()) == raw_bytes(saved)
    assert kept_in(other) == NORMS
    float32 = Block().to(device)
    float32.load_state_dict(saved)  # as torch copies any dtype into any other
    assert torch.equal(float32.head.weight, model.head.weight.float())


def test_a_weight_beyond_float16_keeps_its_exact_master(device: str) -> None:
    model = nn.Linear(4, 4, bias=False).to(device)
    with torch.no_grad():
        model.weight.fill_(1 / 3)
        model.weight[0, 0] = 70000.0
    exact = model.weight.detach().clone()
    amp.prepare(model, torch.float16)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.0, master="float32")
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert torch.equal(optimizer.state[model.weight]["master"], exact)
    assert model.weight[0, 0].item() == 65504.0
