"""Updates beside weights: which of them a format loses, and what training without them does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from counting import UP, stepped
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import amp_mp as amp
from amp_mp.diagnose import UpdateRatios


@pytest.mark.parametrize(
    ("weight", "update", "fate"),
    [
        (1.0, 2.0**-12 / UP, "lost"),
        (1.0, -(2.0**-12) / UP, "lost"),
        (1.0, -(2.0**-12), "between"),  # a tie: the spacing below 1 is half that above
        (1.0, 2.0**-11, "between"),  # a tie, which goes to 1
        (1.0, 2.0**-11 * UP, "kept"),
        (1.0, -(2.0**-11) * UP, "kept"),
        (2 - 2.0**-10, 2.0**-12, "lost"),  # 2^-11 is half the spacing here: a ratio of 2^-12
        (2 - 2.0**-10, 2.0**-11, "between"),
        (2.0**-24, 2.0**-25 / UP, "lost"),  # subnormal: however large the ratio
        (2.0**-24, 2.0**-25, "between"),
        (2.0**-24, 2.0**-25 * UP, "kept"),
        (2.0**-14, -(2.0**-25) / UP, "lost"),  # the spacing below is that of the subnormals
        (0.0, 2.0**-25 * UP, "kept"),
        (0.0, 2.0**-26, "lost"),
    ],
)
def test_which_updates_float16_loses(weight: float, update: float, fate: str) -> None:
    row = stepped(np.array([weight]), np.array([update]))
    assert (row.elements, getattr(row, fate)) == (1, 1)
    assert row.dtype == torch.float16


def test_bfloat16_loses_updates_eight_times_as_large() -> None:
    weight = np.ones(3)
    update = np.array([2.0**-9 / 1.01, 2.0**-8, 2.0**-8 * 1.01])
    row = stepped(weight, update, dtype=torch.bfloat16)
    assert (row.lost, row.between, row.kept) == (1 / 3, 1 / 3, 1 / 3)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_certain_is_certain(seed: int) -> None:
    """Rounds to float16 by NumPy: what is said to be lost is lost, what to be kept is kept."""
    generator = np.random.default_rng(seed)
    size = 500
    half = (generator.standard_normal(size) * np.exp2(generator.uniform(-26, 4, size))).astype("f2")
    weight = half.astype(np.float64)
    ratio = np.exp2(generator.uniform(-15, -8, size)) * generator.choice([-1, 1], size)
    update = np.where(weight == 0, 2.0**-25, weight) * ratio
    moved = (weight - (-update).astype(np.float32)).astype(np.float32)
    change = moved.astype(np.float64) - weight  # the step's, exact
    same = (weight + change).astype(np.float16) == half
    size_of = np.abs(weight)
    lost = np.abs(change) < np.maximum(size_of * 2.0**-12, 2.0**-25)
    kept = np.abs(change) > np.maximum(size_of * 2.0**-11, 2.0**-25)
    assert same[lost].all()
    assert not same[kept].any()
    row = stepped(weight, update)
    assert row.elements == size
    assert row.lost == lost.mean()
    assert row.kept == kept.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.sort((np.abs(change) / size_of)[weight != 0])
    assert row.median == ratios[(len(ratios) - 1) // 2]


def test_the_median_is_the_layers_and_elements_at_rest_are_left_out() -> None:
    model = nn.Linear(2, 3)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.0, 0.0]])
    model.bias.grad = torch.tensor([0.25, 0.125, 0.0])
    with UpdateRatios(nn.ModuleDict({"layer": model})) as ratios:
        optimizer.step()
        model.zero_grad()
        optimizer.step()
    assert [row.elements for row in ratios.report()] == [1, 2]
    assert ratios.medians == {"layer": 0.25}
    table = str(ratios.report()).splitlines()
    assert table[2].split()[:3] == ["layer.weight", "float16", "1"]
    assert table[2].split()[3:] == ["0.00%", "0.00%", "100.00%", "0.25"]
    ratios.reset()
    assert str(ratios.report()) == "no step of an optimizer has been seen"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_are_what_is_measured(device: str, dtype: torch.dtype) -> None:
    model = nn.Linear(1, 2, bias=False)
    nn.init.ones_(model.weight)
    optimizer = amp.optim.SGD(amp.prepare(model.to(device), dtype).parameters(), lr=1.0)
    eps = torch.finfo(dtype).eps
    with UpdateRatios(optimizer) as ratios:
        for _ in range(2):
            model.weight.grad = torch.tensor([[eps / 5], [eps]], dtype=dtype, device=device)
            optimizer.step()
    (row,) = ratios.report()
    assert row[:6] == ("group 0[0]", dtype, 4, 0.5, 0, 0.5)


def test_of_two_optimizers_in_turns_each_step_is_measured_from_where_the_other_left(
    device: str,
) -> None:
    """Each is a power of two far below the weights' last bit, so that both see every step."""
    model = nn.Linear(1, 4, bias=False)
    nn.init.ones_(model.weight)
    amp.prepare(model.to(device), torch.bfloat16)
    makers = [amp.optim.SGD(model.parameters(), lr=1.0, memory=m) for m in ("exact", "float32")]
    with UpdateRatios(makers[0]) as ratios:
        for turn in range(8):
            model.weight.grad = torch.full_like(model.weight, 2.0**-12)
            before = ratios.steps
            makers[turn % 2].step()
            assert ratios.steps - before == (turn % 2 == 0)
            if turn % 2 == 0:
                (median,) = ratios.medians.values()
                assert median == pytest.approx(2.0**-12, rel=2.0**-8)
    (row,) = ratios.report()
    assert row[2:6] == (16, 1.0, 0, 0.0)  # 4 steps of 4 weights, none of which moves
    assert bool((amp.float32_of(model.weight) == 1 - 2.0**-9).all())


def test_without_masters_what_happened_is_shown(device: str) -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16, device=device))
    optimizer = torch.optim.SGD([("weight", param)], lr=1.0)
    param.grad = torch.tensor([2.0**-10, -(2.0**-8), 2.0**-7, 0], dtype=param.dtype, device=device)
    with UpdateRatios(optimizer) as ratios:
        optimizer.step()
    (row,) = ratios.report()
    assert row[:6] == ("weight", torch.bfloat16, 3, 2 / 3, 0, 1 / 3)


def test_a_skipped_step_is_not_counted(device: str) -> None:
    param = nn.Parameter(torch.ones(4, device=device))
    optimizer = amp.optim.SGD([param], lr=0.1, check_overflow=True)
    with UpdateRatios(optimizer) as ratios:
        param.grad = torch.tensor([1.0, 1.0, 1.0, math.inf], device=device)
        optimizer.step()
        assert not ratios.report()
        param.grad = torch.ones(4, device=device)
        optimizer.step()
    assert ratios.report()[0].elements == 4
    param.grad.fill_(1)
    optimizer.step()
    assert ratios.report()[0].elements == 4, "closed"


def test_fp16_optimizer_is_measured_by_its_masters() -> None:
    model = nn.Linear(2, 1).half()
    optimizer = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    with UpdateRatios(optimizer) as ratios:
        optimizer.backward(model(torch.ones(1, 2).half()).sum())
        optimizer.step()
    assert [row[:3] for row in ratios.report()] == [
        ("group 0[0]", torch.float16, 2),
        ("group 0[1]", torch.float16, 1),
    ]


def test_bad_arguments_of_update_ratios() -> None:
    with pytest.raises(TypeError, match="takes an optimizer or a module, found list"):
        UpdateRatios([])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"dtype must be torch\.float32, torch\.float16 or torch\.bfloat16"
    ):
        UpdateRatios(dtype=torch.float64)
