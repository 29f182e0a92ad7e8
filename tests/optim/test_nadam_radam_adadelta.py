"""What is particular to NAdam, RAdam and Adadelta, against torch.optim and NVCaffe's formula."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import pytest
import reference
import torch
from helpers import array, assert_same, on, random, raw_bytes
from torch import nn

import amp_mp as amp

TWINS = [
    (amp.optim.Adadelta, torch.optim.Adadelta),
    (amp.optim.NAdam, torch.optim.NAdam),
    (amp.optim.RAdam, torch.optim.RAdam),
]
BETAS2 = (0.0, 0.5, 2 / 3, 0.667, 0.67, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999)


@pytest.mark.parametrize(("ours", "theirs"), TWINS)
def test_arguments_and_their_defaults_are_torchs(ours: type, theirs: type) -> None:
    found, wanted = (inspect.signature(kind).parameters for kind in (ours, theirs))
    positional = [n for n, p in wanted.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    positional = [n for n in positional if n != "foreach"]  # one of the shared arguments
    assert [n for n, p in found.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert all(found[name].default == wanted[name].default for name in positional)
    weight = nn.Parameter(torch.ones(2))
    torchs = theirs([weight], foreach=False, capturable=False, maximize=True)
    (group,) = ours([weight], foreach=False, capturable=False, maximize=True).param_groups
    for name, value in torchs.param_groups[0].items():
        if name not in ("params", "foreach", "capturable", "differentiable"):
            assert group[name] == value, name


def test_radam_rectifies_as_torch_does_for_any_beta2(device: str) -> None:
    """Of 0 to 1 - 1e-5, and a little above 2/3, where rectification begins late.

    Without it the weight moves by lr 1e-3, with it by lr r, and r is above 0.01.
    """
    choose = np.random.default_rng(1)
    betas = [*BETAS2, *choose.uniform(0, 1, 60), *(1 - 10 ** choose.uniform(-5, 0, 100))]
    betas += [*(2 / 3 + 10 ** choose.uniform(-15, -2, 40))]
    found = []
    for kind, dtype in ((torch.optim.RAdam, torch.float64), (amp.optim.RAdam, torch.float32)):
        weights = [nn.Parameter(torch.zeros(1, device=device, dtype=dtype)) for _ in betas]
        groups = [
            {"params": [w], "betas": (0.9, float(b))} for w, b in zip(weights, betas, strict=True)
        ]
        optimizer, steps = kind(groups, lr=1.0, foreach=False), []
        for _ in range(60):
            for weight in weights:
                weight.data.zero_()
                weight.grad = torch.full_like(weight, 1e-3)
            optimizer.step()
            steps.append([weight.item() for weight in weights])
        found.append(np.array(steps))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_the_unrectified_step_of_radam_does_not_look_at_the_squares(device: str) -> None:
    """g^2 overflows, and the step is that of the momentum all the same, as in torch."""
    weights = [nn.Parameter(torch.zeros(3, device=device)) for _ in range(2)]
    for weight, kind in zip(weights, (torch.optim.RAdam, amp.optim.RAdam), strict=True):
        optimizer = kind([weight], lr=1e-3)
        weight.grad = torch.tensor([1e25, 1.0, 0.0], device=device)
        optimizer.step()
        assert optimizer.state[weight]["exp_avg_sq"][0] == torch.inf
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=0)
    assert weights[1][0] < -1e21


def trained(kind: Any, device: str, steps: int, **arguments: Any) -> tuple[nn.Parameter, Any]:
    weight = nn.Parameter(on(device, random(64, 1), torch.float32).view(2, 32))
    optimizer = kind([weight], **arguments)
    for step in range(steps):
        weight.grad = on(device, random(64, 10 + step, 0.1), torch.float32).view(2, 32)
        optimizer.step()
    return weight, optimizer


def test_nadams_mu_product_is_torchs_both_ways(device: str) -> None:
    arguments = {"lr": 1e-2, "momentum_decay": 0.5, "weight_decay": 0.1}
    _, theirs = trained(torch.optim.NAdam, device, 4, **arguments)
    weight, mine = trained(amp.optim.NAdam, device, 4, **arguments)
    (torchs,), (state,) = theirs.state.values(), mine.state.values()
    product = 1.0
    for step in range(1, 5):
        product *= 0.9 * (1 - 0.5 * 0.96 ** (step * 0.5))
    assert state["mu_product"].item() == pytest.approx(product, rel=1e-15)
    assert "layer" not in state
    assert torchs["mu_product"].item() == pytest.approx(product, rel=1e-6)
    shown = mine.torch_state_dict()["state"][0]
    assert set(shown) == set(torchs)
    assert {n: (v.dtype, v.device) for n, v in shown.items()} == {
        n: (v.dtype, v.device) for n, v in torchs.items()
    }
    theirs.load_state_dict(mine.torch_state_dict())
    assert theirs.state_dict()["state"][0]["mu_product"].item() == np.float32(product)
    saved = theirs.state_dict()
    saved["state"][0]["mu_product"] = product  # torch reads files that have it as a number
    again = amp.optim.NAdam([weight], **arguments)
    again.load_state_dict(saved)
    assert again.torch_state_dict()["state"][0]["mu_product"].item() == np.float32(product)
    before, after = weight.detach().clone(), []
    for optimizer in (mine, again):
        with torch.no_grad():
            weight.copy_(before)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        after.append(weight.detach().clone())
    assert torch.equal(*after)


def test_a_nadam_that_has_taken_no_step_goes_to_torch(device: str) -> None:
    weights = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    mine = amp.optim.NAdam([weights[0]], lr=0.1)
    mine.init_state()
    assert mine.state[weights[0]]["mu_product"].item() == 1
    theirs = torch.optim.NAdam([weights[1]], lr=0.1)
    theirs.load_state_dict(mine.torch_state_dict())
    for weight, optimizer in zip(weights, (mine, theirs), strict=True):
        weight.grad = torch.tensor([1.0, -2.0, 0.5], device=device)
        optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


def test_a_file_without_mu_product_is_refused_and_changes_nothing(device: str) -> None:
    """torch.optim.Adam's, for one: 1 or 0 in its place would make other steps in silence."""
    _, adam = trained(torch.optim.Adam, device, 3)
    weight, mine = trained(amp.optim.NAdam, device, 2)
    before = raw_bytes([weight, mine.state_dict()])
    saved = copy.deepcopy(mine.state_dict())
    saved["state"] = adam.state_dict()["state"]
    message = "'mu_product' of parameter 0 is missing, though it has taken steps"
    with pytest.raises(ValueError, match=message):
        mine.load_state_dict(saved)
    assert raw_bytes([weight, mine.state_dict()]) == before
    del mine.state[weight]["mu_product"]
    amp.optim.forget(mine)
    with pytest.raises(ValueError, match="has no 'mu_product', though the parameter has taken"):
        mine.step()


@pytest.mark.parametrize("kind", ["NAdam", "RAdam"])
def test_groups_may_decay_in_different_ways_and_rates_may_be_tensors(
    device: str, kind: str
) -> None:
    pairs = [[nn.Parameter(torch.linspace(-2, 2, 40, device=device)) for _ in "ab"] for _ in "ab"]
    optimizers = []
    for (first, second), library in zip(pairs, (torch.optim, amp.optim), strict=True):
        groups = [{"params": [first], "decoupled_weight_decay": True}, {"params": [second]}]
        rate = torch.tensor(0.05)
        optimizers.append(
            getattr(library, kind)(groups, lr=rate, weight_decay=0.5, betas=(0.9, 0.9))
        )
    for step in range(12):
        for pair, optimizer in zip(pairs, optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"].fill_(0.05 / (1 + step % 3))
            for weight in pair:
                weight.grad = torch.sin(torch.arange(40, device=device) + float(step))
            optimizer.step()
    for found, wanted in zip(pairs[1], pairs[0], strict=True):
        # twelve steps of a few float32 roundings, of weights and of updates up to lr
        torch.testing.assert_close(found, wanted, rtol=12 * 8 * 2.0**-24, atol=12 * 8 * 2.0**-24)
    assert (pairs[0][0] - pairs[0][1]).abs().max() > 0.05


# NVCaffe's AdaDelta.


def nvcaffe_adadelta(
    g: reference.Floats, w: reference.Floats, h: reference.Floats, h2: reference.Floats, half: bool
) -> tuple[reference.Floats, ...]:
    """One step as its solver writes it, momentum 0.95, delta 1e-3, decay 0.01; returns w, h, h2."""
    momentum, delta = np.float32(0.95), np.float32(1e-3)
    g = g + np.float32(0.01) * w
    h = momentum * h + (np.float32(1 - 0.95) * g) * g
    g = g * np.sqrt((h2 + delta) / (h + delta))
    h2 = momentum * h2 + (np.float32(1 - 0.95) * g) * g
    found = (w - np.float32(0.5) * g, h, h2)
    return tuple(reference.store(x, "float16", saturating=True) if half else x for x in found)


@pytest.mark.parametrize("half", [False, True], ids=["float", "half"])
def test_nvcaffes_adadelta_is_adadelta_with_its_numbers(device: str, half: bool) -> None:
    """As the documentation says: rho is its momentum, eps its delta of at least 1e-3.

    The root of a quotient is rounded otherwise than the quotient of roots: four roundings of the
    update a step. In half these may turn a rounding to 11 bits.
    """
    dtype = torch.float16 if half else torch.float32
    storage = dict.fromkeys(("square_avg", "acc_delta"), "float16") if half else {}
    weight = nn.Parameter(on(device, random(1000, 1), dtype))
    optimizer = amp.optim.Adadelta(
        [weight], lr=0.5, rho=0.95, eps=1e-3, weight_decay=0.01, master="none", **storage
    )
    w, h, h2 = array(weight), *(np.zeros(1000, np.float32) for _ in "ab")
    for step in range(10):
        weight.grad = on(device, random(1000, 10 + step), dtype)
        w, h, h2 = nvcaffe_adadelta(array(weight.grad), w, h, h2, half)
        optimizer.step()
    ulp = 2.0**-11 if half else 2.0**-24
    state = optimizer.state[weight]
    for found, wanted in ((weight, w), (state["square_avg"], h), (state["acc_delta"], h2)):
        np.testing.assert_allclose(array(found), wanted, rtol=10 * 8 * ulp, atol=10 * 8 * ulp)
    if half:  # most numbers are the same to the last bit
        assert np.mean(array(weight) == w) > 0.95


def test_roots_keep_the_small_updates_of_adadelta_that_halves_lose(device: str) -> None:
    """With an eps of 1e-8 the average of squares of updates stays zero in float16."""
    moved = {}
    for how in ("float32", "float16", "float16_root", "ue8m8"):
        weight = nn.Parameter(torch.zeros(1, 32, device=device))
        optimizer = amp.optim.Adadelta([weight], square_avg=how, acc_delta=how, eps=1e-8)
        for _ in range(200):
            weight.grad = torch.full_like(weight, 1e-2)
            optimizer.step()
        moved[how] = weight.mean().item()
    assert moved["float16_root"] == pytest.approx(moved["float32"], rel=2e-2)
    assert moved["ue8m8"] == pytest.approx(moved["float32"], rel=2e-2)
    assert moved["float16"] == pytest.approx(0.23 * moved["float32"], rel=2e-2)


def test_adadelta_takes_rho_1_as_torch_does(device: str) -> None:
    """Both averages stay 0, and the update is the gradient itself."""
    weights = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    for weight, kind in zip(weights, (torch.optim.Adadelta, amp.optim.Adadelta), strict=True):
        weight.grad = torch.tensor([0.5, -0.25, 0.0], device=device)
        kind([weight], rho=1.0).step()
    assert_same(array(weights[1]), array(weights[0]), "weights")
