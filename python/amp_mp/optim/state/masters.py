"""Float32 masters of low-precision parameters."""

from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.optim.state.formats import (
    MASTER_ENTRIES,
    REST_FORMATS,
    beside,
    get,
    new_rest,
    placed,
    put,
    rest_name,
    split_name,
)
from amp_mp.optim.state.original_values import take_original
from amp_mp.sharding.shards import is_dtensor, like, local_of


def set_master(
    format: str, param: Tensor, state: dict[str, Any], values: Tensor | None = None
) -> None:
    """Gives a low-precision parameter a master of the format, holding `values` if there are any.

    Without values an existing master is kept, or converted if it has another format; "none" drops
    it. The parameter becomes the rounded values; a split rounds a value half way between two
    weights away from zero.
    values: beside a DTensor a DTensor placed as it is, or the part on this process.
    """
    if values is None:
        if format == "none":
            _drop_masters(state)
            return
        if state.get(_entry(format, param)) is not None:
            return
        present = master_of(param, state)
        values = take_original(param) if present is None else present
    _drop_masters(state)
    if format == "float32":
        made = torch.empty_like(local_of(param), dtype=torch.float32)
        state["master"] = like(made, param)
    elif format != "none":
        state[_entry(format, param)] = like(new_rest(format, param), param)
    arrays = _arrays(param, state)
    if arrays is not None:
        with torch.no_grad():
            put(local_of(values), *arrays)
        if is_dtensor(param):  # what was written is the memory below it
            torch.autograd.graph.increment_version(param)


def master_of(param: Tensor, state: dict[str, Any]) -> Tensor | None:
    """A low-precision parameter's master, a new float32 tensor of its shape and layout, or None.

    Where the parameter was written since the last step, the master is what was written. Beside a
    DTensor it is one, placed as the parameter is.
    """
    arrays = _arrays(param, state)
    return None if arrays is None else like(get(*arrays), param)


def _drop_masters(state: dict[str, Any]) -> None:
    found = [t for name in MASTER_ENTRIES if (t := state.pop(name, None)) is not None]
    # They may be of another stream, whose allocator would hand them out while this one reads them.
    _C.used_on_current_stream([local_of(tensor) for tensor in found])


def _entry(format: str, param: Tensor) -> str:
    return "master" if format == "float32" else rest_name(format, param.dtype)


def _arrays(param: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor, str] | None:
    """The two arrays of a low-precision parameter's master and their format, or None."""
    second = beside(param, state)
    if second is None:
        return None
    weight = local_of(param).detach()
    second = placed(second, weight)
    if second.dtype == torch.float32:
        return second, weight, split_name("float32", param.dtype)
    return weight, second, split_name(REST_FORMATS[second.dtype], param.dtype)
