"""Every operator of Apex's lists, in every spelling, in the dtype that really ran."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import casting_lists as lists
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import amp_mp as amp
from amp_mp.casting.op_lists import APEX

LOW = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore")  # some spellings are deprecated


class Computed(TorchDispatchMode):
    """The floating dtypes that operators below autocast take in and give out.

    Views, casts and the initialisation of modules do not count, nor does the exact -x.
    """

    IDLE = frozenset(
        [
            "_to_copy",
            "copy_",
            "clone",
            "detach",
            "empty",
            "empty_like",
            "uniform_",
            "fill_",
            "zeros",
            "neg",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.taken: set[torch.dtype] = set()
        self.given: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        views = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        if not views and name not in self.IDLE:
            self.taken |= dtypes_of((args, kwargs or {}))
            self.given |= dtypes_of(result)
        return result


def dtypes_of(values: Any) -> set[torch.dtype]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return {x.dtype for x in leaves if isinstance(x, Tensor) and x.is_floating_point()}


def computed(expression: str, names: dict[str, Any]) -> Computed:
    with Computed() as found, torch.no_grad():
        eval(expression, names)
    return found


@pytest.fixture(scope="module", params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def names(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the expressions use, on each device."""
    return lists.tensors(request.param, LOW)


@pytest.fixture
def apex(names: dict[str, Any], cast_products: None) -> Iterator[dict[str, Any]]:
    """The names, with Apex's table in force."""
    handle = amp.init(device_type=names["device"], dtype=LOW, loss_scale=1.0)
    yield names
    handle._deactivate()
    amp.casting.uninstall()


def each(rows: dict[str, list[str]]) -> Any:
    """A case for every spelling."""
    expressions = [expression for spellings in rows.values() for expression in spellings]
    return pytest.mark.parametrize("expression", expressions)


@each(lists.LOW)
def test_products_run_in_low_precision(apex: dict[str, Any], expression: str) -> None:
    found = computed(expression, apex)
    # attention keeps the logarithm of its sums in float32 for backward
    given = found.given - {torch.float32} if "attention" in expression else found.given
    assert (found.taken, given) == ({LOW}, {LOW})


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


ALL = lists.LOW | lists.VECTOR | lists.FLOAT32 | lists.WIDE_OUTPUT | lists.WIDEST | lists.BANNED
# CUDA's own, which no spelling reaches on a CPU, or reached by a module's fast path alone.
INTERNAL = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_native_multi_head_attention"}


def test_every_operator_of_the_table_is_here() -> None:
    listed = {op.split("::")[1] for _, ops in APEX for op in ops}
    there = {name for name in listed if hasattr(torch.ops.aten, name)}
    assert there - INTERNAL - {"mkldnn_rnn_layer"} == set(ALL)


@each(ALL)
def test_the_torch_table_is_torchs_own(names: dict[str, Any], expression: str) -> None:
    """The same dtypes, or the same kind of error, as without amp_mp."""

    def outcome() -> Any:
        try:
            found = computed(expression, names)
        except (RuntimeError, NotImplementedError) as error:
            return type(error)
        return found.taken, found.given

    with torch.autocast(names["device"], LOW):
        wanted = outcome()
    try:
        with amp.autocast(names["device"], LOW):
            assert amp.policies(names["device"])["aten::mm"] == "low_precision"
            assert outcome() == wanted
    finally:
        amp.casting.uninstall()


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


@pytest.mark.parametrize("name", ALL)
def test_every_spelling_is_here(name: str) -> None:
    text = " | ".join(expression for row in ALL.values() for expression in row)
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
    with pytest.raises(NotImplementedError, match="writes in place and is to run in float32"):
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
    for row in ALL.values():
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
    torch.testing.assert_close(out.float(), wanted, rtol=0.05, atol=0.05)


REDUCTIONS = {
    "sum": lambda x, **more: torch.sum(x, 0, **more),
    "mean": lambda x, **more: torch.mean(x, 0, **more),
    "prod": lambda x, **more: torch.prod(x, 0, **more),
    "cumsum": lambda x, **more: torch.cumsum(x, 0, **more),
    "cumprod": lambda x, **more: torch.cumprod(x, 0, **more),
    "softmax": lambda x, **more: torch.softmax(x, 0, **more),
    "log_softmax": lambda x, **more: torch.log_softmax(x, 0, **more),
    "vector_norm": lambda x, **more: torch.linalg.vector_norm(x, dim=0, **more),
    "norm": lambda x, **more: torch.norm(x, 2, 0, **more),
    "logsumexp": lambda x, **more: torch.logsumexp(x, 0, **more),
    "std": lambda x, **more: torch.std(x, 0, **more),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_into_low_precision_give_what_torch_gives(
    names: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    x = names["v"].view(16, 16).to(dtype)
    wanted = REDUCTIONS[name](x, out=torch.empty(0, device=x.device, dtype=dtype))
    handle = amp.init(device_type=names["device"], dtype=dtype, loss_scale=1.0)
    try:
        out = torch.empty(0, device=x.device, dtype=dtype)
        assert REDUCTIONS[name](x, out=out) is out
        assert torch.equal(out, wanted)
        if name not in ("norm", "logsumexp", "std"):  # into what is written, from float32 as well
            torch.testing.assert_close(
                REDUCTIONS[name](x.float(), out=out), wanted, rtol=2.0**-6, atol=0
            )
    finally:
        handle._deactivate()
        amp.casting.uninstall()
