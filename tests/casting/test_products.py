"""Products of low-precision tensors on a CPU: native or in float32, with the same meaning."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked import Script, run_each
from hypothesis import given, strategies
from random_tests import random_runs
from ranks import on_ranks
from tiers import in_turn
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's name)

import amp_mp as amp
from amp_mp import _C
from amp_mp.casting import products

DTYPES = [torch.bfloat16, torch.float16]
HOWS = ["plain", "transposed", "strided"]  # in memory
THREADS = {torch.bfloat16: 3, torch.float16: 1}
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half an ulp of 1


@pytest.fixture(
    params=[(torch.bfloat16, "float32"), (torch.float16, "float32"), (torch.bfloat16, "converted")],
    ids=str,
)
def low(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A dtype whose products are computed in float32, on more threads than one or on one.

    By the loops, or all but those of few rows by torch.
    """
    dtype, setting = request.param
    monkeypatch.setenv(products.VARIABLE, setting)
    products.choose_products("auto", dtype)
    monkeypatch.delenv(products.VARIABLE)
    torch.set_num_threads(THREADS[dtype])
    return dtype


def values(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# More and fewer rows, columns and depth than a block of 2^18 elements has room for; 0 and 1.
SIZES = [(7, 5, 3), (700, 600, 500), (3000, 300, 90), (90, 300, 3000), (300, 9000, 90),
         (1, 64, 64), (64, 1, 1), (600, 700, 1)]  # fmt: skip


def expect_rounded_once(found: Tensor, exact: Tensor, sizes: Tensor, depth: int) -> None:
    """exact: in float64. sizes: the sum of the summands' absolute values."""
    assert found.shape == exact.shape
    bound = UNIT[found.dtype] * exact.abs() + (depth + 2) * 2.0**-24 * sizes + 2.0**-25
    worst = ((found.double() - exact).abs() / bound).max()
    assert worst <= 1.001, f"{worst} times the bound"


def stored(t: Tensor, how: str) -> Tensor:
    """The same numbers in another order in memory."""
    if how == "transposed":
        return t.mT.contiguous().mT
    if how == "strided":
        return t.repeat_interleave(2, -1)[..., ::2]
    return t


@pytest.mark.parametrize("setting", ["bfloat16", "float16", "float32"])
def test_either_choice_rounds_a_product_once(
    low: torch.dtype, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(products.VARIABLE, setting)
    amp.prepare(nn.Linear(2, 2), low)
    native = str(low).endswith(f".{setting}")
    assert _C.products.choice(low) == ("native" if native else "float32")
    a, b = values(33, 70, dtype=low), values(70, 50, dtype=low, seed=1)
    sizes = a.double().abs() @ b.double().abs()
    expect_rounded_once(a @ b, a.double() @ b.double(), sizes, 70)


@pytest.mark.parametrize(("sizes", "how"), in_turn(SIZES, HOWS))
def test_matrices(low: torch.dtype, sizes: tuple[int, int, int], how: str) -> None:
    m, k, n = sizes
    a, b = (stored(values(*s, dtype=low, seed=s[0]), how) for s in ((m, k), (k, n)))
    c = values(n, dtype=low, seed=3)
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    expect_rounded_once(a @ b, exact, sizes, k)
    expect_rounded_once(F.linear(a, b.t()), exact, sizes, k)
    added = 0.5 * c.double() - 2.0 * exact
    found = torch.addmm(c, a, b, beta=0.5, alpha=-2.0)
    expect_rounded_once(found, added, 2 * sizes + c.double().abs(), k)
    assert torch.equal(torch.addmm(c.fill_(torch.nan), a, b, beta=0.0), a @ b)
    out = torch.empty(0, dtype=low)
    assert torch.equal(torch.mm(a, b, out=out), a @ b)
    into = values(m, n, dtype=low, seed=5)
    wanted = torch.addmm(into, a, b, beta=2.0)
    assert torch.equal(into.addmm_(a, b, beta=2.0), wanted)


@pytest.mark.parametrize(
    ("batches", "m", "k", "n"), [(3, 5, 7, 2), (40, 100, 64, 100), (2, 700, 600, 500)]
)
def test_batches_of_matrices(low: torch.dtype, batches: int, m: int, k: int, n: int) -> None:
    a, b = values(batches, m, k, dtype=low), values(batches, k, n, dtype=low, seed=1)
    c = values(m, n, dtype=low, seed=3)
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    expect_rounded_once(a @ b, exact, sizes, k)
    expect_rounded_once(torch.einsum("bmk,bkn->bmn", a, b), exact, sizes, k)
    found = torch.baddbmm(c, a, b, beta=0.5, alpha=-2.0)
    added = 0.5 * c.double() - 2.0 * exact
    expect_rounded_once(found, added, 2 * sizes + c.double().abs(), k)
    assert torch.equal(torch.bmm(a, b, out=torch.empty(0, dtype=low)), a @ b)
    into = values(batches, m, n, dtype=low, seed=5)
    wanted = torch.baddbmm(into, a, b)
    assert torch.equal(into.baddbmm_(a, b), wanted)


@pytest.mark.parametrize(("sizes", "how"), in_turn([(3, 5, 7), (33, 64, 47), (256, 64, 256)], HOWS))
def test_a_matrix_has_the_same_bits_in_any_batch(
    low: torch.dtype, sizes: tuple[int, int, int], how: str
) -> None:
    """Ranks that have the matrices of Muon in other batches depend on it."""
    m, k, n = sizes
    a, b = (stored(values(9, *s, dtype=low, seed=s[0]), how) for s in ((m, k), (k, n)))
    together = a @ b
    for first, count in ((0, 1), (8, 1), (2, 5)):
        part = slice(first, first + count)
        assert torch.equal(a[part] @ b[part], together[part])
    one = a[:1].expand(9, -1, -1)
    assert torch.equal(one @ b, a[[0] * 9] @ b)


@pytest.mark.parametrize("how", ["plain", "transposed"])
@pytest.mark.parametrize(("k", "n"), [(300, 70), (31, 257), (2100, 40)])
def test_a_few_rows_do_not_depend_on_one_another(
    low: torch.dtype, k: int, n: int, how: str
) -> None:
    """A sample of an evaluation has the same result in any batch of at most 16."""
    x, weight = values(16, k, dtype=low), stored(values(n, k, dtype=low, seed=1), how)
    bias = values(n, dtype=low, seed=2)
    together = F.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    sizes = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    expect_rounded_once(together, exact, sizes, k)
    for first, count in ((0, 1), (3, 2), (9, 7)):
        part = slice(first, first + count)
        assert torch.equal(F.linear(x[part], weight, bias), together[part])


@given(data=strategies.data())
@random_runs(30)
def test_bits_of_the_loops_depend_on_nothing_beside_a_row(data: strategies.DataObject) -> None:
    """Not on threads, on a batch, on the result's order, nor beyond 16 rows on other rows."""
    draw, of = data.draw, strategies.integers
    low = draw(strategies.sampled_from(DTYPES))
    m, k, n = draw(of(17, 210)), draw(of(1, 600)), draw(of(1, 270))
    hows = strategies.sampled_from(["plain", "transposed"])
    a = stored(values(m, k, dtype=low, seed=draw(of(0, 9))), draw(hows))
    b = stored(values(k, n, dtype=low, seed=11), draw(hows))
    _C.products.choose(low, "float32", products._fixed("float32"))
    torch.set_num_threads(1)
    whole = a @ b
    expect_rounded_once(whole, a.double() @ b.double(), a.double().abs() @ b.double().abs(), k)
    torch.set_num_threads(draw(of(2, 5)))
    assert torch.equal(a @ b, whole)
    assert torch.equal((b.t() @ a.t()).t(), whole) or n <= 16
    assert torch.equal(a.expand(2, m, k) @ b.expand(2, k, n), whole.expand(2, m, n))
    if n > 16:
        first = draw(of(0, m - 17))
        part = slice(first, draw(of(first + 17, m)))
        assert torch.equal(a[part] @ b, whole[part])
        columns = slice(draw(of(0, n - 17)), None)
        assert torch.equal(a @ b[:, columns], whole[:, columns])


@pytest.mark.parametrize(
    ("sizes", "how"), in_turn([(1, 500, 90), (90, 500, 1), (5, 33, 64), (64, 32, 64)], HOWS)
)
def test_small_products_have_the_same_bits_under_either_choice(
    low: torch.dtype, sizes: tuple[int, int, int], how: str
) -> None:
    m, k, n = sizes
    a, b = (stored(values(*s, dtype=low, seed=s[0]), how) for s in ((m, k), (k, n)))
    in_float32 = a @ b
    products.choose_products("native", low)
    assert torch.equal(a @ b, in_float32)
    assert torch.equal(a[None] @ b[None], in_float32[None])


# What the loops of an instruction set are off by, in bounds of a result that is rounded once.
LOOPS = """
import torch, amp_mp as amp
for dtype, unit in (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11):
    amp.prepare(torch.nn.Linear(1, 1), dtype, products="float32")
    for m, k, n in (1, 7, 3), (3, 1100, 70), (16, 64, 300), (33, 40, 50), (2, 2048, 31):
        for order in range(8):
            a = torch.randn(k, m).t() if order & 1 else torch.randn(m, k)
            b = torch.randn(n, k).t() if order & 2 else torch.randn(k, n)
            a, b, c = a.to(dtype), b.to(dtype), torch.randn(n).to(dtype)
            c = c if order & 4 else torch.randn(m, n).to(dtype)
            found = torch.addmm(c, a, b, alpha=0.5, beta=-2.0).double()
            a, b, c = a.double(), b.double(), c.double()
            exact, sizes = 0.5 * (a @ b) - 2 * c, a.abs() @ b.abs() + 2 * c.abs()
            bound = unit * exact.abs() + (k + 2) * 2.0**-24 * sizes + 2.0**-25
            assert ((found - exact).abs() <= 1.001 * bound).all(), (dtype, m, k, n, order)
    for channels, positions in (16, 300), (35, 41), (64, 7):
        x = torch.randn(3, channels, positions).to(dtype)
        assert torch.equal(torch.conv1d(x, torch.eye(channels, dtype=dtype)[..., None]), x)
print(amp.build_info()["cpu"])
"""


@pytest.mark.slow
def test_loops_of_every_instruction_set_round_once() -> None:
    names = ["baseline", "avx2", "avx512"]
    for name, done in zip(
        names, run_each([Script(["-c", LOOPS], {"AMP_MP_CPU": n}) for n in names]), strict=True
    ):
        if "AMP_MP_CPU must be" not in done.stderr:
            assert done.stdout.split() == [name], done.stderr


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(96, 160), (5, 70, 96)),
    "conv1d": (lambda: nn.Conv1d(8, 6, 3, padding=1, groups=2), (5, 8, 40)),
    "conv2d": (lambda: nn.Conv2d(8, 6, 3, stride=2, bias=False), (40, 8, 90, 90)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2, dilation=2), (3, 4, 9, 9, 9)),
    "conv1d, many channels": (lambda: nn.Conv1d(20, 24, 3, stride=2, padding=1), (5, 20, 41)),
    "conv2d, many channels": (lambda: nn.Conv2d(33, 18, (3, 2), dilation=2), (40, 33, 42, 40)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(8, 6, 3, output_padding=1, stride=2),
                         (4, 8, 11, 11)),
}  # fmt: skip


def gradients(layer: nn.Module, x: Tensor, seed: int) -> tuple[Tensor, ...]:
    """The layer's result and the gradients of input and weights for a random gradient."""
    x = x.detach().requires_grad_()
    result = layer(x)
    result = result[0] if isinstance(result, tuple) else result
    grad = values(*result.shape, dtype=torch.float32, seed=seed).to(result.dtype)
    inputs = [x, *layer.parameters()]
    return result.detach(), *torch.autograd.grad(result, inputs, grad)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_forward_and_backward(low: torch.dtype, name: str, channels_last: bool) -> None:
    make, shape = LAYERS[name]
    layer, x = make().to(low), values(*shape, dtype=low)
    if channels_last and x.dim() == 4:
        layer, x = (t.to(memory_format=torch.channels_last) for t in (layer, x))
    found = gradients(layer, x, 7)
    layer64 = make().double()
    layer64.load_state_dict(layer.state_dict())
    wanted = gradients(layer64, x.double(), 7)
    assert found[0].stride() == wanted[0].stride()
    for own, exact in zip(found, wanted, strict=True):
        assert own.dtype == low
        # Rounded once, of values about 1 and sums of them: far from one ulp of the largest.
        assert (own.double() - exact).abs().max() <= 2 * UNIT[low] * exact.abs().max()


@pytest.mark.parametrize(
    ("mask", "causal"),  # torch takes one of both
    [(None, False), (None, True), ("bool", False), ("low", False), ("each", False)],
)
def test_attention(low: torch.dtype, mask: str | None, causal: bool) -> None:
    q, k, v = (values(30, 4, 120, 32, dtype=low, seed=s) for s in range(3))
    given = None
    if mask:
        shape = (30, 1, 120, 120) if mask == "each" else (120, 120)
        given = values(*shape, dtype=low, seed=4)
        given = given > -1 if mask == "bool" else given
    runs = []
    for dtype in (low, torch.float64):
        own = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        masked = given if given is None or mask == "bool" else given.to(dtype)
        result = F.scaled_dot_product_attention(*own, attn_mask=masked, is_causal=causal)
        grad = values(*result.shape, dtype=torch.float32, seed=9).to(dtype)
        runs.append((result, *torch.autograd.grad(result, own, grad)))
    for found, exact in zip(*runs, strict=True):
        assert found.dtype == low
        # The backward pass reads the rounded result: two roundings.
        assert (found.double() - exact).abs().max() <= 3 * UNIT[low] * exact.abs().max()


def test_what_torch_refuses_it_refuses_in_its_own_words(low: torch.dtype) -> None:
    a = torch.ones(3, 4, dtype=low)
    for wrong in (lambda: a @ a, lambda: a @ torch.ones(4, 2), lambda: torch.mm(a, a[0])):
        with pytest.raises(RuntimeError) as ours:
            wrong()
        products.choose_products("native", low)
        with pytest.raises(RuntimeError) as torchs:
            wrong()
        products.choose_products("float32", low)
        assert str(ours.value) == str(torchs.value)
    empty = torch.ones(0, 4, dtype=low)
    assert (empty @ a.t()).shape == (0, 3)
    assert torch.equal(
        torch.ones(2, 0, dtype=low) @ torch.ones(0, 3, dtype=low), torch.zeros(2, 3, dtype=low)
    )


def test_nothing_in_float32_is_kept_for_backward(low: torch.dtype) -> None:
    layer, x = nn.Linear(64, 64).to(low), values(8, 64, dtype=low)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        F.scaled_dot_product_attention(*[layer(x).view(1, 1, 8, 64)] * 3).sum()
    assert torch.float32 not in kept[:2]
    assert kept.count(torch.float32) <= 1  # attention's sums, a number a row, as torch keeps them


def test_inference_mode_computes_the_same(low: torch.dtype) -> None:
    layer, x = nn.Linear(600, 500).to(low), values(700, 600, dtype=low)
    q = values(30, 4, 120, 32, dtype=low, seed=1)

    def results() -> list[Tensor]:
        return [layer(x), q @ q.mT, F.scaled_dot_product_attention(q, q, q)]

    with torch.inference_mode():
        inferred = results()
    assert all(map(torch.equal, inferred, results()))


def test_torch_func_compile_and_checkpoint_compute_the_same(low: torch.dtype) -> None:
    layer, x = nn.Linear(64, 48).to(low), values(8, 64, dtype=low)
    wanted = layer(x)
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), wanted)
    assert torch.equal(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False), wanted)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), wanted)
    each = torch.func.vmap(lambda row: F.linear(row[None], layer.weight, layer.bias)[0])(x)
    assert torch.allclose(each.float(), wanted.float(), atol=4 * UNIT[low])
    whole = torch.func.jacrev(lambda x: F.linear(x, layer.weight))(x[0])
    assert torch.equal(whole, layer.weight)


def test_prepare_chooses_and_says_what_it_does_not_know(monkeypatch: Any) -> None:
    monkeypatch.delenv(products.VARIABLE, raising=False)
    with pytest.raises(
        ValueError, match="products must be one of auto, native, float32; found 'bf16'"
    ):
        amp.prepare(nn.Linear(2, 2), torch.bfloat16, products="bf16")
    for choice in ("float32", "native"):
        model = amp.prepare(nn.Linear(2, 2), torch.bfloat16, products=choice)
        assert amp.build_info()["products"]["bfloat16"]["layers"] == choice
        assert model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    monkeypatch.setenv(products.VARIABLE, "fast")
    with pytest.raises(
        ValueError, match=r"AMP_MP_PRODUCTS must be one of bfloat16, .*found 'fast'"
    ):
        amp.prepare(nn.Linear(2, 2), torch.bfloat16)


def test_the_variable_overrides_the_argument() -> None:
    code = (
        "import torch, amp_mp as amp\n"
        "for dtype in torch.bfloat16, torch.float16:\n"
        "    amp.prepare(torch.nn.Linear(2, 2), dtype, products='native')\n"
        "for found in amp.build_info()['products'].values():\n"
        "    print(found['layers'], found['few rows'], found['tall'])"
    )
    by_loops = ["float32", "loops", "loops"]
    expected = {
        "bfloat16": ["native", "loops", "native", *by_loops],
        "float16": [*by_loops, "native", "loops", "native"],
        "float32": [*by_loops, *by_loops],
        "converted": ["float32", "loops", "converted"] * 2,
    }
    ran = run_each([Script(["-c", code], {products.VARIABLE: setting}) for setting in expected])
    for setting, done in zip(expected, ran, strict=True):
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == expected[setting]


def times(**shapes: tuple[float, float, float]) -> products.Seconds:
    """Seconds by shape and way: of `native`, `loops` and `converted`; the others take 1 each."""
    given = {name.replace("_", " "): seconds for name, seconds in shapes.items()}
    ways = ("native", "loops", "converted")
    return {s: dict(zip(ways, given.get(s, (1, 1, 1)), strict=True)) for s in _C.products.work}


# Native products of 10 us and another 1 us for 2^20 multiplications, loops of 10 us for these.
BEGIN_US, NATIVE_US, LOOPS_US = 10, 1, 10
LINES = times(
    square=(BEGIN_US + NATIVE_US / 4, LOOPS_US / 4, LOOPS_US),
    tall=(BEGIN_US + NATIVE_US * 16, LOOPS_US * 16, LOOPS_US * 16),
    few_rows=(2, 1, 3),
)


@pytest.mark.parametrize("products_word", ["auto", "float32", "native"])
@pytest.mark.parametrize(
    ("seconds", "faster", "loops"),
    [
        (times(), "native", {"few rows", "square", "tall", "batch"}),
        # Nothing is gained by less than a tenth, or for the loops by less than a seventh.
        (times(tall=(1.05, 1, 1.2)), "native", {"few rows", "square", "tall", "batch"}),
        (times(tall=(1.2, 1.1, 1)), "float32", {"few rows", "square", "tall", "batch"}),
        (times(tall=(9, 1.3, 1)), "float32", {"few rows", "square", "batch"}),
        (times(tall=(9, 1, 1), few_rows=(1, 2, 1)), "float32", {"square", "tall", "batch"}),
        # A matrix alone and in a batch take the same way.
        (times(tall=(9, 2, 1), square=(9, 2, 1)), "float32", {"few rows", "square", "batch"}),
        (times(tall=(9, 1, 1), square=(9, 2, 1), batch=(9, 2, 1)), "float32", {"few rows", "tall"}),
        (times(**dict.fromkeys(["few_rows", "square", "tall", "batch"], (9.0, 2.0, 1.0))),
         "float32", set()),
    ],
)  # fmt: skip
def test_what_is_clearly_faster_is_chosen_for_each_shape(
    seconds: products.Seconds, faster: str, loops: set[str], products_word: str
) -> None:
    _C.products.choose(torch.bfloat16, products_word, seconds)
    found = _C.products.ways(torch.bfloat16)
    chosen = faster if products_word == "auto" else products_word
    assert found.pop("layers") == chosen
    in_float32 = {shape for shape, way in found.items() if way != "native"}
    if chosen == "float32":
        assert in_float32 == set(_C.products.work)
    else:
        assert "tall" not in in_float32
    assert {shape for shape in in_float32 if found[shape] == "loops"} == loops & in_float32


def test_native_products_begin_where_both_ways_take_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four times as slow a beginning moves the size from which native products pay by four."""
    monkeypatch.delenv(products.VARIABLE, raising=False)
    few = []
    for factor in (1, 4):
        seconds = {s: dict(own) for s, own in LINES.items()}
        for own in (seconds["square"], seconds["tall"]):
            own["native"] += (factor - 1) * BEGIN_US
        _C.products.choose(torch.bfloat16, "auto", seconds)
        linear = nn.Linear(1024, 64, bias=False)
        with amp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale=1.0) as handle:
            rows = (1 << i for i in range(12))
            large = (r for r in rows if linear(torch.ones(r, 1024)).dtype == torch.bfloat16)
            few.append(next(large))
            handle.deactivate()
    assert few[1] == 4 * few[0]


def chosen(words: list[str]) -> str:
    """What a rank has after `prepare`, when each chose by itself before they were one run."""
    os.environ.pop(products.VARIABLE, None)
    products.choose_products(words[torch.distributed.get_rank()], torch.float16)
    amp.prepare(nn.Linear(2, 2), torch.float16)
    return amp.build_info()["products"]["float16"]["layers"]


@pytest.mark.slow
@pytest.mark.xdist_group("distributed")
def test_ranks_that_chose_differently_agree() -> None:
    assert len(set(on_ranks(2, chosen, ["native", "float32"]))) == 1


def test_casts_leave_products_alone_where_low_precision_is_slower(low: torch.dtype) -> None:
    linear, x = nn.Linear(256, 256), torch.randn(64, 256)
    with amp.init(device_type="cpu", dtype=low, loss_scale=1.0):
        assert linear(x).dtype == torch.float32
        casts = amp.explain(linear, x)
        assert [cast.op for cast in casts] == []
        assert f"{low} on this CPU: products are faster in float32" in str(casts)
