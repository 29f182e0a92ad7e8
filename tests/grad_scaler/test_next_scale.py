"""Where GradScaler's scale goes, and when: as torch's, though the step itself works it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_mp as amp

Scaler = torch.amp.GradScaler


def optimizers(device: str, count: int) -> list[Any]:
    params = [nn.Parameter(torch.ones(5, device=device)) for _ in range(count)]
    return [amp.optim.SGD([p], lr=0.1) for p in params]


def set_gradients(optimizer: Any, bad: bool) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, float("inf") if bad else 0.5)


def numbers(scaler: Any) -> tuple[float, int]:
    return scaler._scale.item(), scaler._growth_tracker.item()


def begin(scaler: Any, device: str) -> Tensor:
    scaled: Tensor = scaler.scale(torch.ones((), device=device))
    return scaled


def iteration(scaler: Any, stepped: list[Any], bad: list[bool], device: str) -> None:
    begin(scaler, device)
    for optimizer, overflows in zip(stepped, bad, strict=True):
        set_gradients(optimizer, overflows)
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "arguments",
    [
        {"init_scale": 3.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2},
        {"init_scale": 2.0**127, "growth_interval": 1},  # twice that is infinite
        {"init_scale": 2.0**-127, "growth_interval": 3},  # subnormal: it may rise, not fall
        {"init_scale": 2.0**-124, "backoff_factor": 0.25, "growth_interval": 6},
    ],
    ids=["odd factors", "largest", "subnormal", "smallest"],
)
def test_it_moves_as_torch_moves_it_but_never_below_the_smallest_normal_number(
    device: str, count: int, arguments: dict[str, Any]
) -> None:
    ours = amp.GradScaler(device, **arguments)
    theirs = Scaler(device, **arguments)
    stepped = optimizers(device, count)
    source = torch.Generator().manual_seed(count)
    seen = set()
    for _ in range(60):
        bad = (torch.rand(count, generator=source) < 0.15).tolist()
        begin(theirs, device)
        # torch's rule, told what it would have found
        state = theirs._per_optimizer_states[0]
        state["found_inf_per_device"] = {0: torch.full((), float(any(bad)), device=device)}
        before = theirs.get_scale()
        theirs.update()
        if theirs.get_scale() < min(before, 2.0**-126):
            theirs._scale.fill_(before)
        iteration(ours, stepped, bad, device)
        assert numbers(ours) == numbers(theirs)
        assert ours.get_scale() == theirs.get_scale()
        seen.add(numbers(ours)[0])
    assert len(seen) > 1


MAKERS: dict[str, Callable[[Any], Any]] = {
    "ours": lambda params: amp.optim.SGD(params, lr=0.1),
    "ours, unscaled before": lambda params: amp.optim.SGD(params, lr=0.1, amp_scaling=False),
    "torch's": lambda params: torch.optim.SGD(params, lr=0.1),
    "torch's, fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
POLICIES: dict[str, Callable[[], Any]] = {
    "torch's": lambda: None,
    "Backoff": lambda: amp.scaling.Backoff(1.0, 2.0**40, step_window=2, init_scale=2.0**20),
    "Hysteresis": lambda: amp.scaling.Hysteresis(2.0**20, growth_interval=2, hysteresis=1),
    "Tolerance": lambda: amp.scaling.Tolerance(2.0**20, step_window=2, tolerance=0.0),
}


@pytest.mark.parametrize("read_after", ["update", "step"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("maker", MAKERS)
def test_the_scale_falls_in_the_iterations_that_are_skipped_and_in_no_others(
    device: str, maker: str, policy: str, read_after: str
) -> None:
    """The rule by which trainers leave out a scheduler's step, read before the step or after it."""
    weight = nn.Parameter(torch.zeros(3, device=device))
    optimizer = MAKERS[maker]([weight])
    loss_scale = POLICIES[policy]()
    scaler = amp.GradScaler(device, 2.0**20, growth_interval=2, loss_scale=loss_scale)
    source = torch.Generator().manual_seed(3)
    skipped, fell = [], []
    for overflows in (torch.rand(30, generator=source) < 0.4).tolist():
        begin(scaler, device)
        set_gradients(optimizer, overflows)
        old, before = weight.tolist(), scaler.get_scale()
        scaler.step(optimizer)
        if read_after == "step":
            before = scaler.get_scale()
        scaler.update()
        fell.append(scaler.get_scale() < before)
        skipped.append(weight.tolist() == old)
        assert skipped[-1] == overflows
    assert fell == skipped


@pytest.mark.parametrize("loss_scale", [None, "Backoff", "LogMax"])
def test_a_second_loss_carries_the_same_scale(device: str, loss_scale: Any) -> None:
    scaler = amp.GradScaler(device, init_scale=2.0**24, loss_scale=loss_scale)
    first, second = optimizers(device, 2)
    for _ in range(4):
        before = begin(scaler, device).item()
        set_gradients(first, bad=True)
        scaler.step(first)
        assert begin(scaler, device).item() == scaler.get_scale() == before
        set_gradients(second, bad=False)
        scaler.step(second)
        assert second.last_report(wait=True).loss_scale == before
        assert not second.step_was_skipped
        scaler.update()
        assert scaler.get_scale() == begin(scaler, device).item() < max(before, 1.0 + before / 2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "by hand": lambda scaler: scaler.update(8.0),
    "a snapshot": lambda scaler: scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0}),
    "another factor": lambda scaler: (scaler.set_growth_factor(4.0), scaler.update()),
    "in place": lambda scaler: (scaler._scale.fill_(4.0), scaler.update()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_step_and_update_counts(device: str, change: str) -> None:
    scaler = amp.GradScaler(device, init_scale=2.0, growth_interval=1)
    (optimizer,) = optimizers(device, 1)
    begin(scaler, device)
    set_gradients(optimizer, bad=False)
    scaler.step(optimizer)
    CHANGES[change](scaler)
    assert scaler.get_scale() == scaler._scale.item() == 8.0


def test_a_policy_set_between_step_and_update_moves_on_from_there(device: str) -> None:
    policy = amp.scaling.Backoff(scale_max=2.0**20, step_window=1, init_scale=2.0)
    scaler = amp.GradScaler(device, loss_scale=policy)
    (optimizer,) = optimizers(device, 1)
    begin(scaler, device)
    set_gradients(optimizer, bad=False)
    scaler.step(optimizer)
    policy.scale = 32.0
    scaler.update()
    assert policy.scale == scaler.get_scale() == 64.0


@pytest.mark.parametrize("loss_scale", [None, "Backoff", "LogMax"])
def test_a_restored_scaler_goes_on_alike(device: str, loss_scale: Any) -> None:
    def made() -> tuple[Any, Any]:
        arguments = {"init_scale": 2.0**12, "growth_interval": 3, "loss_scale": loss_scale}
        return amp.GradScaler(device, **arguments), optimizers(device, 1)

    def bad(step: int) -> list[bool]:
        return [step % 5 == 2]

    straight, stepped = made()
    broken, others = made()
    for step in range(20):
        iteration(straight, stepped, bad(step), device)
        iteration(broken, others, bad(step), device)
        if step % 4 == 1:
            saved = broken.state_dict()
            broken, others = made()
            broken.load_state_dict(saved)
        assert broken.state_dict() == straight.state_dict()
        assert broken.get_scale() == straight.get_scale()


def test_an_optimizer_that_is_kept_from_stepping_still_counts(device: str) -> None:
    scaler = amp.GradScaler(device, init_scale=16.0)
    (optimizer,) = optimizers(device, 1)
    begin(scaler, device)
    set_gradients(optimizer, bad=True)
    optimizer.step = lambda: None  # as some frameworks do for a step
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_a_step_that_raises_leaves_the_scale(device: str) -> None:
    scaler = amp.GradScaler(device, init_scale=16.0, growth_interval=1)
    (optimizer,) = optimizers(device, 1)
    iteration(scaler, [optimizer], [False], device)
    assert scaler.get_scale() == 32.0
    begin(scaler, device)
    set_gradients(optimizer, bad=False)
    optimizer.param_groups[0]["lr"] = torch.tensor([0.1, 0.2])
    with pytest.raises(ValueError, match="lr must be one number"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    assert scaler.get_scale() == 32.0
    optimizer.param_groups[0]["lr"] = 0.1
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 64.0


@pytest.mark.parametrize("culprit", [None, 0, 1, 2])
def test_optimizers_of_all_kinds_move_it_together(device: str, culprit: int | None) -> None:
    params = [nn.Parameter(torch.ones(5, device=device)) for _ in range(3)]
    stepped: list[Any] = [
        amp.optim.SGD([params[0]], lr=0.1),
        torch.optim.SGD([params[1]], lr=0.1),
        torch.optim.AdamW([params[2]], fused=True),
    ]
    scaler = amp.GradScaler(device, init_scale=16.0, growth_interval=1)
    iteration(scaler, stepped, [i == culprit for i in range(3)], device)
    assert scaler.get_scale() == (32.0 if culprit is None else 8.0)
    for i, param in enumerate(params):
        assert torch.equal(param, torch.ones_like(param)) == (i == culprit)


KINDS = [torch.optim.SGD, amp.optim.SGD]
AGAIN = r"unscale_ had divided.*scaler\.update\(\) and optimizer\.zero_grad\(\)"


def weight_of(device: str) -> nn.Parameter:
    return nn.Parameter(torch.ones(4, device=device))


@pytest.mark.parametrize("clears", [False, True], ids=["as they were left", "cleared"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_begins_again_after_unscale_is_refused_and_then_trains(
    device: str, kind: Any, clears: bool
) -> None:
    weight = weight_of(device)
    optimizer, scaler = kind([weight], lr=1.0), amp.GradScaler(device, init_scale=2.0**10)

    def iteration(interrupted: bool) -> None:
        if clears:
            optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if interrupted:
            scaler.unscale_(optimizer)
            raise KeyboardInterrupt
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(KeyboardInterrupt):
        iteration(interrupted=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=AGAIN):
            iteration(interrupted=False)
    assert weight.tolist() == [1.0] * 4
    scaler.update()
    optimizer.zero_grad()
    for step in range(2):
        iteration(interrupted=False)
        optimizer.zero_grad()
        assert weight.tolist() == [-step] * 4
    assert not weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_two_networks_may_unscale_and_step_in_any_order(device: str, kind: Any) -> None:
    """A GAN's second loss is scaled after its first optimizer's gradients were unscaled."""
    a, b = weight_of(device), weight_of(device)
    first, second = kind([a], lr=1.0), kind([b], lr=1.0)
    scaler = amp.GradScaler(device, init_scale=2.0**10)

    def backward(weight: Tensor) -> None:
        scaler.scale(weight.sum()).backward()

    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        backward(a)
        scaler.unscale_(first)
        backward(b)
        scaler.unscale_(second)
        for weight in (a, b):
            nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert torch.allclose(a, torch.full_like(a, -0.5))
    assert torch.equal(a, b)
