"""The loss that a handle scales: overflows, errors, and what a loss scale observes.

Exact comparisons use small integers and powers of two, which every format here holds.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any
from unittest import TestCase

import pytest
import torch
from handles import LOW, OPTIMIZERS, Start, scaled_backward, weight_on
from helpers import autocast_state, raw_bytes
from tiers import paired
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.scaling import Backoff

pytestmark = pytest.mark.usefixtures("cast_products")


# The scaled loss.


def test_the_scale_of_float16_is_apex_amps(start: Start) -> None:
    policy = start(dtype=torch.float16).loss_scaler
    wanted = Backoff(1.0, 2.0**24, 2.0, 2000, init_scale=2.0**16)
    assert policy.state_dict() == wanted.state_dict()


def test_bfloat16_is_neither_scaled_nor_checked(start: Start, device: str) -> None:
    handle = start(dtype=torch.bfloat16)
    weight = weight_on(device)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    loss = weight.sum() * float("inf")
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    optimizer.step()
    assert torch.isinf(weight).all()
    assert handle.loss_scaler.scale == 1.0


@pytest.mark.parametrize(
    ("scale", "dtype", "losses"), paired([128.0, "dynamic"], [torch.float32, *LOW], [1, 2, 3])
)
def test_gradients_are_true_after_each_loss(
    start: Start, device: str, scale: float | str, dtype: torch.dtype, losses: int
) -> None:
    handle = start(dtype=torch.bfloat16, loss_scale=scale)
    weight = nn.Parameter(torch.ones(5, dtype=dtype, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for i in range(losses):
        loss = (weight.float() * 2.0 ** (i - 4)).sum()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            assert scaled_loss.dtype == torch.float32
            assert scaled_loss.item() == loss.item() * handle.loss_scaler.scale
            scaled_loss.backward()
        assert weight.grad.tolist() == [(2 ** (i + 1) - 1) / 16] * 5  # (1 + 2 + 4 + ...) / 16


def test_gradients_from_before_stay_true(start: Start, device: str) -> None:
    handle = start(dtype=torch.bfloat16, loss_scale=8.0)
    touched, untouched = weight_on(device), weight_on(device)
    optimizer = torch.optim.SGD([touched, untouched], lr=1.0)
    (3 * touched.sum() + 5 * untouched.sum()).backward()
    scaled_backward(handle, touched.sum(), optimizer)
    assert touched.grad[0, 0].item() == 4.0
    assert untouched.grad[0, 0].item() == 5.0


@pytest.mark.parametrize("container", [list, tuple, iter])
def test_several_optimizers_may_own_the_parameters_and_share_them(
    start: Start, device: str, container: Callable[[Any], Any]
) -> None:
    handle = start(dtype=torch.bfloat16, loss_scale=Backoff(init_scale=8.0))
    first, shared, last = (weight_on(device) for _ in range(3))
    optimizers = [
        torch.optim.SGD([first, shared], lr=1.0),
        torch.optim.SGD([shared, last], lr=1.0),
    ]
    for _ in range(2):
        loss = (first + shared + last).sum()
        scaled_backward(handle, loss, container(optimizers))
    assert [p.grad[0, 0].item() for p in (first, shared, last)] == [2.0, 2.0, 2.0]
    scaled_backward(handle, first.sum() * float("inf"), container(optimizers))
    for optimizer in optimizers:
        optimizer.step()
    assert [p[0, 0].item() for p in (first, shared, last)] == [1.0, 1.0, 1.0]


# Overflow.


def backward(handle: Any, optimizer: Any, weights: list[nn.Parameter], factor: float = 1.0) -> None:
    loss = sum(((i + 2) * w).sum() for i, w in enumerate(weights)) + weights[0][0, 1] * factor
    scaled_backward(handle, loss, optimizer)


@pytest.mark.parametrize(
    ("name", "bad", "overflows"), paired(OPTIMIZERS, [float("inf"), float("nan")], [1, 2])
)
def test_after_an_overflow_exactly_one_step_changes_nothing(
    start: Start,
    device: str,
    name: str,
    bad: float,
    overflows: int,
) -> None:
    handle = start(dtype=torch.float16)
    weights = [weight_on(device), weight_on(device, 2.0)]
    optimizer = OPTIMIZERS[name](weights)
    for _ in range(2):
        optimizer.zero_grad()
        backward(handle, optimizer, weights)
        optimizer.step()

    optimizer.zero_grad()
    with TestCase().assertLogs("amp_mp", logging.WARNING) as told:
        for _ in range(overflows):
            backward(handle, optimizer, weights, bad)
    # one iteration, so one observation: told once, lowered once
    assert sum("Gradient overflow, skipping update" in line for line in told.output) == 1
    assert handle.loss_scaler.scale == 2.0**15
    grads = [w.grad for w in weights]
    before = raw_bytes([weights, optimizer.state_dict()["state"], grads])
    optimizer.step()
    assert raw_bytes([weights, optimizer.state_dict()["state"], grads]) == before
    assert all(w.grad is grad for w, grad in zip(weights, grads, strict=True))

    optimizer.zero_grad()
    backward(handle, optimizer, weights)
    changed = raw_bytes(weights)
    optimizer.step()
    assert all(a != b for a, b in zip(raw_bytes(weights), changed, strict=True))


def test_a_scheduler_does_not_complain_of_a_skipped_step(start: Start, device: str) -> None:
    handle = start(dtype=torch.float16)
    weights = [weight_on(device)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected call of `lr_scheduler.step")
        for factor in (float("inf"), 1.0):  # the very first step is skipped
            optimizer.zero_grad()
            backward(handle, optimizer, weights, factor)
            optimizer.step()
            scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_hooks_and_steps_of_the_user_are_called_for_a_skipped_step_too(
    start: Start, device: str
) -> None:
    handle = start(dtype=torch.float16)
    weights, unused = [weight_on(device)], weight_on(device)
    optimizer = torch.optim.SGD([*weights, unused], lr=1.0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step = optimizer.step
    backward(handle, optimizer, weights, float("inf"))
    assert optimizer.step == step  # never replaced
    optimizer.step()
    assert calls == ["before", "after"]
    assert unused.grad is None


def test_an_overflow_skips_only_the_optimizer_it_belongs_to(start: Start, device: str) -> None:
    handle = start(dtype=torch.float16)
    bad, good = weight_on(device), weight_on(device)
    optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in (bad, good)}
    backward(handle, optimizers[bad], [bad], float("inf"))
    backward(handle, optimizers[good], [good])
    for optimizer in optimizers.values():
        optimizer.step()
    assert bad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert good.tolist() == [[-1.0, -2.0], [-1.0, -1.0]]


# Errors.


@pytest.mark.parametrize("after_backward", [False, True])
def test_an_exception_inside_scale_loss_leaves_everything_as_it_was(
    start: Start, device: str, after_backward: bool
) -> None:
    handle = start(dtype=torch.float16)
    weight, fresh = weight_on(device), weight_on(device)
    optimizer = torch.optim.SGD([weight, fresh], lr=1.0)
    weight.sum().backward()
    before = weight.grad
    policy, casts = handle.loss_scaler.state_dict(), autocast_state()

    def fail() -> None:
        loss = (weight + fresh).sum() * float("inf")
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            if after_backward:
                scaled_loss.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert autocast_state() == casts
    assert handle.is_active()
    assert handle.loss_scaler.state_dict() == policy
    assert weight.grad is before
    assert before.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert fresh.grad is None
    optimizer.step()  # not skipped
    assert weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_what_scale_loss_does_not_take_is_refused_by_name(
    start: Start, device: str, scale: float
) -> None:
    handle, weight = start(dtype=torch.bfloat16, loss_scale=scale), weight_on(device)
    own = amp.FP16_Optimizer(torch.optim.SGD([weight], lr=1.0), verbose=False)
    for words, refused in (
        ("optimizer must be", [None, 3, "SGD", ["SGD"], [None]]),
        (r"call its backward\(loss\)", [own, [own]]),
    ):
        for wrong in refused:
            with pytest.raises(TypeError, match=words), handle.scale_loss(weight.sum(), wrong):
                pass


def test_the_gradient_of_a_float32_island_is_exact(
    start: Start, device: str, cast_products: None
) -> None:
    """Backward under casts recomputes in low precision what forward computed in float32."""
    weight = nn.Parameter(torch.randn(256, 256, device=device))
    x = torch.randn(256, 256, device=device)

    def island() -> Tensor:
        with amp.casting.disable_casts(device):
            return (x @ weight).square().mean()

    island().backward()
    wanted, weight.grad = weight.grad, None
    assert wanted is not None
    handle = start(dtype=torch.bfloat16, loss_scale=8.0)

    def error() -> float:
        assert weight.grad is not None
        found, weight.grad = weight.grad, None
        return float((found - wanted).norm() / wanted.norm())

    island().backward()
    assert 5e-4 < error() < 5e-3, "bfloat16 products: two roundings of 2^-9 an element"
    amp.casting.backward(island())
    assert error() == 0
    scaled_backward(handle, island(), torch.optim.SGD([weight]))
    assert error() == 0


# One observation an iteration.


def test_several_losses_before_a_step_move_the_scale_once(start: Start, device: str) -> None:
    """And many that overflow in one iteration are no streak of skipped steps, which warns."""
    handle, inf = start(loss_scale=Backoff(step_window=2, init_scale=64.0)), float("inf")
    weight = weight_on(device)
    optimizer, scales = torch.optim.SGD([weight], lr=0.0), []
    for factors in ((1, 1), (1, 1), (1, inf), (inf,) * 30, (1, 1)):
        for factor in factors:
            scaled_backward(handle, (weight * factor).sum(), optimizer)
        scales.append(handle.loss_scaler.scale)
        optimizer.step()
        optimizer.zero_grad()
    assert scales == [64.0, 128.0, 64.0, 32.0, 32.0]


def test_log_max_follows_the_gradients_through_the_handle(start: Start, device: str) -> None:
    handle = start(loss_scale="LogMax")
    weight = weight_on(device)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(3):
        scaled_backward(handle, (weight * 2.0**-4).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    # 2^(16 + 4), no spread yet; the corrected averages are quotients of roundings
    assert handle.loss_scaler.scale == pytest.approx(2.0**20, rel=1e-12)


def test_a_gradient_penalty_through_a_scaled_loss(start: Start, device: str) -> None:
    """torch.autograd.grad of the scaled loss, divided by the scale, is the loss's own."""
    handle = start(loss_scale=8.0)
    weight = weight_on(device, 3.0)
    optimizer = torch.optim.SGD([weight])
    loss = weight.square().sum()
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        (gradient,) = torch.autograd.grad(scaled_loss, [weight], create_graph=True)
        penalty = (gradient / handle.loss_scaler.scale).square().sum()
        (scaled_loss + penalty * handle.loss_scaler.scale).backward()
    assert weight.grad is not None
    assert bool((weight.grad == 2 * 3 + 8 * 3).all())  # d(w^2 + 4 w^2)/dw
