"""Adds statistics of shards over the processes that hold them.

Rows are float64 [n, 3], one row a tensor: sum of squares, largest |x|, number of inf and NaN.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.sharding.shards import is_dtensor, split_groups
from amp_mp.text_table import warn

# A process group, and the rows of tensors that are split over it; None for all of them.
Member = tuple[Any, Tensor | None]


def checked_groups(process_groups: Any) -> tuple[Any, ...]:
    """The argument of this name as a tuple: None, a ProcessGroup, a DeviceMesh, or several.

    A mesh stands for the groups of its dimensions. TypeError for anything else.
    """
    if process_groups is None:
        return ()
    several = isinstance(process_groups, tuple | list)
    found: list[Any] = []
    for each in process_groups if several else [process_groups]:
        if hasattr(each, "get_all_groups"):
            found += each.get_all_groups()
        elif hasattr(each, "group_name") and hasattr(each, "size"):
            found.append(each)
        else:
            raise TypeError(
                "process_groups must be torch.distributed process groups or device meshes, found "
                f"{type(each).__name__}"
            )
    return tuple(found)


def refuse_meshes(process_groups: Sequence[Any], params: Sequence[Any]) -> None:
    """Raises ValueError for process_groups in which other processes have parts of these DTensors.

    Their statistics would be added twice.
    """
    meshes = {id(p.device_mesh): p.device_mesh for p in params if is_dtensor(p)}
    if not process_groups or not meshes:
        return
    import torch.distributed as dist

    for group in process_groups:
        others = {*dist.get_process_group_ranks(group)} - {dist.get_rank()}
        for mesh in meshes.values():
            if common := sorted(others.intersection(mesh.mesh.flatten().tolist())):
                raise ValueError(
                    f"process_groups has ranks that hold parts or copies of the same parameters, "
                    f"{common[:8]}: those over which DTensors are split are known, and would be "
                    "counted twice. Name only groups whose processes hold other parameters, as "
                    "pipeline stages do"
                )


class Reduction:
    """Gathers the rows of shards, once for each process group over which tensors are split.

    Every process has to hold the same tensors in the same order, and calls the same methods in the
    same order. Which groups are gathered depends on the tensors alone, never on what is in them:
    else one process would wait for ever. Replicated and plain tensors count once. All processes get
    the same bits: rows are gathered, and then added in the order of ranks.
    """

    def __init__(
        self, params: Sequence[Tensor], process_groups: Sequence[Any], device: torch.device
    ) -> None:
        """params: DTensors and plain tensors. process_groups: those that no mesh knows, added last.

        device: of the rows. ValueError for process_groups of processes that share a DTensor.
        """
        refuse_meshes(process_groups, params)
        count = len(params)
        groups: dict[str, Any] = {}
        keys: dict[tuple[str, ...], list[int]] = {}
        for index, param in enumerate(params):
            own = {group.group_name: group for group in split_groups(param)}
            groups |= own
            keys.setdefault(tuple(own), []).append(index)
        self._process_groups = list(process_groups)
        self._looked = False  # whether other processes' gradients are copies
        self._keys = [selection(indices, count, device) for indices in keys.values()]
        self._of_keys, self._of_tensors = [], []
        for name, group in groups.items():
            numbers = [n for n, key in enumerate(keys) if name in key]
            rows = sorted(i for key, indices in keys.items() if name in key for i in indices)
            self._of_keys.append((group, selection(numbers, len(keys), device)))
            self._of_tensors.append((group, selection(rows, count, device)))
        # Whether other processes hold a part of anything, and whether one all-reduce over the
        # groups of any one tensor would miss some of them.
        self.is_needed = bool(groups or process_groups)
        self.splits_differ = self.is_needed and (len(keys) > 1 or bool(process_groups))

    def total(self, rows: Tensor) -> Tensor:
        """float64 [3]: the statistics of all tensors together, on all processes."""
        sums = [_added(rows if which is None else rows[which]) for which in self._keys]
        of_keys = torch.stack(sums) if len(sums) > 1 else (sums[0] if sums else rows.sum(0))[None]
        return self._over_process_groups(_added(_gathered(of_keys, self._of_keys)))

    def of_tensors(self, rows: Tensor) -> Tensor:
        """The rows of the whole tensors. rows: [n, 3 k], k statistics of each tensor's shard."""
        return _gathered(rows, self._of_tensors)

    def total_of_whole(self, rows: Tensor) -> Tensor:
        """As `total`, from what of_tensors has returned."""
        return self._over_process_groups(_added(rows))

    def _over_process_groups(self, total: Tensor) -> Tensor:
        for group in self._process_groups:
            rows = _all_gather(total[None], group)[:, 0]
            if not self._looked:
                _warn_of_copies(rows)
            total = _added(rows)
        self._looked = True
        return total


def selection(indices: list[int], count: int, device: torch.device) -> Tensor | None:
    """The indices of some of `count` rows, in any order; None for all of them as they are."""
    same = indices == list(range(count))
    return None if same else torch.tensor(indices, dtype=torch.long, device=device)


def _warn_of_copies(rows: Tensor) -> None:
    """Warns where all processes have the same statistics, which different gradients never have."""
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    squares = rows[:, 0].tolist()
    if len(squares) > 1 and len(set(squares)) == 1 and 0 < squares[0] < float("inf"):
        warn(
            "all processes of process_groups have the same gradients, which are counted "
            f"{len(squares)} times. The argument is for processes that hold other parameters "
            "(pipeline stages); leave it out for copies, as of DistributedDataParallel"
        )


def _added(rows: Tensor) -> Tensor:
    return rows[0] if len(rows) == 1 else _C.combine(rows.contiguous())[-1]


def _gathered(rows: Tensor, members: list[Member]) -> Tensor:
    """The rows [n, 3 k], each added over the groups that its tensor is split over."""
    for group, which in members:
        parts = _all_gather(rows if which is None else rows[which], group)
        parts = parts.view(parts.shape[0], parts.shape[1], -1, 3)
        sums = (parts[..., 0].sum(0), parts[..., 1].amax(0), parts[..., 2].sum(0))
        added = torch.stack(sums, -1).flatten(1)
        rows = added if which is None else rows.index_copy(0, which, added)
    return rows


def _all_gather(rows: Tensor, group: Any) -> Tensor:
    import torch.distributed as dist

    found = rows.new_empty(group.size() * rows.numel())
    # torch 2.13 has renamed it, and warns of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    try:
        gather(found, rows.flatten(), group=group)
    except RuntimeError as error:
        if "No backend type associated" not in str(error):
            raise
        raise RuntimeError(
            f"the parameters are on {rows.device.type}, and the process group has no backend for "
            'it; with CPU offload call init_process_group(backend="cpu:gloo,cuda:nccl")'
        ) from error
    return found.view(group.size(), *rows.shape)
