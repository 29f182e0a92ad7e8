"""Statistics of tensors, added over the processes that hold their shards.

Rows are float64 [n, 3], one row a tensor: sum of squares, largest |x|, number of inf and NaN.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from math import isinf
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.sharding.gradients import gradient_of_each, measure
from amp_mp.sharding.shards import any_dtensor, is_dtensor, local_of, split_groups
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


class WholeStatistics:
    """Turns statistics of shards into those of whole tensors, over all processes that hold a part.

    Gathers rows once for each process group over which tensors are split. Every process has to hold
    the same tensors in the same order, and calls the same methods in the same order. Which groups
    are gathered depends on the tensors alone, never on what is in them: else one process would wait
    for ever. Replicated and plain tensors count once. All processes get the same bits: rows are
    gathered, and then added in the order of ranks.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        process_groups: Sequence[Any] = (),
        buckets: Sequence[tuple[torch.device, list[int]]] = (),
    ) -> None:
        """params: DTensors and plain tensors. process_groups: those that no mesh knows, added last.

        buckets: of a native step: the device of each, and where its parameters are among all.
        ValueError for process_groups of processes that share a DTensor.
        """
        refuse_meshes(process_groups, params)
        self.params = list(params)
        self._count = count = len(self.params)
        self._device = device = local_of(params[0]).device if count else torch.device("cpu")
        groups: dict[str, Any] = {}
        keys: dict[tuple[str, ...], list[int]] = {}
        for index, param in enumerate(self.params):
            own = {group.group_name: group for group in split_groups(param)}
            groups |= own
            keys.setdefault(tuple(own), []).append(index)
        self._process_groups = list(process_groups)
        self._looked = False  # whether other processes' gradients are copies
        self._keys = [_selection(indices, count, device) for indices in keys.values()]
        self._of_keys: list[Member] = []
        self._of_tensors: list[Member] = []
        for name, group in groups.items():
            numbers = [n for n, key in enumerate(keys) if name in key]
            rows = sorted(i for key, indices in keys.items() if name in key for i in indices)
            self._of_keys.append((group, _selection(numbers, len(keys), device)))
            self._of_tensors.append((group, _selection(rows, count, device)))
        self._buckets = [(on, _selection(indices, count, device)) for on, indices in buckets]
        # Whether other processes hold a part of anything, and whether one all-reduce over the
        # groups of any one tensor would miss some of them.
        self.is_needed = bool(groups or process_groups)
        self._splits_differ = self.is_needed and (len(keys) > 1 or bool(process_groups))

    def measured(self, *lists: Sequence[Tensor | None]) -> Tensor:
        """Rows [n, 3 k] of k lists of this process's gradients, or tensors of their shapes.

        None, in the place of a parameter without one, has a row of 0.
        """
        tensors = list(chain(*lists))
        rows = torch.zeros(len(tensors), 3, dtype=torch.float64, device=self._device)
        for device in {tensor.device for tensor in tensors if tensor is not None}:
            own = [t if t is not None and t.device == device else None for t in tensors]
            rows += _C.measure(own)[:-1].to(self._device)
        return rows.view(len(lists), len(lists[0]), 3).transpose(0, 1).flatten(1)

    def totals_by_device(self, grads: Sequence[Tensor | None]) -> dict[torch.device, Tensor]:
        """As gradients.measure, of all processes; where several have a part, on one device."""
        if not self.is_needed:
            return measure(grads)
        total = self.total(self.measured(grads))
        return {total.device: total}

    def total(self, rows: Tensor) -> Tensor:
        """float64 [3]: the statistics of all tensors together, on all processes."""
        sums = [_added(rows if which is None else rows[which]) for which in self._keys]
        of_keys = torch.stack(sums) if len(sums) > 1 else (sums[0] if sums else rows.sum(0))[None]
        return self._over_process_groups(_added(_gathered(of_keys, self._of_keys)))

    def of_whole(self, rows: Tensor) -> Tensor:
        """The rows of the whole tensors. rows: [n, 3 k], k statistics of each tensor's shard."""
        return _gathered(rows, self._of_tensors)

    def _over_process_groups(self, total: Tensor) -> Tensor:
        for group in self._process_groups:
            rows = _all_gather(total[None], group)[:, 0]
            if not self._looked:
                _warn_of_copies(rows)
            total = _added(rows)
        self._looked = True
        return total

    # Of the buckets of a native step, which calls these (csrc/torch/step/stepper.cpp).

    def refuse_stock_scaler(self) -> None:
        """Raises RuntimeError where torch's GradScaler would not see an overflow on all processes.

        It reduces what it finds over the mesh of the first gradient alone.
        """
        if self._splits_differ:
            raise RuntimeError(
                "torch.amp.GradScaler misses overflows on other processes where parameters are not "
                "all split over the same processes (tensor parallel, process_groups): some "
                "would skip the step and the others not. Use amp_mp.GradScaler in its place"
            )

    def totals(self, found: list[_C.Measurement]) -> list[_C.Measurement]:
        """For each bucket a measurement with a total alone; together they are that of everything.

        found: of the buckets' gradients on this process.
        """
        return self._split(None, self.total(self._all(found)))

    def of_tensors(
        self, found: list[_C.Measurement], weights: list[_C.Measurement]
    ) -> tuple[list[_C.Measurement], list[_C.Measurement]]:
        """The same with a row for each whole tensor, of the gradients and of the masters."""
        both = self.of_whole(torch.cat([self._all(found), self._all(weights)], 1))
        grads, masters = both[:, :3].contiguous(), both[:, 3:].contiguous()
        total = self._over_process_groups(_added(grads))
        return self._split(grads, total), self._split(masters, torch.zeros_like(total))

    def updates_of(self, bucket: int) -> Callable[[Tensor], Tensor]:
        """A function that makes the rows [n, 3] of a bucket's whole tensors of its shards'."""
        place = self._buckets[bucket][1]

        def updates(rows: Tensor) -> Tensor:
            whole = self.of_whole(self._spread(rows, place))
            return (whole if place is None else whole[place]).to(rows.device)

        return updates

    def _spread(self, rows: Tensor, place: Tensor | None) -> Tensor:
        """A bucket's rows as rows of all parameters, 0 for the others."""
        rows = rows.to(self._device)
        return rows if place is None else rows.new_zeros(self._count, 3).index_copy(0, place, rows)

    def _all(self, found: list[_C.Measurement]) -> Tensor:
        own = zip(found, self._buckets, strict=True)
        parts = [self._spread(each.rows[:-1], place) for each, (_, place) in own]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _split(self, rows: Tensor | None, total: Tensor) -> list[_C.Measurement]:
        """A measurement for each bucket; the total stands in the first."""
        found = []
        for number, (device, place) in enumerate(self._buckets):
            last = (total if number == 0 else torch.zeros_like(total))[None]
            own = rows if rows is None or place is None else rows[place]
            known = last if own is None else torch.cat([own, last])
            found.append(_C.Measurement(known.to(device)))
        return found


def statistics_of(
    known: WholeStatistics | None, groups: list[dict[str, Any]], process_groups: Sequence[Any] = ()
) -> WholeStatistics:
    """The statistics of an optimizer's gradients; `known`, if it is of the same parameters."""
    if known is not None and _C.have_params(groups, known.params):
        return known
    return WholeStatistics([p for group in groups for p in group["params"]], process_groups)


def totals_of(params: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """As `measure`; of DTensors over all processes, which have to pass the same parameters."""
    grads = gradient_of_each(params)
    if any_dtensor(params):
        return WholeStatistics(params).totals_by_device(grads)
    return measure(grads)


def clip_gradients(
    params: Sequence[Tensor], max_norm: float, norm_type: float, process_groups: Sequence[Any] = ()
) -> float:
    """torch.nn.utils.clip_grad_norm_; returns the norm as a number.

    Of DTensors, and with process_groups, all processes get the norm of the whole gradients and have
    to pass the same parameters; ValueError for a norm_type that is not above 0 there.
    """
    if not process_groups and not any_dtensor(params):
        return float(nn.utils.clip_grad_norm_(params, max_norm, norm_type))
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0 for sharded gradients, found {norm_type}")
    grads = gradient_of_each(params)
    device = local_of(params[0]).device
    rows = torch.zeros(len(grads), 3, dtype=torch.float64, device=device)
    for row, grad in zip(rows, grads, strict=True):
        if grad is not None and grad.numel():
            absolute = grad.abs()
            row[0] = 0.0 if isinf(norm_type) else absolute.double().pow(norm_type).sum()
            row[1] = absolute.max()
    total = WholeStatistics(params, process_groups).total(rows)
    norm = float(total[1]) if isinf(norm_type) else float(total[0]) ** (1.0 / norm_type)
    coefficient = max_norm / (norm + 1e-6)
    for grad in grads if not coefficient >= 1.0 else ():
        if grad is not None:
            grad.mul_(coefficient)
    return norm


def _selection(indices: list[int], count: int, device: torch.device) -> Tensor | None:
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
