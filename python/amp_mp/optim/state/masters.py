"""Float32 values of low-precision parameters: masters, and the values that `prepare` keeps."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp.dtypes import rounded
from amp_mp.optim.state.formats import REST_FORMATS, belongs, get, new_rest, put, split_name

# A parameter's float32 values before it was rounded, and its version counter after that.
_float32_values: MutableMapping[Tensor, tuple[Tensor, int]] = WeakTensorKeyDictionary()


def keep_original(param: Tensor, values: Tensor | None = None) -> None:
    """Keeps a float32 parameter's values; call it before replacing `.data` by rounded ones.

    values: those of a parameter that is rounded already, and was written since without a change.
    """
    _float32_values[param] = param.detach() if values is None else values, param._version


def original_of(param: Tensor) -> Tensor | None:
    """The values that `prepare` kept, if the parameter was not written since; not a copy.

    Comparing values alone is not enough: DDP sends the rounded weights of rank 0 to all ranks, and
    with equal values rank 0 alone would use its original, so that masters differ between ranks.
    """
    original, version = _float32_values.get(param, (None, 0))
    if original is None or original.shape != param.shape or param._version != version:
        return None
    return original if torch.equal(rounded(original, param.dtype), param.detach()) else None


def take_original(param: Tensor) -> Tensor:
    """A new float32 master for a low-precision parameter, same shape, layout and device.

    It holds the original values (original_of), if there are any, which are then kept no longer.
    """
    original = original_of(param)
    _float32_values.pop(param, None)
    if original is None:
        return param.detach().to(torch.float32, copy=True)
    return torch.empty_like(param, dtype=torch.float32).copy_(original)


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
