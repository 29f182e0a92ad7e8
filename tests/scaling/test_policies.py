"""Loss-scale policies: Backoff against its definition, every policy's snapshots and arguments."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loss_scales import script

import amp_mp as amp
from amp_mp.scaling import (
    AdaptiveGradScale,
    Backoff,
    Hysteresis,
    LogMax,
    ScalePolicy,
    Static,
    Tolerance,
)
from amp_mp.scaling.policies import from_state_dict, make_policy
from amp_mp.wrappers.fp16_optimizer import apex_policy


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


def apex_preset() -> ScalePolicy:
    return apex_policy(1.0, True, None, None)


PAIRS: dict[str, Callable[[], tuple[ScalePolicy, BackoffByDefinition]]] = {
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


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_verdict_may_be_a_tensor_and_any_count_above_zero_is_an_overflow(
    device: str, value: float, shape: tuple[int, ...]
) -> None:
    policy = Backoff(init_scale=8.0)
    policy.update(torch.full(shape, value, device=device))
    assert policy.scale == (8.0 if value == 0 else 4.0)


# Snapshots.


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
    for name in ("LogMax", "lognormal", " LOGMAX "):
        assert make_policy(name).state_dict() == LogMax().state_dict()


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


# Every policy: devices, snapshots, bounds.


POLICIES: dict[str, Callable[[], ScalePolicy]] = {
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
        snapshots.append(policy.state_dict())
        policy.update(overflow, largest)
        found.append(policy.scale)
    for start in range(0, len(steps), 7):
        saved = json.loads(json.dumps(snapshots[start]))  # plain numbers survive any format
        resumed, loaded = from_state_dict(saved), POLICIES[name]()
        assert type(resumed) is type(policy)
        loaded.update(True, 1.0)
        loaded.load_state_dict(saved)
        for i in range(start, min(start + 40, len(steps))):
            resumed.update(*steps[i])
            loaded.update(*steps[i])
            assert (resumed.scale, loaded.scale) == (found[i], found[i])
            assert resumed.state_dict() == loaded.state_dict()


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


def set_scale(value: Any) -> None:
    policy = Backoff()
    try:
        policy.scale = value
    finally:
        assert policy.scale == 2.0**24


NO_SCALES = (0, -2.0, math.inf, math.nan, "2", None, True)
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *(
        (Backoff, {name: value}, f"^{name} must")
        for name in ("scale_min", "scale_max", "step_factor", "step_window")
        for value in NO_SCALES
    ),
    (Backoff, {"step_factor": 1.0}, "step_factor"),
    (Backoff, {"step_window": 2.5}, "step_window"),
    (Backoff, {"step_window": 0.5}, "step_window"),
    (Backoff, {"init_scale": -1.0}, "init_scale"),
    (Backoff, {"init_scale": 0.5}, "init_scale"),
    (Backoff, {"init_scale": 2.0**25}, "init_scale"),
    (Backoff, {"scale_min": 8.0, "scale_max": 4.0}, "scale_min"),
    *((Static, {"scale": value}, "^scale must") for value in NO_SCALES),
    *((set_scale, {"value": value}, "^scale must") for value in NO_SCALES),
    *((make_policy, {"loss_scale": x}, "^loss_scale") for x in (*NO_SCALES, "LogMin", "128", "")),
    (Hysteresis, {"growth_factor": 1.0}, "growth_factor"),
    (Hysteresis, {"backoff_factor": 1.0}, "backoff_factor"),
    (Hysteresis, {"growth_interval": 0.5}, "growth_interval"),
    (Hysteresis, {"hysteresis": 0}, "hysteresis"),
    (Hysteresis, {"refill": "never"}, "refill"),
    (LogMax, {"beta1": 1.0}, "beta1"),
    (LogMax, {"beta2": -0.1}, "beta2"),
    (LogMax, {"log_max": math.inf}, "log_max"),
    (LogMax, {"overflow_std_dev": "3"}, "overflow_std_dev"),
    (LogMax, {"scale_min": 0.0}, "scale_min"),
    (AdaptiveGradScale, {"target": 0.0}, "target"),
    (Tolerance, {"tolerance": 1.5}, "tolerance"),
    (from_state_dict, {"state_dict": {"policy": "Best"}}, "policy must be one of Static, Backoff"),
]


def test_arguments_that_make_no_sense_are_named() -> None:
    for make, arguments, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make(**arguments)
