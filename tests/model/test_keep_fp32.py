"""keep_fp32's marks: what stays float32 whichever way a model is converted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import raw_bytes, through_a_file
from torch import nn

import amp_mp as amp
from amp_mp.model.convert import convert_network
from amp_mp.model.selection import keep_fp32

LOW = [torch.float16, torch.bfloat16]
CONVERTERS = {"convert_network": convert_network, "prepare": amp.prepare}
converters = pytest.mark.parametrize("convert", CONVERTERS.values(), ids=CONVERTERS)


class Model(nn.Module):
    """A norm, a tied weight, and two buffers that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.full((3,), 1 / 3))
        self.register_buffer("same", self.table)


NORMS = {"body.1.weight", "body.1.bias"}
TIED = {"embed.weight", "head.weight"}
BODY_0 = {"body.0.weight", "body.0.bias"}
BODY_2 = {"body.2.weight", "body.2.bias"}


def float32_in(model: nn.Module) -> set[str]:
    return {name for name, t in model.state_dict().items() if t.dtype == torch.float32}


@converters
@pytest.mark.parametrize(
    ("marks", "kept"),
    [
        ("body.0", BODY_0),
        ("body.*", BODY_0 | NORMS | BODY_2),
        (nn.Linear, BODY_0 | TIED | BODY_2),
        (["*.0.weight", "table"], BODY_0 | {"table", "same"}),
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
    kept = BODY_0 | BODY_2
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
