"""scale_loss in the loops that people write: `continue`, updates by hand, float16 weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from handles import OPTIMIZERS, Start, scaled_backward
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.scaling import Backoff

pytestmark = pytest.mark.filterwarnings("ignore:amp_mp. gradients have been")


Block = Callable[[Tensor], AbstractContextManager[Tensor]]


def weight_on(device: str, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.linspace(0.5, 1, 64, device=device).reshape(2, 32).to(dtype))


def first_gradients(weights: list[nn.Parameter]) -> list[float | None]:
    """The first element of each gradient."""
    return [None if w.grad is None else w.grad.flatten()[0].item() for w in weights]


def overflows(params: list[nn.Parameter]) -> bool:
    return not all(p.grad.isfinite().all() for p in params if p.grad is not None)


CLEAR: dict[str, Callable[[Any, Any], None]] = {
    "zero_grad": lambda optimizer, _: optimizer.zero_grad(),
    "to 0": lambda optimizer, _: optimizer.zero_grad(set_to_none=False),
    "by hand": lambda _, weight: setattr(weight, "grad", None),
    "by hand to 0": lambda _, weight: weight.grad.zero_(),
    "its data to 0": lambda _, weight: weight.grad.data.zero_(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("clear", CLEAR)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_scale_falls_each_time_a_loop_goes_on_past_an_overflow(
    start: Start, device: str, name: str, clear: str, dtype: torch.dtype
) -> None:
    """It used to stay where the first overflow had left it. A clean step is then taken."""
    handle = start(loss_scale=Backoff(init_scale=2.0**20, scale_max=2.0**20))
    weight = weight_on(device, dtype)
    optimizer = OPTIMIZERS[name]([weight])
    scales, before = [], raw_bytes(weight)
    for _ in range(12):
        scales.append(handle.loss_scaler.scale)
        scaled_backward(handle, weight.float().sum() * float("inf"), optimizer)
        if overflows([weight]):
            CLEAR[clear](optimizer, weight)
            continue
        optimizer.step()
    assert scales == [2.0**k for k in range(20, 8, -1)]
    assert raw_bytes(weight) == before
    scaled_backward(handle, weight.float().sum(), optimizer)
    optimizer.step()
    assert raw_bytes(weight) != before


@pytest.mark.parametrize("clear", CLEAR)
def test_the_scale_grows_for_updates_written_by_hand(start: Start, device: str, clear: str) -> None:
    handle = start(loss_scale=Backoff(init_scale=4.0, step_window=3))
    weight = weight_on(device)
    optimizer = torch.optim.SGD([weight], lr=1.0)  # owns the parameters and never steps
    scales = []
    for _ in range(9):
        scaled_backward(handle, weight.sum(), optimizer)
        assert (weight.grad == 1).all()
        with torch.no_grad():
            weight -= 0.125 * weight.grad
        CLEAR[clear](optimizer, weight)
        scales.append(handle.loss_scaler.scale)
    assert scales == [4, 4, 8, 8, 8, 16, 16, 16, 32]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_losses_before_a_step_still_count_once(
    start: Start, device: str, name: str
) -> None:
    handle = start(loss_scale=Backoff(init_scale=4.0, step_window=2))
    a, b = weight_on(device), weight_on(device)
    first, second = OPTIMIZERS[name]([a]), OPTIMIZERS[name]([b])
    for wanted in (4, 8, 8, 16):
        for weight, optimizer in ((a, first), (b, second), (a, first)):
            scaled_backward(handle, weight.sum(), optimizer)
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        assert handle.loss_scaler.scale == wanted


def test_a_wrapped_optimizer_goes_on_past_an_overflow_too(start: Start, device: str) -> None:
    handle = start(loss_scale=Backoff(init_scale=2.0**20, scale_max=2.0**20))
    weight = weight_on(device)
    optimizer = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.125), num_loss=2)
    for i in range(5):
        for scaler in optimizer.loss_scalers:
            assert scaler.scale == 2.0 ** (20 - i)
            scaled_backward(optimizer, weight.sum() * float("inf"))
        optimizer.zero_grad()
    for _ in range(2):
        scaled_backward(optimizer, weight.sum())
    before = raw_bytes(weight)
    optimizer.step()
    assert raw_bytes(weight) != before


# float16 weights.

MEMORY = [None, "exact", "lean", "tiny", "micro", "masterless"]


def small_loss(weight: Tensor, power: int = -20) -> Tensor:
    """Its gradient, 2^power everywhere, is far below what float16 holds without a scale."""
    return weight.float().sum() * 2.0**power


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("losses", [1, 2])
def test_small_float16_gradients_reach_the_masters(
    start: Start, device: str, memory: str | None, losses: int
) -> None:
    """Divided in float16 2^-30 would be 0."""
    handle = start(dtype=torch.float16, loss_scale=2.0**16)
    weight, twin = weight_on(device, torch.float16), weight_on(device, torch.float16)
    optimizer = amp.optim.SGD([weight], lr=2.0**20, memory=memory)
    scaler = amp.GradScaler(device, init_scale=2.0**16)
    reference = amp.optim.SGD([twin], lr=2.0**20, memory=memory)
    for _ in range(3):
        for _ in range(losses):
            scaled_backward(handle, small_loss(weight, -30), optimizer)
            scaler.scale(small_loss(twin, -30)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scaler.step(reference)
        scaler.update()
        reference.zero_grad()
    assert raw_bytes(weight) == raw_bytes(twin)
    start_value = torch.linspace(0.5, 1, 64).half().reshape(2, 32).float()
    moved = (start_value - weight.detach().cpu().float()).mean().item()
    assert moved == pytest.approx(3 * losses * 2.0**-10, rel=0.05)


@pytest.mark.parametrize("name", ["amp SGD", "amp AdamW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_other_dtypes_are_true_after_the_block(
    start: Start, device: str, name: str, dtype: torch.dtype
) -> None:
    handle = start(loss_scale=2.0**16)
    weight = weight_on(device, dtype)
    scaled_backward(handle, small_loss(weight), OPTIMIZERS[name]([weight]))
    assert (weight.grad == 2.0**-20).all()


def test_amp_scaling_false_changes_nothing_about_it(start: Start, device: str) -> None:
    handle = start(dtype=torch.float16, loss_scale=2.0**16)
    weight = weight_on(device, torch.float16)
    optimizer = amp.optim.SGD([weight], lr=1.0, amp_scaling=False)
    scaled_backward(handle, small_loss(weight, -10), optimizer)
    assert (weight.grad == 2.0**-10).all()


def test_clipping_is_by_the_true_norm(start: Start, device: str) -> None:
    handle = start(dtype=torch.float16, loss_scale=2.0**10)
    weight = weight_on(device, torch.float16)
    optimizer = amp.optim.SGD([weight], lr=1.0, max_grad_norm=4.0)
    scaled_backward(handle, weight.float().sum(), optimizer)
    optimizer.step()
    assert optimizer.grad_norm == 8.0  # 64 ones
    (state,) = optimizer.state.values()
    true = torch.linspace(0.5, 1, 64).half().float().reshape(2, 32) - 0.5
    stored = state["master"].cpu() if "master" in state else weight.detach().float().cpu()
    assert (stored - true).abs().max() < 1e-3


Write = Callable[[nn.Parameter], Any]
WRITES: dict[str, Write] = {
    "clipped": lambda weight: nn.utils.clip_grad_norm_([weight], 1.0),
    "multiplied": lambda weight: weight.grad.mul_(0.125),
    "through data": lambda weight: weight.grad.data.mul_(0.125),
    "replaced": lambda weight: setattr(weight, "grad", weight.grad * 0.125),
    "in float16": lambda weight: setattr(weight, "grad", torch.full_like(weight, 0.125)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("memory", MEMORY)
def test_gradients_may_be_written_between_the_loss_and_the_step(
    start: Start, device: str, memory: str | None, write: str
) -> None:
    """They are the true ones, so a script does with them what it does in float32 training."""
    handle = start(dtype=torch.float16, loss_scale=2.0**10)
    weight, twin = weight_on(device, torch.float16), weight_on(device, torch.float16)
    optimizer = amp.optim.SGD([weight], lr=1.0, memory=memory)
    reference = amp.optim.SGD([twin], lr=1.0, memory=memory)
    for _ in range(2):
        scaled_backward(handle, weight.float().sum(), optimizer)
        WRITES[write](weight)
        optimizer.step()
        optimizer.zero_grad()
        twin.grad = torch.full_like(twin, 0.125)  # the norm of 64 ones is 8
        reference.step()
    wanted, found = (torch.as_tensor(p.detach().float()) for p in (twin, weight))
    # clip_grad_norm_ divides by the norm + 1e-6
    assert (found - wanted).abs().max() <= (2.0**-11 if write == "clipped" else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_after_a_write_adds_to_what_was_written(
    start: Start, device: str, dtype: torch.dtype
) -> None:
    handle = start(dtype=torch.float16, loss_scale=2.0**10)
    weight = weight_on(device, dtype)
    optimizer = amp.optim.SGD([weight], lr=1.0)
    scaled_backward(handle, small_loss(weight, -30), optimizer)
    weight.grad.mul_(3)
    scaled_backward(handle, small_loss(weight, -30), optimizer)
    assert weight.grad.dtype == torch.float32
    assert (weight.grad == 2.0**-28).all()
    weight.grad = None
    weight.float().sum().backward()  # without a loss scale, as torch makes it
    assert weight.grad.dtype == dtype


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_plain_backward_after_scaled_ones_is_not_divided_by_the_scale(
    start: Start, device: str, memory: str | None, set_to_none: bool, steps: int
) -> None:
    handle = start(dtype=torch.float16, loss_scale=2.0**10)
    weight, twin = weight_on(device, torch.float16), weight_on(device, torch.float16)
    optimizer = amp.optim.SGD([weight], lr=0.25, memory=memory)
    reference = amp.optim.SGD([twin], lr=0.25, memory=memory)
    scaled_backward(handle, weight.float().sum(), optimizer)
    for _ in range(steps):
        optimizer.step()
        twin.grad = torch.ones_like(twin)
        reference.step()
    for each, param in ((optimizer, weight), (reference, twin)):
        each.zero_grad(set_to_none=set_to_none)
        param.float().sum().backward()
        each.step()
    assert raw_bytes(weight) == raw_bytes(twin)


def test_accumulation_over_a_growing_scale_adds_true_gradients(start: Start, device: str) -> None:
    """The scale doubles after each step here, and the gradients are never cleared."""
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0**8, step_window=1))
    weight = weight_on(device, torch.float16)
    master = weight.detach().float().clone()
    optimizer = amp.optim.SGD([weight], lr=2.0**-8, master="float32")
    for k in range(1, 4):
        scaled_backward(handle, weight.float().sum(), optimizer)
        optimizer.step()
        master -= k * 2.0**-8
    assert torch.equal(optimizer.state[weight]["master"], master)


def test_an_overflow_of_float16_weights_changes_nothing_and_training_goes_on(
    start: Start, device: str
) -> None:
    handle = start(dtype=torch.float16, loss_scale=Backoff(init_scale=2.0**20))
    weight = weight_on(device, torch.float16)
    optimizer = amp.optim.SGD([weight], lr=0.125)
    before = raw_bytes(weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "amp_mp")
        for i in range(8):
            scaled_backward(handle, weight.float().sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            assert (raw_bytes(weight) == before) == (i < 5)  # 2^16 and above are infinite
    assert handle.loss_scaler.scale == 2.0**15


def test_a_parameter_that_two_optimizers_share_is_unscaled_in_place(
    start: Start, device: str
) -> None:
    handle = start(dtype=torch.float16, loss_scale=2.0**10)
    weight = weight_on(device, torch.float16)
    pair = [amp.optim.SGD([weight], lr=0.25), torch.optim.SGD([weight], lr=0.25)]
    scaled_backward(handle, weight.float().sum(), pair)
    assert (weight.grad == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("clear", CLEAR)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_may_be_cleared_inside_of_a_block(
    start: Start, device: str, name: str, clear: str, dtype: torch.dtype
) -> None:
    """Before its loss goes backward, between two times, and after; also of a weight not reached."""
    handle = start(loss_scale=8.0)
    weight, other = weight_on(device, dtype), weight_on(device, dtype)
    optimizer = OPTIMIZERS[name]([weight, other])
    for script in (["both"], [None, "both"], ["one", None, "one"], ["both", "one"], ["one", None]):
        wanted: list[float] = [0.0, 0.0]
        scaled_backward(handle, (weight.float() + 2 * other.float()).sum(), optimizer)
        wanted = [1.0, 2.0]
        both, one = (weight.float() * 3 + other.float()).sum(), (weight.float() * 2).sum()
        loss = both if "both" in script else one
        with handle.scale_loss(loss, optimizer) as scaled:
            for action in script:
                if action is None:
                    # A loop over `.data` is taken to be one over all weights.
                    for each in (weight, other) if "data" in clear else (weight,):
                        if each.grad is not None:
                            CLEAR[clear](optimizer, each)
                    wanted = [0.0, wanted[1] if "hand" in clear else 0.0]
                elif action == "both" or loss is one:
                    scaled.backward(retain_graph=True)
                    wanted = (
                        [wanted[0] + 3, wanted[1] + 1]
                        if loss is both
                        else [wanted[0] + 2, wanted[1]]
                    )
        for param, factor in zip((weight, other), wanted, strict=True):
            found = torch.zeros_like(param) if param.grad is None else param.grad
            assert (found == factor).all(), script
        optimizer.zero_grad()


def as_gradient_surgery(block: Block, weights: list[nn.Parameter]) -> None:
    """Puts gradients of torch.autograd.grad where it finds none."""
    with block((1 * weights[0].float() + 2 * weights[1].float()).sum()) as scaled:
        for weight, grad in zip(weights, torch.autograd.grad(scaled, weights), strict=True):
            weight.grad = grad if weight.grad is None else weight.grad + grad


def as_grad_cache(block: Block, weights: list[nn.Parameter]) -> None:
    """The loss ends at a cached output, whose gradient then goes on to a weight."""
    cached = weights[1].float().detach().requires_grad_()
    with block((weights[0].float() + 2 * cached).sum()) as scaled:
        scaled.backward()
        (weights[1].float() * cached.grad).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loss", [as_gradient_surgery, as_grad_cache])
def test_gradients_in_parts_add_to_those_of_earlier_losses(
    start: Start, device: str, loss: Callable[..., None], name: str, dtype: torch.dtype
) -> None:
    handle = start(loss_scale=8.0)
    weights = [weight_on(device, dtype) for _ in "12"]
    optimizer = OPTIMIZERS[name](weights)
    for _ in range(3):
        loss(lambda given: handle.scale_loss(given, optimizer), weights)
    assert first_gradients(weights) == [3, 6]


def test_gradients_stay_where_a_loss_of_zeros_is_collected_twice(device: str) -> None:
    weights = [weight_on(device, torch.float16), weight_on(device)]
    optimizer = amp.FP16_Optimizer(torch.optim.SGD(weights, lr=0.1), static_loss_scale=8.0)
    optimizer.backward((3 * weights[0].float()).sum())
    optimizer.backward((0 * weights[0].float() + 2 * weights[1]).sum())
    optimizer.update_master_grads()
    optimizer.backward((weights[0].float() + weights[1]).sum())
    assert optimizer.inspect_master_grad_data()[0][0][0, 0].item() == 4
    assert optimizer.inspect_master_grad_data()[0][1][0, 0].item() == 3
