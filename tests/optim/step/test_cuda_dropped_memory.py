"""What amp_mp keeps from one call to the next is dropped on a stream that did not make it.

As in test_cuda_stream_memory.py: the stream that made it takes the memory again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from streams import ORDERS, hold_up, late_in, take_memory
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.optim.base import stepper_of

DEVICE = "cuda"
pytestmark = pytest.mark.usefixtures("cuda")
cuda = late_in(ORDERS)


def adamw(params: Any, **more: Any) -> amp.optim.AdamW:
    return amp.optim.AdamW(params, lr=1e-2, **more)


def on_streams(part: Callable[[Any, Any], list[Tensor]]) -> None:
    """The part's tensors have the same bits on two streams as on one."""
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    wanted = [t.detach().cpu() for t in part(here, here)]
    found = part(here, beside)
    torch.cuda.synchronize()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.detach().cpu(), b)


def low_precision(memory: str = "exact", **how: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    model = amp.prepare(nn.Linear(16, 8).to(DEVICE), torch.bfloat16)
    return model, adamw(model.parameters(), memory=memory, **how)


def fill_gradients(model: nn.Module) -> None:
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.25 * (number + 1))


@contextmanager
def on(stream: Any, after: Any) -> Iterator[None]:
    """A block on the stream, which waits for another first, and is held up."""
    stream.wait_stream(after)
    with torch.cuda.stream(stream):
        hold_up()
        yield


@pytest.mark.parametrize("memory", ["float32", "exact", "lean"])
def test_a_first_step_on_another_stream_than_prepare(memory: str) -> None:
    """The float32 values that prepare kept are read by the first step, which drops them."""

    def part(here: Any, beside: Any) -> list[Tensor]:
        model, optimizer = low_precision(memory)
        with on(beside, here):
            fill_gradients(model)
            optimizer.step()
        take_memory()
        here.wait_stream(beside)
        return list(optimizer.state[model.weight].values())

    on_streams(part)


@pytest.mark.parametrize("memory", ["float32", "lean", "tiny"])
def test_state_that_follows_its_parameter_on_another_stream(memory: str) -> None:
    """The step brings the state to the layout that the weights have now, and drops the old one."""

    def part(here: Any, beside: Any) -> list[Tensor]:
        torch.manual_seed(5)
        model = nn.Conv2d(8, 32, 3).to(DEVICE, torch.bfloat16)
        optimizer = adamw(model.parameters(), memory=memory)
        fill_gradients(model)
        optimizer.step()
        model.to(memory_format=torch.channels_last)
        with on(beside, here):
            fill_gradients(model)
            optimizer.step()
        take_memory()
        here.wait_stream(beside)
        return [model.weight, *optimizer.state[model.weight].values()]

    on_streams(part)


def test_averages_that_are_swapped_out_on_another_stream() -> None:
    def part(here: Any, beside: Any) -> list[Tensor]:
        model, optimizer = low_precision()
        averaged = amp.AveragedModel(model, optimizer)
        swap = averaged.swap()
        swap.__enter__()
        with on(beside, here):
            swap.__exit__(None, None, None)
        take_memory()
        here.wait_stream(beside)
        return list(model.parameters())

    on_streams(part)


def test_losses_that_go_backward_on_different_streams() -> None:
    """The second loss's block adds what the first one's left, and drops it."""

    def part(here: Any, beside: Any) -> list[Tensor]:
        handle = amp.init(device_type=DEVICE, dtype=torch.float16, loss_scale=8.0)
        weight = torch.ones(40, device=DEVICE, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1e-2)
        with handle.scale_loss((weight * 2).sum(), optimizer) as scaled:
            scaled.backward()
        del scaled  # with its graph, which knows the stream
        with on(beside, here), handle.scale_loss((weight * 3).sum(), optimizer) as scaled:
            scaled.backward()
        take_memory()
        here.wait_stream(beside)
        handle._deactivate()
        return [weight.grad]

    on_streams(part)


def test_statistics_that_a_user_asks_for_on_another_stream() -> None:
    """The sums of spans are added where the rows are asked for, and dropped there."""

    def part(here: Any, beside: Any) -> list[Tensor]:
        model, optimizer = low_precision()
        fill_gradients(model)
        measured = stepper_of(optimizer).measure()
        with on(beside, here):
            found = next(iter(measured.totals().values()))
            optimizer.step()
        del measured
        take_memory()
        here.wait_stream(beside)
        return [found, *model.parameters()]

    on_streams(part)
