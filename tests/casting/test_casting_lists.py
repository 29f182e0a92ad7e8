"""Every operator of Apex's lists, in every spelling, in the dtype that really ran."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import casting_lists as lists
import pytest
import torch
from casts import computed, products_in_low_precision, spellings, unlike
from helpers import is_gpu
from torch import Tensor
from torch.nn import functional

import amp_mp as amp
from amp_mp import _C
from amp_mp.casting.op_table import APEX

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


def test_products_run_in_low_precision(apex: dict[str, Any]) -> None:
    def outcome(expression: str) -> Any:
        found = computed(expression, apex)
        # attention keeps the logarithm of its sums in float32 for backward
        given = found.given - {torch.float32} if "attention" in expression else found.given
        return found.taken, given, found.result

    assert unlike(spellings(lists.LOW), outcome, ({LOW}, {LOW}, {LOW})) == {}


@pytest.mark.parametrize("products", ["native", "float32"])
def test_the_products_of_cells_run_in_low_precision(apex: dict[str, Any], products: str) -> None:
    """Where a CPU's products are computed in float32, the formula that follows them is, too."""
    _C.products.choose(LOW, products, _C.products.chosen[LOW][1])

    def outcome(expression: str) -> Any:
        found = computed(expression, apex)
        of_formula = found.by_name
        of_products = set().union(*(of_formula.pop(n) for n in ("mm", "addmm") if n in of_formula))
        return of_products, set().union(*of_formula.values()), found.result

    in_float32 = apex["device"] == "cpu" and products == "float32"
    of_formula = {torch.float32 if in_float32 else LOW}
    assert unlike(spellings(lists.CELLS), outcome, ({LOW}, of_formula, {LOW})) == {}


def taken_and_given(names: dict[str, Any]) -> Callable[[str], Any]:
    """The dtypes that the operators of an expression take in and give out."""

    def outcome(expression: str) -> Any:
        found = computed(expression, names)
        return found.taken, found.given

    return outcome


def test_matrix_times_vector(apex: dict[str, Any]) -> None:
    by_size = amp.policies(apex["device"])["aten::mv"] == "low_precision_if_large"
    wanted = {torch.float32 if apex["device"] == "cpu" and by_size else LOW}
    assert unlike(spellings(lists.VECTOR), taken_and_given(apex), (wanted, wanted)) == {}


def test_sensitive_functions_run_in_float32(apex: dict[str, Any]) -> None:
    wanted = ({torch.float32}, {torch.float32})
    assert unlike(spellings(lists.FLOAT32), taken_and_given(apex), wanted) == {}


def test_sums_give_float32(apex: dict[str, Any]) -> None:
    def outcome(expression: str) -> Any:
        return computed(expression, apex).given

    assert unlike(spellings(lists.WIDE_OUTPUT), outcome, {torch.float32}) == {}


def test_mixtures_run_in_the_widest_dtype(apex: dict[str, Any]) -> None:
    wanted = ({torch.float32}, {torch.float32})
    assert unlike(spellings(lists.WIDEST), taken_and_given(apex), wanted) == {}


def refusal(expression: str, names: dict[str, Any]) -> str:
    """What an expression says that is not implemented; nothing where it is."""
    try:
        eval(expression, names)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_banned_functions_raise_in_every_spelling(apex: dict[str, Any]) -> None:
    words = r"(?s)binary_cross_entropy_with_logits.*BCEWithLogitsLoss"
    wide = {**apex, "h": apex["a"], "g": apex["b"]}

    def outcome(expression: str) -> Any:
        refused = re.search(words, refusal(expression, apex)) is not None
        return refused, computed(expression, wide).taken

    assert unlike(spellings(lists.BANNED), outcome, (True, {torch.float32})) == {}


# CUDA's own, which no spelling reaches on a CPU, or reached by a module's fast path alone.
INTERNAL = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_native_multi_head_attention"}


def test_every_operator_of_the_table_is_here() -> None:
    listed = {op.split("::")[1] for _, ops in APEX for op in ops}
    there = {name for name in listed if hasattr(torch.ops.aten, name)}
    assert there - INTERNAL - {"mkldnn_rnn_layer"} == set(lists.ALL)


def ways_to_call(name: str) -> Iterator[str]:
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


def test_every_spelling_is_here() -> None:
    text = " | ".join(spellings(lists.ALL))
    missing = {
        name: [way for way in ways_to_call(name) if not re.search(way, text)] for name in lists.ALL
    }
    assert {name: ways for name, ways in missing.items() if ways} == {}


def in_place(rows: dict[str, list[str]]) -> list[str]:
    """The in-place form of every method among the spellings: "h.exp()" gives "h.clone().exp_()"."""
    found = []
    for row in rows.values():
        for expression in row:
            call = re.fullmatch(r"(\w+)\.(\w+)(\(.*\))", expression)
            if call and call[1] not in ("torch", "F") and hasattr(Tensor, f"{call[2]}_"):
                found.append(f"{call[1]}.clone().{call[2]}_{call[3]}")
    return found


def test_in_place_on_low_precision_is_refused(apex: dict[str, Any]) -> None:
    words = (
        r"cannot call aten::[\w.]+, which writes in place and is to run in float32, on a BFloat16 "
        r"tensor: call .* returns a new tensor"
    )
    wide = {**apex, "h": apex["a"], "g": apex["b"]}

    def outcome(expression: str) -> Any:
        refused = re.search(words, refusal(expression, apex)) is not None
        return refused, computed(expression, wide).taken

    refused = in_place(lists.FLOAT32 | lists.WIDE_OUTPUT)
    assert len(refused) > 15
    assert unlike(refused, outcome, (True, {torch.float32})) == {}


@pytest.mark.parametrize("written", [torch.float32, LOW])
def test_in_place_follows_what_is_written(apex: dict[str, Any], written: torch.dtype) -> None:
    def outcome(expression: str) -> Any:
        target, rest = expression.split(".", 1)
        start = apex[target].to(written)
        found = computed(f"start.{rest}", {**apex, "start": start})
        return found.taken, found.given

    follow = in_place(lists.LOW | lists.VECTOR | lists.WIDEST)
    assert len(follow) > 5
    assert unlike(follow, outcome, ({written}, {written})) == {}


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


@pytest.mark.parametrize("written", [torch.float32, LOW])
def test_out_follows_what_is_written(apex: dict[str, Any], written: torch.dtype) -> None:
    wide = {k: v.float() if isinstance(v, Tensor) and v.dtype == LOW else v
            for k, v in apex.items()}  # fmt: skip

    def outcome(expression: str) -> Any:
        """The dtypes given out, and whether the values are those without casts."""
        with torch.autocast(apex["device"], enabled=False):
            wanted = eval(expression, wide)
        call = expression[: expression.rindex(")")] + ", out=out)"
        out = torch.empty_like(wanted, dtype=written)
        given = computed(call, {**apex, "out": out}).given
        if written == LOW and "cum" in expression and is_gpu(apex["device"]):
            # torch's kernels round every partial sum to what they write there: as without casts.
            with torch.autocast(apex["device"], enabled=False):
                eval(call, {**apex, "out": (alone := torch.empty_like(out))})
            return given, torch.equal(out, alone)
        return given, torch.allclose(out.float(), wanted, rtol=0.05, atol=0.05)

    found = unlike(with_out(), outcome, ({written}, True))
    if written == LOW:  # as without casts
        for expression in [each for each in found if "nuc" in each]:
            assert "Low precision dtypes not supported" in found.pop(expression)
    assert found == {}
