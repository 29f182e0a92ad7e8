"""Saved tensors as this process needs them: whole beside a plain parameter, else its part."""

from typing import Any

import torch
from torch import Tensor

from amp_mp.optim.state.entries import Held, viewed
from amp_mp.optim.state.formats import (
    NATIVE_FORMATS,
    get,
    has_groups,
    native_name,
    new_state,
    put,
    scale_shape,
)
from amp_mp.sharding.shards import is_dtensor, local_of, origin_of


def whole(value: Tensor) -> Tensor:
    """All of a tensor, as a plain one. All processes must ask for the same DTensors in turn."""
    if not is_dtensor(value):
        return value.detach()
    shown = viewed(value.detach(), torch.int16, torch.bfloat16)  # gloo and NCCL lack int16
    gathered: Tensor = shown.full_tensor()
    return viewed(gathered, torch.bfloat16, value.dtype)  # type: ignore[no-any-return]


def part(value: Tensor, param: Tensor) -> Tensor:
    """This process's part of a tensor that is shaped like the parameter, or like its scales.

    All of it beside a plain parameter. Processes exchange something only where value is a DTensor
    that is not placed as the parameter.
    """
    if is_placed_as(value, param):
        return local_of(value).detach()
    return _slice(whole(value), param)


def part_of_state(found: Held, param: Tensor) -> Held:
    """This process's part of a state, in the format that it has.

    As float32 numbers where its groups do not lie in the parameter's part.
    """
    if found.scale is None:
        return found._replace(data=part(found.data, param))
    shape = scale_shape(param)
    if not is_dtensor(param):
        return found._replace(data=whole(found.data), scale=whole(found.scale))
    fits = has_groups(param)
    placed = is_placed_as(found.data, param) and is_placed_as(found.scale, param)
    if fits and placed and tuple(found.scale.shape) == shape:
        return found._replace(data=local_of(found.data), scale=local_of(found.scale))
    data, scale = whole(found.data), whole(found.scale)
    if fits and data.is_contiguous():
        return found._replace(data=_slice(data, param), scale=_slice(scale.reshape(shape), param))
    values = get(data, scale, native_name(found.format))
    return Held(found.entry, "float32", _slice(values, param), None)


def stored_anew(
    found: Held, format: str, param: Tensor, **random: int
) -> tuple[Tensor, Tensor | None]:
    """The data and scales of a state's values in another format, or in the parameter's layout.

    found: this process's part. random: put's arguments that choose the random bits.
    """
    native = native_name(format)
    values = get(found.data.detach(), found.scale, native_name(found.format))
    data, scale = new_state(format, param)
    put(values.to(data.device), data, scale, native, **random, **places(param, native))
    return data, scale


def places(param: Tensor, native: str) -> dict[str, int]:
    """put's arguments that say where the shard's elements are in the whole tensor.

    Rounding then draws the same bits for an element however the tensor is split.
    """
    if not NATIVE_FORMATS[native]["stochastic"]:
        return {}
    return {name: number for name, number in origin_of(param)._asdict().items() if number}


def is_placed_as(value: Tensor, param: Tensor) -> bool:
    """Whether both are plain tensors, or DTensors split in the same way."""
    return _placing(value) == _placing(param)


def _placing(tensor: Any) -> tuple[object, ...]:
    return (tensor.device_mesh, *tensor.placements) if is_dtensor(tensor) else ()


def _slice(value: Tensor, param: Tensor) -> Tensor:
    """A whole tensor's part on this process, contiguous."""
    if not is_dtensor(param):
        return value
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    if shape == tuple(value.shape):
        return value
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        value = value.narrow(dim, min(start, value.shape[dim] - size), size)
    return value.contiguous()
