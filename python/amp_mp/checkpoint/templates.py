"""Empty tensors, as a file stores them, for torch.distributed.checkpoint to fill."""

from typing import Any

import torch
from torch import Tensor

from amp_mp.checkpoint.contents import Contents, Entry
from amp_mp.optim.state.formats import GROUP, MASTER_ENTRIES
from amp_mp.optim.state.init import CLOCK
from amp_mp.sharding.shards import is_dtensor, like, local_of, shards_of


def model_template(contents: Contents, targets: dict[str, Any], strict: bool) -> dict[str, Any]:
    """By key, an empty tensor in the file's dtype for every tensor of the model.

    targets: the model's state dict. Raises ValueError for a tensor that is missing (with strict,
    also one that only the file has) or has another shape.
    """
    if contents.model is None:
        raise ValueError("the checkpoint has none of the model's parameters, by their names")
    own = {f"{contents.model}{name}": value for name, value in targets.items()}
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
        if entry is None:
            if key in contents.keys:
                found[key] = None
            continue
        if not isinstance(value, Tensor) or tuple(value.shape) != entry.shape:
            shape = tuple(getattr(value, "shape", ()))
            raise ValueError(
                f"{key!r} has shape {entry.shape} in the checkpoint, {shape} in the model; nothing "
                "was loaded"
            )
        found[key] = _empty_like(value, entry)
    return found


def state_template(
    contents: Contents, name: str, param: Tensor, *, all_entries: bool
) -> dict[str, Any]:
    """By key, an empty tensor for every entry of a parameter's optimizer state.

    all_entries: else only those that belong to the weight's master, where the file has the weight
    in another dtype.
    """
    weight = contents.tensors.get(f"{contents.model}{name}")
    keys = contents.states(name)
    if not all_entries:
        differs = weight is not None and weight.dtype != param.dtype
        keys = {entry: key for entry, key in keys.items() if differs and entry in MASTER_ENTRIES}
    whole = not _splits_groups(contents, param, keys)
    return {
        key: _empty_state(contents.tensors[key], param, whole, plain=entry in CLOCK)
        for entry, key in keys.items()
    }


def _splits_groups(contents: Contents, param: Tensor, keys: dict[str, str]) -> bool:
    """Whether the codes and scales of the file can be cut where the parameter is cut."""
    scales = [contents.tensors[key] for entry, key in keys.items() if entry.endswith("_scale")]
    counts = shards_of(param)
    return all(
        len(each.shape) == len(counts)
        and each.shape[-1] * GROUP == param.shape[-1]
        and param.shape[-1] % (GROUP * counts[-1]) == 0
        for each in scales
    )


def _empty_state(entry: Entry, param: Tensor, whole: bool, plain: bool) -> Tensor:
    device = local_of(param).device
    if plain:  # the same on all processes, whatever the parameter's shape
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)
    codes = not entry.dtype.is_floating_point
    if entry.shape == tuple(param.shape) and not (whole and codes):
        return _empty_like(param, entry)
    local = local_of(param).shape
    if is_dtensor(param) and not whole and len(entry.shape) == param.dim() > 0:
        own = torch.empty((*local[:-1], local[-1] // GROUP), dtype=entry.dtype, device=device)
        return like(own, param, entry.shape)
    return torch.empty(entry.shape, dtype=entry.dtype, device=device)


def _empty_like(value: Any, entry: Entry) -> Tensor:
    """As the file has it, split and placed as the value is."""
    return like(torch.empty_like(local_of(value), dtype=entry.dtype), value)
