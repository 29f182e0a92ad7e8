"""Modules that stay float32: what they are given, what they return, and after a change of dtype."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import through_a_file
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import amp_mp as amp

BF16, F32 = torch.bfloat16, torch.float32
LOW = [torch.float16, torch.bfloat16]

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Output:
    value: Tensor
    others: list[Tensor] | None = None
    count: int = 3


@dataclasses.dataclass(frozen=True)
class FrozenOutput:
    value: Tensor
    name: str = "x"


class RegisteredCache:
    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value


register_pytree_node(
    RegisteredCache, lambda c: ([c.value], None), lambda values, _: RegisteredCache(*values)
)


class Returns(nn.Module):
    """Returns its input in a structure."""

    def __init__(self, structure: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.structure = structure

    def forward(self, x: Any) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        assert x.dtype == F32
        return self.structure(x * self.weight)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [t for each in value for t in tensors_in(each)] if isinstance(value, list | tuple) else []
    )


STRUCTURES = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, None, 7),
    "list": lambda x: [x, x + 1],
    "dict": lambda x: {"a": x, "b": {"c": (x,)}},
    "ordered": lambda x: OrderedDict(out=x, aux=x),
    "named tuple": lambda x: Pair(x, x),
    "dataclass": lambda x: Output(x, [x, x]),
    "frozen dataclass": FrozenOutput,
    "dataclass in a tuple": lambda x: (Output(x), {"a": FrozenOutput(x)}),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", STRUCTURES)
def test_results_of_any_structure_have_the_dtype_that_was_given(
    device: str, name: str, dtype: torch.dtype
) -> None:
    model = nn.Sequential(Returns(STRUCTURES[name]), nn.Identity()).to(device)
    amp.prepare(model, dtype, keep_fp32="0")
    x = torch.randn(3, device=device)
    found, wanted = model[0](x.to(dtype)), STRUCTURES[name](x.to(dtype))
    assert type(found) is type(wanted)
    assert {t.dtype for t in tensors_in(found)} == {dtype}
    assert len(tensors_in(found)) == len(tensors_in(wanted))
    assert {t.dtype for t in tensors_in(model[0](x))} == {F32}
    assert {t.dtype for t in tensors_in(model[0]((x.to(dtype), None)))} == {dtype}


def test_whole_numbers_and_masks_pass_as_they_are(device: str) -> None:
    model = Returns(lambda x: (x, x > 0, torch.arange(3)))
    amp.prepare(model.to(device), BF16, keep_fp32=Returns)
    found = model(torch.randn(3, device=device).bfloat16())
    assert [t.dtype for t in found] == [BF16, torch.bool, torch.int64]


def test_a_recurrent_layer_takes_packed_sequences(device: str) -> None:
    model = nn.Sequential(nn.RNN(4, 3), nn.Linear(3, 3)).to(device)
    twin = copy.deepcopy(model)
    amp.prepare(model, BF16, keep_fp32=nn.RNN)
    rows = [torch.randn(n, 4, device=device).bfloat16() for n in (5, 2)]
    out, state = model[0](pack_sequence(rows))
    wanted, _ = twin[0](pack_sequence([row.float() for row in rows]))
    assert isinstance(out, PackedSequence)
    assert (out.data.dtype, state.dtype) == (BF16, BF16)
    assert torch.equal(out.data, wanted.data.bfloat16())
    assert torch.equal(out.batch_sizes, wanted.batch_sizes)


def test_an_argument_that_needs_no_cast_is_the_callers_own(device: str) -> None:
    """A list that the module appends to."""

    class Notes(nn.Module):
        def forward(self, x: Tensor, seen: list[str]) -> Tensor:
            seen.append("here")
            return x

    model = amp.prepare(nn.Sequential(Notes()).to(device), BF16, keep_fp32="0")
    seen: list[str] = []
    model[0](torch.ones(2, device=device, dtype=BF16), seen)
    assert seen == ["here"]


@pytest.mark.parametrize("registered", [False, True])
def test_a_cache_that_a_kept_module_writes_to_is_the_callers_own(
    device: str, registered: bool
) -> None:
    """A dataclass, and a class that a library has made known to torch's pytrees."""
    if registered:
        cache: Any = RegisteredCache()
    else:
        cache = Output(torch.zeros(2, dtype=BF16), [])
    cache.value = torch.zeros(2, dtype=BF16, device=device)

    class Attends(nn.Linear):
        def forward(self, x: Tensor, cache: Any) -> Tensor:
            cache.value = super().forward(x)
            return cache.value

    model = amp.prepare(nn.Sequential(Attends(2, 2)).to(device), BF16, keep_fp32="0")
    y = model[0](torch.ones(2, device=device, dtype=BF16), cache)
    assert y.dtype == BF16
    assert torch.equal(cache.value.bfloat16(), y)
    assert y.abs().sum() > 0


# The dtype of the weights when the module runs.


def block(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8)).to(device)


@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
def test_a_model_converted_after_prepare_is_a_plain_model(device: str, dtype: torch.dtype) -> None:
    model = block(device)
    amp.prepare(model, BF16).to(dtype)
    plain = block(device).to(dtype)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 8, device=device).to(dtype)
    assert torch.equal(model(x), plain(x))


def test_norms_of_a_float64_model_are_computed_in_float64(device: str) -> None:
    model = amp.prepare(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(device), BF16)
    model[1].double()
    x = torch.randn(4, 8, device=device).bfloat16()
    wanted = nn.functional.layer_norm(model[0](x).double(), (8,)).bfloat16()
    assert torch.equal(model(x), wanted)


# Beside modules that are not kept.


@pytest.mark.parametrize("keep", ["head", "embed", "head.weight", nn.Embedding])
def test_a_kept_head_that_is_tied_works(device: str, keep: Any) -> None:
    model = nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(11, 8), body=nn.Linear(8, 8), head=nn.Linear(8, 11, bias=False)
        )
    ).to(device)
    model.head.weight = model.embed.weight
    if keep == "head.weight":
        keep = ["head", keep]
    amp.prepare(model, BF16, keep_fp32=keep)
    assert model.embed.weight.dtype == F32
    assert model.body.weight.dtype == BF16
    y = model(torch.arange(11, device=device))
    assert y.dtype == BF16
    y.float().sum().backward()
    assert model.head.weight.grad.dtype == F32


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_kept_embedding_returns_what_the_next_layer_takes(device: str, copied: Any) -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8)).to(device)
    model = copied(amp.prepare(model, BF16, keep_fp32=nn.Embedding))
    assert model(torch.arange(5, device=device)).dtype == BF16
    model.float()
    assert model(torch.arange(5, device=device)).dtype == F32


def test_a_norm_after_a_float32_residual_gives_what_the_next_layer_takes(device: str) -> None:
    """Mamba keeps its residual in float32, and casts it to the norm's dtype."""
    model = amp.prepare(block(device), BF16)
    x = torch.randn(4, 8, device=device)
    assert model[1](x.to(model[1].weight.dtype)).dtype == BF16


def test_norms_within_a_kept_module_return_float32(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))
    amp.prepare(model.to(device), BF16, keep_fp32="1")
    x = torch.randn(4, 8, device=device).bfloat16()
    assert model(x).dtype == BF16
    assert model[1][0](x.float()).dtype == F32


# Threads, checkpointing, torch.compile.


def test_threads_with_different_dtypes_do_not_disturb_one_another(device: str) -> None:
    model = amp.prepare(nn.Sequential(nn.Linear(64, 64)).to(device), BF16, keep_fp32="0")
    inputs = [torch.randn(4, 64, device=device).to((BF16, F32)[i % 2]) for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: model(x).dtype, inputs))
    assert found == [x.dtype for x in inputs]


def test_a_module_that_calls_itself(device: str) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self(x, again=False) if again else super().forward(x)

    model = amp.prepare(nn.Sequential(Twice(4, 4)).to(device), BF16, keep_fp32="0")
    assert model(torch.ones(1, 4, device=device, dtype=BF16)).dtype == BF16


def test_checkpointing_gives_the_same_gradients(device: str) -> None:
    model = amp.prepare(block(device), BF16)
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        x = torch.linspace(-1, 1, 32, device=device).view(4, 8).bfloat16().requires_grad_()
        run(x).float().square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.slow
def test_a_prepared_model_compiles_as_one_graph() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8))
    amp.prepare(model, BF16, keep_fp32="0")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    tokens = torch.arange(5)
    assert torch.equal(compiled(tokens), model(tokens))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inv_freq


def opt_level_2(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.apex.amp.initialize(model, optimizer, opt_level="O2", verbosity=0)[0]


SCRIPTED: dict[str, Any] = {
    "norm": lambda: amp.prepare(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), BF16),
    "rotary": lambda: amp.prepare(nn.Sequential(nn.Linear(4, 4), Rotary()), BF16),
    "network_to_half": lambda: amp.apex.fp16_utils.network_to_half(nn.BatchNorm1d(4)),
    "O2": lambda: opt_level_2(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("kind", SCRIPTED)
def test_torch_jit_script_names_what_exports_the_model(kind: str) -> None:
    model, x = SCRIPTED[kind](), torch.randn(3, 4, dtype=BF16)
    with pytest.raises(AttributeError, match=r"use torch\.jit\.trace or"):
        torch.jit.script(model)
    with pytest.raises(AttributeError, match=r"use torch\.jit\.trace or"):
        torch.jit.script(copy.deepcopy(model))
    model = model.eval()
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))
