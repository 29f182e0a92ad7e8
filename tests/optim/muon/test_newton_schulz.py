"""Polynomials, dtypes and sizes of Newton-Schulz, against float64 and the papers' definitions."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers import is_gpu
from numpy.typing import NDArray
from orthogonality import (
    DTYPES,
    LEAST,
    SPECTRA,
    composed,
    distance,
    matrices,
    orthogonal,
    parts_of,
    polar,
    singular_values,
)
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import _C

JORDAN = (3.4445, -4.775, 2.0315)
UNIT = 2.0**-8  # of bfloat16
SETS = ("quintic", "polar_express", "cans", "deepseek")
# Of the largest element of an update, how much a GPU's may differ, whose products add in another
# order in another stack or for another batch: tests/optim/muon/test_muon.py.
OF_ORDER = 12 * UNIT


# Where the published numbers send singular values of [.002, 1]: for cans, 1 +- .1134 of the best
# quintics, the margin of 1.01 widens the lower end by its square. Jordan 2024 and torch say .5 to
# 1.5 of quintic; the last steps of polar_express and deepseek converge to 1.
RANGES = {
    "quintic": (0.68, 1.2025),
    "cans": (0.8866 / 1.0205, 1.1135),
    "polar_express": (1.0, 1.0),
    "deepseek": (1.0, 1.00055),
}


def best_quintic(low: float, high: float) -> NDArray[Any]:
    """The odd polynomial of degree 5 that is nearest to 1 on an interval, by Remez' algorithm.

    Its error has one size and changing signs in four points: the ends, and where its slope is 0.
    """
    if low / high > 1 - 5e-6:
        return np.array([15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5])
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    for _ in range(50):
        points = np.array([low, *inner, high])
        signs = np.array([1, -1, 1, -1])
        system = np.stack([points, points**3, points**5, signs], 1)
        a, b, c, _ = np.linalg.solve(system, np.ones(4))
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
    return np.array([a, b, c])


def greedy(low: float, count: int, cushion: float = 0.0) -> NDArray[Any]:
    """Each the best for where the one before leaves [low, 1]: theorem 3.1 of arXiv 2505.16932.

    With a cushion it is made for at least that part of the upper end, and scaled to be central.
    """
    high, found = 1.0, []
    for _ in range(count):
        made = best_quintic(max(low, cushion * high), high)
        ends = [made @ [x, x**3, x**5] for x in (low, high)]
        made = made * 2 / sum(ends) if low < cushion * high else made
        low = made @ [low, low**3, low**5]
        high = 2 - low
        found.append(made)
    return np.array(found)


def polynomials(coefficients: Any, steps: int | None = None) -> list[tuple[float, ...]]:
    found = _C.ns_iterations({"ns_coefficients": coefficients, "ns_steps": steps})
    return [tuple(each) for each in found]


def without_margin(found: list[tuple[float, ...]]) -> np.ndarray:
    """As published: of all but the last, x was divided by 1.01."""
    powers = np.array([1.01, 1.01**3, 1.01**5])
    return np.array([*(np.array(each) * powers for each in found[:-1]), found[-1]])


def test_polar_express_and_cans_are_the_best_quintics_of_their_papers() -> None:
    cans = without_margin(polynomials("cans"))
    assert np.allclose(cans, greedy(1e-3, 5), rtol=1e-9)
    # As published, to four digits.
    assert tuple(cans[0].round(4)) == (8.4703, -25.1081, 18.6293)
    assert tuple(cans[4].round(4)) == (2.2737, -1.6447, 0.4162)
    express = without_margin(polynomials("polar_express"))
    assert np.allclose(express, greedy(1e-3, 8, cushion=0.02407327424182761), rtol=1e-8)


def test_names_triples_and_lists_say_how_many_iterations_there_are() -> None:
    assert polynomials("quintic") == polynomials(JORDAN) == [JORDAN] * 5
    assert polynomials("deepseek") == [JORDAN] * 8 + [(2.0, -1.5, 0.5)] * 2
    assert [len(polynomials(name)) for name in SETS] == [5, 8, 5, 10]
    listed = [(3.0, -3.0, 1.0), (2, -1.5, np.float32(0.5))]
    assert polynomials(listed) == [(3.0, -3.0, 1.0), (2.0, -1.5, 0.5)]
    assert polynomials(listed, 4) == [(3.0, -3.0, 1.0)] + [(2.0, -1.5, 0.5)] * 3
    assert polynomials("polar_express", 5) == polynomials("polar_express")[:5]
    assert polynomials("polar_express", 10)[7:] == [(1.875, -1.25, 0.375)] * 3
    assert polynomials(JORDAN, 0) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_singular_values_are_where_the_papers_have_them(name: str, dtype: torch.dtype) -> None:
    # Rounding to bfloat16 moves a small singular value of such a matrix by 1.5e-4 of the norm, and
    # the polynomials together have slopes of 485 to 1,000 there.
    slack = UNIT if dtype != torch.bfloat16 else 0.1 if name in ("quintic", "cans") else 3 * UNIT
    low, high = RANGES[name]
    group = {"ns_coefficients": name}
    for spectrum in SPECTRA:
        for shape in ((48, 80), (80, 48), (64, 64)):
            stack = matrices(shape, spectrum, 3, seed=3)
            found = singular_values(orthogonal(stack, dtype, group))
            assert found.min() >= low - slack, (spectrum, shape)
            assert found.max() <= high + min(slack, 3 * UNIT), (spectrum, shape)
            if dtype == torch.float32:
                norms = np.linalg.norm(stack.double().numpy(), axis=(1, 2))
                wanted = np.sort(composed(group, singular_values(stack) / norms[:, None]))
                assert np.abs(np.sort(found) - wanted).max() < UNIT, (spectrum, shape)


@pytest.mark.parametrize("name", SETS)
def test_a_matrix_of_one_singular_value_stays_bounded(device: str, name: str) -> None:
    """Its norm is its singular value, which rounding moves to above 1."""
    source = torch.Generator().manual_seed(1)
    for shape in ((64, 96), (48, 48), (7, 200)):
        outer = torch.randn(8, shape[0], 1, generator=source) @ torch.randn(
            8, 1, shape[1], generator=source
        )
        stack = outer.bfloat16().to(device)
        _C.orthogonalise_(stack, {"ns_coefficients": name})
        largest = torch.linalg.matrix_norm(stack.double().cpu(), 2)
        assert (largest - 1).abs().max() < 0.35, shape


class Training:
    """One matrix whose gradients have a size, and the norm of its update."""

    def __init__(self, device: str, dtype: torch.dtype, **options: Any) -> None:
        source = torch.Generator().manual_seed(5)
        self.values = torch.randn(48, 80, generator=source)
        self.weight = nn.Parameter(torch.zeros(48, 80, device=device, dtype=dtype))
        options = {"weight_decay": 0.0, "master": "float32", **options}
        self.optimizer = amp.optim.Muon([self.weight], lr=1.0, **options)

    def norm(self, size: float) -> float:
        """Of the first update."""
        self.weight.grad_dtype = torch.float32
        self.weight.grad = (self.values * size).to(self.weight.device)
        self.optimizer.step()
        return float(self.weight.detach().double().norm())


@pytest.mark.parametrize("ns_gram", [False, True])
@pytest.mark.parametrize("ns_dtype", DTYPES)
def test_updates_do_not_depend_on_the_gradients_size(
    device: str, ns_dtype: torch.dtype, ns_gram: bool
) -> None:
    options: dict[str, Any] = {"ns_dtype": ns_dtype, "ns_gram": ns_gram}
    norms = [
        Training(device, torch.float32, **options).norm(10.0**-exponent)
        for exponent in (0, 3, 6, 10, 12, 20, 30)
    ]
    assert min(norms) > 0.7 * math.sqrt(48)
    assert max(norms) / min(norms) < 1.01


def test_powers_of_two_change_no_bit(device: str) -> None:
    weights = []
    for exponent in (0, 40, 100):
        training = Training(device, torch.bfloat16)
        training.norm(2.0**-exponent)
        weights.append(training.weight.detach())
    assert all(torch.equal(weights[0], other) for other in weights)


def test_a_loss_scale_and_float16_gradients_lose_no_update(device: str) -> None:
    """Gradients of 1e-7 are nothing in float16 without a scale; the directions are bfloat16."""
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).to(device)
    updates = []
    for scale, size in ((2.0**16, 1e-7), (1.0, 1e-2)):
        weight = nn.Parameter(torch.zeros(64, 64, device=device, dtype=torch.float16))
        options: dict[str, Any] = {"lr": 0.02, "max_grad_norm": 1.0, "weight_decay": 0.0}
        optimizer = amp.optim.Muon([weight], memory="lean", **options)
        scaler = amp.GradScaler(device, init_scale=scale)
        scaler.scale(torch.ones((), device=device))
        weight.grad = (values * size * scale).half()
        scaler.step(optimizer)
        updates.append(float(weight.detach().float().norm()))
    assert updates[0] == pytest.approx(updates[1], rel=0.01)


def test_eps_is_torchs_bound(device: str) -> None:
    for size in (1e-2, 1e-8, 1e-10):
        ours = Training(device, torch.float32, eps=1e-7, momentum=0.0)
        twin = nn.Parameter(torch.zeros(48, 80))
        twin.grad = ours.values * size
        torch.optim.Muon([twin], lr=1.0, weight_decay=0.0, momentum=0.0).step()
        ours.norm(size)
        assert_equal_but_for_order(ours.weight.detach().cpu(), twin.detach(), device)


def assert_equal_but_for_order(found: Tensor, wanted: Tensor, device: str) -> None:
    """Equal bit for bit, and on a GPU within the bound above."""
    if not is_gpu(device):
        assert torch.equal(found, wanted)
    assert (found - wanted).abs().max() <= OF_ORDER * wanted.abs().max()


def test_zeros_stay_zeros(device: str) -> None:
    for dtype in DTYPES:
        for ns_gram in (False, True):
            training = Training(device, torch.float32, ns_dtype=dtype, ns_gram=ns_gram)
            assert training.norm(0.0) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ns_gram", [False, True])
@pytest.mark.parametrize("shape", [(5, 24, 40), (3, 40, 24), (2, 1, 7)])
def test_a_matrix_has_the_same_bits_in_any_stack(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], ns_gram: bool
) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16().to(device)
    alone = [each[None].clone() for each in stack]
    group = {"ns_coefficients": "polar_express", "ns_dtype": dtype, "ns_gram": ns_gram}
    _C.orthogonalise_(stack, group)
    for each in alone:
        _C.orthogonalise_(each, group)
    assert_equal_but_for_order(stack, torch.cat(alone), device)


def follow_blocks(weight: Tensor, whole: Any, apart: list[Any], each: Any, units: int) -> None:
    """Three steps of a matrix in blocks and of its blocks as matrices.

    The first block has the same bits. The others' rates are of other shapes, and go into the last
    polynomial, whose numbers are rounded once more. units: of bfloat16, that they may differ by.
    """
    sizes = [len(param) for param in apart]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(weight.shape, generator=generator).to(weight.device)
        weight.grad = grad.clone()
        for param, own in zip(apart, grad.split(sizes), strict=True):
            param.grad = own.clone()
        before = weight.detach().clone()
        whole.step()
        each.step()
        wanted = torch.cat([p.detach() for p in apart])
        assert (weight - wanted).abs().max() <= units * UNIT * (wanted - before).abs().max()
        whole_ones = sum(n for n in sizes if n == sizes[0])
        assert torch.equal(weight[:whole_ones], wanted[:whole_ones])
        with torch.no_grad():
            weight.copy_(wanted)


@pytest.mark.parametrize("adjust", ["original", "sqrt", "match_rms_adamw"])
@pytest.mark.parametrize("in_groups", [True, False])
def test_unequal_blocks_are_matrices_with_rates_of_their_own(
    device: str, adjust: str, in_groups: bool
) -> None:
    """Grouped heads: two query heads of 32 rows, one key and one value head of 16 each."""
    sizes = (32, 32, 16, 16)
    model = nn.ModuleDict({"qkv": nn.Linear(24, 96, bias=False)}).to(device)
    weight = model["qkv"].weight
    apart = [nn.Parameter(each.clone()) for each in weight.detach().split(sizes)]
    options: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": adjust, "ns_coefficients": "cans"}
    if in_groups:
        whole = amp.optim.Muon([{"params": [weight], "split": [*sizes]}], **options)
    else:
        whole = amp.optim.Muon(model, matrices="*", split={"qkv.*": sizes}, **options)
    follow_blocks(weight, whole, apart, amp.optim.Muon(apart, **options), 2)


def test_unequal_blocks_of_stacks_and_transposed_memory(device: str) -> None:
    values = torch.randn(3, 20, 12, generator=torch.Generator().manual_seed(1)).to(device)
    options: dict[str, Any] = {"lr": 0.02, "split": None}
    stack = nn.Parameter(values.clone())
    turned = nn.Parameter(values[0].t().contiguous().t())
    apart = [nn.Parameter(part.clone()) for each in values for part in each.split((12, 8))]
    assert not turned.is_contiguous()
    groups: list[dict[str, Any]] = [{"params": [stack], "split": (12, 8)}]
    groups += [{"params": [turned], "split": (12, 8)}, {"params": apart}]
    optimizer = amp.optim.Muon(groups, lr=options["lr"], weight_decay=0.0)
    for param in (stack, *apart):
        param.grad = param.detach().clone()
    turned.grad = values[0].clone()
    optimizer.step()
    wanted = torch.cat([p.detach() for p in apart]).view_as(values) - values
    assert_equal_but_for_order(stack.detach() - values, wanted, device)
    assert_equal_but_for_order(turned.detach() - values[0], wanted[0], device)


def test_momentum_0_is_the_gradient_itself(device: str) -> None:
    """A mean that is moved by its whole distance keeps what was rounded off the distance."""
    ours = nn.Parameter(torch.randn(32, 48, device=device))
    theirs = nn.Parameter(ours.detach().cpu().clone())
    one = amp.optim.Muon([ours], lr=0.02, momentum=0.0)
    two = torch.optim.Muon([theirs], lr=0.02, momentum=0.0)
    for size in (1e3, 1e-4, 1e5, 1e-12):
        grad = torch.randn(32, 48) * size
        ours.grad, theirs.grad = grad.to(device), grad.clone()
        one.step()
        two.step()
        assert torch.equal(one.state[ours]["momentum_buffer"].cpu(), grad)
        assert torch.equal(two.state[theirs]["momentum_buffer"], grad)


def test_names_go_to_torch_as_its_numbers(device: str) -> None:
    for given, wanted in (("quintic", (5, JORDAN)), ((2.0, -1.5, 0.5), (5, (2.0, -1.5, 0.5)))):
        ours = nn.Parameter(torch.randn(16, 8))
        own = amp.optim.Muon([ours], ns_coefficients=given)
        (group,) = own.torch_state_dict()["param_groups"]
        assert (group["ns_steps"], group["ns_coefficients"], group["eps"]) == (*wanted, 1e-7)
        stock = torch.optim.Muon([nn.Parameter(ours.detach().clone())])
        stock.load_state_dict(own.torch_state_dict())
        stock.param_groups[0]["params"][0].grad = torch.randn(16, 8)
        stock.step()
    own = amp.optim.Muon([nn.Parameter(torch.randn(16, 8))], ns_coefficients="deepseek")
    assert len(own.torch_state_dict()["param_groups"][0]["ns_coefficients"]) == 10


def test_options_are_saved_and_loaded(device: str) -> None:
    weight = nn.Parameter(torch.randn(16, 8, device=device))
    options: dict[str, Any] = {"ns_coefficients": "cans", "ns_dtype": torch.float32}
    optimizer = amp.optim.Muon([{"params": [weight], "split": [12, 4]}], **options)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    again = nn.Parameter(weight.detach().clone())
    resumed = amp.optim.Muon([again])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (group,) = resumed.param_groups
    assert (group["ns_coefficients"], group["ns_dtype"], group["split"]) == (
        *("cans", torch.float32),
        (12, 4),
    )
    grad = torch.randn_like(weight)
    weight.grad, again.grad = grad, grad.clone()
    optimizer.step()
    resumed.step()
    assert torch.equal(weight, again)


def test_a_schedule_may_change_the_polynomials(device: str) -> None:
    values: Tensor = torch.randn(16, 24, device=device)
    weight, other = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    optimizer = amp.optim.Muon([weight], lr=0.02)
    for name in SETS:
        optimizer.param_groups[0]["ns_coefficients"] = name
        oracle = amp.optim.Muon([other], lr=0.02, ns_coefficients=name, momentum=0.95)
        if optimizer.state[weight]:
            oracle.load_state_dict(optimizer.state_dict())
        weight.grad = torch.randn_like(weight)
        other.grad = weight.grad.clone()
        optimizer.step()
        oracle.step()
        assert torch.equal(weight, other)
    optimizer.param_groups[0]["ns_coefficients"] = "unknown"
    before = weight.detach().clone()
    with pytest.raises(ValueError, match="param_group 0: ns_coefficients must be"):
        optimizer.step()
    assert torch.equal(weight, before)


def test_the_polynomials_send_their_interval_where_the_page_says() -> None:
    values = np.geomspace(LEAST, 1.0, 20_001)
    for name in SETS:
        found = composed({"ns_coefficients": name}, values)
        assert (found.min(), found.max()) == pytest.approx(RANGES[name], abs=2e-3), name


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
