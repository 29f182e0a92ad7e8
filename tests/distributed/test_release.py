"""Steps during the backward pass of a sharded model, and backward passes that reduce nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers import NO_GRADIENT, warns
from layouts import Net, digests, disagreements, local, noise, shard, whole
from ranks import on_ranks
from tiers import full, tiered
from torch import Tensor, nn

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

LOW = torch.bfloat16
SPLITS = [("fsdp", 2), ("hsdp", 4), ("tp fsdp", 4)]
PRESETS = ["float32", "exact", "lean", "tiny", "micro", "nano", "masterless"]


def loss_of(net: nn.Module, step: int) -> Tensor:
    x = noise((4, 8, 32), step).to(next(net.parameters()).dtype)
    return net(x).float().square().mean()


def released(layout: str, presets: list[str]) -> list[str]:
    """Where a net whose gradients are released parts from one that is stepped at the end."""
    found = []
    for preset in presets:
        runs = []
        for release in (False, True):
            net = shard(Net(LOW), layout)
            optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, memory=preset)
            if release:
                optimizer.attach(net)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(net, step).backward()
                if release:
                    assert all(p.grad is None for p in net.parameters())
                optimizer.step()
            runs.append(digests(list(net.parameters()), optimizer))
        found += [f"{preset}, {text}" for text in disagreements(runs)]
    return found


@pytest.mark.parametrize(
    ("layout", "world", "presets"),
    [("hsdp", 4, ["exact", "micro", "nano"]), *(full((*split, PRESETS)) for split in SPLITS)],
)
def test_release_is_the_step_at_the_end(layout: str, world: int, presets: list[str]) -> None:
    for rank in on_ranks(world, released, layout, presets):
        assert rank == []


def refusals() -> list[str]:
    """What attach says to each setting that needs a decision about all shards of a gradient."""
    messages = []
    for options, attached in (
        ({"check_overflow": True}, {}),
        ({"max_grad_norm": 1.0}, {}),
        ({"max_grad_norm": 1.0}, {"clip": "parameter"}),
        ({}, {"scaler": amp.GradScaler("cpu")}),
    ):
        net = shard(Net(LOW), "fsdp")
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, **options)
        with pytest.raises(ValueError) as caught:
            optimizer.attach(net, **attached)
        messages.append(str(caught.value))
        loss_of(net, 0).backward()  # nothing is attached
        assert all(p.grad is not None for p in net.parameters())
        optimizer.step()
    return messages


def test_release_refuses_what_needs_all_shards_of_a_gradient() -> None:
    names = ["check_overflow", 'clip="parameter"', 'clip="parameter"', "scaler"]
    for messages in on_ranks(2, refusals):
        for message, name in zip(messages, names, strict=True):
            assert name in message
        assert all('clip="previous"' in message for message in messages[1:3])


def clipped(layout: str) -> tuple[list[float], list[float]]:
    """The norms that a net with clip="previous" reports, and those of its gradients by torch.

    From the second step on its weights have to be those of a net that is clipped by hand.
    """
    net, reference = shard(Net(), layout), shard(Net(), layout)
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1, max_grad_norm=0.01)
    optimizer.attach(net, clip="previous")
    found, expected = [], []
    for step in range(4):
        reference.load_state_dict(net.state_dict())
        loss_of(net, step).backward()
        optimizer.step()
        assert optimizer.grad_norm is not None
        found.append(optimizer.grad_norm)
        reference.zero_grad()
        loss_of(reference, step).backward()
        expected.append(norm_of(reference))
        if step == 0:
            continue
        multiplier = min(1.0, 0.01 / (expected[-2] + 1e-6))
        assert multiplier < 1
        for own, param in zip(net.parameters(), reference.parameters(), strict=True):
            wanted = whole(param) - 0.1 * multiplier * whole(param.grad)
            torch.testing.assert_close(whole(own), wanted, rtol=1e-6, atol=1e-6)
    return found, expected


def norm_of(net: nn.Module) -> float:
    gradients = [whole(p.grad).double().reshape(-1) for p in net.parameters()]
    return float(torch.cat(gradients).norm())


@pytest.mark.parametrize(("layout", "world"), tiered(SPLITS, SPLITS[2:]))
def test_clipping_by_the_previous_norm(layout: str, world: int) -> None:
    ranks = on_ranks(world, clipped, layout)
    for found, expected in ranks:
        assert found == pytest.approx(expected, rel=1e-6)
        assert found == ranks[0][0], "the ranks have different norms"


def accumulated(layout: str, options: dict[str, Any]) -> list[str]:
    """Where a step between a backward pass without reduction and one with it makes a difference.

    Before the reduction no parameter has a gradient.
    """
    runs = []
    for steps_between in (False, True):
        net = shard(Net(LOW), layout)
        params = list(net.parameters())
        optimizer = amp.optim.AdamW(params, lr=0.01, memory="tiny", **options)
        for step in range(3):
            net.set_requires_gradient_sync(False)
            loss_of(net, 2 * step).backward()
            before = digests(params, optimizer)
            if steps_between:
                assert all(p.grad is None for p in params)
                with warns(NO_GRADIENT, step == 0):
                    optimizer.step()
                changed = disagreements([before, digests(params, optimizer)])
                assert changed == [], changed
            net.set_requires_gradient_sync(True)
            loss_of(net, 2 * step + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(digests(params, optimizer))
    return disagreements(runs)


@pytest.mark.parametrize(("layout", "world"), tiered(SPLITS, SPLITS[:1]))
@pytest.mark.parametrize("options", [{}, {"check_overflow": True}, {"max_grad_norm": 0.01}])
def test_a_step_before_gradients_are_reduced_changes_nothing(
    layout: str, world: int, options: dict[str, Any]
) -> None:
    for rank in on_ranks(world, accumulated, layout, options):
        assert rank == []


def overflows_under_release() -> list[tuple[bool, bool, list[str]]]:
    """For each step: whether a weight changed, what the optimizer says, and warnings.

    The first and the third have an inf.
    """
    net = shard(Net(LOW), "fsdp")
    optimizer = amp.optim.SGD(net.parameters(), lr=0.01, max_grad_norm=0.1)
    optimizer.attach(net, clip="previous")
    found = []
    for step in range(3):
        before = [local(p).clone() for p in net.parameters()]
        loss = loss_of(net, step) * (float("inf") if step in (0, 2) else 1.0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            loss.backward()
            optimizer.step()
        changed = any(
            not torch.equal(a, local(p)) for a, p in zip(before, net.parameters(), strict=True)
        )
        texts = [str(w.message)[:34] for w in seen if "stepped shards" in str(w.message)]
        found.append((changed, optimizer.step_was_skipped, texts))
    return found


def test_an_overflow_of_released_shards_is_skipped_at_first_and_warned_of_later() -> None:
    """At first all shards wait for the norm; later they are stepped before it is known."""
    warning = ["amp_mp: gradients were inf or NaN i"[:34]]
    wanted = [(False, True, []), (True, False, []), (True, True, warning)]
    assert on_ranks(2, overflows_under_release) == [wanted] * 2
