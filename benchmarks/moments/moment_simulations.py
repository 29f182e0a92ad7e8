"""Adam on made-up gradients, with moments stored in several formats beside Adam in float64.

In each simulation all formats see the same gradients, and those that round stochastically the same
random bytes, so a format's results do not depend on which others run. An update uses the moments
of its own step before they are rounded; what the next step reads is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from moment_codes import F32, GROUP, Array, Code, Floats, random_bytes
from numpy.typing import NDArray
from simulated_formats import Format

BETA1, EPSILON = 0.9, 1e-8
SETTLING = 20  # steps after a stop in which exact Adam's updates are still large

Wide = NDArray[np.float64]
Results = dict[str, dict[str, float]]
Tick = Callable[[], Any]


class Setting(NamedTuple):
    """How much is simulated."""

    rows: int  # of a group of 32 elements; a multiple of 8, so that blocks of 256 are full
    steps: int
    seed: int
    size: float = 1e-3  # of a typical gradient


def sizes_of(setting: Setting, source: np.random.Generator, count: int, log_sd: float) -> Wide:
    """Log-normal sizes of elements' gradients: their logarithm has this standard deviation."""
    return setting.size * np.exp(log_sd * source.standard_normal(count))


class Adam:
    """Both moments of some parameters, and the updates; without weights and learning rate.

    Arguments:
        first, square: how the moments are stored between steps; None for float64, not rounded.
    """

    def __init__(self, first: Code | None, square: Code | None, count: int, beta2: float) -> None:
        self.first, self.square = first, square
        self.real: Any = np.float64 if first is None else F32
        self.m: Array = np.zeros(count, self.real)
        self.v: Array = np.zeros(count, self.real)
        self.beta2, self.steps = beta2, 0

    def step(self, gradient: Floats, random: Array) -> Array:
        """The update for a gradient, before the learning rate."""
        real = self.real
        g = gradient.astype(real)
        self.steps += 1
        m = real(BETA1) * self.m + real(1 - BETA1) * g
        v = real(self.beta2) * self.v + real(1 - self.beta2) * (g * g)
        corrected = m / real(1 - BETA1**self.steps)
        root = np.sqrt(v / real(1 - self.beta2**self.steps))
        self.m = m if self.first is None else self.first.stored(m, random)
        self.v = v if self.square is None else self.square.stored(v, random)
        return corrected / (root + real(EPSILON))


def adams(formats: Sequence[Format], count: int, beta2: float) -> tuple[Adam, dict[str, Adam]]:
    """Adam in float64, and in each format."""
    return Adam(None, None, count, beta2), {
        format.name: Adam(format.first, format.square, count, beta2) for format in formats
    }


def unequal(
    formats: Sequence[Format], setting: Setting, beta2: float, log_sd: float, tick: Tick
) -> Results:
    """Groups whose elements have gradients of different sizes.

    The sizes of the elements are log-normal and stay; a gradient is normal, times the size. Results
    of a format: `largest`, its largest update over exact Adam's largest; `nmse`, the energy of its
    updates' errors over the energy of exact updates. Errors count after 100 steps, or half of them.
    """
    source = np.random.default_rng([setting.seed, 1])
    count = setting.rows * GROUP
    sizes = sizes_of(setting, source, count, log_sd)
    exact, others = adams(formats, count, beta2)
    largest, error = dict.fromkeys(others, 0.0), dict.fromkeys(others, 0.0)
    exact_largest = energy = 0.0
    for step in range(1, setting.steps + 1):
        gradient = (sizes * source.standard_normal(count)).astype(F32)
        random = random_bytes(source, count)
        counts = step > min(100, setting.steps // 2)
        wanted = exact.step(gradient, random)
        exact_largest = max(exact_largest, float(np.abs(wanted).max()))
        energy += float(np.square(wanted).sum()) if counts else 0.0
        for name, adam in others.items():
            found = adam.step(gradient, random)
            largest[name] = max(largest[name], float(np.abs(found).max()))
            if counts:
                error[name] += float(np.square(found - wanted).sum())
        tick()
    return {
        name: {"largest": largest[name] / exact_largest, "nmse": error[name] / energy}
        for name in others
    }


def drop_times(beta2: float) -> tuple[int, int]:
    """Two times after a drop: exact Adam's second moment is still falling, and it has settled."""
    return round(2.8 / (1 - beta2)), round(10 / (1 - beta2))


def drop(
    formats: Sequence[Format], setting: Setting, beta2: float, times: tuple[int, int], tick: Tick
) -> Results:
    """All gradients become ten times smaller, once, and second moments have to follow.

    A group's elements are nearly alike (log-sd 0.3). Results of a format: the second moment over
    exact Adam's, after so many steps, its mean and standard deviation over the elements: `mean` and
    `sd` at the first of the times, `settled_mean` and `settled_sd` at the second.
    """
    source = np.random.default_rng([setting.seed, 2])
    count = 128 * GROUP
    sizes = sizes_of(setting, source, count, 0.3)
    exact = sizes**2
    start = exact.astype(F32)
    random = random_bytes(source, count)
    stored = {format.name: format.square.stored(start, random) for format in formats}
    results: Results = {name: {} for name in stored}
    for step in range(1, times[1] + 1):
        gradient = (0.1 * sizes * source.standard_normal(count)).astype(F32)
        random = random_bytes(source, count)
        exact = beta2 * exact + (1 - beta2) * gradient.astype(np.float64) ** 2
        square = F32(1 - beta2) * (gradient * gradient)
        for format in formats:
            v = F32(beta2) * stored[format.name] + square
            stored[format.name] = format.square.stored(v, random)
        tick()
        for time, prefix in zip(times, ("", "settled_"), strict=True):
            for name in stored if step == time else ():
                ratio = stored[name] / exact
                results[name][f"{prefix}mean"] = float(ratio.mean())
                results[name][f"{prefix}sd"] = float(ratio.std())
    return results


def stopped(formats: Sequence[Format], setting: Setting, beta2: float, tick: Tick) -> Results:
    """Half of each group's elements get no more gradients from the middle of the run on.

    The other half goes on (sizes of log-sd 1.5), so the groups keep their scales. Results of a
    format: `largest`, its largest update of a stopped element, 20 steps after the stop and later;
    `exact`, that of exact Adam.
    """
    source = np.random.default_rng([setting.seed, 3])
    count = setting.rows * GROUP
    sizes = sizes_of(setting, source, count, 1.5)
    exact, others = adams(formats, count, beta2)
    largest = dict.fromkeys(others, 0.0)
    exact_largest = 0.0
    stop = setting.steps // 2
    for step in range(1, setting.steps + 1):
        gradient = (sizes * source.standard_normal(count)).astype(F32)
        random = random_bytes(source, count)
        if step > stop:
            gradient[::2] = 0
        late = step > stop + SETTLING
        wanted = exact.step(gradient, random)
        if late:
            exact_largest = max(exact_largest, float(np.abs(wanted[::2]).max()))
        for name, adam in others.items():
            found = adam.step(gradient, random)
            if late:
                largest[name] = max(largest[name], float(np.abs(found[::2]).max()))
        tick()
    return {name: {"largest": largest[name], "exact": exact_largest} for name in others}


def stored_error(
    formats: Sequence[Format], setting: Setting, log_sd: float, times: int, tick: Tick
) -> Results:
    """First moments that are stored once.

    A moment is normal, times a log-normal size. Result of a format: `nmse`, the energy of the
    errors over the energy of the moments.
    """
    source = np.random.default_rng([setting.seed, 4])
    count = setting.rows * GROUP
    energy, error = 0.0, {format.name: 0.0 for format in formats}
    for _ in range(times):
        x = (sizes_of(setting, source, count, log_sd) * source.standard_normal(count)).astype(F32)
        random = random_bytes(source, count)
        energy += float(np.square(x, dtype=np.float64).sum())
        for format in formats:
            wrong = format.first.stored(x, random).astype(np.float64) - x
            error[format.name] += float(np.square(wrong).sum())
        tick()
    return {name: {"nmse": value / energy} for name, value in error.items()}


def constant(
    formats: Sequence[Format], setting: Setting, beta2: float, steps: int, tick: Tick
) -> Results:
    """Gradients that never change: does rounding pull a moment to one side, step after step?

    The sizes of a group have log-sd 1. Results of a format: `first` and `square`, each moment over
    exact Adam's, averaged over the last two thirds of the steps and over the elements; `first_sd`
    and `square_sd`, how the elements' averages scatter.
    """
    source = np.random.default_rng([setting.seed, 5])
    count = 128 * GROUP
    signs = source.choice([-1.0, 1.0], count)
    gradient = (signs * sizes_of(setting, source, count, 1.0)).astype(F32)
    exact, others = adams(formats, count, beta2)
    sums = {name: np.zeros((2, count)) for name in others}
    counted = 0
    for step in range(steps):
        random = random_bytes(source, count)
        exact.step(gradient, random)
        counts = step >= steps // 3
        counted += counts
        for name, adam in others.items():
            adam.step(gradient, random)
            if counts:
                sums[name] += np.stack([adam.m / exact.m, adam.v / exact.v])
        tick()
    ratios = {name: total / counted for name, total in sums.items()}
    return {
        name: {
            "first": float(ratio[0].mean()),
            "first_sd": float(ratio[0].std()),
            "square": float(ratio[1].mean()),
            "square_sd": float(ratio[1].std()),
        }
        for name, ratio in ratios.items()
    }
