"""What prepare is called with: right, or one clear error before anything is changed."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from converting import converters
from helpers import raw_bytes
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import amp_mp as amp

BF16 = torch.bfloat16


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))


@converters
def test_a_list_is_refused_and_a_module_list_is_a_module(convert: Any, device: str) -> None:
    models = [network().to(device), network().to(device)]
    with pytest.raises(TypeError, match=r"^model must be one torch.nn.Module, found list; call"):
        convert(models, BF16)
    assert models[0][0].weight.dtype == torch.float32
    convert(nn.ModuleList(models), BF16)
    assert {m[0].weight.dtype for m in models} == {BF16}


@converters
def test_wrong_arguments_are_named_and_nothing_is_converted(convert: Any) -> None:
    model = network()
    for dtype in (torch.int8, None):
        with pytest.raises(ValueError, match=rf"^dtype must be .*found {dtype}"):
            convert(model, dtype)
    for wrong in ("haed", "*.wieght", "", "0.", "Linear"):
        words = rf"^keep_fp32: {re.escape(repr(wrong))} matches no module or parameter"
        with pytest.raises(ValueError, match=words):
            convert(model, BF16, keep_fp32=["0", wrong])
    for wrong in (3, None, int, BF16):
        words = rf"takes nn.Module types, modules and strings, found {re.escape(repr(wrong))}"
        with pytest.raises(TypeError, match=words):
            convert(model, BF16, keep_fp32=["0", wrong])
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@converters
def test_a_tensor_whose_memory_is_others_is_refused_by_name(convert: Any) -> None:
    """As the weights that torchao gathers in float8, and quantised ones."""
    model = network()
    model.append(nn.Linear(8, 8))
    model[2].weight = nn.Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)))
    words = r" is a TwoTensor, whose memory other tensors have; pass plain tensors or DTensors$"
    with pytest.raises(TypeError, match=r"^model\.2\.weight" + words):
        convert(model, BF16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with pytest.raises(TypeError, match=r"^parameter 4 of group 0" + words):
        amp.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(("source", "target"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_a_model_in_another_low_precision_is_converted(
    device: str, source: str, target: str
) -> None:
    """As from_pretrained(dtype=...) gives it, with norms in low precision as well."""
    dtype = getattr(torch, target)
    model = network().to(device, getattr(torch, source))
    twin = copy.deepcopy(model).float()
    amp.prepare(model, dtype)
    assert torch.equal(model[0].weight, twin[0].weight.to(dtype))
    assert torch.equal(model[1].weight, twin[1].weight)
    assert model[1].weight.dtype == torch.float32
    x = torch.randn(4, 8, device=device).to(dtype)
    assert model(x).dtype == dtype
    optimizer = amp.optim.SGD(model.parameters(), lr=0.0, master="float32")
    model(x).float().sum().backward()
    optimizer.step()
    assert torch.equal(optimizer.state[model[0].weight]["master"], twin[0].weight)


def test_norms_of_a_model_in_the_same_low_precision_become_float32(device: str) -> None:
    model = amp.prepare(network().to(device).bfloat16(), BF16)
    assert (model[0].weight.dtype, model[1].weight.dtype) == (BF16, torch.float32)
    assert model(torch.ones(2, 8, device=device, dtype=BF16)).dtype == BF16


@converters
def test_a_model_made_in_inference_mode_is_refused_by_name(convert: Any) -> None:
    with torch.inference_mode():
        model = network()
    with pytest.raises(ValueError, match=r"^model.0.weight was made under torch.inference_mode"):
        convert(model, BF16)
    model = network()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="call it outside"):
        convert(model, BF16)
    assert model[0].weight.dtype == torch.float32


@converters
def test_a_lazy_layer_is_refused_by_name(convert: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"^model.1.weight is lazy; run the model once before"):
        convert(model, BF16)
    assert model[0].weight.dtype == torch.float32


@converters
def test_a_wrapped_model_is_refused_before_it_is_changed(convert: Any, tmp_path: Path) -> None:
    init = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=init, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(network())
        before = raw_bytes(model.state_dict())
        with pytest.raises(ValueError, match=r"^model is a DistributedDataParallel.*then wrap"):
            convert(model, BF16)
        outer = nn.ModuleDict({"inside": model})
        with pytest.raises(ValueError, match=r"^model.inside is a DistributedDataParallel"):
            convert(outer, BF16)
        assert raw_bytes(model.state_dict()) == before
    finally:
        torch.distributed.destroy_process_group()


def test_recurrent_weights_are_flattened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For cuDNN, which takes them as one piece of memory."""
    seen: list[torch.dtype] = []
    monkeypatch.setattr(
        nn.LSTM, "flatten_parameters", lambda self: seen.append(self.weight_ih_l0.dtype)
    )
    model = nn.Sequential(nn.LSTM(4, 3))
    seen.clear()
    amp.prepare(model, BF16)
    assert seen == [BF16]
