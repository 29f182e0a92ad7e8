"""Every operator of Apex's lists, in every spelling, in the dtype that really ran."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import casting_lists as lists
import pytest
import torch
from casts import computed, each, products_in_low_precision
from helpers import is_gpu
from torch import Tensor
from torch.nn import functional

import amp_mp as amp
from amp_mp import _C
from amp_mp.casting.op_table import APEX
from amp_mp.casting.products import CHOSEN

LOW = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:(?!amp_mp)")  # some spellings are deprecated


@pytest.fixture(scope="module", params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def names(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the expressions use, on each device."""
    return lists.tensors(request.param, LOW)


@pytest.fixture(scope="module")
def apex(names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The names, with Apex's table in force.

    For all tests of the file: to put it in force takes longer than what each does with it.
    """
    with products_in_low_precision():
        handle = amp.init(device_type=names["device"], dtype=LOW, loss_scale=1.0)
        yield names
        handle._deactivate()
        amp.casting.uninstall()


@each(lists.LOW)
def test_products_run_in_low_precision(apex: dict[str, Any], expression: str) -> None:
    found = computed(expression, apex)
    # attention keeps the logarithm of its sums in float32 for backward
    given = found.given - {torch.float32} if "attention" in expression else found.given
    assert (found.taken, given, found.result) == ({LOW}, {LOW}, {LOW})


@each(lists.CELLS)
@pytest.mark.parametrize("products", ["native", "float32"])
def test_the_products_of_cells_run_in_low_precision(
    apex: dict[str, Any], expression: str, products: str
) -> None:
    """Where a CPU's products are computed in float32, the formula that follows them is, too."""
    _C.products.choose(LOW, products, CHOSEN[LOW][1])
    found = computed(expression, apex)
    of_formula = found.by_name
    of_products = set().union(*(of_formula.pop(n) for n in ("mm", "addmm") if n in of_formula))
    in_float32 = apex["device"] == "cpu" and products == "float32"
    assert of_products == {LOW}
    assert set().union(*of_formula.values()) == {torch.float32 if in_float32 else LOW}
    assert found.result == {LOW}


@each(lists.VECTOR)
def test_matrix_times_vector(apex: dict[str, Any], expression: str) -> None:
    by_size = amp.policies(apex["device"])["aten::mv"] == "low_precision_if_large"
    wanted = torch.float32 if apex["device"] == "cpu" and by_size else LOW
    found = computed(expression, apex)
    assert (found.taken, found.given) == ({wanted}, {wanted})


@each(lists.FLOAT32)
def test_sensitive_functions_run_in_float32(apex: dict[str, Any], expression: str) -> None:
    found = computed(expression, apex)
    assert (found.taken, found.given) == ({torch.float32}, {torch.float32})


@each(lists.WIDE_OUTPUT)
def test_sums_give_float32(apex: dict[str, Any], expression: str) -> None:
    assert computed(expression, apex).given == {torch.float32}


@each(lists.WIDEST)
def test_mixtures_run_in_the_widest_dtype(apex: dict[str, Any], expression: str) -> None:
    found = computed(expression, apex)
    assert (found.taken, found.given) == ({torch.float32}, {torch.float32})


@each(lists.BANNED)
def test_banned_functions_raise_in_every_spelling(apex: dict[str, Any], expression: str) -> None:
    names = r"(?s)binary_cross_entropy_with_logits.*BCEWithLogitsLoss"
    with pytest.raises(NotImplementedError, match=names):
        computed(expression, apex)
    wide = {**apex, "h": apex["a"], "g": apex["b"]}
    assert computed(expression, wide).taken == {torch.float32}


# CUDA's own, which no spelling reaches on a CPU, or reached by a module's fast path alone.
INTERNAL = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_native_multi_head_attention"}


def test_every_operator_of_the_table_is_here() -> None:
    listed = {op.split("::")[1] for _, ops in APEX for op in ops}
    there = {name for name in listed if hasattr(torch.ops.aten, name)}
    assert there - INTERNAL - {"mkldnn_rnn_layer"} == set(lists.ALL)


def spellings(name: str) -> Iterator[str]:
    """As regular expressions, every way this torch has to call an operator by its own name."""
    short = name.removeprefix("linalg_")
    public = not name.startswith("_")
    if name.startswith("linalg_"):
        yield rf"torch\.linalg\.{short}\("
    elif hasattr(torch, name) and public:
        yield rf"torch\.{name}\("
    if hasattr(Tensor, name) and public:
        yield rf"(?<!torch)(?<!F)(?<!nn)\.{name}\("
    if hasattr(functional, name):
        yield rf"F\.{name}\("
    if hasattr(torch.linalg, name):
        yield rf"torch\.linalg\.{name}\("


@pytest.mark.parametrize("name", lists.ALL)
def test_every_spelling_is_here(name: str) -> None:
    text = " | ".join(expression for row in lists.ALL.values() for expression in row)
    missing = [spelling for spelling in spellings(name) if not re.search(spelling, text)]
    assert not missing


def in_place(rows: dict[str, list[str]]) -> list[str]:
    """The in-place form of every method among the spellings: "h.exp()" gives "h.clone().exp_()"."""
    found = []
    for row in rows.values():
        for expression in row:
            call = re.fullmatch(r"(\w+)\.(\w+)(\(.*\))", expression)
            if call and call[1] not in ("torch", "F") and hasattr(Tensor, f"{call[2]}_"):
                found.append(f"{call[1]}.clone().{call[2]}_{call[3]}")
    return found


@pytest.mark.parametrize("expression", in_place(lists.FLOAT32 | lists.WIDE_OUTPUT))
def test_in_place_on_low_precision_is_refused(apex: dict[str, Any], expression: str) -> None:
    words = (
        r"cannot call aten::[\w.]+, which writes in place and is to run in float32, on a BFloat16 "
    )
    with pytest.raises(NotImplementedError, match=f"{words}tensor: call .* returns a new tensor"):
        eval(expression, apex)
    wide = {**apex, "h": apex["a"], "g": apex["b"]}
    assert computed(expression, wide).taken == {torch.float32}


@pytest.mark.parametrize("expression", in_place(lists.LOW | lists.VECTOR | lists.WIDEST))
@pytest.mark.parametrize("written", [torch.float32, LOW])
def test_in_place_follows_what_is_written(
    apex: dict[str, Any], expression: str, written: torch.dtype
) -> None:
    target, rest = expression.split(".", 1)
    start = apex[target].to(written)
    found = computed(f"start.{rest}", {**apex, "start": start})
    assert (found.taken, found.given) == ({written}, {written})


def with_out() -> list[str]:
    """Functions whose documentation has out=, called by their own name."""
    found = []
    for row in lists.ALL.values():
        for expression in row:
            function = re.match(r"torch\.(linalg\.)?(\w+)\(", expression)
            documented = (function and eval(function[0][:-1]).__doc__) or ""
            if "out=None" in documented and not re.search("input=|_mean", expression):
                found.append(expression)
    return found


@pytest.mark.parametrize("expression", with_out())
@pytest.mark.parametrize("written", [torch.float32, LOW])
def test_out_follows_what_is_written(
    apex: dict[str, Any], expression: str, written: torch.dtype
) -> None:
    with torch.autocast(apex["device"], enabled=False):
        wide = {k: v.float() if isinstance(v, Tensor) and v.dtype == LOW else v
                for k, v in apex.items()}  # fmt: skip
        wanted = eval(expression, wide)
    call = expression[: expression.rindex(")")] + ", out=out)"
    out = torch.empty_like(wanted, dtype=written)
    if written == LOW and "nuc" in expression:
        with pytest.raises(RuntimeError, match="Low precision dtypes not supported"):
            eval(call, {**apex, "out": out})  # as without casts
        return
    found = computed(call, {**apex, "out": out})
    assert found.given == {written}
    if written == LOW and "cum" in expression and is_gpu(apex["device"]):
        # torch's kernels round every partial sum to what they write there: as without casts.
        with torch.autocast(apex["device"], enabled=False):
            eval(call, {**apex, "out": (alone := torch.empty_like(out))})
        assert torch.equal(out, alone)
        return
    torch.testing.assert_close(out.float(), wanted, rtol=0.05, atol=0.05)
