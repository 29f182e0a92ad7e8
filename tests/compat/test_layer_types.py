"""amp.compat.set_layer_types: what each layer stores and computes in, by its numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_bounds import Bounded, product
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import amp_mp as amp
from amp_mp.compat import set_layer_types

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
WORDS = {"DOUBLE": F64, "FLOAT": F32, "FLOAT16": F16}
COMBINATIONS = list(itertools.product(WORDS, WORDS, ["FLOAT", "FLOAT16"], ["FLOAT", "FLOAT16"]))


def typed(module: nn.Module, *words: str, **more: Any) -> nn.Module:
    """The module with these types of the net: forward, backward, and their math types."""
    names = ("default_forward_type", "default_backward_type")
    names += ("default_forward_math", "default_backward_math")
    set_layer_types(module, **dict(zip(names, words, strict=False)), **more)
    return module


def on(device: str, *values: float, dtype: torch.dtype = F32, grad: bool = False) -> Tensor:
    return torch.tensor([values], dtype=dtype, device=device, requires_grad=grad)


def scalar_layer(device: str, weight: float = 1.0) -> nn.Linear:
    """y = weight x, of one number."""
    layer = nn.Linear(1, 1, bias=False, device=device)
    nn.init.constant_(layer.weight, weight)
    return layer


def fits(value: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether rounding to the dtypes changes nothing."""
    return all(torch.equal(value.to(dtype).to(value.dtype), value) for dtype in dtypes)


# All combinations, on a linear layer and a convolution, against float64 with a derived bound.

Bilinear = Callable[[Tensor, Tensor], Tensor]


def linear_case(device: str) -> tuple[nn.Module, Tensor, list[Bilinear], list[int], Any]:
    layer = nn.Linear(37, 19, device=device)
    x = torch.randn(23, 37, device=device, dtype=F64)
    functions: list[Bilinear] = [
        lambda x, w: x @ w.t(),
        lambda g, w: g @ w,
        lambda g, x: g.t() @ x,
        lambda g, one: g.t() @ one,
    ]
    return layer, x, functions, [37, 19, 23, 23], lambda b: b


def convolution_case(device: str) -> tuple[nn.Module, Tensor, list[Bilinear], list[int], Any]:
    layer = nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2, device=device)
    x = torch.randn(3, 6, 9, 9, device=device, dtype=F64)
    how = {"stride": 2, "padding": 1, "groups": 2}
    input, weight = torch.nn.grad.conv2d_input, torch.nn.grad.conv2d_weight
    functions: list[Bilinear] = [
        lambda x, w: nn.functional.conv2d(x, w, **how),
        lambda g, w: input(x.shape, w, g, **how),
        lambda g, x: weight(x, layer.weight.shape, g, **how),
        lambda g, one: g.sum((0, 2, 3)),
    ]
    return layer, x, functions, [3 * 9, 4 * 9, 3 * 25, 3 * 25], lambda b: b[:, None, None]


@pytest.mark.parametrize("case", [linear_case, convolution_case])
@pytest.mark.parametrize("words", COMBINATIONS, ids="-".join)
def test_every_combination_is_within_the_formats_own_bound(
    device: str, case: Any, words: tuple[str, ...]
) -> None:
    layer, x, (forward, to_input, to_weight, to_bias), terms, spread = case(device)
    f, b, fm, bm = (WORDS[word] for word in words)
    typed(layer, *words)
    x.requires_grad_()
    y = layer(x)
    g = torch.randn(y.shape, device=device, dtype=F64)
    y.backward(g.to(y.dtype))

    assert y.dtype == torch.promote_types(f, b)
    xs, ws, bs = (Bounded.of(t).rounded(f) for t in (x, layer.weight, layer.bias))
    wanted = product(forward, xs.rounded(fm), ws.rounded(fm), terms[0], fm)
    bias = Bounded(spread(bs.value), spread(bs.error)).rounded(fm)
    assert (wanted + bias).rounded(fm, fm, f).holds(y)
    assert fits(y, f)

    gs = Bounded.of(g).rounded(y.dtype, b, bm)
    for found, function, other, n in (
        (x.grad, to_input, ws.rounded(bm), terms[1]),
        (layer.weight.grad, to_weight, xs.rounded(bm), terms[2]),
        (layer.bias.grad, to_bias, Bounded.of(torch.ones(23, device=device)), terms[3]),
    ):
        assert found is not None
        assert product(function, gs, other, n, bm).rounded(bm, b, found.dtype).holds(found)
        assert fits(found, b)


@pytest.mark.parametrize("case", [linear_case, convolution_case])
def test_float_everywhere_is_the_layer_itself_bit_for_bit(device: str, case: Any) -> None:
    layer, x, *_ = case(device)
    x = x.float().requires_grad_()
    tensors = [x, *layer.parameters()]
    plain = layer(x)
    wanted = [plain, *torch.autograd.grad(plain.sum(), tensors)]
    found = typed(layer)(x)
    for a, b in zip([found, *torch.autograd.grad(found.sum(), tensors)], wanted, strict=True):
        assert torch.equal(a, b)


# Each type does what its name says: numbers that only one of the four roundings changes.


@pytest.mark.parametrize("words", COMBINATIONS, ids="-".join)
def test_2049_shows_which_way_is_narrow(device: str, words: tuple[str, ...]) -> None:
    """float16 has 2048 and 2050, and not 2049."""
    layer = typed(scalar_layer(device), *words)
    x = on(device, 2049.0, dtype=F64, grad=True)
    y = layer(x)
    y.backward(on(device, 2049.0, dtype=y.dtype) if y.dtype != F16 else on(device, 3.0, dtype=F16))
    narrow = "FLOAT16" in (words[0], words[2])
    assert y.item() == (2048 if narrow else 2049)
    if y.dtype != F16:
        assert x.grad.item() == (2048 if "FLOAT16" in (words[1], words[3]) else 2049)


class Scaled(nn.Module):
    """weight x, as a layer of no kind that is known."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@pytest.mark.parametrize("kind", ["linear", "other"])
@pytest.mark.parametrize("maths", [(), ("FLOAT", "FLOAT"), ("FLOAT16", "FLOAT")])
def test_a_float16_gradient_does_not_saturate(
    device: str, kind: str, maths: tuple[str, ...]
) -> None:
    layer: Any = scalar_layer(device, 4.0) if kind == "linear" else Scaled(4.0).to(device)
    typed(layer, "FLOAT", "FLOAT16", *maths)
    x = on(device, 1.0, grad=True)
    layer(x).backward(on(device, 60000.0))
    assert x.grad.item() == math.inf
    assert layer.weight.grad.item() == 60000  # a float16 number


def test_a_batch_norm_passes_gradients_below_float16_on(device: str) -> None:
    norm = typed(nn.BatchNorm1d(1).to(device).eval(), "FLOAT16", "FLOAT", "FLOAT", "FLOAT")
    x = on(device, 3.0, grad=True)
    norm(x).backward(on(device, 2.0**-40))
    assert x.grad.item() == pytest.approx(2.0**-40, rel=1e-4, abs=0)


def test_an_activation_that_overflows_is_infinite_and_a_weight_saturates(device: str) -> None:
    layer = typed(scalar_layer(device, 1e6), "FLOAT16", "FLOAT16", "FLOAT", "FLOAT")
    assert layer(on(device, 1e-3)).item() == pytest.approx(65.504, rel=1e-3)
    assert layer(on(device, 2.0)).item() == math.inf


def test_gradients_below_float16_survive_beside_float16_activations(device: str) -> None:
    """Two layers: the gradient between them does not go through float16 either."""
    net = nn.Sequential(scalar_layer(device), nn.ReLU(), SquareRoot(), scalar_layer(device))
    typed(net, "FLOAT16", "FLOAT", "FLOAT", "FLOAT")
    x = on(device, 2049.0, grad=True)
    y = net(x)
    assert (y.item(), y.dtype) == (2048, F32)
    y.backward(on(device, 2.0**-40))
    assert x.grad.item() == 2.0**-40
    assert net[0].weight.grad.item() == 2048 * 2.0**-40


class SquareRoot(nn.Module):
    """sqrt(x^2): 300 becomes inf in float16 on its way, and not in float32."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return (x * x).sqrt()


@pytest.mark.parametrize(("forward_math", "backward_math"), list(itertools.product(*[WORDS] * 2)))
def test_any_layer_computes_in_its_math_types(
    device: str, forward_math: str, backward_math: str
) -> None:
    layer = typed(SquareRoot(), "FLOAT16", "FLOAT16", forward_math, backward_math)
    x = on(device, 300.0, grad=True)
    y = layer(x)
    assert y.item() == (math.inf if forward_math == "FLOAT16" else 300)
    y.sum().backward()
    assert x.grad.item() == 1 if backward_math != "FLOAT16" else x.grad.isnan().all() or x.grad == 0
    assert layer.runs == (1 if forward_math == backward_math else 2)


@pytest.mark.parametrize("words", [["FLOAT16", "FLOAT16"], ["FLOAT", "FLOAT", "FLOAT16"]])
def test_integers_for_a_linear_layer_are_torchs_error(device: str, words: list[str]) -> None:
    layer = typed(nn.Linear(2, 2).to(device), *words)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.ones(1, 2, dtype=torch.int64, device=device))


def test_a_linear_layer_and_a_convolution_run_once_in_two_math_types(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("linear", "conv2d"):
        monkeypatch.setattr(nn.functional, name, counted(getattr(nn.functional, name), calls))
    monkeypatch.setattr(torch, "convolution", counted(torch.convolution, calls))
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4)).to(device)
    typed(net, "FLOAT16", "FLOAT16", "FLOAT16", "FLOAT")
    net(torch.randn(2, 2, 4, 4, device=device)).sum().backward()
    assert len(calls) == 2


def counted(function: Callable[..., Tensor], calls: list[Any]) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(function)
        return function(*args, **kwargs)

    return call


# What is kept for the backward pass.


def kept_bytes(net: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct tensors that a forward keeps besides parameters and the input."""
    own = {t.untyped_storage().data_ptr() for t in [x, *net.parameters(), *net.buffers()]}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net(x)
    return sum(t.untyped_storage().nbytes() for t in found.values())


@pytest.mark.parametrize("words", COMBINATIONS, ids="-".join)
def test_what_is_kept_has_the_forward_types_memory(device: str, words: tuple[str, ...]) -> None:
    """Or less: where both directions compute in less, that is all that the backward pass needs."""
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
    x = torch.randn(32, 16, device=device)
    typed(net, *words)
    f = WORDS[words[0]].itemsize
    visible = torch.promote_types(WORDS[words[0]], WORDS[words[1]]).itemsize
    inputs = 32 * 16 + 32 * 64  # of the linear layers
    # ReLU's result is kept in the dtype that has both types.
    assert kept_bytes(net, x) <= inputs * f + 32 * 64 * visible


def test_a_batch_norm_between_float16_layers_keeps_float16(device: str) -> None:
    net = nn.Sequential(nn.BatchNorm1d(64)).to(device)
    typed(net, "FLOAT16", "FLOAT16")
    x = torch.randn(128, 64, device=device)
    assert kept_bytes(net, x) <= 128 * 64 * 2 + 4 * 64 * 4


# What stays float32.


def test_norms_losses_and_softmax_are_float_at_least(device: str) -> None:
    net = nn.ModuleDict(
        {
            "bn": nn.BatchNorm2d(3),
            "ln": nn.LayerNorm(4),
            "softmax": nn.Softmax(-1),
            "loss": nn.MSELoss(),
        }
    ).to(device)
    types = set_layer_types(net, default_forward_type="FLOAT16", default_backward_type="FLOAT16")
    assert [row[2:6] for row in types] == [
        ("FLOAT16", "FLOAT16", "FLOAT", "FLOAT"),
        ("FLOAT16", "FLOAT16", "FLOAT", "FLOAT"),
        ("FLOAT16", "FLOAT16", "FLOAT", "FLOAT"),
        ("FLOAT", "FLOAT", "FLOAT", "FLOAT"),
    ]
    x = 300 * torch.randn(5, 3, 4, 4, device=device)
    low = x.half().float()
    y = net["bn"](x)
    assert y.dtype == F16
    torch.testing.assert_close(
        net["bn"].running_var, 0.9 + 0.1 * low.var((0, 2, 3)), rtol=1e-5, atol=0
    )  # 90,000 times 80 elements: float16 would have overflowed
    assert net["bn"].running_var.dtype == net["bn"].weight.dtype == F32
    loss = net["loss"](y, torch.full_like(x, 1000.0))
    assert loss.dtype == F32
    assert loss.item() == pytest.approx(((y.float() - 1000) ** 2).mean().item(), rel=1e-5)
    assert net["softmax"](torch.tensor([[70000.0, 70000.0]], device=device)).isnan().all()
    assert net["softmax"](torch.tensor([[60000.0, 60000.0]], device=device)).tolist() == [[0.5] * 2]


def test_a_norms_weights_are_not_rounded(device: str) -> None:
    norm = nn.LayerNorm(64, device=device)
    nn.init.uniform_(norm.weight, 1, 2)
    nn.init.uniform_(norm.bias, 1, 2)
    typed(norm, "FLOAT16", "FLOAT16")
    x = torch.randn(5, 64, device=device).half()
    wanted = nn.functional.layer_norm(x.float(), (64,), norm.weight, norm.bias).half()
    rounded = (p.detach().half().float() for p in norm.parameters())
    assert torch.equal(norm(x), wanted)
    assert not torch.equal(nn.functional.layer_norm(x.float(), (64,), *rounded).half(), wanted)


def test_double_math_of_a_norm_updates_its_statistics(device: str) -> None:
    net = nn.Sequential(nn.BatchNorm1d(3)).to(device)
    plain = nn.BatchNorm1d(3).to(device)
    typed(net, "DOUBLE", "DOUBLE")
    x = torch.randn(8, 3, device=device)
    torch.testing.assert_close(net(x).float(), plain(x))
    torch.testing.assert_close(net[0].running_var, plain.running_var)
    assert net[0].running_var.dtype == F32


@pytest.mark.parametrize("how", ["mark", "prepare"])
def test_what_is_kept_float32_stays_so_unless_it_is_named(device: str, how: str) -> None:
    net = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Sequential(nn.Linear(2, 2))})
    net.to(device)
    if how == "mark":
        amp.keep_fp32(net, "head")
    else:
        amp.prepare(net, F16, keep_fp32=["head"])
    words = {"default_forward_type": "FLOAT16", "default_backward_type": "FLOAT16"}
    types = set_layer_types(net, **words)
    assert [row.forward_type for row in types] == ["FLOAT16", "FLOAT"]
    types.undo()
    types = set_layer_types(net, **words, layers={"head.*": {"backward_type": BF16}})
    assert types[1][2:6] == ("FLOAT", "BFLOAT16", "FLOAT", "BFLOAT16")


# Words, patterns and what falls back to what.


def test_words_and_dtypes_and_what_math_falls_back_to(device: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))).to(device)
    types = set_layer_types(
        net,
        default_forward_type=F16,
        default_backward_type="BFLOAT16",
        default_backward_math="FLOAT",
        layers={
            "1": {"forward_type": "FLOAT"},
            "1.1": {"backward_type": "DOUBLE", "forward_math": "FLOAT16"},
        },
    )
    assert [row[2:6] for row in types] == [
        ("FLOAT16", "BFLOAT16", "FLOAT16", "FLOAT"),
        ("FLOAT", "BFLOAT16", "FLOAT", "FLOAT"),
        ("FLOAT", "DOUBLE", "FLOAT16", "DOUBLE"),
    ]
    table = str(types)
    assert table.splitlines()[0].split()[:3] == ["layer", "class", "forward_type"]
    assert len(table.splitlines()) == 5  # the header, three layers, the solver
    y = net(torch.randn(3, 2, device=device))
    assert y.dtype == F64


def test_patterns_see_through_checkpointed_blocks() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 4))
    types = set_layer_types(model, layers={"0.0": {"forward_type": "FLOAT16"}})
    found = {row.layer: row.forward_type for row in types}
    assert found == {"0._checkpoint_wrapped_module.0": "FLOAT16", "1": "FLOAT"}


def test_the_last_pattern_wins_and_undo_takes_all_back(device: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    before = [dict(module.__dict__) for module in net.modules()]
    layers = {"*": {"forward_type": "FLOAT16"}, "0": {"forward_type": "DOUBLE"}}
    types = set_layer_types(net, layers=layers)
    assert [row.forward_type for row in types] == ["DOUBLE", "FLOAT16"]
    types.undo()
    types.undo()
    assert [dict(module.__dict__) for module in net.modules()] == before
    assert net(torch.randn(4, 3, device=device)).dtype == F32


MODEL: Callable[[], nn.Module] = lambda: nn.ModuleDict(  # noqa: E731
    {"fc1": nn.Linear(2, 2), "bn": nn.BatchNorm1d(2), "loss": nn.MSELoss(), "sm": nn.Softmax(-1)}
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"default_forward_type": "HALF"}, "default_forward_type must be DOUBLE, FLOAT.*'HALF'"),
        ({"default_backward_type": "INT"}, "default_backward_type .*'INT'"),
        ({"default_backward_math": torch.int32}, "default_backward_math .*torch.int32"),
        ({"default_forward_math": 16}, "default_forward_math .*16"),
        ({"solver_data_type": "BFLOAT16"}, "solver_data_type must be FLOAT, FLOAT16, DOUBLE"),
        ({"solver_data_type": "DOUBLE"}, r"model.fc1.weight is torch.float32; call model.double"),
        (
            {"solver_data_type": "FLOAT16"},
            r"model.fc1.weight .* amp.apex.fp16_utils.convert_network",
        ),
        ({"layers": {"fc2": {"forward_type": "FLOAT"}}}, "'fc2' matches no layer"),
        (
            {"layers": {"fc1": {"type": "FLOAT"}}},
            r"layers\['fc1'\]: 'type' is none of forward_type",
        ),
        ({"layers": {"fc1": {"forward_math": "x"}}}, r"layers\['fc1'\]: forward_math must be"),
        (
            {"layers": {"*": {"backward_math": "FLOAT16"}}},
            r"layers\['\*'\]: backward_math cannot be FLOAT16 for bn \(BatchNorm1d\).*FLOAT at",
        ),
        (
            {"layers": {"loss": {"backward_type": "FLOAT16"}}},
            r"backward_type cannot be FLOAT16 for loss \(MSELoss\)",
        ),
        ({"layers": {"sm": {"forward_math": "FLOAT16"}}}, r"forward_math .* for sm \(Softmax\)"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_changed(
    arguments: dict[str, Any], message: str
) -> None:
    model = MODEL()
    with pytest.raises(ValueError, match=message):
        set_layer_types(model, **arguments)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_other_kinds_of_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module"):
        set_layer_types([nn.Linear(2, 2)])  # type: ignore[arg-type]
    for layers in (["fc*"], {"fc*": "FLOAT"}, {0: {"forward_type": "FLOAT"}}):
        with pytest.raises(TypeError, match="layers must"):
            set_layer_types(MODEL(), layers=layers)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer 0 is lazy"):
        set_layer_types(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ValueError, match=r"layer bn has low-precision statist.*float\(\) first"):
        set_layer_types(MODEL().half())


def test_applied_twice_is_refused_and_names_the_layer() -> None:
    model = MODEL()
    set_layer_types(model["fc1"])
    with pytest.raises(ValueError, match=r"layer fc1 has types already; call .*undo_layer_types"):
        set_layer_types(model)
    amp.compat.undo_layer_types(model)
    set_layer_types(model)


def test_a_forward_of_its_own_is_refused_and_main_grads_may_come_later(device: str) -> None:
    model = amp.prepare(nn.Sequential(nn.Linear(4, 4)).to(device), F16)
    with amp.attach_main_grads(model), pytest.raises(ValueError, match="layer 0 has a forward"):
        set_layer_types(model)
    typed(model, "FLOAT16", "FLOAT", "FLOAT16", "FLOAT")
    with amp.attach_main_grads(model):
        model(torch.ones(1, 4, device=device)).backward(torch.full((1, 4), 2.0**-40, device=device))
        assert (model[0].weight.grad == 2.0**-40).all()


# The solver's type.


def test_solver_options_build_every_fused_optimizer(device: str) -> None:
    fused = [
        amp.optim.SGD,
        amp.optim.Adam,
        amp.optim.AdamW,
        amp.optim.Adagrad,
        amp.optim.RMSprop,
        amp.optim.Lion,
        amp.optim.LAMB,
        amp.optim.LARS,
        amp.optim.NovoGrad,
        amp.optim.Adamax,
        amp.optim.Adadelta,
        amp.optim.NAdam,
        amp.optim.RAdam,
    ]
    for kind in fused:
        net = amp.apex.fp16_utils.convert_network(nn.Sequential(nn.Linear(4, 4)).to(device), F16)
        solver = set_layer_types(net, solver_data_type="FLOAT16").solver
        optimizer = kind(net.parameters(), lr=0.01, **solver.options(kind))
        net(torch.ones(1, 4, device=device)).sum().backward()
        optimizer.step()
        state = optimizer.state[net[0].weight]
        assert "master" not in state
        assert not any(name.startswith("remainder") for name in state)
        own = [t.dtype for name, t in state.items() if t.shape == net[0].weight.shape]
        assert set(own) <= {F16} or kind is amp.optim.Adamax  # whose infinity norm is float32
    assert (
        amp.optim.AdamW(
            [torch.ones(2)], **set_layer_types(nn.Linear(2, 2)).solver.options(amp.optim.AdamW)
        ).param_groups[0]["master"]
        == "split32"
    )


def test_solver_types_that_an_optimizer_cannot_have_are_refused() -> None:
    double = set_layer_types(nn.Linear(2, 2).double(), solver_data_type="DOUBLE").solver
    assert double.options(torch.optim.SGD) == {}
    with pytest.raises(ValueError, match=r"AdamW has no float64 parameters; use torch.optim"):
        double.options(amp.optim.AdamW)
    prepared = amp.prepare(nn.Linear(2, 2), F16)
    with pytest.raises(ValueError, match=r"low-precision parameters' own dtype; use amp.optim"):
        set_layer_types(prepared).solver.options(torch.optim.SGD)
    with pytest.raises(TypeError, match="optimizer must be"):
        double.options("SGD")  # type: ignore[arg-type]
