"""attach with loss scales, clipping and measuring, and what it refuses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
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
    optimizer.attach(net, release=True, scaler=scaler)
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
    optimizer.attach(net, release=True, scaler=scaler)
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
    optimizer.attach(net, release=True, scaler=amp.GradScaler(device, enabled=enabled))
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
    optimizer.attach(net, release=True, clip=clip, scaler=scaler)
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
        optimizer.attach(net, release=True, clip="previous")
        if warm:
            train(net, optimizer, 2)
            net.load_state_dict(weights)
            optimizer.load_state_dict(state)
        train(net, optimizer, 2)
        found.append(raw_bytes(list(net.parameters())))
    assert found[0] == found[1]


# Measure.


@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.LAMB])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("measure", [False, True])
def test_gradients_are_read_once(device: str, kind: Any, scaled: bool, measure: bool) -> None:
    """What no version counter sees after backward, a step sees only where it reads them itself."""
    net = model(device)
    optimizer = kind(net.parameters(), lr=0.01, max_grad_norm=0.05)
    scaler = amp.GradScaler(device, init_scale=SCALE, enabled=scaled)
    if measure:
        optimizer.attach(net, measure=True)
    for step in range(3):
        scaler.scale(loss_of(net, step)).backward()
        norm = float(torch.cat([p.grad.double().view(-1) for p in net.parameters()]).norm())
        for p in net.parameters():
            p.grad.data.mul_(4)
        scaler.step(optimizer)
        scaler.update()
        early = measure and device == "cpu"  # on CUDA the step's one pass costs less
        wanted = norm * (1 if early else 4) / (SCALE if scaled else 1)
        assert optimizer.grad_norm == pytest.approx(wanted, rel=1e-6)
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.LAMB])
def test_measured_gradients_give_the_same_bits(device: str, kind: Any) -> None:
    found = []
    for measure in (True, False):
        net = model(device, LOW)
        optimizer = kind(net.parameters(), lr=0.01, memory="lean", max_grad_norm=0.05)
        if measure:
            optimizer.attach(net, measure=True)
        norms = []
        for step in range(3):
            if step == 1:  # a parameter that has state but no gradient
                net.norm.weight.requires_grad_(False)
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
            net.norm.weight.requires_grad_(True)
        found.append([state_of(net, optimizer), norms])
    assert found[0] == found[1]


@pytest.mark.parametrize("scaler_name", ["amp", "torch"])
def test_a_scaler_uses_what_was_measured(device: str, scaler_name: str) -> None:
    scalers = {"amp": amp.GradScaler, "torch": torch.amp.GradScaler}
    found = []
    for measure in (True, False):
        net = model(device)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, max_grad_norm=0.05)
        scaler = scalers[scaler_name](device, init_scale=SCALE)
        overflow_at(net.last.weight, [1])
        if measure:
            optimizer.attach(net, measure=True)
        for step in range(3):
            scaler.scale(loss_of(net, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append([optimizer.step_was_skipped, optimizer.grad_norm, scaler.get_scale()])
            optimizer.zero_grad()
        found.append(state_of(net, optimizer))
    assert found[:4] == found[4:]
    assert found[1] == [True, math.inf, SCALE / 2]


def new_object(param: Tensor) -> None:
    """The same values' place in memory, if the allocator will, and version: another tensor."""
    shape = param.grad.shape
    param.grad = None
    param.grad = torch.ones(shape, device=param.device)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda net: net.last.weight.grad.mul_(2),
    "through a view": lambda net: net.last.weight.grad.view(-1)[3:5].fill_(7),
    "torch's clipping": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.01),
    "another tensor": lambda net: setattr(net.last.weight, "grad", net.last.weight.grad * 2),
    "a new tensor": lambda net: new_object(net.last.weight),
    "other memory": lambda net: setattr(net.norm.bias.grad, "data", torch.ones(64)),
    "dropped": lambda net: setattr(net.last.weight, "grad", None),
    "accumulated": lambda net: loss_of(net, 5).backward(),
    "accumulated by hand": lambda net: net.last.weight.grad.add_(net.last.weight.grad),
    "all new": lambda net: [new_object(p) for p in net.parameters()],
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_changed_after_the_hook_are_measured_again(change: str) -> None:
    found = []
    for measure in (True, False):
        net = model("cpu")
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, max_grad_norm=0.05)
        if measure:
            optimizer.attach(net, measure=True)
        for step in range(2):
            loss_of(net, step).backward()
            CHANGES[change](net)
            optimizer.step()
            found.append(optimizer.grad_norm)
            optimizer.zero_grad()
        found.append(state_of(net, optimizer))
    assert found[:3] == found[3:]


def scaler_of_torch() -> Any:
    return torch.amp.GradScaler("cpu")


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "neither": (ValueError, "release and measure", {}),
    "both": (ValueError, "release and measure", {"release": True, "measure": True}),
    "clip": (ValueError, "clip must be one of parameter, previous", {"clip": "all"}),
    "torch's scaler": (TypeError, "amp_mp.GradScaler", {"scaler": scaler_of_torch}),
    "a number": (TypeError, "amp_mp.GradScaler", {"scaler": lambda: 1024.0}),
    "measured scaler": (
        ValueError,
        "scaler= is for release=True",
        {"measure": True, "release": False, "scaler": lambda: amp.GradScaler("cpu")},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    kind, message, arguments = REFUSED[name]
    given = {k: v() if callable(v) else v for k, v in arguments.items()}
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    release = {} if name == "neither" else {"release": True}
    with pytest.raises(kind, match=message):
        optimizer.attach(net, **{**release, **given})
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    optimizer.attach(net, release=True)
    with pytest.raises(RuntimeError, match="attached already"):
        optimizer.attach(net, release=True)


def test_models_that_do_not_fit_are_refused() -> None:
    optimizer = amp.optim.AdamW(model("cpu").parameters())
    with pytest.raises(ValueError, match="model holds none"):
        optimizer.attach(model("cpu"), release=True)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        optimizer.attach([], release=True)
    whole = torch.zeros(10)
    net = nn.ParameterList([nn.Parameter(whole[:6]), nn.Parameter(whole[4:])])
    with pytest.raises(ValueError, match="parameter 1 of group 0"):
        amp.optim.AdamW(net.parameters()).attach(net, release=True)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters(), amp_scaling=False)
    with pytest.raises(ValueError, match="amp_scaling"):
        optimizer.attach(net, release=True, scaler=amp.GradScaler("cpu"))


@pytest.mark.parametrize("mode", ["release", "measure"])
@pytest.mark.parametrize("clipped", [False, True])
def test_a_sparse_gradient_is_refused_by_name(mode: str, clipped: bool) -> None:
    net = nn.Embedding(10, 4, sparse=True)
    before = raw_bytes(net.weight)
    optimizer = amp.optim.AdamW(net.named_parameters(), max_grad_norm=1.0 if clipped else None)
    optimizer.attach(net, **{mode: True})
    with pytest.raises((TypeError, ValueError), match=r"'weight'.*[Ss]parse"):  # noqa: PT012
        net(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert raw_bytes(net.weight) == before


def test_scalers_that_were_not_named_are_refused_not_ignored() -> None:
    for scaler in (amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        net = model("cpu")
        optimizer = amp.optim.AdamW(net.parameters())
        optimizer.attach(net, release=True)
        scaler.scale(loss_of(net, 0)).backward()
        with pytest.raises(RuntimeError, match="scaler="):
            scaler.step(optimizer)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    scaler = amp.GradScaler("cpu")
    optimizer.attach(net, release=True, scaler=scaler)
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    optimizer.attach(net, release=True)
    with pytest.raises(RuntimeError, match="nothing has measured them"):
        stepper_of(optimizer).totals()


def test_scale_loss_refuses_an_optimizer_that_releases(device: str) -> None:
    """It would step with gradients that are still scaled."""
    net = nn.Linear(2, 2).to(device)
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
    optimizer.attach(net, release=True)
    handle = amp.init(device_type=device, dtype=torch.bfloat16, loss_scale=8.0)
    try:
        with (
            pytest.raises(ValueError, match="release=True steps during backward"),
            handle.scale_loss(net(torch.ones(1, 2, device=device)).sum(), optimizer),
        ):
            pass
    finally:
        handle._deactivate()
        amp.casting.uninstall()
