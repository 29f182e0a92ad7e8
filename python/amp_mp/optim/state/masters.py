"""Float32 masters of low-precision parameters."""

from typing import Any

import torch
from torch import Tensor

from amp_mp.optim.state.formats import REST_FORMATS, belongs, get, new_rest, put, split_name
from amp_mp.optim.state.original_values import take_original


def set_master(
    format: str, param: Tensor, state: dict[str, Any], values: Tensor | None = None
) -> None:
    """Gives a low-precision parameter a master of the format, holding `values` if there are any.

    Without values an existing master is kept, or converted if it has another format. The parameter
    becomes the rounded values; a split rounds a value half way between two weights away from zero.
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
        state["master"] = torch.empty_like(param, dtype=torch.float32)
    elif format != "none":
        state["remainder"] = new_rest(format, param)
    arrays = _arrays(param, state)
    if arrays is not None:
        with torch.no_grad():
            put(values, *arrays)


def master_of(param: Tensor, state: dict[str, Any]) -> Tensor | None:
    """A low-precision parameter's master, a new float32 tensor of its shape and layout, or None.

    Where the parameter was written since the last step, the master is what was written.
    """
    arrays = _arrays(param, state)
    return None if arrays is None else get(*arrays)


def _arrays(param: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor, str] | None:
    """The two arrays of a low-precision parameter's master and their format, or None."""
    weight, master, rest = param.detach(), state.get("master"), state.get("remainder")
    if master is not None:
        return master, weight, split_name("float32", param.dtype)
    if rest is not None and belongs(rest, param):
        return weight, rest, split_name(REST_FORMATS[rest.dtype], param.dtype)
    return None
