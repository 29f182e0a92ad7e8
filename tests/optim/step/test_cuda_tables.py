"""A step on a GPU reads its tables from device memory: they follow whatever changes between steps.

The oracle is the same optimizer on a CPU, bit for bit. Launches are counted.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import NO_GRADIENT, PRETEND_GPU, warns
from tiers import full, tiered
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from twins import Twins, shapes_of
from watching import Seen

import amp_mp as amp
from amp_mp.optim.base import stepper_of

pytestmark = pytest.mark.usefixtures("cuda")


def launches(seen: Seen) -> int:
    assert (seen.others, seen.waits) == (0, 0)
    return seen.kernels


@pytest.mark.parametrize(
    ("tensors", "groups"), [(1, 1), (8, 2), (9, 1), (146, 146), full((2000, 3))]
)
def test_a_list_of_any_usual_length_is_three_launches(tensors: int, groups: int) -> None:
    """Layer-wise rates have 146 groups."""
    twins = Twins([(5,)] * tensors, groups=groups, max_grad_norm=1.0)
    twins.fill(0)
    twins.step()
    twins.fill(1)
    assert launches(twins.seen()) == 3
    twins.check()


@pytest.mark.full
def test_longer_lists_are_four_launches() -> None:
    """One launch of measure takes 2,036 tensors; apply and decide take any number."""
    twins = Twins([(2,)] * 2100, max_grad_norm=1.0)
    twins.fill(0)
    twins.step()
    twins.fill(1)
    assert launches(twins.seen()) == 4
    twins.check()


@pytest.mark.full
def test_gradients_of_the_longest_lists_are_uploaded_where_they_are_new() -> None:
    """The arguments of a launch hold some 4,000 pointers."""
    twins = Twins([(1,)] * 4100, check_overflow=False)
    twins.fill(0)
    twins.step()
    for step, (in_place, expected) in enumerate([(False, 4), (True, 2)], 1):
        twins.fill(step, in_place)
        assert launches(twins.seen()) == expected, step
    twins.check()


@pytest.mark.parametrize("tensors", [1, 40])
def test_learning_rates_and_gradients_are_never_uploaded(tensors: int) -> None:
    """Each step has another rate, and its gradients are at other addresses."""
    twins = Twins(shapes_of(tensors), groups=min(tensors, 5), check_overflow=False)
    twins.fill(0)
    twins.step()
    for step in range(1, 5):
        twins.fill(step)
        for side in twins.sides:
            for number, group in enumerate(side.optimizer.param_groups):
                group["lr"] = 1e-2 / (step + number)
        assert launches(twins.seen()) == 2
        twins.check(step)


def test_what_changes_is_uploaded_in_one_launch_once() -> None:
    twins = Twins(shapes_of(40), groups=5, check_overflow=False)
    twins.fill(0)
    twins.step()
    for step, change in enumerate(
        [{"betas": (0.8, 0.99)}, {"weight_decay": 0.5}, {"eps": 1e-3}, {"maximize": True}], 1
    ):
        twins.each_group(**change)
        for expected in (3, 2):
            twins.fill(step)
            assert launches(twins.seen()) == expected
            twins.check(change)
    for without, expected in (({3, 17}, 3), ({3, 17}, 2), ({4}, 3), (set(), 3), (set(), 2)):
        twins.fill(9, without=without)
        assert launches(twins.seen()) == expected
        twins.check(without)


@pytest.mark.skipif(not PRETEND_GPU, reason="only the pretend GPU counts bytes of arguments")
def test_a_step_of_one_tensor_carries_few_arguments() -> None:
    """As in gradient release, where each parameter is stepped alone."""
    twins = Twins([(40, 3)], max_grad_norm=1.0)
    twins.fill(0)
    twins.step()
    from pretend_gpu.device import ledger

    with ledger() as found:
        twins.ours.optimizer.step()
    assert found.launches == 3
    assert 500 < found.argument_bytes < 2500


def other_memory(twins: Twins, step: int) -> None:
    for side in twins.sides:
        for param in side.params[step % 3 :: 3]:
            param.data = param.data.clone()


def loaded_state(twins: Twins, step: int) -> None:
    for side in twins.sides:
        twins.kept.append(side.optimizer.state_dict())
        side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


def more_params(twins: Twins, step: int) -> None:
    values = torch.randn(6, step + 1, generator=torch.Generator().manual_seed(step))
    for side in twins.sides:
        side.params.append(side.new(values))
        side.optimizer.add_param_group({"params": [side.params[-1]], "lr": 0.1})


def other_numbers(twins: Twins, step: int) -> None:
    twins.each_group(betas=(0.5 + 0.01 * (step % 30), 0.99), weight_decay=0.01 * step)


def other_rate(twins: Twins, step: int) -> None:
    for side in twins.sides:
        group = side.optimizer.param_groups[step % len(side.optimizer.param_groups)]
        group["lr"] = 0.1 / (1 + step)


def rate_on_the_device(twins: Twins, step: int) -> None:
    for side in twins.sides:
        rate = torch.tensor(0.1 / (1 + step), dtype=torch.float64, device=side.device)
        side.optimizer.param_groups[0]["lr"] = rate


def state_of_one_replaced(twins: Twins, step: int) -> None:
    for side in twins.sides:
        state = side.optimizer.state[side.params[step % len(side.params)]]
        twins.kept.append(dict(state))
        for name in list(state):
            state[name] = state[name].clone()


CHANGES: list[Callable[[Twins, int], None]] = [
    other_memory,
    loaded_state,
    more_params,
    other_numbers,
    other_rate,
    rate_on_the_device,
    state_of_one_replaced,
]


@pytest.mark.parametrize("seed", tiered(range(6), range(3)))
def test_steps_among_changes_by_chance_are_the_hosts(seed: int) -> None:
    """Whatever changes between two steps, and whichever parameters have gradients."""
    chance = random.Random(seed)
    kind = chance.choice([amp.optim.AdamW, amp.optim.SGD, amp.optim.LAMB])
    more = {"momentum": 0.9} if kind is amp.optim.SGD else {}
    twins = Twins(
        shapes_of(chance.choice([2, 8, 9, 33, 70])),
        kind=kind,
        groups=chance.choice([1, 2]),
        memory=chance.choice(["exact", "float32", "tiny"]),
        max_grad_norm=chance.choice([None, 1.0]),
        **more,
    )
    changes = [c for c in CHANGES if c is not other_numbers or kind is amp.optim.AdamW]
    stream = torch.cuda.Stream()
    for step in range(25):
        count = len(twins.ours.params)
        without = set(chance.sample(range(count), chance.randrange(count))) if step % 3 else set()
        twins.fill(step, in_place=chance.random() < 0.5, without=without)
        if chance.random() < 0.3:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                twins.ours.optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
            twins.theirs.optimizer.step()
        else:
            twins.step()
        twins.check(step)
        for change in chance.sample(changes, chance.randrange(3)):
            change(twins, step)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_each_device_has_a_table() -> None:
    def trained(devices: list[str]) -> Any:
        source = torch.Generator().manual_seed(1)
        params = [nn.Parameter(torch.randn(5, generator=source).to(d)) for d in devices]
        optimizer = amp.optim.AdamW(params, lr=0.1, max_grad_norm=1.0)
        for step in range(4):
            for p in params:
                p.grad = torch.randn(5, generator=source).to(p.device)
            optimizer.param_groups[0]["betas"] = (0.9 - 0.1 * step, 0.99)
            optimizer.step()
        return [p.detach().cpu() for p in params]

    found = trained(["cuda:0", "cuda:1"] * 12)
    for a, b in zip(found, trained(["cuda:0"] * 24), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


class HostMemory(TorchDispatchMode):
    """Counts tensors that are made in the host's memory."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().startswith("aten::empty") and out.device.type == "cpu":
            self.made += 1
        return out


@pytest.mark.parametrize("norm", [None, 1.0])
@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.LAMB, amp.optim.NovoGrad])
@pytest.mark.parametrize("empty", [False, True], ids=["no gradient", "an empty gradient"])
def test_a_step_with_nothing_to_do_gives_kernels_no_memory_of_the_host(
    kind: Any, norm: float | None, empty: bool
) -> None:
    """A kernel that writes there ends the process, or makes every later call of CUDA fail."""
    weight, none = (nn.Parameter(torch.ones(size, device="cuda")) for size in (5, 0))
    optimizer = kind([weight, none], lr=0.1, max_grad_norm=norm)
    if empty:
        none.grad = torch.ones_like(none)
    with HostMemory() as host:
        with warns(NO_GRADIENT, not empty):
            optimizer.step()
        stepper_of(optimizer).totals()
    torch.cuda.synchronize()
    assert host.made == 0
    assert (weight == 1).all()
