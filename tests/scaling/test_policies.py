"""Loss-scale policies: Backoff against its definition, snapshots, and what is refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import amp_mp as amp
from amp_mp import _C
from amp_mp.apex.fp16_state import apex_policy
from amp_mp.scaling import (
    AdaptiveGradScale,
    Backoff,
    Hysteresis,
    LogMax,
    LogNormal,
    Policy,
    Static,
    Tolerance,
    from_state_dict,
    make_policy,
)
from amp_mp.scaling.policies import NO_CEILING


@dataclass
class BackoffByDefinition:
    """OpenSeq2Seq's rule in its own words, the iteration read before it is incremented."""

    scale: float
    scale_min: float = 1.0
    scale_max: float = 2.0**24
    step_factor: float = 2.0
    step_window: int = 2000
    iteration: int = 0
    last_overflow: int = -1

    def clip(self, scale: float) -> float:
        return min(max(scale, self.scale_min), self.scale_max)

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = self.clip(self.scale / self.step_factor)
            self.last_overflow = self.iteration
        elif (self.iteration - self.last_overflow) % self.step_window == 0:
            self.scale = self.clip(self.scale * self.step_factor)
        self.iteration += 1


def apex_preset() -> Policy:
    return apex_policy(1.0, True, None, None)


PAIRS: dict[str, Callable[[], tuple[Policy, BackoffByDefinition]]] = {
    "defaults": lambda: (Backoff(), BackoffByDefinition(2.0**24)),
    "a short window, from below": lambda: (
        Backoff(scale_min=2.0, scale_max=2.0**10, step_window=7, init_scale=16.0),
        BackoffByDefinition(16.0, 2.0, 2.0**10, 2.0, 7),
    ),
    "a window of one": lambda: (
        Backoff(step_window=1, init_scale=1.0),
        BackoffByDefinition(1.0, step_window=1),
    ),
    "a factor that rounds": lambda: (
        Backoff(scale_min=0.25, scale_max=1e6, step_factor=1.7, step_window=50),
        BackoffByDefinition(1e6, 0.25, 1e6, 1.7, 50),
    ),
    "Apex's": lambda: (
        apex_preset(),
        BackoffByDefinition(2.0**32, 1.0, float("inf"), step_window=1000),
    ),
}


def script(length: int, share: float, seed: int) -> list[bool]:
    """Overflows, in bursts and far apart: of random density, and so of any gap length."""
    source = random.Random(seed)
    overflows: list[bool] = []
    while len(overflows) < length:
        density = share * source.choice([0.0, 0.1, 1.0, 10.0])
        overflows += [source.random() < density for _ in range(source.randrange(1, 3000))]
    return overflows[:length]


@pytest.mark.parametrize("name", PAIRS)
def test_backoff_equals_its_definition_step_by_step(name: str) -> None:
    policy, definition = PAIRS[name]()
    overflows = script(20_000, 0.01, seed=1)
    assert 100 < sum(overflows) < 10_000
    found, wanted = [policy.scale], [definition.scale]
    for overflow in overflows:
        policy.update(overflow)
        definition.update(overflow)
        found.append(policy.scale)
        wanted.append(definition.scale)
    assert found == wanted
    assert len(set(found)) > 5  # the script moved it, up and down


@pytest.mark.parametrize("before", [[], [True], [False, True], [True, False, True]])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_scale_grows_after_exactly_a_window_of_clean_steps_and_every_further_one(
    window: int, before: list[bool]
) -> None:
    policy = Backoff(step_window=window, init_scale=2.0**12)
    for overflow in before:
        policy.update(overflow)
    start, found = policy.scale, []
    for _ in range(3 * window):
        policy.update(False)
        found.append(policy.scale)
    assert found == [start * 2.0 ** ((i + 1) // window) for i in range(3 * window)]


def test_apex_preset_starts_at_2_to_32_grows_every_1000_and_stops_falling_at_1() -> None:
    policy = apex_preset()
    assert policy.scale == 2.0**32
    for _ in range(999):
        policy.update(False)
    assert policy.scale == 2.0**32
    policy.update(False)
    assert policy.scale == 2.0**33
    for _ in range(40):
        policy.update(True)
    assert policy.scale == 1.0


def test_apex_preset_has_no_ceiling_but_that_of_a_normal_reciprocal() -> None:
    policy = apex_policy(1.0, True, {"init_scale": 2.0**125, "scale_window": 1}, None)
    for _ in range(3):
        policy.update(False)
    smallest_normal = 2.0**-126
    assert 1 / policy.scale == smallest_normal


def test_scale_stays_between_its_limits() -> None:
    policy = Backoff(scale_min=3.0, scale_max=20.0, step_factor=4.0, step_window=1, init_scale=10.0)
    policy.update(False)
    assert policy.scale == 20.0
    for wanted in (5.0, 3.0, 3.0):
        policy.update(True)
        assert policy.scale == wanted


def test_a_static_scale_never_moves() -> None:
    policy = Static(128.0)
    for overflow in script(3000, 0.01, seed=2):
        policy.update(overflow)
    assert policy.scale == 128.0


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_verdict_may_be_a_tensor_and_any_count_above_zero_is_an_overflow(
    device: str, value: float, shape: tuple[int, ...]
) -> None:
    policy = Backoff(init_scale=8.0)
    policy.update(torch.full(shape, value, device=device))
    assert policy.scale == (8.0 if value == 0 else 4.0)


def test_the_scale_can_be_set_and_moves_on_from_there() -> None:
    policy = Backoff()
    policy.scale = 64
    assert policy.scale == 64.0
    policy.update(True)
    assert policy.scale == 32.0


# Snapshots.


@pytest.mark.parametrize("steps", [0, 1, 6, 7, 50, 501])
@pytest.mark.parametrize("name", PAIRS)
def test_a_snapshot_continues_exactly_where_it_was_taken(name: str, steps: int) -> None:
    policy, _ = PAIRS[name]()
    overflows = script(2000, 0.03, seed=3)
    for overflow in overflows[:steps]:
        policy.update(overflow)
    saved = policy.state_dict()
    other, _ = PAIRS[name]()
    other.update(True)
    other.load_state_dict(json.loads(json.dumps(saved)))  # plain numbers survive any format
    for overflow in overflows[steps:]:
        policy.update(overflow)
        other.update(overflow)
        assert other.scale == policy.scale
    assert other.state_dict() == policy.state_dict() != saved


def test_a_snapshot_does_not_follow_its_policy() -> None:
    policy = Backoff()
    saved = policy.state_dict()
    policy.update(True)
    assert saved["scale"] == 2.0**24


BAD_SNAPSHOTS: dict[str, tuple[dict[str, Any], str]] = {
    "of another policy": (Static(4.0).state_dict(), "Static"),
    "of nothing": ({}, "policy"),
    "without a number": (
        {k: v for k, v in Backoff().state_dict().items() if k != "step_window"},
        "step_window",
    ),
    "NaN as scale": ({**Backoff().state_dict(), "scale": float("nan")}, "scale"),
    "a word as scale": ({**Backoff().state_dict(), "scale": "large"}, "scale"),
    "an empty window": ({**Backoff().state_dict(), "step_window": 0}, "step_window"),
    "limits the wrong way round": ({**Backoff().state_dict(), "scale_min": 2.0**30}, "scale_min"),
    "a negative iteration": ({**Backoff().state_dict(), "iteration": -5}, "iteration"),
    "an iteration that is none": ({**Backoff().state_dict(), "last_overflow": None}, "overflow"),
}


@pytest.mark.parametrize("name", BAD_SNAPSHOTS)
def test_a_bad_snapshot_is_refused_and_nothing_changed(name: str) -> None:
    snapshot, word = BAD_SNAPSHOTS[name]
    policy = Backoff(init_scale=4.0)
    policy.update(True)
    before = policy.state_dict()
    with pytest.raises(ValueError, match=word):
        policy.load_state_dict(snapshot)
    assert policy.state_dict() == before


# Arguments.


def test_make_policy_takes_numbers_names_and_policies() -> None:
    own, preset = Backoff(init_scale=2.0), Backoff(init_scale=4.0)
    assert make_policy(own) is own
    assert make_policy("dynamic", preset) is preset
    assert make_policy("dynamic").state_dict() == Backoff().state_dict()
    for name in ("Backoff", "backoff", " BACKOFF "):
        assert make_policy(name, preset).state_dict() == Backoff().state_dict()
    for number in (128, 128.0):
        assert make_policy(number).state_dict() == Static(128.0).state_dict()


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "2", None, True])
@pytest.mark.parametrize("name", ["scale_min", "scale_max", "step_factor", "step_window"])
def test_backoff_names_the_argument_that_is_no_positive_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        Backoff(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"step_factor": 1.0}, "step_factor"),
        ({"step_window": 2.5}, "step_window"),
        ({"step_window": 0.5}, "step_window"),
        ({"init_scale": -1.0}, "init_scale"),
        ({"init_scale": 0.5}, "init_scale"),
        ({"init_scale": 2.0**25}, "init_scale"),
        ({"scale_min": 8.0, "scale_max": 4.0}, "scale_min"),
    ],
)
def test_backoff_names_the_argument_that_does_not_fit(
    arguments: dict[str, float], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        Backoff(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -2.0, float("inf"), float("nan"), "2", None, True])
def test_a_scale_that_is_no_positive_number_is_refused_by_name(value: Any) -> None:
    policy = Backoff()
    with pytest.raises(ValueError, match=r"^scale must"):
        Static(value)
    with pytest.raises(ValueError, match=r"^scale must"):
        policy.scale = value
    assert policy.scale == 2.0**24


@pytest.mark.parametrize("value", ["LogMin", "128", "", 0, float("nan"), None, True])
def test_make_policy_names_loss_scale_when_it_is_none(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^loss_scale"):
        make_policy(value)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"static_loss_scale": 0}, "static_loss_scale"),
        ({"static_loss_scale": "128"}, "static_loss_scale"),
        ({"loss_scale": -1.0}, "loss_scale"),
        ({"loss_scale": "auto"}, "loss_scale"),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"window": 3}}, "window"),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 0}}, "init_scale"),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_factor": 1}}, "factor"),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 0}}, "window"),
    ],
)
def test_fp16_optimizer_names_the_scale_argument_and_leaves_the_optimizer_alone(
    arguments: dict[str, Any], name: str
) -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    inner = torch.optim.SGD([param], lr=1.0)
    with pytest.raises(ValueError, match=name):
        amp.FP16_Optimizer(inner, **arguments)
    assert inner.param_groups[0]["params"][0] is param


# Hysteresis: both readings, from their sources' own words.


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


def test_patience_of_one_is_torchs_own_rule() -> None:
    policy = Hysteresis(2.0**16, growth_interval=7, hysteresis=1, scale_min=2.0**-100)
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for overflow in script(1_000, 0.3, seed=3):
        policy.update(overflow)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 7)
        assert policy.scale == float(scale) < 2.0**126


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


# Every policy: devices, snapshots, bounds.


POLICIES: dict[str, Callable[[], Policy]] = {
    "Backoff": lambda: Backoff(step_window=9),
    "Apex's FP16_Optimizer": apex_preset,
    "Apex's amp": lambda: Backoff(init_scale=2.0**16),
    "Hysteresis, Apex": lambda: Hysteresis(growth_interval=9),
    "Hysteresis, Megatron": lambda: Hysteresis(growth_interval=9, refill="growth"),
    "LogMax": lambda: LogMax(),
    "AdaptiveGradScale": lambda: AdaptiveGradScale(),
    "Tolerance": lambda: Tolerance(step_window=9, tolerance=0.1),
}


def observations(count: int) -> list[tuple[bool, float]]:
    source = random.Random(13)
    return [(o, 2.0 ** source.gauss(-2.0, 1.0)) for o in script(count, 0.02, seed=13)]


@pytest.mark.parametrize("name", POLICIES)
def test_state_on_a_device_moves_as_on_the_host(name: str, device: str) -> None:
    host, other = POLICIES[name](), POLICIES[name]().to(device)
    for overflow, largest in observations(2_000):
        host.update(overflow, largest)
        other.update(
            torch.tensor(float(overflow), device=device),
            torch.tensor(largest, dtype=torch.float64, device=device),
        )
    assert other.scale == pytest.approx(host.scale, rel=1e-9 if name == "LogMax" else 0.0)
    assert other.scale_tensor.device.type == device


@pytest.mark.parametrize("name", POLICIES)
def test_a_snapshot_taken_at_any_step_continues_the_same(name: str) -> None:
    steps = observations(300)
    policy, found = POLICIES[name](), []
    snapshots = []
    for overflow, largest in steps:
        snapshots.append(json.loads(json.dumps(policy.state_dict())))
        policy.update(overflow, largest)
        found.append(policy.scale)
    for start in range(0, len(steps), 7):
        resumed = from_state_dict(snapshots[start])
        assert type(resumed) is type(policy)
        for i in range(start, min(start + 40, len(steps))):
            resumed.update(*steps[i])
            assert resumed.scale == found[i]


@pytest.mark.parametrize("name", POLICIES)
def test_a_scale_beyond_its_bounds_cannot_be_set(name: str) -> None:
    policy = POLICIES[name]()
    before = policy.state_dict()
    for value in (2.0**127, 2.0**-120):
        with pytest.raises(ValueError, match="scale_min <= init_scale <= scale_max"):
            policy.scale = value
        assert policy.state_dict() == before
    policy.scale = 2.0**8
    assert policy.scale == 2.0**8


def test_log_max_has_two_names_and_make_policy_knows_both() -> None:
    assert LogNormal is LogMax
    for name in ("LogMax", "lognormal", " LOGMAX "):
        assert make_policy(name).state_dict() == LogMax().state_dict()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Hysteresis(growth_factor=1.0), "growth_factor"),
        (lambda: Hysteresis(backoff_factor=1.0), "backoff_factor"),
        (lambda: Hysteresis(growth_interval=0.5), "growth_interval"),  # type: ignore[arg-type]
        (lambda: Hysteresis(hysteresis=0), "hysteresis"),
        (lambda: Hysteresis(refill="never"), "refill"),
        (lambda: LogMax(beta1=1.0), "beta1"),
        (lambda: LogMax(beta2=-0.1), "beta2"),
        (lambda: LogMax(log_max=math.inf), "log_max"),
        (lambda: LogMax(overflow_std_dev="3"), "overflow_std_dev"),  # type: ignore[arg-type]
        (lambda: LogMax(scale_min=0.0), "scale_min"),
        (lambda: AdaptiveGradScale(target=0.0), "target"),
        (lambda: Tolerance(tolerance=1.5), "tolerance"),
        (lambda: from_state_dict({"policy": "Best"}), "policy must be one of Static, Backoff"),
    ],
)
def test_arguments_that_make_no_sense_are_named(make: Callable[[], Policy], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make()
