"""attach with loss scales, clipping and measuring, and what it refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from attached import LOW, SCALE, loss_of, model, state_of, train
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.optim.base import stepper_of


def overflow_at(param: Tensor, steps: list[int]) -> None:
    """The parameter's gradients at these backwards get an inf."""
    calls = iter(range(1000))

    def hook(grad: Tensor) -> Tensor:
        if next(calls) in steps:
            grad = grad.clone()
            grad.view(-1)[-1] = math.inf
        return grad

    param.register_hook(hook)


@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.LAMB])
def test_an_overflow_stops_its_parameter_alone_and_halves_the_scale(device: str, kind: Any) -> None:
    net, twin = model(device, LOW), model(device, LOW)
    optimizer = kind(net.parameters(), lr=0.01, memory="lean")
    plain = kind(twin.parameters(), lr=0.01, memory="lean")
    scaler = amp.GradScaler(device, init_scale=SCALE, growth_interval=2)
    optimizer.attach(net, scaler=scaler)
    overflow_at(net.inner.weight, [2])
    scales = []
    for step in range(4):
        before = raw_bytes([net.inner.weight, optimizer.state[net.inner.weight]])
        scaler.scale(loss_of(net, step)).backward()
        loss_of(twin, step).backward()
        if step == 2:
            assert raw_bytes([net.inner.weight, optimizer.state[net.inner.weight]]) == before
            twin.inner.weight.grad = None
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        plain.zero_grad()
        assert optimizer.step_was_skipped == (step == 2)
        assert (optimizer.grad_norm == math.inf) == (step == 2)
        # The scales are powers of two: unscaled in the step, gradients have the plain run's bits.
        assert state_of(net, optimizer) == state_of(twin, plain)
        scales.append(scaler.get_scale() / SCALE)
    assert scales == [1, 2, 1, 1]
    assert [optimizer.state[p]["step"].item() for p in net.parameters()] == [3, 4, 4, 4, 4]


def test_the_scaler_gets_what_measuring_at_once_gives(device: str) -> None:
    net, twin = model(device), model(device)
    scaler = amp.GradScaler(device, init_scale=SCALE, loss_scale="LogMax")
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
    optimizer.attach(net, scaler=scaler)
    ordinary = amp.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        scale = scaler.get_scale()
        scaler.scale(loss_of(net, step)).backward()
        (loss_of(twin, step) * scale).backward()
        totals = stepper_of(optimizer).totals()
        assert raw_bytes(totals) == raw_bytes(stepper_of(ordinary).totals())
        ordinary.grad_scale = scale
        ordinary.step()
        ordinary.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        (total,) = totals.values()
        assert optimizer.grad_norm == pytest.approx(math.sqrt(total[0]) / scale, rel=1e-15)
        assert scaler.get_scale() != scale
        assert raw_bytes(list(net.parameters())) == raw_bytes(list(twin.parameters()))


@pytest.mark.parametrize("enabled", [True, False])
def test_an_unused_scaler_is_a_scale_of_1(device: str, enabled: bool) -> None:
    net, twin = model(device), model(device)
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
    optimizer.attach(net, scaler=amp.GradScaler(device, enabled=enabled))
    train(net, optimizer, 2)
    plain = amp.optim.SGD(twin.parameters(), lr=0.1)
    train(twin, plain, 2)
    assert state_of(net, optimizer) == state_of(twin, plain)
    assert (optimizer.grad_norm is not None) == enabled


# Clipping.


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", ["parameter", "previous"])
def test_clipping_is_the_formula(device: str, clip: str, scaled: bool) -> None:
    """In float64: min(1, max_norm / (norm + 1e-6)), by the norm that the variant names."""
    net, limit, lr = model(device), 0.05, 0.5
    twin = copy.deepcopy(net).double()
    optimizer = amp.optim.SGD(net.parameters(), lr=lr, max_grad_norm=limit)
    scaler = amp.GradScaler(device, init_scale=SCALE, enabled=scaled)
    optimizer.attach(net, clip=clip, scaler=scaler)
    overflow_at(net.last.weight, [2])
    previous = None  # the norm of the last step without overflow
    for step in range(5):
        scaler.scale(loss_of(net, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_of(twin, step).backward()
        squares = 0.0
        coefficients = []
        for param in twin.parameters():
            norm = param.grad.norm().item()
            squares += norm**2
            by = norm if clip == "parameter" or previous is None else previous
            coefficients.append(min(1.0, limit / (by + 1e-6)))
            if step != 2 or param is not twin.last.weight:
                param.data -= lr * coefficients[-1] * param.grad
            param.grad = None
        assert min(coefficients) < 0.9  # there is something to see
        if step != 2:
            previous = math.sqrt(squares)
            assert optimizer.grad_norm == pytest.approx(previous, rel=1e-5)
        assert optimizer.step_was_skipped == (step == 2)
    # A gradient from float32 activations is off by some 2^-20 of its size, a weight by 2^-24 a
    # step; weights are below 2, steps below lr limit.
    for param, wanted in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.double(), wanted, rtol=0, atol=5 * 2.0**-22)


def test_after_loading_there_is_no_previous_norm(device: str) -> None:
    """So that a resumed run does not depend on what the process has done before."""
    found = []
    for warm in (True, False):
        net = model(device)
        optimizer = amp.optim.SGD(net.parameters(), lr=0.5, max_grad_norm=0.05)
        weights, state = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
        optimizer.attach(net, clip="previous")
        if warm:
            train(net, optimizer, 2)
            net.load_state_dict(weights)
            optimizer.load_state_dict(state)
        train(net, optimizer, 2)
        found.append(raw_bytes(list(net.parameters())))
    assert found[0] == found[1]


def scaler_of_torch() -> Any:
    return torch.amp.GradScaler("cpu")


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "clip": (ValueError, "clip must be one of parameter, previous", {"clip": "all"}),
    "torch's scaler": (TypeError, "amp_mp.GradScaler", {"scaler": scaler_of_torch}),
    "a number": (TypeError, "amp_mp.GradScaler", {"scaler": lambda: 1024.0}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    kind, message, arguments = REFUSED[name]
    given = {k: v() if callable(v) else v for k, v in arguments.items()}
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    with pytest.raises(kind, match=message):
        optimizer.attach(net, **given)
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    optimizer.attach(net)
    with pytest.raises(RuntimeError, match="attached already"):
        optimizer.attach(net)


def test_models_that_do_not_fit_are_refused() -> None:
    optimizer = amp.optim.AdamW(model("cpu").parameters())
    with pytest.raises(ValueError, match="model holds none"):
        optimizer.attach(model("cpu"))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        optimizer.attach([])
    whole = torch.zeros(10)
    net = nn.ParameterList([nn.Parameter(whole[:6]), nn.Parameter(whole[4:])])
    with pytest.raises(ValueError, match="parameter 1 of group 0"):
        amp.optim.AdamW(net.parameters()).attach(net)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters(), amp_scaling=False)
    with pytest.raises(ValueError, match="amp_scaling"):
        optimizer.attach(net, scaler=amp.GradScaler("cpu"))


@pytest.mark.parametrize("clipped", [False, True])
def test_a_sparse_gradient_is_refused_by_name(clipped: bool) -> None:
    net = nn.Embedding(10, 4, sparse=True)
    before = raw_bytes(net.weight)
    optimizer = amp.optim.AdamW(net.named_parameters(), max_grad_norm=1.0 if clipped else None)
    optimizer.attach(net)
    with pytest.raises((TypeError, ValueError), match=r"'weight'.*[Ss]parse"):  # noqa: PT012
        net(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert raw_bytes(net.weight) == before


def test_scalers_that_were_not_named_are_refused_not_ignored() -> None:
    for scaler in (amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        net = model("cpu")
        optimizer = amp.optim.AdamW(net.parameters())
        optimizer.attach(net)
        scaler.scale(loss_of(net, 0)).backward()
        with pytest.raises(RuntimeError, match="scaler="):
            scaler.step(optimizer)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    scaler = amp.GradScaler("cpu")
    optimizer.attach(net, scaler=scaler)
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    optimizer.attach(net)
    with pytest.raises(RuntimeError, match="nothing has measured them"):
        stepper_of(optimizer).totals()


def test_scale_loss_refuses_an_optimizer_that_releases(device: str) -> None:
    """It would step with gradients that are still scaled."""
    net = nn.Linear(2, 2).to(device)
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
    optimizer.attach(net)
    handle = amp.init(device_type=device, dtype=torch.bfloat16, loss_scale=8.0)
    try:
        with (
            pytest.raises(ValueError, match="with attach steps during backward"),
            handle.scale_loss(net(torch.ones(1, 2, device=device)).sum(), optimizer),
        ):
            pass
    finally:
        handle._deactivate()
        amp.casting.uninstall()
