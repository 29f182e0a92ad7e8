"""Streams that are late: of the pretend GPU by its own means, of a GPU by kernels that wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import PRETEND_GPU
from tiers import tiered
from torch import Tensor

HELD_UP = 20_000_000  # cycles: some milliseconds
ORDERS = [f"cuda-order{order}" for order in range(4 if PRETEND_GPU else 1)]  # of delayed kernels


@contextmanager
def late(seed: int) -> Iterator[None]:
    """Kernels run as late as their streams permit, in one of the orders that these permit.

    AMP_MP_DELAYED_STREAMS gives others for the same seeds.
    """
    if not PRETEND_GPU:
        yield
        return
    from pretend_gpu.device import delayed_streams

    with delayed_streams(seed + 1000 * int(os.environ.get("AMP_MP_DELAYED_STREAMS") or 0)):
        yield


def late_in(chosen: list[str]) -> Any:
    """The fixture `cuda` of a file: kernels are late in each of ORDERS, of which some are chosen.

    chosen: those that are not marked `full`.
    """

    @pytest.fixture(name="cuda", params=tiered(ORDERS, chosen))
    def cuda(request: pytest.FixtureRequest) -> Iterator[None]:
        with late(int(request.param[-1])):
            yield

    return cuda


def hold_up() -> None:
    """What is queued next on the current stream runs later than the host goes on."""
    if not PRETEND_GPU:
        torch.cuda._sleep(HELD_UP)


def take_memory() -> list[Tensor]:
    """Writes into all small memory that the current stream's allocator has free.

    What a script does that reads its next batch on a stream of its own.
    """
    sizes = [(128 * blocks,) for blocks in range(1, 9) for _ in range(6)]
    return [torch.full(size, 3e33, device="cuda") for size in sizes]
