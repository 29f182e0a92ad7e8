"""Layer types in models: shared, frozen and repeated layers, hooks, autocast, torch.func."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import PRETEND_GPU, is_gpu
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.utils import parametrizations
from typed_networks import (
    APART,
    BF16,
    F16,
    F32,
    HALF,
    MIXED,
    PSEUDO,
    SETTINGS,
    assert_equal,
    gradients,
    images,
    network,
)

import amp_mp as amp
from amp_mp.compat import set_layer_types, undo_layer_types


@pytest.fixture(params=SETTINGS)
def words(request: pytest.FixtureRequest) -> dict[str, str]:
    return SETTINGS[request.param]


# Whatever a model does with its layers.


class Twice(nn.Module):
    """One layer in two places and under two names, and a residual between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) + x)


def test_a_shared_layer_is_one_layer_with_two_names(device: str, words: dict[str, str]) -> None:
    net = Twice().to(device)
    types = set_layer_types(net, **words, layers={"second": {"forward_type": "FLOAT"}})
    assert [(row.layer, row.forward_type) for row in types] == [("first, second", "FLOAT")]
    plain = copy.deepcopy(net)
    undo_layer_types(plain)
    x = torch.randn(5, 4, device=device)
    for a, b in zip(gradients(net, net, x), gradients(plain, plain, x), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (nn.Bilinear(4, 6, 3), [(5, 4), (5, 6)]),
        (nn.LSTM(4, 6, 2), [(5, 2, 4)]),
        (nn.GRUCell(4, 6), [(5, 4), (5, 6)]),
        (nn.MultiheadAttention(4, 2), [(5, 2, 4)] * 3),
        (nn.Conv1d(4, 6, 3, padding="same"), [(2, 4, 7)]),
        (nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), [(2, 4, 7)]),
        (nn.Conv2d(4, 6, 3, dilation=2), [(4, 7, 7)]),
        (nn.Conv3d(4, 6, 2, bias=False), [(1, 4, 3, 3, 3)]),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), [(2, 4, 5, 5)]),
        (nn.PReLU(), [(5, 4)]),
        (nn.GroupNorm(2, 4), [(5, 4, 3)]),
        (parametrizations.weight_norm(nn.Linear(4, 6)), [(5, 4)]),
        (parametrizations.weight_norm(nn.ConvTranspose1d(4, 6, 2)), [(2, 4, 5)]),
    ],
    ids=lambda value: str(value).split("(")[0] if isinstance(value, nn.Module) else "",
)
def test_layers_of_every_kind_stay_close_to_float32(
    device: str, words: dict[str, str], layer: nn.Module, shapes: list[tuple[int, ...]]
) -> None:
    missing = (nn.LSTM, nn.GRUCell, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
    if PRETEND_GPU and isinstance(layer, missing):
        pytest.skip("the pretend GPU has no kernels for them")
    net = copy.deepcopy(layer).to(device)
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    wanted, wanted_grads = outputs_and_gradients(net, inputs)
    set_layer_types(net, **words)
    found, found_grads = outputs_and_gradients(net, inputs)
    dtype = F32 if words is MIXED else F16
    assert all(each.dtype == dtype for each in found)
    # A few hundred roundings of 2^-11 relative to numbers of about 1.
    for a, b in zip([*found, *found_grads], [*wanted, *wanted_grads], strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.01, atol=0.03)
    assert not all(torch.equal(a.float(), b) for a, b in zip(found, wanted, strict=True))


def outputs_and_gradients(
    net: nn.Module, inputs: list[Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    output = net(*inputs)
    tensors = [t for t in torch.utils._pytree.tree_leaves(output) if t.requires_grad]
    leaves = [*inputs, *net.parameters()]
    loss = sum(
        (t.float() * torch.linspace(-1, 1, t.numel(), device=t.device).view_as(t)).sum()
        for t in tensors
    )
    return tensors, list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding_looks_up_and_stores(device: str, sparse: bool) -> None:
    if PRETEND_GPU and sparse:
        pytest.skip("the pretend GPU has no sparse kernels")
    table = nn.Embedding(5, 2, padding_idx=0, sparse=sparse).to(device)
    nn.init.constant_(table.weight, 2049.0)
    set_layer_types(table, **HALF)
    y = table(torch.tensor([[1, 1, 0]], device=device))
    assert (y.dtype, y.unique().item()) == (F16, 2048)
    y.sum().backward()
    assert table.weight.grad.to_dense().tolist() == [[0.0] * 2, [2.0] * 2, *[[0.0] * 2] * 3]


def test_a_transformer_in_evaluation_calls_its_layers(device: str, words: dict[str, str]) -> None:
    """torch's own fast path would compute with the float32 weights."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).to(device).eval()
    plain = copy.deepcopy(net)
    types = set_layer_types(net, **words)
    x = torch.randn(2, 5, 8, device=device)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device)
    with torch.no_grad():
        for mask in (None,) if PRETEND_GPU else (None, padding):  # which has no nested tensors
            found, wanted = (each(x, src_key_padding_mask=mask) for each in (net, plain))
            assert found.dtype == (F32 if words is MIXED else F16)
            torch.testing.assert_close(found[0].float(), wanted[0], rtol=0.01, atol=0.02)
    types.undo()
    assert [len(m._forward_pre_hooks) for m in net.modules()] == [0] * len(list(net.modules()))
    assert net.use_nested_tensor == plain.use_nested_tensor


def test_hooks_see_what_goes_in_and_comes_out(device: str, words: dict[str, str]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    set_layer_types(net, **words)
    seen: list[torch.dtype] = []
    net[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    net[0].register_full_backward_hook(lambda module, given, got: seen.append(got[0].dtype))
    net(torch.randn(3, 4, device=device, requires_grad=True)).sum().backward()
    assert seen == [F32 if words is MIXED else F16] * 2


def test_autocast_changes_nothing_in_a_layer_that_has_types(device: str) -> None:
    net, x = network(device), images(device)
    set_layer_types(net, **PSEUDO)
    wanted = gradients(net, net, x)
    with torch.autocast(device, BF16):
        torch.manual_seed(1)
        net.zero_grad()
        output = net(x)
        output.float().square().sum().backward()
    assert_equal([output.detach(), *(p.grad for p in net.parameters())], wanted)


def test_no_grad_and_inference_mode_give_the_same(device: str, words: dict[str, str]) -> None:
    net, x = network(device).eval(), images(device)
    set_layer_types(net, **words)
    wanted = net(x).detach()
    with torch.no_grad():
        assert torch.equal(net(x), wanted)
    with torch.inference_mode():
        assert torch.equal(net(x), wanted)


def test_a_frozen_layer_and_a_part_of_a_graph(device: str, words: dict[str, str]) -> None:
    net, x = network(device), images(device)
    set_layer_types(net, **words)
    net[0].requires_grad_(False)
    net[5].weight.requires_grad_(False)
    gradients(net, net, x)
    assert [net[0].weight.grad, net[5].weight.grad] == [None, None]
    assert net[5].bias.grad.abs().sum() > 0


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1)


@pytest.mark.parametrize("last", [nn.ReLU(inplace=True), nn.Dropout(0.0), View(), nn.Identity()])
@pytest.mark.parametrize("apart", ["backward_type", "backward_math"])
def test_writing_in_place_after_a_layer(device: str, last: nn.Module, apart: str) -> None:
    """A layer that changes its gradient alone returns a tensor that may be written."""
    last = copy.deepcopy(last)
    net = nn.Sequential(nn.Linear(4, 4), last).to(device)
    set_layer_types(net, **{f"default_{apart}": "FLOAT16"})
    y = net(torch.randn(3, 4, device=device))
    y = y.mul_(2) if not isinstance(last, nn.ReLU) else y  # which keeps its result
    y.sum().backward()
    assert net[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("kind", [nn.LeakyReLU, nn.ReLU, nn.Dropout, nn.AlphaDropout])
def test_an_in_place_layer_is_the_same_as_another(
    device: str, words: dict[str, str], kind: Any
) -> None:
    if kind is nn.Dropout and is_gpu(device):
        pytest.skip("torch's dropout in place draws other numbers on a GPU than that beside it")
    net = nn.Sequential(nn.Linear(4, 4), kind(inplace=True), nn.Linear(4, 4)).to(device)
    other = copy.deepcopy(net)
    other[1].inplace = False
    set_layer_types(net, **words)
    set_layer_types(other, **words)
    x = torch.randn(5, 4, device=device)
    assert_equal(gradients(net, net, x), gradients(other, other, x))


# torch.func.


def test_functional_call_uses_the_weights_it_is_given(device: str, words: dict[str, str]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)).to(device)
    set_layer_types(net, **words)
    own = dict(net.named_parameters())
    zeros = {name: torch.zeros_like(p, requires_grad=True) for name, p in own.items()}
    y = torch.func.functional_call(net, zeros, (torch.ones(1, 4, device=device),))
    assert y.abs().sum() == 0
    y.sum().backward()
    assert dict(net.named_parameters()).keys() == own.keys()
    assert all(dict(net.named_parameters())[name] is p for name, p in own.items())
    assert zeros["2.bias"].grad.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["half", "pseudo", "mixed", "apart"])
def test_torch_func_differentiates_it(device: str, name: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    set_layer_types(net, **SETTINGS[name])
    x = torch.randn(3, 4, device=device)
    params = {key: p.detach() for key, p in net.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, params, (x,)).float().square().sum()

    found = torch.func.grad(loss)(params)
    wanted = gradients(net, net, x)[1:]
    assert_equal(list(found.values()), wanted)


@pytest.mark.parametrize(("layer", "over"), [(nn.PReLU, grad), (nn.Softplus, vmap)])
def test_torch_func_refuses_a_layer_that_runs_twice(device: str, layer: Any, over: Any) -> None:
    net = layer().to(device)
    set_layer_types(net, **APART)
    with pytest.raises(RuntimeError, match=layer.__name__ + r" has two math types.*torch.func can"):
        over(lambda x: net(x).sum())(torch.ones(3, device=device))


# What runs twice, and what cannot be done.


def test_a_layer_that_runs_again_draws_and_counts_once(device: str) -> None:
    dropout = nn.Dropout(0.5).to(device)
    set_layer_types(dropout, **APART)
    x = torch.ones(1000, device=device, requires_grad=True)
    y = dropout(x)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(x.grad, y.detach().float())  # 0 or 2, of one mask
    assert torch.equal(torch.get_rng_state(), state)

    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (torch.rand(x.shape, device=x.device) < 0.5)

    masks = Masks()
    set_layer_types(masks, **APART)
    x = torch.ones(1000, device=device, requires_grad=True)
    if device == "cpu":
        y = masks(x)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach().float())
    else:  # another dtype may draw other numbers there
        with pytest.raises(RuntimeError, match=r"Masks has .* on a GPU.*: give it one math type"):
            masks(x)
        assert masks.eval()(x).sum() > 0

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x * self.calls

    counts = Counts().to(device)
    set_layer_types(counts, **APART)
    x = torch.ones(3, device=device, requires_grad=True)
    counts(x).sum().backward()
    assert counts.calls.item() == 1


def test_a_layer_that_would_run_again_otherwise_is_an_error(device: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(device).eval()
    set_layer_types(net, **APART)
    y = net(torch.ones(2, 3, device=device))
    net.train()
    with pytest.raises(RuntimeError, match=r"Dropout was switched between train\(\) and eval\(\)"):
        y.sum().backward()
    net = nn.Sequential(nn.PReLU()).to(device)
    set_layer_types(net, **APART)
    y = net(torch.ones(2, 3, device=device))
    with torch.no_grad():
        net[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def penalty_gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of a penalty of the input's gradient."""
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return list(torch.autograd.grad(slope.float().square().sum(), list(net.parameters())[::2]))


def test_second_derivatives(device: str, words: dict[str, str]) -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(12, 1)).to(device)
    x = torch.randn(3, 2, 5, device=device, requires_grad=True)
    net.insert(1, Sine())
    wanted = penalty_gradients(net, x)
    one_math = {"1": {"forward_math": "FLOAT", "backward_math": "FLOAT"}}
    types = set_layer_types(net, **words, layers=one_math)
    for a, b in zip(penalty_gradients(net, x), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.01)
    types.undo()
    set_layer_types(net, **words)
    if words is APART:
        with pytest.raises(RuntimeError, match=r"create_graph=True .* give it one math type"):
            penalty_gradients(net, x)


def test_one_part_of_a_model(device: str) -> None:
    net, x = network(device), images(device)
    types = set_layer_types(net[5], **HALF)
    assert [row.layer for row in types] == ["(the model)"]
    with pytest.raises(RuntimeError, match="dtype"):  # torch's: the next layer has no types
        net(x)
    types.undo()
    words = {f"{way}_{what}": "FLOAT16" for way in ("forward", "backward") for what in ("type",)}
    types = set_layer_types(net, layers={"5": words})
    assert [row.layer for row in types if row.forward_type == "FLOAT16"] == ["5"]
    assert net(x).dtype == F32


WIDE = {"default_forward_type": "FLOAT", "default_backward_math": "FLOAT"}  # rounds nothing
ROUNDINGS = {"wide": WIDE, "half": HALF, "pseudo": PSEUDO, "mixed": MIXED}
# Relative error of a chain of four layers whose values or gradients are rounded to float16.
BOUND = {"wide": 1e-5, "half": 2.0**-7, "pseudo": 2.0**-7, "mixed": 2.0**-7}
NETWORKS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)),
    "convolution": lambda: nn.Sequential(
        *(nn.Unflatten(0, (1, 2, 3)), nn.Conv2d(1, 2, 2), nn.Tanh()),
        *(nn.Flatten(0), nn.Linear(4, 3)),
    ),
}


def case(name: str, setting: str) -> tuple[nn.Module, dict[str, Tensor], Tensor, nn.Module]:
    """A model with types, its parameters, eight inputs, and the model in float64."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    plain = NETWORKS[name]().double()
    plain.load_state_dict(model.state_dict())
    amp.compat.set_layer_types(model, **ROUNDINGS[setting])
    return model, dict(model.named_parameters()), torch.randn(8, 6), plain


def function(model: nn.Module) -> Any:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).double().square().sum()

    return loss


def assert_close(found: Any, wanted: Any, bound: float) -> None:
    for a, b in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True
    ):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= bound * (b.double().norm() + 1e-3)


@pytest.mark.parametrize("setting", ROUNDINGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_single_samples(name: str, setting: str) -> None:
    model, params, x, plain = case(name, setting)
    found = vmap(grad(function(model)), in_dims=(None, 0))(params, x)
    wide = {n: p.detach() for n, p in plain.named_parameters()}
    wanted = vmap(grad(function(plain)), in_dims=(None, 0))(wide, x.double())
    assert_close(found, wanted, BOUND[setting])
    single = grad(function(model))(params, x[3])
    assert_close({n: g[3] for n, g in found.items()}, single, BOUND[setting])


@pytest.mark.parametrize("setting", ROUNDINGS)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("what", ["jvp", "jacfwd", "jacrev", "hessian"])
def test_derivatives_are_the_plain_models(name: str, setting: str, what: str) -> None:
    model, _, x, plain = case(name, setting)
    given, wide = x[0], x[0].double()

    def of(net: nn.Module, point: Tensor) -> Any:
        if what == "jvp":
            return jvp(net, (point,), (torch.ones_like(point),))
        if what == "hessian":
            return hessian(lambda each: net(each).double().square().sum())(point)
        return {"jacfwd": jacfwd, "jacrev": jacrev}[what](net)(point)

    assert_close(
        of(model, given), of(plain, wide), BOUND[setting] * (4 if what == "hessian" else 1)
    )
