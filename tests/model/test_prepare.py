"""prepare: a float32 model in low precision, with nothing lost for the masters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from converting import (
    BATCH_NORM,
    FLOAT32,
    LAYER_NORM,
    NORMS,
    TIED,
    Model,
    converters,
    float32_in,
    starting,
)
from helpers import PRETEND_GPU, raw_bytes
from torch import Tensor, nn

import amp_mp as amp

LOW = [torch.float16, torch.bfloat16]


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


def test_channels_last_weights_keep_their_layout_and_their_bits(device: str) -> None:
    model = nn.Conv2d(4, 6, 3, bias=False).to(device, memory_format=torch.channels_last)
    original = model.weight.detach().clone()
    amp.prepare(model, torch.bfloat16)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.0, master="float32")
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert torch.equal(optimizer.state[model.weight]["master"], original)


# What is converted, and what is not.


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (None, NORMS),
        ([], set()),
        (nn.LayerNorm, LAYER_NORM),
        ([nn.BatchNorm1d], BATCH_NORM),
        ([nn.LayerNorm, nn.BatchNorm1d], NORMS),
        ("norm", LAYER_NORM),
        (["body.2"], starting("body.2")),
        (["body"], starting("body")),
        (["body.*"], starting("body")),
        (["*.bias"], starting("body", "norm")),
        (["*.0.weight", nn.LayerNorm], starting("body.0", "norm")),
        (["table"], {"table", "same"}),
        (["head"], TIED),
        (["embed"], TIED),
        (["head.weight"], TIED),
        (["embed.weight"], TIED),
        (["*"], FLOAT32),
        (("nor?", "body.[02]"), starting("norm", "body.0", "body.2")),
    ],
)
def test_keep_fp32_adds_types_and_patterns_and_keep_fp32_only_has_no_others(
    keep: Any, kept: set[str]
) -> None:
    assert float32_in(amp.prepare(Model(), torch.bfloat16, keep_fp32_only=keep)) == kept
    assert float32_in(amp.prepare(Model(), torch.bfloat16, keep_fp32=keep)) == kept | NORMS


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


@converters
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_become_what_torch_makes_of_them(
    device: str, convert: Any, dtype: torch.dtype
) -> None:
    """Of a backward before, as where a script freezes in what the first batches show."""
    sparse = not PRETEND_GPU or device == "cpu"  # it has no sparse tensors
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Embedding(3, 3, sparse=sparse))
    model.to(device)
    x = torch.randn(2, 4, device=device)
    (model[:2](x).square().sum() + model[2](torch.tensor([1, 1], device=device)).sum()).backward()
    twin = copy.deepcopy(model)
    for param, original in zip(twin.parameters(), model.parameters(), strict=True):
        param.grad = original.grad.clone()
    twin[0].to(dtype)
    twin[2].to(dtype)
    convert(model, dtype)
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert found.grad.dtype == found.dtype
        assert found.grad.is_sparse == wanted.grad.is_sparse
        assert torch.equal(found.grad.to_dense(), wanted.grad.to_dense())
    model[:2](x.to(dtype)).float().square().sum().backward()  # adds to them
    assert (model[0].weight.grad.float() - 2 * twin[0].weight.grad).abs().max() < 0.1


@converters
def test_a_gradients_own_dtype_stays(device: str, convert: Any) -> None:
    """torch's grad_dtype, which a script has set to add up in float32."""
    model = nn.Linear(4, 3).to(device)
    model.weight.grad_dtype = torch.float32
    model.weight.grad = grad = torch.randn(3, 4, device=device)
    convert(model, torch.bfloat16)
    assert torch.equal(model.weight.grad, grad)
    assert model.weight.grad.dtype == torch.float32


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


@pytest.mark.parametrize("keep", [None, ["norm", "body.*"]])
@pytest.mark.parametrize("dtype", LOW)
def test_preparing_twice_is_preparing_once(device: str, dtype: torch.dtype, keep: Any) -> None:
    tokens = torch.arange(6, device=device)
    once = amp.prepare(Model().to(device), dtype, keep)
    twice = amp.prepare(copy.deepcopy(once), dtype, keep)
    assert raw_bytes(once.state_dict()) == raw_bytes(twice.state_dict())
    found, wanted = twice(tokens), once(tokens)
    assert raw_bytes(found) == raw_bytes(wanted)


# A prepared model is a model like any other.
