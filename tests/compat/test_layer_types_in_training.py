"""Layer types beside the rest of a training script: prepare, optimizers, compile, copies, hooks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import PRETEND_GPU
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import amp_mp as amp
from amp_mp.compat import set_layer_types, undo_layer_types

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# Types by name: all in half; half storage with float32 arithmetic; float32 gradients; two maths.
HALF = {"default_forward_type": "FLOAT16", "default_backward_type": "FLOAT16"}
PSEUDO = HALF | {"default_forward_math": "FLOAT", "default_backward_math": "FLOAT"}
MIXED = {"default_forward_type": "FLOAT16", "default_forward_math": "FLOAT"}
APART = HALF | {"default_backward_math": "FLOAT"}
SETTINGS = {"half": HALF, "pseudo": PSEUDO, "mixed": MIXED, "apart": APART}


@pytest.fixture(params=SETTINGS)
def words(request: pytest.FixtureRequest) -> dict[str, str]:
    return SETTINGS[request.param]


def network(device: str) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(54, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4)),
    ).to(device)


def images(device: str) -> Tensor:
    return torch.randn(8, 3, 8, 8, device=device)


def gradients(net: nn.Module, call: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """What the call returns, and the parameters' gradients of its sum of squares."""
    torch.manual_seed(1)
    net.zero_grad()
    output = call(*inputs)
    output.float().square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# Training.


@pytest.mark.parametrize("order", ["prepare first", "types first"])
def test_prepare_and_a_fused_optimizer(device: str, words: dict[str, str], order: str) -> None:
    """The weights' gradients have their dtype, masters start at float32, the loss falls."""
    net, x = network(device), images(device)
    weight = net[0].weight.detach().clone()
    y = torch.randint(0, 4, (8,), device=device)
    if order == "prepare first":
        amp.prepare(net, F16)
    types = set_layer_types(net, **words)
    if order == "types first":
        amp.prepare(net, F16)
    assert net[0].weight.dtype == F16
    options = types.solver.options(amp.optim.SGD)
    optimizer = amp.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, max_grad_norm=5.0, **options)
    master = amp.float32_state_dict(net, optimizer)["0.weight"]
    assert torch.equal(master, weight)
    scaler = amp.GradScaler(device, init_scale=128.0)
    losses = []
    for _ in range(25):
        loss = nn.functional.cross_entropy(net(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert net[0].weight.grad.dtype == F16
    assert net[1].weight.grad.dtype == F32
    assert scaler.get_scale() == 128
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_prepare_before_or_after_makes_no_difference(device: str, words: dict[str, str]) -> None:
    first, x = network(device), images(device)
    second = copy.deepcopy(first)
    set_layer_types(amp.prepare(first, F16), **words)
    set_layer_types(second, **words)
    amp.prepare(second, F16)
    assert_equal(gradients(first, first, x), gradients(second, second, x))


def test_a_prepared_norm_passes_float32_gradients_on(device: str) -> None:
    """prepare's own casts would make the norm's result float16, and with it its gradient."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)).to(device)
    net[0].weight.data.copy_(torch.eye(2))
    amp.prepare(net, F16)
    set_layer_types(net, **MIXED)
    x = torch.tensor([[1.0, 3.0]], device=device, requires_grad=True)
    y = net(x)
    assert y.dtype == F32
    y.backward(torch.tensor([[2.0**-36, 0.0]], device=device))
    # d/dx of (x - mean) / sqrt(var + eps) for two numbers is about eps / 2 of the gradient
    assert 0 < x.grad[0, 0].item() < 2.0**-36 * 1e-5


@pytest.mark.parametrize("kind", ["FP16_Optimizer", "torch", "clip_grad_norm_"])
def test_other_ways_to_step(device: str, words: dict[str, str], kind: str) -> None:
    net, x = network(device), images(device)
    set_layer_types(net, **words)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01)
    if kind == "FP16_Optimizer":
        optimizer = amp.FP16_Optimizer(optimizer, loss_scale=64.0, verbose=False)
        optimizer.backward(net(x).float().square().mean())
    else:
        net(x).float().square().mean().backward()
    if kind == "clip_grad_norm_":
        assert nn.utils.clip_grad_norm_(net.parameters(), 1e-3).isfinite()
    optimizer.step()
    assert all(p.dtype == F32 for p in net.parameters())
    moved = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
    assert all(moved[:1] + moved[2:])  # a bias before a norm has a gradient near zero


def test_an_overflow_of_a_float16_gradient_skips_the_step(device: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    set_layer_types(net, default_backward_type="FLOAT16")
    optimizer = amp.optim.AdamW(net.parameters())
    scaler = amp.GradScaler(device, init_scale=2.0**20)
    before = [p.detach().clone() for p in net.parameters()]
    scaler.scale(net(torch.ones(4, 2, device=device)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**19
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_bits(
    device: str, words: dict[str, str], reentrant: bool
) -> None:
    net, x = network(device), images(device).requires_grad_()
    set_layer_types(net, **words)
    other = copy.deepcopy(net)
    wanted = gradients(net, net, x)
    found = gradients(other, lambda x: checkpoint(other, x, use_reentrant=reentrant), x)
    assert_equal(found, wanted)


# torch.compile.


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_compiled_model_has_the_same_bits(device: str, name: str) -> None:
    """One graph, but for a layer other than a linear one or a convolution in two math types."""
    if device == "cuda":
        pytest.skip("the graphs are the same as on the CPU")
    net, x = network(device), images(device)
    net[7].p = 0.0  # the compiled one draws other numbers
    net[2].inplace = False
    set_layer_types(net, **SETTINGS[name])
    other = copy.deepcopy(net)
    wanted = gradients(net, net, x)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=name != "apart")
    assert_equal(gradients(other, compiled, x), wanted)


@pytest.mark.slow
def test_products_in_two_maths_compile_to_one_graph_and_undo_is_noticed(device: str) -> None:
    if device == "cuda":
        pytest.skip("the graphs are the same as on the CPU")
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    x, plain = images(device), copy.deepcopy(net)
    types = set_layer_types(net, **APART)
    other = copy.deepcopy(net)
    wanted = gradients(net, net, x)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    assert_equal(gradients(other, compiled, x), wanted)
    undo_layer_types(other)
    assert_equal(gradients(other, compiled, x), gradients(plain, plain, x))
    types.undo()
    assert_equal(gradients(net, net, x), gradients(plain, plain, x))


# Copies, state dicts, pickles.


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_types_and_weights_of_its_own(
    device: str, words: dict[str, str], way: str
) -> None:
    net, x = network(device), images(device)
    set_layer_types(net, **words)
    if way == "deepcopy":
        other = copy.deepcopy(net)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(net))
    else:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert_equal(gradients(other, other, x), gradients(net, net, x))
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    assert gradients(other, other, x)[0].abs().sum() > 0
    undo_layer_types(other)
    assert other(x).dtype == F32


def test_the_state_dict_is_the_models_own(device: str, words: dict[str, str]) -> None:
    net, plain = network(device), network(device)
    keys = list(net.state_dict())
    set_layer_types(net, **words)
    assert list(net.state_dict()) == keys
    assert all(value.dtype in (F32, torch.int64) for value in net.state_dict().values())
    plain.load_state_dict(net.state_dict())
    net.load_state_dict(plain.state_dict())


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
    net(torch.randn(3, 4, device=device)).sum().backward()
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


@pytest.mark.parametrize("kind", [nn.LeakyReLU, nn.ReLU, nn.Dropout])
def test_an_in_place_layer_is_the_same_as_another(
    device: str, words: dict[str, str], kind: Any
) -> None:
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


def test_torch_func_refuses_a_layer_that_runs_twice(device: str) -> None:
    net = nn.PReLU().to(device)
    set_layer_types(net, **APART)
    with pytest.raises(RuntimeError, match=r"functorch transforms.* setup_context"):
        torch.func.grad(lambda x: net(x).sum())(torch.ones(3, device=device))


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
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(device)
    set_layer_types(net, **APART)
    y = net(torch.ones(2, 3, device=device))
    net.eval()
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
