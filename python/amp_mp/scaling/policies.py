"""The loss-scale policies and their names; csrc/core/scale.h has their arithmetic.

Each of them raises ValueError for an argument that is out of range, naming it.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.dtypes import check_choice

# The fields of each kind's state. A state begins with the position of its kind.
KINDS = _C.scale_kinds()

# The largest scale whose reciprocal is a normal float32. It stands for "no upper bound".
NO_CEILING = 2.0**126
# The smallest normal float32. No scale is below it: 1 / scale has to be finite.
FLOOR = 2.0**-126

ABOVE_1 = "above 1", lambda x: x > 1
DECAY = "in [0, 1)", lambda x: 0 <= x < 1
WHOLE = "a whole number from 1 on", lambda x: x >= 1 and x % 1 == 0
COUNT = "a count of steps", lambda x: -1 <= x < 2**53  # -1 is "not yet"

# What the fields of a state but the scales must be, in the words of the error and as a test.
REQUIREMENTS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "target": ("finite and above 0", lambda x: x > 0),
    "step_factor": ABOVE_1,
    "growth_factor": ABOVE_1,
    "backoff_factor": ("above 0 and below 1", lambda x: 0 < x < 1),
    "beta1": DECAY,
    "beta2": DECAY,
    "tolerance": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "step_window": WHOLE,
    "growth_interval": WHOLE,
    "hysteresis": WHOLE,
    "iteration": COUNT,
    "last_overflow": COUNT,
    "last_rescale": COUNT,
    "overflows": COUNT,
    "growth_tracker": COUNT,
}


class ScalePolicy:
    """A loss scale and how it moves.

    `state_tensor`, float64, on the CPU unless `to` has moved it, is the whole state: the kind, the
    scale, then the kind's other numbers.
    """

    _kind: ClassVar[str]  # the name in csrc/core/scale.h
    needs_max_abs = False  # whether update has to be told max_abs

    def __init__(self, *first: float, **others: float) -> None:
        """For subclasses: the first fields of the state in order, others by name, the rest 0."""
        fields = KINDS[self._kind]
        state = dict.fromkeys(fields, 0.0) | dict(zip(fields, first, strict=False)) | others
        self._check(state)
        numbers = [list(KINDS).index(self._kind), *state.values()]
        self.state_tensor = torch.tensor(numbers, dtype=torch.float64)

    def to(self, device: torch.device | str) -> Self:
        """Moves the state to a device, where `update` then runs without the host waiting."""
        self.state_tensor = self.state_tensor.to(device)
        return self

    @property
    def scale(self) -> float:
        """The factor of the next loss. Can be set within the policy's bounds (ValueError)."""
        return float(self.state_tensor[1])

    @scale.setter
    def scale(self, value: float) -> None:
        self._check({**self._values(), "scale": check_scale(value, "scale")})
        self.state_tensor[1] = value

    @property
    def scale_tensor(self) -> Tensor:
        """The scale as a float64 tensor of no dimension on the policy's device, a view."""
        return self.state_tensor[1]

    def update(self, found_inf: bool | Tensor, max_abs: float | Tensor | None = None) -> None:
        """Moves the scale after a step.

        found_inf: whether a gradient was inf or NaN: a bool or a tensor of one element. max_abs:
        largest finite unscaled |g| of the step, for policies that look at it; ValueError if they
        miss it after a step without overflow.
        """
        if max_abs is None and self.needs_max_abs and not bool(found_inf):
            follows = f"{type(self).__name__} follows the largest unscaled gradient"
            raise ValueError(f"max_abs: {follows}; pass it to update")
        state = self.state_tensor
        largest = None if max_abs is None else _number(max_abs, state.device)
        _C.update_scale_(_C.ScaleUpdate(policy=state), _number(found_inf, state.device), largest)

    def _values(self) -> dict[str, float]:
        return dict(zip(KINDS[self._kind], self.state_tensor[1:].tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """A snapshot: plain numbers by name, and the policy's name."""
        return {"policy": type(self).__name__, **self._values()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where the snapshot was taken.

        ValueError, before any change: another policy's snapshot, a number missing or out of range.
        """
        name = state_dict.get("policy")
        fields = KINDS[self._kind]
        missing = [field for field in fields if field not in state_dict]
        if name != type(self).__name__ or missing:
            raise ValueError(
                f"state_dict: expected a snapshot of {type(self).__name__} with "
                f"{', '.join(fields)}; found policy {name!r}, missing {missing}"
            )
        values = {field: state_dict[field] for field in fields}
        check_scale(values["scale"], "scale")
        self._check(values)
        self.state_tensor[1:] = torch.tensor(list(values.values()), dtype=torch.float64)

    def _check(self, values: dict[str, Any]) -> None:
        for name, x in values.items():
            if name in ("scale", "scale_min", "scale_max"):
                continue
            words, holds = REQUIREMENTS.get(name, ("a finite number", math.isfinite))
            is_number = isinstance(x, int | float) and not isinstance(x, bool)
            if not (is_number and math.isfinite(x) and holds(x)):
                raise ValueError(f"{name} must be {words}, found {x!r}")
        if "scale_min" not in values:
            check_scale(values["scale"], "scale")
            return
        low, high = (check_scale(values[name], name) for name in ("scale_min", "scale_max"))
        scale = check_scale(values["scale"], "init_scale")
        if not low <= scale <= high:
            raise ValueError(
                f"scale_min <= init_scale <= scale_max must hold, found {low}, {scale}, {high}"
            )

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:g}" for name, value in self._values().items())
        return f"{type(self).__name__}({values})"


def _number(value: float | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device).reshape(())


def check_scale(value: float, name: str) -> float:
    """The value as a float; ValueError unless it is a finite number from 2^-126 on."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, found {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and above 0, found {value!r}")
    if value < FLOOR:
        raise ValueError(f"{name} must be at least 2^-126, a normal float32, found {value!r}")
    return float(value)


class Static(ScalePolicy):
    """A scale that never moves: a finite number above 0 (ValueError)."""

    _kind = "fixed"

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)


class Backoff(ScalePolicy):
    """Divide the scale by step_factor on overflow, multiply it after step_window steps without one.

    OpenSeq2Seq's rule, which is Apex's as well: at iteration i, counted from 0, the scale grows if
    (i - iteration of the last overflow, at first -1) is a multiple of step_window. The scale stays
    in [scale_min, scale_max] and starts at init_scale, by default scale_max.
    """

    _kind = "backoff"

    def __init__(
        self,
        scale_min: float = 1.0,
        scale_max: float = 2.0**24,
        step_factor: float = 2.0,
        step_window: int = 2000,
        *,
        init_scale: float | None = None,
    ) -> None:
        scale = scale_max if init_scale is None else init_scale
        super().__init__(scale, scale_min, scale_max, step_factor, step_window, last_overflow=-1)


class Hysteresis(ScalePolicy):
    """torch.amp's rule with patience: only the `hysteresis`-th overflow lowers the scale.

    An overflow reduces the patience by 1; at 0 it multiplies the scale by backoff_factor.
    growth_interval clean steps in a row multiply it by growth_factor.

    Args:
        hysteresis: the patience; 1 is torch's rule, whose arguments the first four are.
        refill: when the patience is full again: "clean_step", after any step without overflow
            (Apex's update_scale_hysteresis), or "growth", only when the scale grows (Megatron-LM's
            DynamicGradScaler).
        scale_min, scale_max: bounds of the scale.
    """

    _kind = "hysteresis"

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        *,
        refill: str = "clean_step",
        scale_min: float = 1.0,
        scale_max: float = NO_CEILING,
    ) -> None:
        check_choice("refill", refill, ("clean_step", "growth"))
        settings = scale_min, scale_max, growth_factor, backoff_factor, growth_interval, hysteresis
        own = {"refill_on_growth": float(refill == "growth"), "hysteresis_tracker": hysteresis}
        super().__init__(init_scale, *settings, **own)


class LogMax(ScalePolicy):
    """OpenSeq2Seq's LogMax: the scale follows the distribution of max |g|.

    x = log2 max |g| is taken to be normal. Its mean mu is an average over about 1 / (1 - beta1)
    steps and its deviation sigma over 1 / (1 - beta2), both corrected for their start:

        scale = 2^(log_max - (mu + overflow_std_dev sigma)), within [scale_min, scale_max]

    so that overflow_std_dev = 3.09 means an overflow in a thousand steps. The first step is taken
    at scale 1. An overflow enters as x = log_max; gradients that are all zero change nothing.
    """

    _kind = "log_max"
    needs_max_abs = True

    def __init__(
        self,
        scale_min: float = 1.0,
        scale_max: float = 2.0**24,
        log_max: float = 16.0,
        beta1: float = 0.99,
        beta2: float = 0.999,
        overflow_std_dev: float = 3.09,
    ) -> None:
        scale = min(max(1.0, scale_min), scale_max)
        settings = scale_min, scale_max, log_max, beta1, beta2, overflow_std_dev
        super().__init__(scale, *settings, missing=1, slow_missing=1)


class AdaptiveGradScale(ScalePolicy):
    """NVCaffe's global_grad_scale_adaptive: keeps the largest scaled gradient at 4 target.

    scale = 4 target / max |g| of the step before, or target where all gradients were zero, within
    [scale_min, scale_max]. It starts at target.
    """

    _kind = "adaptive"
    needs_max_abs = True

    def __init__(
        self, target: float = 1000.0, scale_min: float = 2.0**-24, scale_max: float = NO_CEILING
    ) -> None:
        super().__init__(target, scale_min, scale_max, target)


class Tolerance(ScalePolicy):
    """fairseq's DynamicLossScaler: an occasional overflow skips its step but keeps the scale.

    On overflow the scale is divided by step_factor only if overflows / steps >= tolerance, counted
    since the scale last changed. It is multiplied by step_factor after step_window steps without
    overflow, and stays in [scale_min, scale_max]. A tolerance of 0 lowers it at every overflow.
    """

    _kind = "tolerance"

    def __init__(
        self,
        init_scale: float = 2.0**15,
        step_factor: float = 2.0,
        step_window: int = 2000,
        tolerance: float = 0.05,
        scale_min: float = 1e-4,
        scale_max: float = NO_CEILING,
    ) -> None:
        settings = scale_min, scale_max, step_factor, step_window, tolerance
        super().__init__(init_scale, *settings, last_overflow=-1, last_rescale=-1)


NAMES: dict[str, type[ScalePolicy]] = {
    **dict.fromkeys(("dynamic", "backoff"), Backoff),
    **dict.fromkeys(("logmax", "lognormal"), LogMax),
}


def make_policy(
    loss_scale: float | str | ScalePolicy, dynamic: ScalePolicy | None = None
) -> ScalePolicy:
    """The policy of a `loss_scale=` argument.

    loss_scale: a number makes a Static policy, a policy is taken as it is; "Backoff", "LogMax" (or
    "LogNormal") with their defaults, "dynamic". dynamic: what that stands for; default: Backoff
    with its defaults. ValueError for an unknown name, or a number not finite or not above 0.
    """
    if isinstance(loss_scale, ScalePolicy):
        return loss_scale
    if not isinstance(loss_scale, str):
        return Static(check_scale(loss_scale, "loss_scale"))
    name = loss_scale.lower().strip()
    if name == "dynamic" and dynamic is not None:
        return dynamic
    if name not in NAMES:
        raise ValueError(
            f'loss_scale: Unknown scaling algorithm: {loss_scale}; expected "dynamic", "Backoff", '
            '"LogMax", a number, or a policy of amp_mp.scaling'
        )
    return NAMES[name]()


def from_state_dict(state_dict: dict[str, Any]) -> ScalePolicy:
    """The policy of a snapshot, in its state; ValueError: unknown, a number missing or wrong."""
    name = state_dict.get("policy")
    kinds = {kind.__name__: kind for kind in ScalePolicy.__subclasses__()}
    if name not in kinds:
        raise ValueError(f"state_dict: policy must be one of {', '.join(kinds)}, found {name!r}")
    policy = kinds[name]()
    policy.load_state_dict(state_dict)
    return policy
