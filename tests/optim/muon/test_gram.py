"""Newton-Schulz on the Gram matrices of long matrices, against float64 and the direct products."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from orthogonality import DTYPES, SPECTRA, distance, matrices, parts_of, polar
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import _C

SETS = ("quintic", "cans", "polar_express", "deepseek")


def made(stack: Tensor, factor: float = 1.0, **group: Any) -> Tensor:
    own = stack.clone()
    _C.orthogonalise_(own, group, factor)
    return own


@cache
def cases() -> list[tuple[Tensor, Any]]:
    """Stacks of matrices with their singular vectors and values."""
    source = torch.Generator().manual_seed(1)
    stacks = []
    for shape in ((24, 96), (96, 24), (32, 32)):
        stacks += [matrices(shape, spectrum, 2, seed=3) for spectrum in SPECTRA]
        # Of rank 1: other singular values are rounding errors, which grow from 0.
        sides = [torch.randn(2, n, 1, generator=source) for n in shape]
        stacks.append((sides[0] @ sides[1].mT).bfloat16())
    return [(stack, parts_of(stack)) for stack in stacks]


# What rounds: the elements of the update, by 2^-9 of their size at most. Independent errors of that
# size have a norm of 2^-9 (1 + sqrt(short / long)) of the update's, which is at most 1.2. Before,
# in float32: the Gram matrix by 2^-24, which grows to at most 2^-12, and X by 2^-24, which grows by
# the polynomials' slope at 0. Without a new Gram matrix the last two sets are off by .5 and 1e18.
@pytest.mark.parametrize(
    ("name", "steps"), [*((name, None) for name in SETS), ("cans", 3), ("cans", 0)]
)
def test_updates_are_float64s_up_to_their_rounding(
    device: str, name: str, steps: int | None
) -> None:
    group = {"ns_coefficients": name, "ns_steps": steps, "ns_dtype": torch.float32}
    slope = math.prod(each[0] for each in _C.ns_iterations(group))
    unit = 1.2 * 2**-8 + 2**-24 * (2**12 + slope)
    for stack, parts in cases():
        found = made(stack.to(device), 0.7, **group, ns_gram=True)
        assert distance(found.cpu(), 0.7 * polar(parts, group)) <= 0.7 * unit, stack.shape


@pytest.mark.parametrize("name", SETS)
def test_low_precision_is_nearer_to_float64_than_without(device: str, name: str) -> None:
    """Products are float32's on a CPU and float16's on a GPU, never bfloat16's."""
    group = {"ns_coefficients": name}
    for stack, parts in cases()[1:3]:  # the spectra with small values
        wanted = polar(parts, group)
        without = distance(made(stack.to(device), **group).cpu(), wanted)
        for dtype in DTYPES[:2]:
            found = made(stack.to(device), **group, ns_dtype=dtype, ns_gram=True)
            assert distance(found.cpu(), wanted) < without / (2 if device == "cpu" else 1), dtype


def test_auto_is_for_matrices_twice_as_long_as_wide(device: str) -> None:
    source = torch.Generator().manual_seed(2)
    for shape in ((24, 47), (47, 24), (24, 48), (48, 24), (24, 24)):
        stack = torch.randn(2, *shape, generator=source).bfloat16().to(device)
        kinds = [made(stack, ns_gram=kind) for kind in (False, True)]
        assert not torch.equal(*kinds)
        assert torch.equal(made(stack), kinds[0])
        assert torch.equal(made(stack, ns_gram="auto"), kinds[48 in shape])


def test_auto_reads_the_shape_of_blocks(device: str) -> None:
    values = torch.randn(48, 48, generator=torch.Generator().manual_seed(3)).to(device)

    def stepped(split: int, ns_gram: Any) -> Tensor:
        weight = nn.Parameter(torch.zeros_like(values))
        optimizer = amp.optim.Muon([{"params": [weight], "split": split}], ns_gram=ns_gram)
        weight.grad = values.clone()
        optimizer.step()
        return weight.detach()

    for split, is_long in ((1, False), (2, True)):
        kinds = [stepped(split, kind) for kind in (False, True)]
        assert not torch.equal(*kinds)
        assert torch.equal(stepped(split, "auto"), kinds[is_long])


def test_a_run_without_the_number_resumes_with_products_as_they_were(device: str) -> None:
    """A file may lack ns_gram."""
    weight = nn.Parameter(torch.ones(8, 32, device=device))
    optimizer = amp.optim.Muon([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    state = optimizer.state_dict()
    del state["param_groups"][0]["ns_gram"]
    again = nn.Parameter(weight.detach().clone())
    resumed = amp.optim.Muon([again])
    resumed.load_state_dict(state)
    again.grad = weight.grad.clone()
    optimizer.step()
    resumed.step()
    assert torch.equal(weight, again)
