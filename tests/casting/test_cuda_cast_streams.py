"""Copies of weights among CUDA streams: one is taken only where an order says that it is ready."""

from __future__ import annotations

import pytest
import torch
from helpers import PRETEND_GPU
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import _C

DEVICE = "cuda"
pytestmark = pytest.mark.usefixtures("cuda")


def hold_up() -> None:
    """What is queued next on the current stream runs later than the host goes on."""
    if not PRETEND_GPU:
        torch.cuda._sleep(100_000_000)


def copy_of(weight: Tensor) -> Tensor:
    """The cached copy of a weight."""
    return _C.casting.cached()[weight]


@pytest.mark.parametrize("keep", [False, True])
def test_two_branches_on_two_streams_share_a_weight(keep: bool) -> None:
    """Both streams wait for the weight, and neither for the other: each casts it itself."""
    weight, x = nn.Parameter(torch.eye(64, device=DEVICE)), torch.ones(64, 64, device=DEVICE)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    copies, results = [], []
    with amp.autocast(DEVICE, dtype=torch.bfloat16, keep_casts=keep):
        for stream in streams:
            with torch.cuda.stream(stream):
                if not results:
                    hold_up()
                results.append(x @ weight)
                copies.append(copy_of(weight))
                results.append(x @ weight)
                assert copy_of(weight).data_ptr() == copies[-1].data_ptr()
        assert copies[0].data_ptr() != copies[1].data_ptr()
    torch.cuda.synchronize()
    for result in results:
        assert result.eq(1).all()


def test_one_stream_casts_a_weight_once() -> None:
    weight, x = nn.Parameter(torch.eye(8, device=DEVICE)), torch.ones(8, 8, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()), amp.autocast(DEVICE, dtype=torch.bfloat16):
        x @ weight
        copy = copy_of(weight)
        x @ weight
        assert copy_of(weight).data_ptr() == copy.data_ptr()


def test_a_copy_that_the_step_wrote_serves_every_stream() -> None:
    """It is ready when the weight is, for which the other stream waits in any case."""
    weight, x = nn.Parameter(torch.eye(8, device=DEVICE)), torch.ones(8, 8, device=DEVICE)
    optimizer = amp.optim.SGD([weight], lr=0.5)
    beside = torch.cuda.Stream()

    def product() -> Tensor:
        with amp.autocast(DEVICE, dtype=torch.bfloat16, keep_casts=True):
            return (x @ weight).float()

    try:
        product().sum().backward()
        optimizer.step()
        copy = copy_of(weight)
        hold_up()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            found = product()
            assert copy_of(weight).data_ptr() == copy.data_ptr()
            assert torch.equal(found, x @ weight.detach().bfloat16().float())
        torch.cuda.synchronize()
    finally:
        amp.casting.clear_cache()
