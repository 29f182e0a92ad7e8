"""Float32 masters of low-precision parameters."""

from typing import Any

import torch
from torch import Tensor

from amp_mp.optim.state.formats import REST_FORMATS, get, new_rest, put, split_name
from amp_mp.optim.state.original_values import take_original


def set_master(
    format: str, param: Tensor, state: dict[str, Any], values: Tensor | None = None
) -> None:
    """Gives a low-precision parameter a master of the format, holding `values` if there are any.

    Without values an existing master is kept, or converted if it has another format. A split master
    also writes the parameter: a value half way between two weights is rounded away from zero.
    """
    if values is None:
        name = "master" if format == "float32" else "remainder"
        if format == "none" or state.get(name) is not None:
            return
        present = master_of(param, state)
        values = take_original(param) if present is None else present
    state.pop("master", None)
    state.pop("remainder", None)
    if format == "float32":
        state["master"] = values
    elif format != "none":
        state["remainder"] = new_rest(format, param)
        with torch.no_grad():
            put(values, param.detach(), state["remainder"], split_name(format, param.dtype))


def master_of(param: Tensor, state: dict[str, Any]) -> Tensor | None:
    """A low-precision parameter's master as float32, shape and layout of the parameter, or None.

    It is the state's own tensor, or decoded from the parameter and its remainder.
    """
    master: Tensor | None = state.get("master")
    rest = state.get("remainder")
    if master is not None or rest is None:
        return master
    return get(param.detach(), rest, split_name(REST_FORMATS[rest.dtype], param.dtype))
