"""Changed weights at the receiver."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.model import moving
from amp_mp.model.changes import Taken
from amp_mp.model.watched import Names
from amp_mp.sharding.shards import local_of


@torch.no_grad()
def apply_changes(
    model: nn.Module,
    taken: Mapping[str, tuple[Tensor, Tensor]],
    *,
    version: int | None = None,
) -> None:
    """Puts changed weights into another model: those that `Changes.take` gave, from any device.

    model: has parameters, or persistent buffers, of these names, in the values' dtype or in
    float32. In a DTensor, and in a plain parameter beside it, positions count in the part on this
    process.
    version: which version of the weights the model has, `taken.version` of what was put in before
    and 0 at first; then changes that begin at another one are refused. Default None: not asked.

    Raises TypeError for what is no module, for a dtype that would round the values, and for changes
    without a version where one is asked for; ValueError for unknown names, positions outside of the
    parameter, another number of values, and another version. Nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {model!r}")
    if version is not None:
        _check_version(taken, version)
    present = Names.of(model, buffers=True)
    if unknown := sorted(taken.keys() - present.first.keys()):
        raise ValueError(
            f"{len(unknown)} of {len(taken)} names are not those of the model's parameters: "
            f"{', '.join(unknown[:5])}; the model has {', '.join(list(present.first)[:5])}"
        )
    names, writes = [], []
    for name, (positions, values) in taken.items():
        local = local_of(present.tensors[present.first[name]][1]).detach()
        if values.dtype not in (local.dtype, *LOW_PRECISION) or (
            values.dtype != local.dtype and local.dtype != torch.float32
        ):
            raise TypeError(f"{name} is {local.dtype}, and {values.dtype} values would be rounded")
        if positions.shape != values.shape or positions.dim() != 1:
            raise ValueError(
                f"{name} has positions of shape {tuple(positions.shape)} and values of shape "
                f"{tuple(values.shape)}; both must be lists of the same length"
            )
        if len(positions):
            names.append(name)
            places = positions.to(local.device, non_blocking=True).contiguous()
            placed = values.to(local.device, local.dtype, non_blocking=True).contiguous()
            writes.append((local, places, placed))
    scattered = [_in_memory(name, *write) for name, write in zip(names, writes, strict=True)]
    outside = _C.scatter(*map(list, zip(*scattered, strict=True))) if scattered else []
    for name, bad, (local, positions, _) in zip(names, outside, writes, strict=True):
        if bad:
            _refuse_positions(name, local, positions)
    owners = {name: present.tensors[present.first[name]] for name in taken}
    moving.leave_out(owner for owner, tensor in owners.values() if not tensor.requires_grad)


def _check_version(taken: Mapping[str, tuple[Tensor, Tensor]], version: int) -> None:
    if not isinstance(taken, Taken):
        raise TypeError(
            f"version={version} asks where the changes begin, and a {type(taken).__name__} does "
            "not say; pass what Changes.take() gave, or compare versions yourself"
        )
    if taken.base is not None and not taken.base <= version <= taken.version:
        raise ValueError(
            f"these changes lead from version {taken.base} to {taken.version}, and the model has "
            f"version {version}; call changes.mark_all() and send the next take()"
        )


def _in_memory(
    name: str, local: Tensor, positions: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor's memory, with places in it in place of row-major positions."""
    if local.is_contiguous():
        return local, positions, values
    first, last = torch.stack(positions.aminmax()).tolist()
    if not 0 <= first <= last < local.numel():
        _refuse_positions(name, local, positions)
    where = torch.unravel_index(positions.long(), local.shape)
    places = sum(index * step for index, step in zip(where, local.stride(), strict=True))
    return local.as_strided((local.numel(),), (1,)), torch.as_tensor(places), values


def _refuse_positions(name: str, local: Tensor, positions: Tensor) -> None:
    first, last = torch.stack(positions.aminmax()).tolist()
    raise ValueError(
        f"{name} has positions from {first} to {last}, and {local.numel()} weights here; "
        "positions of a whole tensor belong to models that are not sharded"
    )
