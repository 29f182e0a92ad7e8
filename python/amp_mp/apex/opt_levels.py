"""The opt levels O0 to O3: what each of them means, and what a script has changed about it."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from amp_mp.dtypes import LOW_PRECISION, NATIVE, check_choice, check_dtype
from amp_mp.scaling.policies import Backoff, ScalePolicy, make_policy

DTYPE = "AMP_MP_APEX_DTYPE"  # the variable that chooses the low precision of unchanged scripts
CHANGES = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "cast_model_outputs",
)
LOW = "low"  # the low precision, which a script may choose
# What each level is, in words, and its defaults in the order of CHANGES.
LEVELS: dict[str, tuple[Any, ...]] = {
    "O0": ("float32", torch.float32, False, None, False, 1.0),
    "O1": ("operators in low precision", None, True, None, None, "dynamic"),
    "O2": ("model in low precision, float32 masters", LOW, False, True, True, "dynamic"),
    "O3": ("everything in low precision", LOW, False, False, False, 1.0),
}


# What contradicts a level, and why.
ONLY_IN_O1 = {"patch_torch_functions": "operators are cast in O1 alone; choose opt_level='O1'"}
NOT_IN_O1 = {
    "cast_model_type": "O1 casts operators, and the model stays float32; choose 'O2'",
    "keep_batchnorm_fp32": "batch norms are float32 in O1; leave it out, or choose 'O2'",
    "master_weights": "the weights are float32 in O1; leave it out, or choose 'O2'",
}


@dataclass
class Properties:
    """What is in force since `initialize`; Apex's opt_properties."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str | ScalePolicy = 1.0
    cast_model_outputs: torch.dtype | None = None
    dtype: torch.dtype = torch.float16

    @property
    def options(self) -> dict[str, Any]:
        """The values by Apex's names."""
        return {n: x for n, x in vars(self).items() if n not in ("cast_model_outputs", "dtype")}

    def __str__(self) -> str:
        """One line for the log."""
        shown = [(name, getattr(self, name)) for name in CHANGES]
        values = ", ".join(f"{name} {value}" for name, value in shown if value is not None)
        words = LEVELS[str(self.opt_level)][0]
        return f"opt_level {self.opt_level} ({words}, {self.dtype}): {values}"


def choose(opt_level: str, dtype: torch.dtype | None, given: tuple[Any, ...]) -> Properties:
    """The properties of a level; given: CHANGES, None for the default. Errors as `initialize`."""
    if opt_level not in LEVELS:
        raise RuntimeError(
            f"opt_level must be 'O0', 'O1', 'O2' or 'O3', found {opt_level!r}; it begins with the "
            "letter O, not with the number zero"
        )
    changes = {n: value for n, value in zip(CHANGES, given, strict=True) if value is not None}
    if changes.get("cast_model_type") is False:
        changes["cast_model_type"] = None
    low = _low_precision(dtype, changes.get("cast_model_type"))
    defaults = dict(zip(CHANGES, LEVELS[opt_level][1:], strict=False))
    for name in ("cast_model_type", "cast_model_outputs"):
        if changes.get(name) is not None:
            check_dtype(changes[name], NATIVE, name)
    for name in changes.keys() & {"keep_batchnorm_fp32", "master_weights", "patch_torch_functions"}:
        check_choice(name, str(changes[name]), ("True", "False"))
        changes[name] = str(changes[name]) == "True"
    _refuse_contradictions(opt_level, changes)
    if defaults["cast_model_type"] == LOW:
        defaults["cast_model_type"] = low
    if low == torch.bfloat16 and defaults["loss_scale"] == "dynamic":
        defaults["loss_scale"] = 1.0  # it has float32's range
    if opt_level == "O1":  # a model that stays float32 is what O1 means
        changes.pop("cast_model_type", None)
    return Properties(True, opt_level, **{**defaults, **changes}, dtype=low)


def make_scale(
    loss_scale: float | str | ScalePolicy, lowest: float | None, highest: float
) -> ScalePolicy:
    """The policy of a loss: "dynamic" within the bounds, a number, the text of one, or a policy."""
    try:
        bounds = min(1.0, highest) if lowest is None else lowest, highest
        start = max(min(2.0**16, highest), bounds[0])
        dynamic = Backoff(*bounds, init_scale=start)
    except (ValueError, TypeError) as error:
        raise ValueError(f"min_loss_scale={lowest}, max_loss_scale={highest}: {error}") from None
    if isinstance(loss_scale, str):
        with suppress(ValueError):  # it is a name
            loss_scale = float(loss_scale)
    return make_policy(loss_scale, dynamic)


def _low_precision(dtype: Any, model_type: Any) -> torch.dtype:
    name, argument = os.environ.get(DTYPE) or "float16", f"the environment variable {DTYPE}"
    found: Any = getattr(torch, name, name)
    if dtype is not None or model_type in LOW_PRECISION:
        found = model_type if dtype is None else dtype
        argument = "dtype"
    check_dtype(found, LOW_PRECISION, argument)
    if model_type in LOW_PRECISION and model_type != found:
        raise RuntimeError(f"cast_model_type={model_type} contradicts dtype={dtype}; give one")
    low: torch.dtype = found
    return low


def _refuse_contradictions(opt_level: str, changes: dict[str, Any]) -> None:
    for name, why in (NOT_IN_O1 if opt_level == "O1" else ONLY_IN_O1).items():
        if changes.get(name) not in (None, torch.float32) and (opt_level == "O1" or changes[name]):
            raise RuntimeError(f"{name}={changes[name]} with opt_level={opt_level!r}: {why}")
