"""When an update is lost because the weight is too large beside it: why there are float32 masters.

A weight is stored to p bits after the point. In its binade steps are 2^-p of the power of two below
it; an update under half a step rounds away, one of exactly half a step goes to the even neighbour.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import amp_mp as amp
from amp_mp import _C

PRECISIONS = [(torch.float16, 10), (torch.bfloat16, 7)]


def weights(dtype: torch.dtype, p: int, k: int, device: str) -> Tensor:
    """2^k (1 + m / 2^p) for every m."""
    exact = (1 + torch.arange(2**p, dtype=torch.float64) / 2**p) * 2.0**k
    return exact.to(dtype).to(device)


def next_above(x: Tensor) -> Tensor:
    """Of the format's numbers; on the CPU, where torch has it for float16."""
    return torch.nextafter(x.cpu(), torch.tensor(math.inf, dtype=x.dtype)).to(x.device)


def next_below(x: Tensor) -> Tensor:
    return -next_above(-x)


@pytest.mark.parametrize(("dtype", "p"), PRECISIONS)
@pytest.mark.parametrize("k", [-1, 0, 1, 5])
def test_up_to_2_to_the_minus_12_of_a_weight_all_is_lost_above_2_to_the_minus_11_nothing(
    device: str, dtype: torch.dtype, p: int, k: int
) -> None:
    """float16; for bfloat16 2^-9 and 2^-8."""
    w = weights(dtype, p, k, device)
    small, large = w * 2.0 ** -(p + 2), w * 2.0 ** -(p + 1)  # exact
    assert torch.equal(w + small, w)
    assert torch.equal(w - small, w)
    # At the ratio itself a power of two does not grow: a tie.
    assert (w + large == w).tolist() == [True] + [False] * (2**p - 1)
    assert (w - large != w).all()
    larger = next_above(large)
    assert (w + larger != w).all()
    assert (w - larger != w).all()


@pytest.mark.parametrize(("dtype", "p"), PRECISIONS)
def test_between_the_two_it_depends_on_the_mantissa(
    device: str, dtype: torch.dtype, p: int
) -> None:
    """Lost below half a step, 2^-(p + 1) in [1, 2); at half a step the even neighbour wins."""
    half_step = torch.tensor(2.0 ** -(p + 1), dtype=dtype, device=device)
    less, more = next_below(half_step), next_above(half_step)
    w = weights(dtype, p, 0, device)
    odd = torch.arange(2**p, device=device) % 2 == 1
    assert torch.equal(w + less, w)
    assert torch.equal(w + half_step != w, odd)
    assert (w + more != w).all()
    # Below a power of two steps are half as large, so 1 shrinks already above a quarter step.
    assert torch.equal(w[1:] - less, w[1:])
    one = w[0]
    assert one - half_step / 2 == one
    assert one - next_above(half_step / 2) == 1 - 2.0 ** -(p + 1)


@pytest.mark.parametrize(
    ("dtype", "quantum"), [(torch.float16, 2.0**-24), (torch.bfloat16, 2.0**-133)]
)
def test_subnormal_weights_move_by_quanta(device: str, dtype: torch.dtype, quantum: float) -> None:
    updates = [quantum / 4, quantum / 2, quantum * 0.75, quantum]
    moved = {2: [2, 2, 3, 3], 3: [3, 4, 4, 4]}  # even and odd
    for start, wanted in moved.items():
        sums = torch.tensor([start * quantum + u for u in updates], device=device)
        by_amp = torch.empty_like(sums, dtype=dtype)
        _C.copy_([by_amp], [sums])
        for stored in (sums.to(dtype), by_amp):
            assert (stored.double() / quantum).tolist() == wanted


@pytest.mark.parametrize(("dtype", "p"), PRECISIONS)
def test_a_float32_master_keeps_the_updates_that_the_weight_loses(
    device: str, dtype: torch.dtype, p: int
) -> None:
    """Four quarter steps: nothing in low precision, a step with a master."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=dtype, device=device))
    lost = weight.detach().clone()
    gradient = torch.full_like(lost, -(2.0 ** -(p + 2)))
    optimizer = amp.optim.SGD([weight], lr=1.0)
    for _ in range(4):
        lost -= gradient
        weight.grad = gradient.clone()
        optimizer.step()
    assert lost.item() == 1.0
    assert weight.item() == 1 + 2.0**-p
