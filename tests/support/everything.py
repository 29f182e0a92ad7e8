"""Every byte that a refusal must leave: models, optimizers, schedulers, scalers, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from helpers import raw_bytes


def everything(*parts: Any) -> list[Any]:
    """What modules, optimizers, schedulers, scalers and tensors hold, and the generators."""
    found = [raw_bytes(_of(part)) for part in parts]
    kind, keys, *rest = np.random.get_state()
    found += [raw_bytes(torch.get_rng_state()), str(kind), np.asarray(keys).tobytes(), rest]
    return [*found, random.getstate()]


def _of(part: Any) -> Any:
    if isinstance(part, torch.optim.Optimizer):
        state = part.state_dict()
        order = [list(each) for each in state["state"].values() if isinstance(each, dict)]
        return [state, order, repr(state["param_groups"]), part.defaults]
    return part.state_dict() if hasattr(part, "state_dict") else part


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """What a call raises; None where it returns."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    return None
