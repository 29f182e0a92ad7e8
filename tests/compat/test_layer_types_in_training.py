"""Layer types beside prepare, optimizers, torch.compile, copies and state dicts."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers import through_a_file
from tiers import tiered
from torch import nn
from torch.utils.checkpoint import checkpoint
from typed_networks import (
    APART,
    F16,
    F32,
    MIXED,
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
@pytest.mark.parametrize("name", tiered(SETTINGS, ["pseudo"]))
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
        other = through_a_file(net)
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
