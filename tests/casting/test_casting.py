"""The op-policy table: what runs in which precision, however it is spelled."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_mp as amp
from amp_mp import _C

LOW = torch.bfloat16
ROWS, SIZE = 64, 256  # large enough for a CPU to multiply in low precision


class Data:
    """Tensors to call operators with: a and b float32, h and g the same in low precision.

    Large enough for a CPU to multiply them in low precision.
    """

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.a, self.b = (
            torch.rand(256, 256, device=device) + 0.1,
            torch.rand(256, 256, device=device),
        )
        self.h, self.g = self.a.to(LOW), self.b.to(LOW)


def test_what_is_on_no_list_float64_and_the_users_dtype_are_left_alone(apex: str) -> None:
    d = Data(apex)
    assert torch.relu(d.h).dtype == LOW
    assert (d.h + d.g).dtype == LOW
    assert torch.mm(d.a.double(), d.b.double()).dtype == torch.float64
    assert d.h.sum(dtype=LOW).dtype == LOW
    assert torch.exp(torch.ones(2, device=apex, dtype=torch.float64)).dtype == torch.float64


def test_the_callers_lists_are_not_changed(apex: str) -> None:
    d = Data(apex)
    tensors = [d.a, d.h]
    torch.cat(tensors)
    assert tensors[0] is d.a
    assert tensors[1] is d.h


def test_banned_functions_raise_with_the_recipe_unless_allowed(device: str) -> None:
    p, y = torch.rand(4, device=device), torch.ones(4, device=device)
    for allowed in (False, True):
        with amp.init(device_type=device, dtype=LOW, allow_banned=allowed):
            assert functional.binary_cross_entropy(p, y).dtype == torch.float32
            if allowed:
                loss = functional.binary_cross_entropy(p.to(LOW), y.to(LOW))
                assert loss.dtype == torch.float32
            else:
                with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
                    nn.BCELoss()(p.to(LOW), y.to(LOW))


def test_explain_says_that_casting_is_off(device: str) -> None:
    x = torch.ones(4, 4, device=device)
    assert "casting is off here; call explain in amp.autocast" in str(amp.explain(torch.mm, x, x))
    with amp.autocast(device, LOW):
        assert "casting is off" not in str(amp.explain(torch.add, x, x))


def test_deactivated_is_stock_torch_and_uninstalled_leaves_no_trace(device: str) -> None:
    d = Data(device)
    key = "AutocastCPU" if device == "cpu" else "AutocastCUDA"
    before = torch._C._dispatch_dump_table("aten::gelu"), torch._C._dispatch_dump_table("aten::mm")
    with torch.autocast(device, LOW):
        stock = torch.mm(d.a, d.b).dtype, torch.exp(d.h).dtype, functional.softmax(d.h, -1).dtype
    stock_dtype = torch.get_autocast_dtype(device)
    for _ in range(3):  # repeated init does not stack
        handle = amp.init(device_type=device, dtype=LOW)
    assert torch.exp(d.h).dtype == torch.float32
    handle._deactivate()
    torch.set_autocast_enabled(device, False)
    torch.set_autocast_dtype(device, stock_dtype)
    with torch.autocast(device, LOW):
        found = torch.mm(d.a, d.b).dtype, torch.exp(d.h).dtype, functional.softmax(d.h, -1).dtype
    assert found == stock
    amp.casting.uninstall()
    after = torch._C._dispatch_dump_table("aten::gelu"), torch._C._dispatch_dump_table("aten::mm")
    assert after == before, key
    assert amp.policies(device) == {}


def test_users_change_policies_before_and_after_init_and_for_a_block(device: str) -> None:
    d = Data(device)
    amp.set_policy("aten::gelu", "float32", device)
    with amp.init(device_type=device, dtype=LOW):
        assert functional.gelu(d.h).dtype == torch.float32
        with amp.set_policy("aten::gelu", "stock"), amp.set_policy("aten::exp", "unchanged"):
            assert functional.gelu(d.h).dtype == LOW
            assert torch.exp(d.h).dtype == LOW
        assert functional.gelu(d.h).dtype == torch.float32
        assert torch.exp(d.h).dtype == torch.float32
        with pytest.raises(ZeroDivisionError), amp.set_policy("aten::exp", "unchanged"):
            1 // (torch.exp(d.h).dtype != LOW)
        assert torch.exp(d.h).dtype == torch.float32, "also after an exception"
        assert amp.policies(device)["aten::gelu"] == "float32"


def test_an_operator_of_another_library_takes_a_policy(apex: str) -> None:
    # Scoped: torch 2.11 compiles nothing after a library has left an operator's name behind.
    with torch.library._scoped_library("amp_mp_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
        twice = torch.ops.amp_mp_test.twice
        with amp.set_policy("amp_mp_test::twice", "low_precision"):
            assert twice(torch.ones(2, device=apex)).dtype == LOW
        assert twice(torch.ones(2, device=apex)).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("aten::gelu", "fast"), "policy must be one of stock"),
        (("aten::no_such_op", "float32"), "torch has no operator 'aten::no_such_op'"),
        (("gelu", "float32"), 'expected a name like "aten::gelu"'),
        (("aten::gelu", "float32", "tpu"), 'device must be "cpu" or "cuda"'),
    ],
)
def test_bad_policies_are_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        amp.set_policy(*arguments)


# Steps, losses, functions


def test_casts_are_off_in_a_step_and_on_in_its_closure(apex: str) -> None:
    d = Data(apex)

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.inside = torch.mm(d.a, d.b).dtype
            self.closure = closure()
            self.after = torch.mm(d.a, d.b).dtype
            if self.closure is None:
                raise ArithmeticError("a step that fails")

    optimizer = Watching([nn.Parameter(d.a)])
    optimizer.step(lambda: torch.mm(d.a, d.b).dtype)
    assert (optimizer.inside, optimizer.closure, optimizer.after) == (
        torch.float32,
        LOW,
        torch.float32,
    )
    assert torch.mm(d.a, d.b).dtype == LOW
    with pytest.raises(ArithmeticError):
        optimizer.step(lambda: None)
    assert torch.mm(d.a, d.b).dtype == LOW, "casts are on again after a step that raised"


def test_explain_lists_the_casts(apex: str) -> None:
    d = Data(apex)
    casts = amp.explain(lambda: torch.exp(torch.mm(d.a, d.g)))
    assert [tuple(c) for c in casts] == [
        ("aten::mm", "self", "Float", "BFloat16", False),
        ("aten::exp", "self", "BFloat16", "Float", False),
    ]
    assert str(casts).splitlines()[1].split() == ["aten::mm", "self", "Float", "BFloat16"]
    assert amp.explain(torch.mm, d.h, d.g) == []
    linear = nn.Linear(SIZE, SIZE, bias=False).to(apex)
    found = [amp.explain(linear, d.a)[-1] for _ in range(2)]
    assert [(cast.argument, cast.cached) for cast in found] == [("weight", False), ("weight", True)]


def test_policies_print_as_a_table(apex: str) -> None:
    lines = str(amp.policies(apex)).splitlines()
    assert lines[0].split() == ["operator", "policy"]
    assert ["aten::exp", "float32"] in [line.split() for line in lines]


def test_verbose_prints_the_casts_that_are_computed(
    device: str, cast_products: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with amp.init(device_type=device, dtype=LOW, loss_scale=1.0, verbose=True):
        linear = nn.Linear(SIZE, SIZE, bias=False).to(device)
        x = torch.ones(ROWS, SIZE, device=device, dtype=LOW)
        linear(x)
        linear(x)
    printed = capfd.readouterr()
    assert "loss scale" in printed.out
    assert printed.err.splitlines() == ["amp_mp: aten::linear(weight): Float -> BFloat16"]


Pair = namedtuple("Pair", "first second")


def test_user_functions_cast_containers_and_keep_their_names(apex: str) -> None:
    @amp.casting.half_function
    def half(x: Any, *, more: Any) -> Any:
        """What it does."""
        return x, more

    a = torch.ones(2, device=apex)
    pair, more = half(Pair(a, [a]), more={"k": (a, 3, a.double())})
    assert isinstance(pair, Pair)
    assert (pair.first.dtype, pair.second[0].dtype, more["k"][0].dtype) == (LOW, LOW, LOW)
    assert more["k"][1] == 3
    assert more["k"][2].dtype == torch.float64
    assert (half.__name__, half.__doc__) == ("half", "What it does.")
    assert amp.casting.float_function(lambda x: x)(a.to(LOW)).dtype == torch.float32
    widest = amp.casting.promote_function(lambda x, y: (x.dtype, y.dtype))(a, a.to(LOW))
    assert widest == (torch.float32, torch.float32)
    with amp.casting.disable_casts(apex):
        assert half(a, more=None)[0].dtype == torch.float32


def test_registered_functions_of_a_module(apex: str) -> None:
    class Library:
        scale = staticmethod(lambda x: x * 2)

    amp.casting.register_half_function(Library, "scale")
    assert Library.scale(torch.ones(2, device=apex)).dtype == LOW
    with pytest.raises(ValueError, match="No function named missing"):
        amp.casting.register_float_function(Library, "missing")


def test_autograd_functions_get_gradients_in_their_arguments_dtypes(apex: str) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            assert grad.dtype == x.dtype == LOW
            return 2 * grad * x

    square = amp.casting.half_function(Square.apply)
    x = torch.full((3,), 3.0, device=apex, requires_grad=True)
    square(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert x.grad.tolist() == [6.0] * 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(apex: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.GELU(), nn.Linear(SIZE, SIZE)
    ).to(apex)
    x = torch.randn(ROWS, SIZE, device=apex, requires_grad=True)
    grads = []
    for through in (
        net,
        lambda y: torch.utils.checkpoint.checkpoint(net, y, use_reentrant=reentrant),
    ):
        net.zero_grad()
        through(x).float().sum().backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    for plain, checkpointed in zip(*grads, strict=True):
        assert torch.equal(plain, checkpointed)


def test_a_compiled_model_equals_eager_and_follows_a_changed_policy(apex: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE)).to(apex)
    x = torch.randn(ROWS, SIZE, device=apex)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), net(x))
    gelu = torch.compile(functional.gelu, backend="aot_eager", fullgraph=True)
    assert gelu(x.to(LOW)).dtype == LOW
    with amp.set_policy("aten::gelu", "float32"):
        assert gelu(x.to(LOW)).dtype == torch.float32
    torch._dynamo.reset()


def test_a_graph_for_any_number_of_rows_casts_as_eager_does(apex: str) -> None:
    """Also where a few rows are too small a product for low precision on a CPU."""
    net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE)).to(apex)
    graphs = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(net, backend=backend, fullgraph=True, dynamic=True)
    dtypes = set()
    for rows in (200, 3, 96, 64, 5, 111):
        x = torch.randn(rows, SIZE, device=apex)
        found, wanted = compiled(x), net(x)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
        dtypes.add(found.dtype)
    by_size = apex == "cpu" and amp.build_info()["products"]["bfloat16"]["layers"] == "native"
    wanted = {torch.float32, LOW} if by_size else {LOW}
    # Beside the baseline's slow loops native products may be faster for 3 rows already.
    assert dtypes == wanted or (amp.build_info()["cpu"] == "baseline" and dtypes == {LOW})
    assert graphs <= 2, "one for each answer"
    torch._dynamo.reset()


def test_function_transforms_see_the_same_casts(apex: str) -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(SIZE, SIZE).to(apex), torch.randn(ROWS, SIZE, device=apex)
    params = dict(net.named_parameters())

    def loss(p: dict[str, Tensor], y: Tensor) -> Tensor:
        return torch.func.functional_call(net, p, (y,)).float().square().sum()

    net(x).float().square().sum().backward()
    grads = torch.func.grad(loss)(params, x)
    assert torch.equal(grads["weight"], net.weight.grad)
    rows = torch.vmap(lambda row: net(row))(x)
    # vmap takes linear apart before autocast sees it, here as in torch: a product and a float32 sum
    torch.testing.assert_close(rows, net(x).float(), rtol=2.0**-7, atol=2.0**-7)
    value, tangent = torch.func.jvp(lambda y: net(y).float(), (x,), (torch.ones_like(x),))
    assert torch.equal(value, net(x).float())
    assert tangent.isfinite().all()


def test_an_exported_model_follows_autocast_as_the_model_does(apex: str) -> None:
    net, x = (
        nn.Sequential(nn.Linear(SIZE, SIZE), nn.Softmax(-1)).to(apex),
        torch.randn(ROWS, SIZE, device=apex),
    )
    wanted = net(x)
    exported = torch.export.export(net, (x,)).module()
    assert torch.equal(exported(x), wanted)
    with amp.casting.disable_casts(apex):
        assert torch.equal(exported(x), net(x))


def test_a_refused_name_leaves_no_trace_in_the_table() -> None:
    for device, op in (("tpu", "aten::mm"), ("cpu", "mm"), ("cpu", "aten::no_such_op")):
        try:
            assert _C.casting.set_policy(device, op, "float32") == ""
        except ValueError:
            assert (device, op) != ("cpu", "aten::no_such_op")
        assert _C.casting.policies(device) == {}
