"""Tensors as this process needs them: whole beside a plain parameter, else its part."""

from typing import Any

from torch import Tensor

from amp_mp.sharding.shards import is_dtensor, local_of


def whole(value: Tensor) -> Tensor:
    """All of a tensor, as a plain one. All processes must ask for the same DTensors in turn."""
    found: Any = value.detach()
    return found.full_tensor() if is_dtensor(found) else found  # type: ignore[no-any-return]


def part(value: Tensor, param: Tensor) -> Tensor:
    """This process's part of a tensor that is split as the parameter is, or could be.

    All of it beside a plain parameter. Processes exchange something only where value is a DTensor
    that is not placed as the parameter.
    """
    if type(value) is Tensor and not is_dtensor(param):
        return value
    if is_placed_as(value, param):
        return local_of(value).detach()
    return part_of_whole(whole(value), param)


def is_placed_as(value: Tensor, param: Tensor) -> bool:
    """Whether both are plain tensors, or DTensors split in the same way."""
    return _placing(value) == _placing(param)


def _placing(tensor: Any) -> tuple[object, ...]:
    return (tensor.device_mesh, *tensor.placements) if is_dtensor(tensor) else ()


def part_of_whole(value: Tensor, param: Tensor) -> Tensor:
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
