"""A DTensor's shard on this process: its memory, its origin in the whole tensor, its groups."""

import sys
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from amp_mp.torch_private import dtensor_of, gathered_parameters, local_shape_and_offset


class Origin(NamedTuple):
    """Where a shard's elements are in the whole tensor, both counted in row-major order.

    Element e of the shard is element first + e // row_length * row_stride + e % row_length of the
    whole; with row_length 0 it is element first + e.
    """

    first: int = 0
    row_length: int = 0
    row_stride: int = 0


def is_dtensor(tensor: Any) -> bool:
    """Whether the tensor is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Any) -> Tensor:
    """A DTensor's memory on this process, and any other tensor itself.

    It is the same object at every call until the DTensor gets other memory (load_state_dict with
    assign=True, model.to). It requires no gradient and has none.
    """
    local: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local


def any_dtensor(tensors: Iterable[Any]) -> bool:
    """Whether one of the tensors is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    kinds = set(map(type, tensors)) - {Tensor, nn.Parameter}
    if module is None or not kinds:
        return False
    return any(issubclass(kind, module.DTensor) for kind in kinds)


def locals_of(tensors: Iterable[Any]) -> list[Tensor]:
    """`local_of` each of them."""
    given = list(tensors)
    return [local_of(tensor) for tensor in given] if any_dtensor(given) else given


def set_local(tensor: Any, local: Tensor) -> None:
    """Gives a tensor other memory and another dtype, a DTensor on this process; the object stays.

    So do the attributes, hooks and weak references of a Parameter. module._apply would lose them:
    it exchanges the insides of two DTensors.
    """
    if not is_dtensor(tensor):
        tensor.data = local
        return
    new: Any = like(local, tensor)
    tensor.data = new  # changes the dtype, and not the memory
    tensor._local_tensor, tensor._spec = new._local_tensor, new._spec


def shards_of(tensor: Any) -> tuple[int, ...]:
    """Into how many pieces each of the tensor's dimensions is cut; all 1 for a plain tensor."""
    counts = [1] * tensor.dim()
    if is_dtensor(tensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            if not placement.is_replicate():  # is_shard() is False for _StridedShard
                counts[placement.dim] *= size
    return tuple(counts)


def origin_of(tensor: Any) -> Origin:
    """Where this process's shard begins. Needs a tensor that why_unusable has nothing against."""
    if not is_dtensor(tensor):
        return Origin()
    shape, offset = local_shape_and_offset(tensor.shape, tensor)
    cut = [dim for dim, count in enumerate(shards_of(tensor)) if count > 1]
    if not cut or 0 in shape:
        return Origin()
    strides = [prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim())]
    first = sum(o * s for o, s in zip(offset, strides, strict=True))
    last = cut[-1]
    if last == 0:
        return Origin(first)
    return Origin(first, prod(shape[last:]), tensor.shape[last] * strides[last])


def why_without_memory(tensor: Any) -> str:
    """Why a tensor, or its shard, has no memory to be written, in words; empty if it has."""
    local = local_of(tensor)
    if not hasattr(local, "__tensor_flatten__"):
        return ""
    kind = type(local.data)
    found = f"is a {kind.__name__}, whose memory other tensors have; pass plain tensors or DTensors"
    if kind.__module__.startswith("torchao.float8"):
        found += ": make Float8LinearConfig with enable_fsdp_float8_all_gather=False"
    return found


def why_unusable(tensor: Any) -> str:
    """Why a parameter's shard cannot be stepped by itself, in words; empty if it can."""
    if without_memory := why_without_memory(tensor):
        return without_memory
    if not is_dtensor(tensor):
        return ""
    partial = [p for p in tensor.placements if not p.is_replicate() and not hasattr(p, "dim")]
    if partial:
        return f"has the placement {partial[0]}; parameters must be sharded or replicated"
    cut = [dim for dim, count in enumerate(shards_of(tensor)) if count > 1]
    if cut and not tensor._local_tensor.is_contiguous():
        return (
            f"is sharded, and its shard has the strides {tensor._local_tensor.stride()}; make it "
            "contiguous before it is sharded"
        )
    if len([dim for dim in cut if dim > 0]) > 1:
        return f"is sharded along the dimensions {cut}; at most one besides the first can be"
    return ""


def like(local: Tensor, param: Any, shape: tuple[int, ...] | None = None) -> Tensor:
    """This process's shard as a tensor placed as the parameter is: a DTensor beside a DTensor.

    shape: the whole tensor's, by default the parameter's. The local tensor stays where it is;
    DTensor.from_local would move it to the mesh's device, and guess the shape of uneven shards.
    """
    if not is_dtensor(param):
        return local
    shape = tuple(param.shape) if shape is None else tuple(shape)
    strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    if shape == tuple(param.shape):
        strides = param.stride()
    elif shape == tuple(local.shape):  # not cut, so of any layout
        strides = local.stride()
    return dtensor_of(local, param, shape, strides)


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
    shape, offset = local_shape_and_offset(value.shape, param)
    if shape == tuple(value.shape):
        return value
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        value = value.narrow(dim, min(start, value.shape[dim] - size), size)
    return value.contiguous()


def why_foreign(tensor: Any) -> str:
    """What is wrong with a DTensor of a file that another process has pickled; else empty.

    It has that process's part, which is placed as this process's part would be.
    """
    if not is_dtensor(tensor):
        return ""
    import torch.distributed as dist

    rank = getattr(tensor.device_mesh, "_rank", None)
    if rank is None or not dist.is_initialized() or rank == dist.get_rank():
        return ""
    return (
        f"is the part of rank {rank}, which has saved it; load on each rank the file that the same "
        "rank has saved, or use amp_mp.checkpoint"
    )


def split_groups(tensor: Any) -> list[Any]:
    """The process groups over which the tensor is split, in the order of its mesh's dimensions."""
    if not is_dtensor(tensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]


def is_gathered(param: Tensor) -> bool:
    """Whether a plain parameter is one that fully_shard has gathered, and drops at reshard()."""
    return not is_dtensor(param) and any(each is param for each in gathered_parameters())
