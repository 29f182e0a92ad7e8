"""Loss-scale policies: which scale the next step uses.

The state machines are in csrc/core/scale.h, over a float64 tensor, the same on the host and on a
device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C

# The largest scale whose reciprocal is still a normal float32: where others have no ceiling.
NO_CEILING = 2.0**126


class Policy:
    """A loss scale and how it moves: `scale`, `update(found_inf)`, `state_dict()`."""

    _kind: int
    _fields: tuple[str, ...]  # the state tensor's elements after the kind

    def __init__(self, **values: float) -> None:
        """For subclasses: the state's elements by name."""
        numbers = [float(self._kind), *(values[name] for name in self._fields)]
        self._state = torch.tensor(numbers, dtype=torch.float64)

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by."""
        return float(self._state[1])

    @scale.setter
    def scale(self, value: float) -> None:
        self._state[1] = check_scale(value, "scale")

    def update(self, found_inf: bool | Tensor, max_abs: float | None = None) -> None:
        """Moves the scale after a step.

        Args:
            found_inf: whether a gradient was inf or NaN: a bool, or a tensor of one element, not 0
                if so.
            max_abs: largest unscaled |g| of the step, for policies that look at it; unused here.
        """
        found = torch.as_tensor(found_inf, dtype=torch.float32).reshape(()).to(self._state.device)
        _C.update_scale_(self._state, found)

    def state_dict(self) -> dict[str, Any]:
        """A snapshot: plain numbers by name, and the policy's name."""
        values = dict(zip(self._fields, self._state[1:].tolist(), strict=True))
        return {"policy": type(self).__name__, **values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where the snapshot was taken.

        Raises ValueError, before anything is changed, for another policy's snapshot, or a number
        that is missing or makes no sense.
        """
        name = state_dict.get("policy")
        missing = [field for field in self._fields if field not in state_dict]
        if name != type(self).__name__ or missing:
            raise ValueError(
                f"state_dict: expected a snapshot of {type(self).__name__} with "
                f"{', '.join(self._fields)}; found policy {name!r}, missing {missing}"
            )
        values = {field: state_dict[field] for field in self._fields}
        self._check(values)
        self._state[1:] = torch.tensor(list(values.values()), dtype=torch.float64)

    def _check(self, values: dict[str, Any]) -> None:
        """Raises ValueError for a snapshot's number that makes no sense."""
        check_scale(values["scale"], "scale")

    def __repr__(self) -> str:
        """The policy with its numbers."""
        values = zip(self._fields, self._state[1:].tolist(), strict=True)
        return f"{type(self).__name__}({', '.join(f'{k}={v:g}' for k, v in values)})"


class Static(Policy):
    """A scale that never moves. 1 is no scaling.

    Raises ValueError unless the scale is a finite number above 0.
    """

    _kind = 0
    _fields = ("scale",)

    def __init__(self, scale: float = 1.0) -> None:
        """See the class."""
        super().__init__(scale=check_scale(scale, "scale"))


class Backoff(Policy):
    """Divide the scale by step_factor on overflow, multiply it after step_window steps without one.

    OpenSeq2Seq's rule, which is Apex's as well: at iteration i, counted from 0, the scale grows if
    (i - iteration of the last overflow, at first -1) is a multiple of step_window. The scale stays
    in [scale_min, scale_max] and starts at init_scale, by default scale_max.

    Raises ValueError naming the argument that makes no sense.
    """

    _kind = 1
    _fields = (
        "scale",
        "scale_min",
        "scale_max",
        "step_factor",
        "step_window",
        "iteration",
        "last_overflow",
    )

    def __init__(
        self,
        scale_min: float = 1.0,
        scale_max: float = 2.0**24,
        step_factor: float = 2.0,
        step_window: int = 2000,
        *,
        init_scale: float | None = None,
    ) -> None:
        """See the class."""
        check_scale(scale_min, "scale_min")
        check_scale(scale_max, "scale_max")
        start = check_scale(scale_max if init_scale is None else init_scale, "init_scale")
        if not scale_min <= start <= scale_max:
            raise ValueError(
                "scale_min <= init_scale <= scale_max must hold, "
                f"found {scale_min}, {start}, {scale_max}"
            )
        if check_scale(step_factor, "step_factor") <= 1:
            raise ValueError(f"step_factor must be above 1, found {step_factor!r}")
        if check_scale(step_window, "step_window") % 1 != 0:
            raise ValueError(f"step_window must be a whole number from 1 on, found {step_window!r}")
        super().__init__(
            scale=start,
            scale_min=scale_min,
            scale_max=scale_max,
            step_factor=step_factor,
            step_window=step_window,
            iteration=0,
            last_overflow=-1,
        )

    def _check(self, values: dict[str, Any]) -> None:
        super()._check(values)
        Backoff(*(values[name] for name in self._fields[1:5]))
        for name in ("iteration", "last_overflow"):
            count = values[name]
            if not (isinstance(count, int | float) and -1 <= count < 2**53):
                raise ValueError(f"{name} must be a count of steps, found {count!r}")


def make_policy(loss_scale: float | str | Policy, dynamic: Policy | None = None) -> Policy:
    """What a `loss_scale=` argument means: a number, a policy, "Backoff", or "dynamic".

    Args:
        loss_scale: a number makes a Static policy, a policy is taken as it is.
        dynamic: what "dynamic" means here; a Backoff policy with its defaults if not given.

    Raises:
        ValueError: an unknown name, or a number that is no scale.
    """
    if isinstance(loss_scale, Policy):
        return loss_scale
    if isinstance(loss_scale, str):
        name = loss_scale.lower().strip()
        if name == "dynamic":
            return Backoff() if dynamic is None else dynamic
        if name == "backoff":
            return Backoff()
        raise ValueError(
            f'loss_scale: unknown scaling algorithm {loss_scale!r}; expected "dynamic", "Backoff", '
            "a number, or a policy of amp_mp.scaling"
        )
    return Static(check_scale(loss_scale, "loss_scale"))


def apex_policy(
    static: float,
    dynamic: bool,
    arguments: dict[str, Any] | None,
    loss_scale: float | str | Policy | None,
) -> Policy:
    """What the scale arguments of Apex's FP16_Optimizer mean.

    Its dynamic scale starts at 2^32, halves on overflow but not below 1, doubles after 1000 steps
    without one, and has no ceiling.

    Raises:
        ValueError: an unknown name in the arguments, or a number that is no scale.
    """
    given = dict(arguments or {})
    start = check_scale(given.pop("init_scale", 2.0**32), "dynamic_loss_args['init_scale']")
    factor, window = given.pop("scale_factor", 2.0), given.pop("scale_window", 1000)
    if given:
        raise ValueError(
            f"dynamic_loss_args: unknown {sorted(given)}; "
            "known are init_scale, scale_factor, scale_window"
        )
    try:
        preset = Backoff(min(1.0, start), NO_CEILING, factor, window, init_scale=start)
    except ValueError as error:  # Apex's names are others
        raise ValueError(f"dynamic_loss_args: {error}") from None
    if loss_scale is not None:
        return make_policy(loss_scale, preset)
    return preset if dynamic else make_policy(check_scale(static, "static_loss_scale"))


def check_scale(value: float, name: str) -> float:
    """The value as a float; ValueError unless it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, found {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and above 0, found {value!r}")
    return float(value)
