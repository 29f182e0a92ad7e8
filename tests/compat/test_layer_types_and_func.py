"""torch.func over models with layer types: what it gives on the plain model, in these types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from typed_networks import HALF, MIXED, PSEUDO

import amp_mp as amp

WIDE = {"default_forward_type": "FLOAT", "default_backward_math": "FLOAT"}  # rounds nothing
SETTINGS = {"wide": WIDE, "half": HALF, "pseudo": PSEUDO, "mixed": MIXED}
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
    amp.compat.set_layer_types(model, **SETTINGS[setting])
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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_single_samples(name: str, setting: str) -> None:
    model, params, x, plain = case(name, setting)
    found = vmap(grad(function(model)), in_dims=(None, 0))(params, x)
    wide = {n: p.detach() for n, p in plain.named_parameters()}
    wanted = vmap(grad(function(plain)), in_dims=(None, 0))(wide, x.double())
    assert_close(found, wanted, BOUND[setting])
    single = grad(function(model))(params, x[3])
    assert_close({n: g[3] for n, g in found.items()}, single, BOUND[setting])


@pytest.mark.parametrize("setting", SETTINGS)
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


def test_a_layer_that_runs_again_in_backward_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus())
    amp.compat.set_layer_types(model, **HALF, default_backward_math="FLOAT")
    with pytest.raises(RuntimeError, match="Softplus has two math types"):
        vmap(model)(torch.randn(3, 4))
