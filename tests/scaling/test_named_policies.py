"""Hysteresis, LogMax, AdaptiveGradScale and Tolerance against their sources' recurrences."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from loss_scales import script

from amp_mp import _C
from amp_mp.scaling import (
    AdaptiveGradScale,
    Backoff,
    Hysteresis,
    LogMax,
    ScalePolicy,
    Static,
    Tolerance,
)
from amp_mp.scaling.overflows import OverflowWatch
from amp_mp.scaling.policies import NO_CEILING


@dataclass
class ApexHysteresis:
    """NVIDIA/apex update_scale_hysteresis: found_inf takes one off the tracker; while it is still
    above zero only the growth tracker is reset; any clean step refills it."""

    scale: float
    growth: float
    backoff: float
    interval: int
    hysteresis: int
    floor: float = 1.0
    growth_tracker: int = 0

    def __post_init__(self) -> None:
        self.tracker = self.hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self.tracker -= 1
            self.growth_tracker = 0
            if self.tracker <= 0:
                self.scale = max(self.scale * self.backoff, self.floor)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.interval:
                self.scale, self.growth_tracker = min(self.scale * self.growth, NO_CEILING), 0
            self.refill()

    def refill(self) -> None:
        self.tracker = self.hysteresis


class MegatronHysteresis(ApexHysteresis):
    """Megatron-LM DynamicGradScaler: refilled only where the scale grows."""

    def refill(self) -> None:
        if self.growth_tracker == 0:
            self.tracker = self.hysteresis


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize(("refill", "source"), [("clean_step", ApexHysteresis),
                                                ("growth", MegatronHysteresis)])  # fmt: skip
def test_hysteresis_equals_its_source_step_by_step(
    refill: str, source: type[ApexHysteresis], patience: int
) -> None:
    policy = Hysteresis(2.0**10, 2.0, 0.5, 50, patience, refill=refill)
    wanted = source(2.0**10, 2.0, 0.5, 50, patience)
    for overflow in script(20_000, 0.02, seed=patience):
        policy.update(overflow)
        wanted.update(overflow)
        assert policy.scale == wanted.scale
    assert wanted.scale != 2.0**10


# LogMax, against the recurrences in double.


@dataclass
class LogMaxByDefinition:
    log_max: float = 16.0
    beta1: float = 0.99
    beta2: float = 0.999
    z: float = 3.09
    scale_min: float = 1.0
    scale_max: float = 2.0**24
    scale: float = 1.0
    m: float = 0.0
    s: float = 0.0
    q: float = 0.0
    steps: int = 0

    def update(self, overflow: bool, largest: float) -> None:
        if not overflow and largest == 0:
            return
        x = self.log_max if overflow else math.log2(largest)
        self.steps += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * x
        self.s = self.beta2 * self.s + (1 - self.beta2) * x
        self.q = self.beta2 * self.q + (1 - self.beta2) * x * x
        corrected = 1 - self.beta2**self.steps
        mean = self.m / (1 - self.beta1**self.steps)
        variance = max(self.q / corrected - (self.s / corrected) ** 2, 0.0)
        wanted = 2.0 ** (self.log_max - (mean + self.z * math.sqrt(variance)))
        self.scale = min(max(wanted, self.scale_min), self.scale_max)


def test_log_max_equals_its_definition() -> None:
    policy, wanted = LogMax(), LogMaxByDefinition()
    source = random.Random(5)
    for step in range(20_000):
        largest = 0.0 if step % 97 == 0 else 2.0 ** source.gauss(-3 + step / 4000, 1.0)
        overflow = source.random() < 0.002
        policy.update(overflow, largest)
        wanted.update(overflow, largest)
        # beta^t as running products against pow: 20,000 roundings of 2^-53 at most
        assert policy.scale == pytest.approx(wanted.scale, rel=2e-6)
    assert 1.0 < policy.scale < 2.0**24


def log_max_overflows(spread: float, steps: int) -> tuple[list[bool], int]:
    """Overflows of LogMax on log-normal maxima: the scaled maximum exceeds 2^log_max.

    Each step of a policy that is told the true maximum always; and how many of one that, as in
    training, is told only that there was an overflow.
    """
    exponents = np.random.default_rng(11).normal(-4.0, spread, steps)
    told, trained = (LogMax(scale_min=2.0**-40, scale_max=2.0**40).state_tensor for _ in range(2))
    update_told, update_trained = (_C.ScaleUpdate(policy=state) for state in (told, trained))
    yes, no = (torch.tensor(x, dtype=torch.float64) for x in (1.0, 0.0))
    largest = torch.empty((), dtype=torch.float64)
    seen, count = [], 0
    for exponent in exponents.tolist():
        largest.fill_(2.0**exponent)
        seen.append(exponent + math.log2(float(told[1])) >= 16.0)
        _C.update_scale_(update_told, no, largest)
        overflow = exponent + math.log2(float(trained[1])) >= 16.0
        count += overflow
        _C.update_scale_(update_trained, yes if overflow else no, largest)
    return seen, count


@pytest.mark.full
@pytest.mark.slow
def test_log_max_overflows_once_in_a_thousand_steps() -> None:
    """The maxima's spread makes no difference: the scale follows in units of it."""
    steps, few = 500_000, 100_000
    seen, count = log_max_overflows(1.0, steps)
    # The Gaussian tail at 3.09 is 0.0010008; moving estimates add a little. 500,000 steps have a
    # standard deviation of 0.000045.
    assert 0.00095 <= sum(seen) / steps <= 0.00120
    assert count / steps <= 0.00120
    for spread in (0.25, 0.5, 2.0):
        found, count = log_max_overflows(spread, few)
        assert found == seen[:few]
        assert count / few <= 0.00120


def test_one_overflow_does_not_pin_log_max() -> None:
    policy = LogMax()
    source = random.Random(7)
    for _ in range(3000):
        policy.update(False, 2.0 ** source.gauss(4.0, 0.5))
    before = policy.scale
    policy.update(True)
    dip = policy.scale
    assert before / 3 < dip < before
    for _ in range(300):
        policy.update(False, 2.0 ** source.gauss(4.0, 0.5))
    assert policy.scale > 0.8 * before


def test_a_zero_gradient_leaves_log_max_as_it_was() -> None:
    policy = LogMax()
    policy.update(False, 0.5)
    before = policy.state_dict()
    policy.update(False, 0.0)
    assert policy.state_dict() == before
    with pytest.raises(ValueError, match="max_abs: LogMax follows"):
        policy.update(False)
    assert policy.state_dict() == before


def test_adaptive_grad_scale_aims_at_four_times_its_target() -> None:
    policy = AdaptiveGradScale(1000.0)
    assert policy.scale == 1000.0  # also before the first step
    for largest, scale in ((0.5, 8000.0), (4000.0, 1.0), (0.0, 1000.0)):
        policy.update(False, largest)
        assert policy.scale == scale


class FairseqScaler:
    """fairseq's DynamicLossScaler, as in its source, without the error at the smallest scale."""

    def __init__(self, window: int, tolerance: float) -> None:
        self.scale, self.window, self.tolerance = 2.0**15, window, tolerance
        self.iteration, self.last_overflow, self.last_rescale, self.overflows = 0, -1, -1, 0

    def step(self, overflow: bool) -> None:
        if overflow:
            since = self.iteration - self.last_rescale
            self.last_overflow = self.iteration
            self.overflows += 1
            if self.overflows / float(since) >= self.tolerance:
                self.scale /= 2.0
                self.last_rescale, self.overflows = self.iteration, 0
        elif (self.iteration - self.last_overflow) % self.window == 0:
            self.scale *= 2.0
            self.last_rescale = self.iteration
        self.iteration += 1


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.3, 1.0])
def test_tolerance_is_fairseqs_recurrence(tolerance: float) -> None:
    policy = Tolerance(step_window=7, tolerance=tolerance, scale_min=2.0**-100)
    theirs, scales = FairseqScaler(7, tolerance), set()
    for overflow in script(20_000, 0.1, seed=5):
        policy.update(overflow)
        theirs.step(overflow)
        wanted = min(max(theirs.scale, 2.0**-100), 2.0**126)
        theirs.scale = wanted
        assert policy.scale == wanted
        scales.add(wanted)
    assert len(scales) > 3


def warned_at(step: Callable[[bool], None], overflows: str) -> dict[int, str]:
    """The warnings by step, from 1. overflows: a character per step, "x" where it overflows."""
    found = {}
    for number, each in enumerate(overflows, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(each == "x")
        for warning in caught:
            found[number] = str(warning.message)
    return found


def updates(policy: ScalePolicy, overflows: str) -> dict[int, str]:
    watch = OverflowWatch()
    return warned_at(lambda bad: watch.update(policy, bad, 1.0, "at scale {:g}".format), overflows)


@pytest.mark.parametrize(
    ("policy", "overflows", "expected"),
    [
        # Never falls: told at the fifth overflow of each streak, and at the fortieth.
        (Static(8.0), "x" * 4 + "." + "x" * 41, [10, 45]),
        # 4, 2, 1 and then no further: steps 3 to 7 are the first five at 1.
        (Backoff(1.0, 4.0), "x" * 12, [7]),
        (Backoff(1.0, 4.0), "." + "xxxx." * 20, []),
        # 50 halvings above its floor.
        (Backoff(1.0, 2.0**50), "x" * 45, [40]),
        # Falls where all steps since its last change overflowed, so never after a clean first one.
        (Tolerance(2.0**50, tolerance=1.0), "." + "x" * 9, [6]),
    ],
)
def test_where_no_scale_can_end_the_overflows(
    policy: ScalePolicy, overflows: str, expected: list[int]
) -> None:
    assert list(updates(policy, overflows)) == expected


def test_what_is_said_of_a_scale_that_cannot_fall() -> None:
    (message,) = updates(Backoff(1.0, 4.0), ".." + "x" * 8).values()
    assert "in each of the last 7 steps, since step 3" in message
    assert "the loss scale is 1, which cannot fall further: no scale can cure that" in message
    assert message.endswith("at scale 1")
    (message,) = updates(Backoff(1.0, 2.0**50), "x" * 40).values()
    assert "since step 1, and the loss scale is 1024: no scale can cure that" in message
    assert message.endswith("at scale 2048")


def test_skipped_steps_are_told_once_per_streak() -> None:
    watch = OverflowWatch()

    def step(bad: bool) -> None:
        watch.count(bad)
        watch.warn_of_skips("AdamW", lambda: "weight")

    found = warned_at(step, "x" * 24 + "." + "x" * 60 + "." + "x" * 25)
    assert list(found) == [50, 111]
    assert found[50].startswith("amp_mp: AdamW has skipped 25 steps in a row, since step 26: ")
    assert found[111].startswith("amp_mp: AdamW has skipped 25 steps in a row, since step 87: ")
    assert found[50].endswith("weight")
