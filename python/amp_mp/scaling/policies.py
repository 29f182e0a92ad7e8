"""The base of the loss-scale policies; csrc/core/scale.h has their arithmetic."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from amp_mp import _C

# The fields of each kind's state. A state begins with the position of its kind.
KINDS = _C.scale_kinds()

# The largest scale whose reciprocal is a normal float32. It stands for "no upper bound".
NO_CEILING = 2.0**126
# The smallest normal float32. No scale is below it: 1 / scale has to be finite.
FLOOR = 2.0**-126

WHOLE = "step_window growth_interval hysteresis"
COUNTS = "iteration last_overflow last_rescale overflows growth_tracker"  # -1 is "not yet"

# What the fields of a state but the scales must be, in the words of the error and as a test.
REQUIREMENTS: dict[str, tuple[str, Callable[[float], bool]]] = {
    field: (words, holds)
    for fields, words, holds in (
        ("target", "finite and above 0", lambda x: x > 0),
        ("step_factor growth_factor", "above 1", lambda x: x > 1),
        ("backoff_factor", "above 0 and below 1", lambda x: 0 < x < 1),
        ("beta1 beta2", "in [0, 1)", lambda x: 0 <= x < 1),
        ("tolerance", "in [0, 1]", lambda x: 0 <= x <= 1),
        (WHOLE, "a whole number from 1 on", lambda x: x >= 1 and x % 1 == 0),
        (COUNTS, "a count of steps", lambda x: -1 <= x < 2**53),
    )
    for field in fields.split()
}


class ScalePolicy:
    """A loss scale and how it moves.

    `state_tensor`, float64, on the CPU unless `to` has moved it, is the whole state: the kind, the
    scale, then the kind's other numbers.
    """

    _kind: ClassVar[str]  # the name in csrc/core/scale.h
    _fields: ClassVar[tuple[str, ...]]  # the elements of the state after the kind
    needs_max_abs = False  # whether update has to be told max_abs

    def __init_subclass__(cls) -> None:
        cls._fields = KINDS[cls._kind]

    def __init__(self, *first: float, **others: float) -> None:
        """For subclasses: the first fields of the state in order, others by name, the rest 0."""
        state = dict.fromkeys(self._fields, 0.0) | dict(zip(self._fields, first, strict=False))
        state |= others
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
        return dict(zip(self._fields, self.state_tensor[1:].tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """A snapshot: plain numbers by name, and the policy's name."""
        return {"policy": type(self).__name__, **self._values()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where the snapshot was taken.

        ValueError, before any change: another policy's snapshot, a number missing or out of range.
        """
        name = state_dict.get("policy")
        missing = [field for field in self._fields if field not in state_dict]
        if name != type(self).__name__ or missing:
            raise ValueError(
                f"state_dict: expected a snapshot of {type(self).__name__} with "
                f"{', '.join(self._fields)}; found policy {name!r}, missing {missing}"
            )
        values = {field: state_dict[field] for field in self._fields}
        check_scale(values["scale"], "scale")
        self._check(values)
        self.state_tensor[1:] = torch.tensor(list(values.values()), dtype=torch.float64)

    def _check(self, values: dict[str, Any]) -> None:
        """Raises ValueError for a number that is out of range, naming it."""
        for name in self._fields:
            if name in ("scale", "scale_min", "scale_max"):
                continue
            x = values[name]
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


class Static(ScalePolicy):
    """A scale that never moves, a finite number above 0 (ValueError). 1 is no scaling."""

    _kind = "fixed"

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)


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
