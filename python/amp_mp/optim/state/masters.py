"""Float32 values of low-precision parameters: masters, and the values that `prepare` keeps."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_mp.dtypes import rounded
from amp_mp.optim.state.formats import REST_FORMATS, get, new_rest, put, split_name

# A parameter's float32 values before it was rounded, and its version counter after that.
_float32_values: MutableMapping[Tensor, tuple[Tensor, int]] = WeakTensorKeyDictionary()


def keep_original(param: Tensor) -> None:
    """Keeps a float32 parameter's values; call it before replacing `.data` by rounded ones."""
    _float32_values[param] = param.detach(), param._version


def take_original(param: Tensor) -> Tensor:
    """A new float32 master for a low-precision parameter, same shape, layout and device.

    It holds the original values if `prepare` kept them and the parameter was not written since.
    Comparing values alone is not enough: DDP sends the rounded weights of rank 0 to all ranks, and
    with equal values rank 0 alone would use its original, so that masters differ between ranks.
    """
    original, version = _float32_values.pop(param, (None, 0))
    if original is not None and original.shape == param.shape and param._version == version:
        master = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
        master.copy_(original)
        if torch.equal(rounded(master, param.dtype), param.detach()):
            return master
    return param.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)


def set_master(
    format: str, param: Tensor, state: dict[str, Any], values: Tensor | None = None
) -> None:
    """Gives a low-precision parameter a master of the format, holding `values` if there are any.

    Without values an existing master is kept, or converted if it has another format. A split master
    also writes the parameter: a value half way between two weights is rounded away from zero.
    """
    rest = state.get("remainder")
    if values is None:
        if "master" in state if format == "float32" else rest is not None:
            return
        if format == "none":
            return
        values = master_of(param, state)
        values = take_original(param) if values is None else values
    state.pop("master", None)
    state.pop("remainder", None)
    if format == "float32":
        state["master"] = values
    elif format != "none":
        state["remainder"] = new_rest(format, param)
        with torch.no_grad():
            put(values, param.detach(), state["remainder"], split_name(format, param.dtype))


def master_of(param: Tensor, state: dict[str, Any]) -> Tensor | None:
    """A low-precision parameter's master as float32: the tensor itself, or decoded; None without.

    Same shape and layout as the parameter.
    """
    master: Tensor | None = state.get("master")
    if master is not None:
        return master
    rest = state.get("remainder")
    if rest is None:
        return None
    return get(param.detach(), rest, split_name(REST_FORMATS[rest.dtype], param.dtype))
