"""How far a norm is from the exact one, and from that of the same gradient in other shards.

docs/distributed.md says where both bounds are from.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from amp_mp import _C

ROUNDING = 2.0**-24  # how far float32 rounds, as part of the number
LANES, BLOCK = 64, 4096  # csrc/core/reduce.h
CUTS = (1, 2, 3, 8, 64)


def norm(grad: Tensor, cuts: int) -> float:
    """The norm of a gradient whose shards are summed apart and added in double."""
    return math.sqrt(sum(float(_C.measure([part.clone()])[-1, 0]) for part in grad.chunk(cuts)))


def exact(grad: Tensor) -> float:
    return math.sqrt(math.fsum(grad.double().square().tolist()))


def swallowed(count: int) -> Tensor:
    """The first element of each lane is 1, so that the squares of the others are rounded away."""
    grad = torch.full((count,), 2.0**-12.5 * 0.999)
    grad.view(-1, BLOCK)[:, :LANES] = 1.0
    return grad


GRADIENTS = {
    "one number": lambda n: torch.full((n,), 0.1),
    "swallowed": swallowed,
    "log-normal": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(0)).mul(3).exp(),
    "one large": lambda n: torch.full((n,), 1e-4).index_fill_(0, torch.tensor([n // 3]), 1.0),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_no_gradient_exceeds_the_bound_of_a_lane(kind: str) -> None:
    """A lane of 64 squares is rounded 64 times, and a norm has half of its error."""
    grad = GRADIENTS[kind](4 * BLOCK)
    wanted = exact(grad)
    for cuts in CUTS:
        assert norm(grad, cuts) == pytest.approx(wanted, rel=LANES * ROUNDING / 2)


def test_the_bound_is_nearly_reached() -> None:
    grad = swallowed(BLOCK)
    whole, wanted = norm(grad, 1), exact(grad)
    assert 1 - whole / wanted > 0.4 * LANES * ROUNDING / 2
    shards = math.hypot(norm(grad[:LANES], 1), norm(grad[LANES:], 1))  # nothing is swallowed
    assert shards == pytest.approx(wanted, rel=ROUNDING)
    assert shards != pytest.approx(whole, rel=10 * ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "trials"), [(1, 64), (100, 64), (BLOCK, 64), (10**6, 2)])
def test_norms_of_normal_gradients_hardly_depend_on_the_shards(
    size: int, trials: int, dtype: torch.dtype
) -> None:
    bound = ROUNDING * min(1.0, math.sqrt(BLOCK / size))
    for seed in range(trials):
        source = torch.Generator().manual_seed(seed)
        grad = torch.randn(size, generator=source).to(dtype)
        found = [norm(grad, cuts) for cuts in CUTS]
        assert found == pytest.approx([found[0]] * len(CUTS), rel=bound, abs=0)
        assert found[0] == pytest.approx(exact(grad), rel=ROUNDING, abs=0)
