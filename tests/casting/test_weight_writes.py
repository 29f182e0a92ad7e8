"""A weight written in any way is the weight that the next region multiplies by, as in torch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tiers import tiered
from torch import Tensor, nn
from weight_writes import ON_A_CPU, WRITES

import amp_mp as amp
from amp_mp.casting.op_table import install
from amp_mp.casting.step_hooks import install_step_hooks

LOW = torch.bfloat16
ROWS, SIZE = 64, 256  # large enough for a CPU to multiply in low precision

Write = Callable[[], None]
Forward = Callable[[], Tensor]


def region(device: str) -> torch.autocast:
    return torch.autocast(device, LOW)


def regions(device: str, forward: Forward, write: Write) -> list[Tensor]:
    found = []
    for change in (write, write):
        with region(device):
            found.append(forward())
        change()
    with region(device):
        found.append(forward())
    return found


def regions_without_gradients(device: str, forward: Forward, write: Write) -> list[Tensor]:
    with torch.no_grad():
        return regions(device, forward, write)


def train_and_evaluate(device: str, forward: Forward, write: Write) -> list[Tensor]:
    with region(device):
        trained = forward()
    trained.float().square().mean().backward()
    write()
    with torch.no_grad(), region(device):
        return [trained, forward()]


def nested(device: str, forward: Forward, write: Write) -> list[Tensor]:
    found = []
    for change in (write, lambda: None):
        with region(device):
            with region(device), torch.no_grad():
                found.append(forward())
            with torch.autocast(device, enabled=False):
                pass
            found.append(forward())
        change()
    return found


def pool_of(threads: int, device: str) -> ThreadPoolExecutor:
    """Threads whose work goes to this one's CUDA stream: others would have to wait for it."""
    if device != "cuda":
        return ThreadPoolExecutor(threads)
    here = (torch.cuda.current_stream(),)
    return ThreadPoolExecutor(threads, initializer=torch.cuda.set_stream, initargs=here)


def in_a_thread_of_its_own(device: str, forward: Forward, write: Write) -> list[Tensor]:
    def evaluate() -> Tensor:
        with region(device):
            return forward()

    with pool_of(2, device) as pool:
        found = [evaluate(), pool.submit(evaluate).result()]
        pool.submit(write).result()
        return [*found, pool.submit(evaluate).result(), evaluate()]


def beside_a_region_that_stays_open(device: str, forward: Forward, write: Write) -> list[Tensor]:
    """The end of one thread's region ends the copies of all threads, as in torch."""
    found: list[Tensor] = []
    meet = threading.Barrier(2, timeout=60)

    def other() -> None:
        with region(device):
            found.append(forward())
            meet.wait()
            meet.wait()
            found.append(forward())

    with pool_of(1, device) as pool:
        running = pool.submit(other)
        meet.wait()
        with region(device):
            found.append(forward())
        write()
        with region(device):
            found.append(forward())
        meet.wait()
        running.result()
    return found


WITH_REGIONS = [
    regions, regions_without_gradients, train_and_evaluate, nested, in_a_thread_of_its_own,
    beside_a_region_that_stays_open,
]  # fmt: skip


def run(scenario: Callable[..., list[Tensor]], device: str, way: str) -> list[Tensor]:
    """What a scenario finds when a weight is written in one of the ways."""
    torch.manual_seed(0)
    linear, x = nn.Linear(SIZE, SIZE, bias=False).to(device), torch.randn(ROWS, SIZE).to(device)

    def write() -> None:
        torch.manual_seed(1)
        with torch.autocast(device, enabled=False):
            WRITES[way](linear)

    return [each.detach() for each in scenario(device, lambda: linear(x), write)]


def run_all(scenario: Callable[..., list[Tensor]], device: str) -> dict[str, list[Tensor]]:
    """What the scenario finds, by the way to write."""
    ways = [way for way in WRITES if device == "cpu" or way not in ON_A_CPU]
    return {way: run(scenario, device, way) for way in ways}


def is_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def check(found: dict[str, list[Tensor]], wanted: dict[str, list[Tensor]]) -> None:
    assert len(wanted) >= 30
    assert not [way for way, outs in wanted.items() if is_equal(outs[0], outs[-1])], "not written"
    stale = [
        way
        for way, outs in wanted.items()
        if not all(is_equal(*pair) for pair in zip(found[way], outs, strict=True))
    ]
    assert stale == []


@pytest.fixture
def uninstalled(_threads_are_left_as_they_were: None, cast_products: None) -> Iterator[None]:
    """No table stays in force. One thread of torch's: the products are small."""
    torch.set_num_threads(1)
    yield
    amp.casting.uninstall()


@pytest.mark.parametrize(
    "scenario", tiered(WITH_REGIONS, WITH_REGIONS[2:5]), ids=lambda scenario: scenario.__name__
)
def test_regions_see_every_write(device: str, uninstalled: None, scenario: Any) -> None:
    wanted = run_all(scenario, device)
    install_step_hooks()
    for table in ("apex", "torch", "stock"):
        install(table, device)
        check(run_all(scenario, device), wanted)


# Under amp.init there is no region: what is wanted is what torch gives in one region a forward.


def evaluation(device: str, forward: Forward, write: Write) -> list[Tensor]:
    with torch.no_grad():
        first = forward()
        write()
        second = forward()
        write()
        return [first, second, forward()]


def training(backward: Callable[[Tensor], None]) -> Callable[..., list[Tensor]]:
    def scenario(device: str, forward: Forward, write: Write) -> list[Tensor]:
        found = []
        for _ in range(3):
            out = forward()
            found.append(out)
            backward(out.float().square().mean())
            write()
        with torch.no_grad():
            return [*found, forward()]

    return scenario


TABLES = ["apex", "torch", "stock"]
WAYS = ["evaluation", "plain backward", "amp.casting.backward", "scale_loss", "a step"]


@pytest.mark.parametrize(
    ("how", "table"),
    tiered(itertools.product(WAYS, TABLES), list(zip(WAYS, itertools.cycle(TABLES)))),
)
def test_amp_init_sees_every_write(device: str, uninstalled: None, how: str, table: str) -> None:
    other = [torch.zeros(1, device=device, requires_grad=True)]
    optimizer = torch.optim.SGD(other)

    def with_handle(loss: Tensor) -> None:
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    def with_step(loss: Tensor) -> None:
        torch.autograd.grad(loss, other, allow_unused=True)  # no gradient for the weight
        optimizer.step()

    backward = {
        "evaluation": None,
        "plain backward": lambda loss: loss.backward(),
        "amp.casting.backward": amp.casting.backward,
        "scale_loss": with_handle,
        "a step": with_step,
    }[how]

    def stock(device: str, forward: Forward, write: Write) -> list[Tensor]:
        def forward_in_a_region() -> Tensor:
            with region(device):
                return forward()

        scenario = training(lambda loss: loss.backward()) if backward else evaluation
        return scenario(device, forward_in_a_region, write)

    wanted = run_all(stock, device)
    with amp.init(device_type=device, dtype=LOW, policies=table, loss_scale=1.0) as handle:
        check(run_all(training(backward) if backward else evaluation, device), wanted)


@pytest.mark.parametrize("table", ["apex", "torch"])
@pytest.mark.parametrize("how", ["region", "no_grad region", "init, evaluation", "init, training"])
def test_nothing_refers_to_a_weight_afterwards(
    device: str, uninstalled: None, table: str, how: str
) -> None:
    """torch.utils.swap_tensors, and Module.to where it swaps, refuse a weight with references."""
    linear, x = nn.Linear(SIZE, SIZE).to(device), torch.randn(ROWS, SIZE, device=device)
    if "region" in how:
        install(table, device)
        gradients: AbstractContextManager[Any] = torch.no_grad() if "no" in how else nullcontext()
        with gradients, region(device):
            linear(x)
    else:
        with amp.init(device_type=device, dtype=LOW, policies=table, loss_scale=1.0):
            with torch.set_grad_enabled("training" in how):
                out = linear(x)
            if out.requires_grad:
                amp.casting.backward(out.float().mean())
                linear.zero_grad()
            torch.utils.swap_tensors(linear.weight, nn.Parameter(torch.ones_like(linear.weight)))
    torch.utils.swap_tensors(linear.weight, nn.Parameter(torch.ones_like(linear.weight)))
    assert bool((linear.weight == 1).all())


def test_a_critic_is_clipped_after_our_step(device: str, uninstalled: None) -> None:
    """As in WGAN: the optimizer steps, and `.data` is clamped behind its back."""
    critic, x = nn.Linear(SIZE, SIZE, bias=False).to(device), torch.randn(ROWS, SIZE).to(device)
    optimizer = amp.optim.SGD(critic.parameters(), lr=1.0)
    for _ in range(3):
        with amp.autocast(device, LOW):
            out = critic(x)
        assert is_equal(out, nn.functional.linear(x.to(LOW), critic.weight.to(LOW)))
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for param in critic.parameters():
            param.data.clamp_(-0.001, 0.001)
