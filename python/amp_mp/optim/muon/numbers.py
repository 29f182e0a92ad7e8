"""The numbers of Muon's param_groups: their checks, and the rate of a matrix."""

from collections.abc import Mapping
from math import sqrt
from numbers import Real
from typing import Any

ADJUSTMENTS = (None, "original", "match_rms_adamw")


def check_numbers(group: Mapping[str, Any]) -> None:
    """Raises ValueError naming a number of Muon's that a param_group has and that cannot be."""
    if "use_muon" in group and not isinstance(group["use_muon"], bool):
        raise ValueError(f"use_muon must be True or False, found {group['use_muon']!r}")
    if "ns_steps" not in group:
        return
    coefficients, steps = group.get("ns_coefficients"), group["ns_steps"]
    listed = coefficients if isinstance(coefficients, tuple | list) else ()
    if len(listed) != 3 or not all(isinstance(c, Real) for c in listed):
        raise ValueError(f"ns_coefficients must be three numbers, found {coefficients!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps must be a whole number of [0, 100), found {steps!r}")
    if group.get("adjust_lr_fn") not in ADJUSTMENTS:
        known = ", ".join(repr(each) for each in ADJUSTMENTS)
        raise ValueError(f"adjust_lr_fn must be one of {known}; found {group['adjust_lr_fn']!r}")
    split = group.get("split", 1)
    if isinstance(split, bool) or not isinstance(split, int) or split < 1:
        raise ValueError(f"split must be a whole number of at least 1, found {split!r}")
    if not isinstance(group.get("flatten", False), bool):
        raise ValueError(f"flatten must be True or False, found {group['flatten']!r}")


def factor_of_rate(group: Mapping[str, Any], shape: tuple[int, int]) -> float:
    """What the learning rate is multiplied by for matrices of a shape, as torch.optim.Muon's."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns)) if columns else 1.0
