"""Norms of whole tensors, gathered from the processes that hold the parts: LARS, LAMB, NovoGrad.

The numbers are small integers, of which float32 and double add squares exactly. So the norm of the
whole is the same number however it was added, and the steps must be equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import cuts
import numpy as np
import pytest
import torch
from cuts import Blocks
from torch import Tensor

from amp_mp import _C

SHAPE = (40, 96)
WHOLE = cuts.cuts(SHAPE, [], [])
HALVES = cuts.cuts(SHAPE, [16], [])
FORMATS = {
    "lars_": ("bfloat16_stochastic",),
    "novograd_": ("bfloat16_stochastic",),
    "lamb_": ("float32", "float32"),
}
OPERATORS = list(FORMATS)
# With these m is g, v is g^2 and LAMB's update the sign of g plus w / 2.
LAMB = {**cuts.HYPER, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.5, "eps": 0.0}


def integers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 9, SHAPE[0] * SHAPE[1]).astype(np.float32)


def values(seed: int) -> np.ndarray:
    return integers(seed) if seed == 1 else np.zeros(SHAPE[0] * SHAPE[1], np.float32)


def blocks(device: str, parts: list[cuts.Cut], operator: str) -> Blocks:
    weight = "float32" if operator == "lamb_" else "bfloat16_stochastic"
    found = Blocks(device, SHAPE, parts, operator, weight, FORMATS[operator], values=values)
    found.hyper = _C.Hyper(**(LAMB if operator == "lamb_" else cuts.HYPER))
    found.set_gradients(torch.from_numpy(integers(9) + 0.5))  # no zeros
    return found


def added(parts: list[Tensor]) -> Tensor:
    """The statistics [n, 3] of whole tensors from those of their parts."""
    each = torch.stack(parts)
    return torch.stack([each[..., 0].sum(0), each[..., 1].amax(0), each[..., 2].sum(0)], 1)


def whole_rows(rows: Tensor) -> Tensor:
    """The rows of slots that are the parts of one tensor: each gets the rows of the whole."""
    return added([row[None] for row in rows]).repeat(len(rows), 1)


def gathered(of: _C.Measurement) -> _C.Measurement:
    return _C.Measurement(_C.combine(whole_rows(of.rows[:-1])))


def step_parts(parts: Blocks, skip: bool = False) -> list[Tensor]:
    """A step with all norms gathered; returns what sum_updates was called with."""
    calls: list[Tensor] = []

    def sum_updates(rows: Tensor) -> Tensor:
        calls.append(rows.clone())
        return whole_rows(rows)

    measured, weights = gathered(parts.slots.measure()), gathered(parts.slots.measure_weights())
    parts.step(skip, measured=measured, weights=weights, sum_updates=sum_updates)
    return calls


@pytest.mark.parametrize("operator", OPERATORS)
def test_halves_step_as_the_whole_does(device: str, operator: str) -> None:
    whole, halves = blocks(device, WHOLE, operator), blocks(device, HALVES, operator)
    before = whole.raw()["weight"]
    whole.step(measure=True)
    calls = step_parts(halves)
    assert not np.array_equal(whole.raw()["weight"], before)
    for name, wanted in whole.raw().items():
        assert np.array_equal(halves.raw()[name], wanted), name
    assert torch.equal(halves.clocks[0], whole.clocks[0])
    assert len(calls) == (operator == "lamb_")


@pytest.mark.parametrize("operator", OPERATORS)
def test_their_own_norms_step_them_elsewhere(device: str, operator: str) -> None:
    """What makes the test above able to fail."""
    whole, halves = blocks(device, WHOLE, operator), blocks(device, HALVES, operator)
    whole.step(measure=True)
    halves.step(measure=True)
    assert not np.array_equal(whole.raw()["weight"], halves.raw()["weight"])


@pytest.mark.parametrize("operator", OPERATORS)
def test_weights_are_those_that_the_step_measures(device: str, operator: str) -> None:
    own, given = blocks(device, HALVES, operator), blocks(device, HALVES, operator)
    own.step(measure=True)
    given.step(measure=True, weights=given.slots.measure_weights())
    for name, wanted in own.raw().items():
        assert np.array_equal(given.raw()[name], wanted), name
    rows = given.slots.measure_weights().rows
    assert torch.equal(rows, _C.measure([p.detach() for p in given.params]))


def test_updates_are_the_ones_that_lamb_makes(device: str) -> None:
    halves = blocks(device, HALVES, "lamb_")
    weights = [p.detach().double().cpu().numpy() for p in halves.params]
    grads = [p.grad.double().cpu().numpy() for p in halves.params if p.grad is not None]
    (rows,) = step_parts(halves)
    assert rows.device == halves.params[0].device
    assert rows.dtype == torch.float64
    for row, w, g in zip(rows.tolist(), weights, grads, strict=True):
        update = np.sign(g) + 0.5 * w
        assert row == [np.sum(update**2), np.abs(update).max(), 0]


@pytest.mark.parametrize("decided", [False, True])
def test_a_skipped_step_gathers_once_and_changes_nothing(device: str, decided: bool) -> None:
    halves = blocks(device, HALVES, "lamb_")
    before = [t.detach().clone() for t in halves.tensors()]
    versions = [p._version for p in halves.params]
    inputs: dict[str, Any] = {}
    if decided:
        inputs["inputs"] = _C.DecideInputs(found_inf=torch.ones(1, device=device))
    calls: list[Tensor] = []

    def sum_updates(rows: Tensor) -> Tensor:
        calls.append(rows.clone())
        return rows

    halves.step(not decided, measure=True, sum_updates=sum_updates, **inputs)
    assert [c.tolist() for c in calls] == [[[0.0] * 3] * 2]
    if device == "cpu":  # a GPU does not tell the host
        assert [p._version for p in halves.params] == versions
    for found, wanted in zip(halves.tensors(), before, strict=True):
        assert torch.equal(found, wanted)


def test_slots_without_gradients_are_rows_of_zeros(device: str) -> None:
    """Other processes may have gradients where this one has none."""
    parts = cuts.cuts(SHAPE, [3, 8, 20, 21, 33], [])
    for absent in ([0], [1, 2], [5], [0, 3, 5], [0, 1, 2, 3, 4, 5]):
        some = blocks(device, parts, "lamb_")
        for i in absent:
            some.params[i].grad = None
        untouched = [some.params[i].detach().clone() for i in absent]
        (rows,) = step_parts(some)
        assert rows.shape == (6, 3)
        assert [i for i, row in enumerate(rows.tolist()) if not any(row)] == absent
        measured = some.slots.measure_weights().rows
        assert [i for i, row in enumerate(measured[:-1].tolist()) if not any(row)] == absent
        for i, wanted in zip(absent, untouched, strict=True):
            assert torch.equal(some.params[i].detach(), wanted)


def test_what_is_gathered_is_checked(device: str) -> None:
    halves = blocks(device, HALVES, "lamb_")
    for wrong, error, message in (
        (
            torch.zeros(3, 3, dtype=torch.float64, device=device),
            ValueError,
            r"must have shape \[2, 3",
        ),
        (torch.zeros(2, 3, device=device), TypeError, "must be Double"),
    ):
        with pytest.raises(error, match=f"result of sum_updates.*{message}"):
            halves.step(measure=True, sum_updates=lambda rows, wrong=wrong: wrong)

    def fails(rows: Tensor) -> Tensor:
        raise KeyError("the other process is gone")

    with pytest.raises(KeyError, match="the other process is gone"):
        halves.step(measure=True, sum_updates=fails)
    short = _C.Measurement(torch.zeros(2, 3, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match="weights has 1 rows and a total, the slots are 2"):
        halves.step(measure=True, weights=short)
