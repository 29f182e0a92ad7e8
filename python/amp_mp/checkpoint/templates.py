"""Empty tensors, as a file stores them, for torch.distributed.checkpoint to fill.

A template has the file's dtype, and is split over processes as the tensor that it is for, so that
every process reads its own shard. Three things are read whole on every process: numbers such as the
step count; codes of groups that the shards here would cut, with their scales; and what is neither
the model's nor the optimizer's.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from amp_mp.checkpoint.contents import Contents, TensorInfo
from amp_mp.optim.state.formats import has_groups, scale_shape
from amp_mp.optim.state.schema import CLOCK, as_bytes, scale_name
from amp_mp.sharding.shards import is_dtensor, like, local_of

EXTRA = "_extra_state"  # the end of the names of what modules save by get_extra_state
# The layout of codes that were not row-major, by the number of dimensions: the only dense one for
# 2, the one that torch has a name for with more.
OTHER_LAYOUTS = {2: (1, 0), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


def model_template(contents: Contents, targets: dict[str, Any], strict: bool) -> dict[str, Any]:
    """By key, an empty tensor for every tensor of the model, None for what is no tensor.

    targets: the model's state dict. Raises ValueError for a tensor that is missing (with strict,
    also one that only the file has) or has another shape.
    """
    if contents.model is None:
        raise ValueError(
            "the checkpoint has none of the model's parameters, by their names; nothing was loaded"
        )
    own = {contents.weight(name): value for name, value in targets.items()}
    if strict:
        missing = sorted(own.keys() - contents.keys)
        beside = {key for key in contents.tensors if key.startswith(contents.model)}
        extra = sorted(beside - own.keys()) if contents.model else []
        for keys, whose in ((missing, "in the checkpoint"), (extra, "in the model")):
            if keys:
                raise ValueError(
                    f"{keys[0]!r} and {len(keys) - 1} others are not {whose}; nothing was loaded "
                    "(strict=False leaves them out)"
                )
    found: dict[str, Any] = {}
    for key, value in own.items():
        entry = contents.tensors.get(key)
        if key not in contents.keys:
            continue
        if entry is None or key.endswith(EXTRA):
            found[key] = empty(contents, key)
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape != entry.shape:
            raise ValueError(
                f"{key!r} has shape {entry.shape} in the checkpoint, {shape} in the model; nothing "
                "was loaded"
            )
        found[key] = _empty_like(value, entry)
    return found


def state_template(
    contents: Contents, name: str, param: Tensor, wanted: Collection[str] | None = None
) -> dict[str, Any]:
    """By entry, an empty tensor for what the file has of a parameter's optimizer state.

    wanted: the entries to read, all by default. Raises ValueError for codes in an unknown layout.
    """
    keys = contents.states.get(name, {})
    keys = {entry: key for entry, key in keys.items() if wanted is None or entry in wanted}
    found: dict[str, Any] = {}
    for entry, key in keys.items():
        scales = contents.tensors.get(keys.get(scale_name(entry), ""))
        if key not in contents.tensors or entry in CLOCK:
            found[entry] = empty(contents, key, local_of(param).device)
        elif scales is not None:
            data = contents.tensors[key]
            found |= _grouped(entry, data, scales, param)
        elif entry not in found:
            found[entry] = _empty_state(contents, key, param)
    return found


def _empty_state(contents: Contents, key: str, param: Tensor) -> Tensor | None:
    """An empty tensor for a state without groups, or for what has another shape: whole."""
    entry, shape = contents.tensors[key], tuple(param.shape)
    if entry.shape == shape:
        return _empty_like(param, entry)
    if entry.shape == (*shape, 2) and entry.dtype == torch.uint8:
        return as_bytes(_empty_like(param, TensorInfo(shape, torch.int16)))
    return empty(contents, key, local_of(param).device)


def empty(contents: Contents, key: str, device: torch.device | None = None) -> Tensor | None:
    """A whole tensor, or None for what is no tensor."""
    entry = contents.tensors.get(key)
    return None if entry is None else torch.empty(entry.shape, dtype=entry.dtype, device=device)


def _grouped(entry: str, data: TensorInfo, scales: TensorInfo, param: Tensor) -> dict[str, Tensor]:
    """Empty codes and their scales: cut as the parameter is where that cuts between groups."""
    local, second = local_of(param), scale_name(entry)
    if scales.shape == scale_shape(param) and (has_groups(param) or not is_dtensor(param)):
        shape = scale_shape(param, tuple(local.shape))
        own = torch.empty(shape, dtype=scales.dtype, device=local.device)
        return {entry: _empty_like(param, data), second: like(own, param, scales.shape)}
    row_major = scale_shape(torch.empty(data.shape, device="meta"))
    order = tuple(range(len(data.shape)))
    if len(scales.shape) == 1 and row_major != scales.shape:
        # Groups are of neighbours in memory, and flat scales say that this was not row-major.
        order = OTHER_LAYOUTS.get(len(data.shape), ())
        if not order:
            raise ValueError(
                f"{entry!r} of a parameter of shape {data.shape} was saved in a layout that is not "
                "row-major; load it into a parameter of the same layout; nothing was loaded"
            )
    codes = torch.empty([data.shape[d] for d in order], dtype=data.dtype, device=local.device)
    codes = codes.permute([order.index(d) for d in range(len(order))])
    whole = torch.empty(scales.shape, dtype=scales.dtype, device=local.device)
    return {entry: codes, second: whole}


def _empty_like(value: Any, entry: TensorInfo) -> Tensor:
    """As the file has it, split and placed as the value is."""
    return like(torch.empty_like(local_of(value), dtype=entry.dtype), value)
