"""Statistics of tensors, added over the processes that hold their shards.

Rows are float64 [n, 3], one row a tensor: sum of squares, largest |x|, number of inf and NaN.

Note: One order of sums (docs/design.md)
Note: The same gathers on every process (docs/design.md)
"""

from collections.abc import Callable, Iterable, MutableSet, Sequence
from functools import reduce
from itertools import chain
from math import isinf
from operator import or_
from typing import Any
from weakref import WeakSet
from zlib import crc32

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.messages import warn
from amp_mp.param_groups import labelled, params_in
from amp_mp.sharding.gradients import Statistics, gradient_of_each, measure
from amp_mp.sharding.shards import any_dtensor, is_dtensor, local_of, split_groups
from amp_mp.torch_versions import all_gather

# Sums of the same gradients on several processes differ by less: kernels that add in any order.
ALIKE = 1e-3
# A process group's name, and what its processes hold: "mesh", parts of the same tensors, or
# "process_groups", other tensors. One group may be both.
GroupName = tuple[str, str]
Key = frozenset[GroupName]  # the groups over which a tensor's row is added
Gather = Callable[[Tensor, Any], Tensor]  # rows [n, 3 k], a process group: [processes, n, 3 k]
COMPLETE: Key = frozenset()
EMPTY = 'empty where it has no parameters: {"params": [], "process_groups": group}'
# The process groups over which processes have compared their process_groups.
_compared: MutableSet[Any] = WeakSet()


class GroupsOfRun:
    """Stands for process_groups in a copy, which has the same ones, and in a pickle, without any.

    No step takes one that was unpickled for None.
    """

    def __init__(self, named: Any = None) -> None:
        """named: the process_groups, as they were given."""
        self.named = named

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupsOfRun":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        warn(
            "process_groups is left out of the pickle, because a process group is of one run; set "
            "it again where this is unpickled, before the first step there"
        )
        return GroupsOfRun, ()

    def unpacked(self) -> Any:
        """The process_groups in a copy; this object where a pickle has left them out."""
        return self if self.named is None else self.named


def checked_groups(process_groups: Any) -> tuple[Any, ...]:
    """The argument of this name as a tuple: None, a ProcessGroup, a DeviceMesh, or several.

    A mesh stands for the groups of its dimensions. TypeError for anything else; ValueError where a
    pickle has left them out.
    """
    if process_groups is None:
        return ()
    if isinstance(process_groups, GroupsOfRun):
        raise ValueError(
            "process_groups was left out of the pickle that this is from, and each process would "
            'clip and skip by numbers of its own; set optimizer.param_groups[i]["process_groups"] '
            "to the group, or to None; make a GradScaler anew and load this one's state_dict()"
        )
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


def named_groups(groups: Sequence[dict[str, Any]], default: Any = None) -> list[tuple[Any, ...]]:
    """The process_groups of each param_group: its own, or the default where it names none."""
    given = checked_groups(default)
    return [checked_groups(group.get("process_groups")) or given for group in groups]


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
                    "process_groups has ranks that hold parts or copies of the same parameters, "
                    f"{common[:8]}: those over which DTensors are split are known, and would be "
                    "counted twice. Name only groups whose processes hold other parameters, as "
                    "pipeline stages and experts do, in the param_group of those parameters: "
                    '{"params": experts, "process_groups": group}'
                )


class WholeStatistics:
    """Turns statistics of shards into those of whole tensors, over all processes that hold a part.

    Tensors of one key are added over the same process groups. A row is complete when it was added
    over all of them: it is then the same on every process, or their decisions would differ. There
    is one all-gather for each group, first of meshes, then of process_groups:

        over                    adds                               compares
        a mesh's group          a row for each key with it; for    a row for each key that
                                norms one for each tensor          is complete
        one of process_groups   a row for all keys that wait for   the sum of what is complete
                                the same process_groups

    Every process has to have the same param_groups with the same tensors in the same order, except
    in those with process_groups, which may be empty, and call the same methods in the same order.
    Gathers, their order and the number of their rows follow from what all processes of their group
    have in common: the param_groups, the tensors without process_groups, and those that are split
    over the group. Else one process would wait for ever, or add what another one has not.
    All processes get the same bits: rows are gathered, and then added in the order of ranks.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        process_groups: Sequence[Any] = (),
        buckets: Sequence[tuple[torch.device, list[int], list[int]]] = (),
    ) -> None:
        """groups: param_groups of DTensors and plain tensors.

        process_groups: those of the groups that name none. buckets: a native step's, each with its
        device, and which of all parameters it steps, and which it will. ValueError for
        process_groups of processes that share a DTensor.
        """
        self._groups = list(groups)
        self._named = named_groups(groups, process_groups)
        self._sizes = [len(group["params"]) for group in groups]
        self.params = params_in(groups)
        self._count = count = len(self.params)
        self.device = device = (
            local_of(self.params[0]).device if count else _device_of(chain(*self._named))
        )
        self._meshes: dict[GroupName, Any] = {}
        self._others: dict[GroupName, Any] = {}
        self._keys: list[Key] = []  # of each tensor
        # Those of process_groups alone, for which a total has a row also where no tensor is here.
        self._always: list[Key] = [COMPLETE]
        of_others: dict[GroupName, Any] = {}
        for group, named in zip(groups, self._named, strict=True):
            refuse_meshes(named, group["params"])
            different = {("process_groups", each.group_name): each for each in named}
            self._others |= different
            self._always.append(frozenset(different))
            for param in group["params"]:
                split = {("mesh", each.group_name): each for each in split_groups(param)}
                (of_others if different else self._meshes).update(split)
                self._keys.append(frozenset({*split, *different}))
        self._meshes |= of_others
        self._order = self._order_of_meshes()
        self._places = self._by_key(range(count))
        self._buckets = [(on, _selection(stepped, count, device)) for on, stepped, _ in buckets]
        self._in_buckets = [sorted(all_of_it) for *_, all_of_it in buckets]
        self._places_in: dict[int, dict[Key, Tensor | None]] = {}
        self._has_compared = False
        # Whether other processes hold a part of anything, and whether one all-reduce over the
        # groups of any one tensor would miss some of them.
        self.is_needed = bool(self._meshes or self._others)
        self._splits_differ = self.is_needed and (len(self._places) > 1 or bool(self._others))

    def _order_of_meshes(self) -> list[GroupName]:
        """Those of fewer keys come first, then smaller ones: so later gathers compare more.

        Processes that add one tensor over two groups in another order add it twice. So the order
        follows from tensors without process_groups, since a process may have no others.
        """
        keys = {key for key in self._keys if key.isdisjoint(self._others)}
        counts = {name: sum(name in key for key in keys) for name in self._meshes}
        return sorted(self._meshes, key=lambda name: (counts[name], self._meshes[name].size()))

    def _by_key(self, params: Iterable[int]) -> dict[Key, Tensor | None]:
        """Which rows the parameters of each key are; None for all rows."""
        found: dict[Key, list[int]] = {}
        for i in params:
            found.setdefault(self._keys[i], []).append(i)
        return {key: _selection(own, self._count, self.device) for key, own in found.items()}

    def is_of(self, groups: list[dict[str, Any]], process_groups: Sequence[Any] = ()) -> bool:
        """Whether param_groups have these tensors and these process_groups still."""
        same = self._sizes == [len(group["params"]) for group in groups]
        same = same and _C.have_params(groups, self.params)
        return same and self._named == named_groups(groups, process_groups)

    def measured(self, *lists: Sequence[Tensor | None]) -> Tensor:
        """Rows [n, 3 k] of k lists of this process's gradients, or tensors of their shapes.

        None has a row of 0.
        """
        tensors = list(chain(*lists))
        rows = torch.zeros(len(tensors), 3, dtype=torch.float64, device=self.device)
        for device in {tensor.device for tensor in tensors if tensor is not None}:
            own = [t if t is not None and t.device == device else None for t in tensors]
            rows += _C.measure(own)[:-1].to(self.device)
        return rows.view(len(lists), len(lists[0]), 3).transpose(0, 1).flatten(1)

    def totals_by_device(self, grads: Sequence[Tensor | None]) -> dict[torch.device, Tensor]:
        """As gradients.measure, of all processes; where several have a part, on one device."""
        if not self.is_needed:
            return measure(grads)
        total = self.total(self.measured(grads))
        return {total.device: total}

    def total(self, rows: Tensor) -> Tensor:
        """float64 [3]: the statistics of all tensors together, on all processes.

        RuntimeError where tensors that are neither split nor of process_groups differ.
        """
        compares = self._is_to_compare()
        sums = self._over_meshes(self._sums(rows), self._gather, compares)
        return self._over_others(sums, compares)

    def _sums(self, rows: Tensor) -> dict[Key, Tensor]:
        """The sum of the rows of each key, [1, 3 k]."""
        return {
            key: _added(rows if own is None else rows[own]) for key, own in self._places.items()
        }

    def of_whole(self, rows: Tensor) -> Tensor:
        """The rows of the whole tensors. rows: [n, 3 k], k statistics of each tensor's shard."""
        return self._whole(rows, self._places)

    def _whole(
        self,
        rows: Tensor,
        places: dict[Key, Tensor | None],
        gather: Gather | None = None,
        compares: bool = False,
    ) -> Tensor:
        """The rows with those of split tensors in the place of their shards'; as _over_meshes."""
        split = {key: own for key, own in places.items() if not key.isdisjoint(self._meshes)}
        taken = {
            key: rows if own is None else rows[own]
            for key, own in (places if gather else split).items()
        }
        added = self._over_meshes(taken, gather, compares)
        for key, own in split.items():
            rows = added[key] if own is None else rows.index_copy(0, own, added[key])
        return rows

    def _over_meshes(
        self, rows: dict[Key, Tensor], gather: Gather | None = None, compares: bool = False
    ) -> dict[Key, Tensor]:
        """The rows of each key, [m, 3 k], with what the other processes have of these tensors.

        gather: sends what is complete, too, which all processes have or none. compares: whether
        that is compared.
        """
        done: set[GroupName] = set()
        for name in self._order:
            due = [key for key in rows if name in key]
            if not due:
                continue
            complete = [key for key in rows if key <= done] if gather else []
            own = _joined([rows[key] for key in due + complete])
            parts = (gather or _all_gather)(own, self._meshes[name])
            sizes = [len(rows[key]) for key in due]
            end = sum(sizes)
            if compares and complete:
                self._compare(parts[:, end:])
            added = _over_processes(parts[:, :end])
            each = added.split_with_sizes(sizes) if len(due) > 1 else [added]
            rows = rows | dict(zip(due, each, strict=True))
            done.add(name)
        return rows

    def _over_others(self, sums: dict[Key, Tensor], compares: bool) -> Tensor:
        """float64 [3]: the sum of all keys' rows, [1, 3], over process_groups, too.

        Processes may have different keys there. So what waits for the same groups is one row, and
        groups for which fewer rows wait come first.
        """
        left: dict[Key, list[Tensor]] = {key: [] for key in self._always}
        for key, row in sums.items():
            left[key.intersection(self._others)].append(row)
        waiting = dict(self._others)
        while waiting:
            name = min(waiting, key=lambda each: sum(each in key for key in left))
            due = [key for key in left if name in key]
            own = [self._sum(left.pop(key)) for key in due] + [self._sum(left[COMPLETE])]
            parts = self._gather(_joined(own), waiting.pop(name))
            if compares:
                self._compare(parts[:, -1:], parts[:, :-1])
            for key, row in zip(due, _over_processes(parts[:, :-1]), strict=True):
                left.setdefault(key - {name}, []).append(row[None])
        return self._sum(left[COMPLETE])[0]

    def _sum(self, rows: list[Tensor]) -> Tensor:
        if not rows:
            return torch.zeros(1, 3, dtype=torch.float64, device=self.device)
        return _added(torch.cat(rows)) if len(rows) > 1 else rows[0]

    def _gather(self, rows: Tensor, group: Any) -> Tensor:
        """As _all_gather; the first time over a group it sends a row of process_groups, too.

        All processes gather over it for the first time at once. RuntimeError where one is in some
        of another's process_groups and has no param_group with them: it would not take part.
        """
        import torch.distributed as dist

        if group in _compared:
            return _all_gather(rows, group)
        _compared.add(group)
        ranks, members = dist.get_process_group_ranks(group), dist.get_process_group_ranks
        # A bit for each name; those of process_groups in which all of these ranks are once more.
        bits = {name: 1 << crc32(name[1].encode()) % 50 for name in self._others}
        of_all = {bits[n] for n, each in self._others.items() if {*ranks} <= {*members(each)}}
        own = rows.new_zeros(1, rows.shape[1])
        own[0, 0], own[0, 1] = sum({*bits.values()}), sum(of_all)
        parts = _all_gather(torch.cat([rows, own]), group)
        if not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
            sent = zip(ranks, parts[:, -1, :2].tolist(), strict=True)
            masks = {rank: (int(its), int(common)) for rank, (its, common) in sent}
            needed = reduce(or_, (common for _, common in masks.values()))
            lacking = {rank for rank, (its, _) in masks.items() if needed & ~its}
            for name, each in self._others.items():
                lacking |= {r for r in members(each) if r in masks and not masks[r][0] & bits[name]}
            if lacking:
                raise RuntimeError(
                    f"the optimizers of the ranks {sorted(lacking)[:8]} have no param_group with "
                    "process_groups in which they are, as other processes have, which would wait "
                    f"for them. Every process of process_groups needs the param_group, {EMPTY}"
                )
        return parts[:, :-1]

    def _is_to_compare(self) -> bool:
        """Whether a step compares: on a GPU, where the host waits, until one had gradients."""
        if self.device.type != "cuda":
            return True
        return not (self._has_compared or torch.cuda.is_current_stream_capturing())

    def _compare(self, complete: Tensor, of_others: Tensor | None = None) -> None:
        """RuntimeError where complete rows, [processes, n, 3 k], differ between processes.

        of_others: the rows that are added over process_groups; warns if these do not differ.
        """
        if of_others is not None and not self._has_compared:
            _warn_of_copies(of_others)
        found = Statistics(*(each.T.tolist() for each in complete[..., :3].unbind(-1)))
        if of_others is not None or max(map(max, found.sum_squares)) > 0:
            self._has_compared = True
        for squares, bad in zip(found.sum_squares, found.non_finite, strict=True):
            least, most = min(squares), max(squares)
            if most - least > ALIKE * most or len(set(bad)) > 1:
                self._refuse_different(squares, bad)

    def _refuse_different(self, squares: list[float], bad: list[float]) -> None:
        """Raises RuntimeError; squares, bad: each process's statistics of what must be the same."""
        labels = [
            label
            for number, (group, named) in enumerate(zip(self._groups, self._named, strict=True))
            for param, label in labelled(group, number)
            if not named and not split_groups(param)
        ]
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        raise RuntimeError(
            "the gradients of parameters that each process holds whole "
            f"({', '.join(labels[:3])}{more}) differ between processes: their squares add up to "
            f"{min(squares):g} with {min(bad):g} inf or NaN, and to {max(squares):g} with "
            f"{max(bad):g}. Each process would clip and skip by numbers of its own. Where "
            "processes hold other parameters there, as experts, give these a param_group with the "
            'group of those processes, {"params": experts, "process_groups": group}; otherwise '
            "average their gradients before the step"
        )

    # For the buckets of a native step, which calls these (csrc/torch/step/steps.cpp).

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

        There is one also where this process has no bucket. found: what the buckets' gradients on
        this process have.
        """
        return self._split(None, self.total(self._all(found)))

    def of_tensors(
        self, found: list[_C.Measurement], weights: list[_C.Measurement]
    ) -> tuple[list[_C.Measurement], list[_C.Measurement]]:
        """As `totals`, with a row for each whole tensor, for the gradients and for the masters."""
        rows = torch.cat([self._all(found), self._all(weights)], 1)
        compares = self._is_to_compare()
        both = self._whole(rows, self._places, self._gather, compares)
        grads, masters = both[:, :3].contiguous(), both[:, 3:].contiguous()
        sums = self._sums(grads) if self._others else {COMPLETE: _added(grads)}
        total = self._over_others(sums, compares)
        return self._split(grads, total), self._split(masters, torch.zeros_like(total))

    def updates_of(self, bucket: int) -> Callable[[Tensor], Tensor]:
        """A function from rows [n, 3 k] of a bucket's shards to those of its whole tensors."""
        place = self._buckets[bucket][1]
        # Of its tensors alone: another process may not have this bucket.
        if bucket not in self._places_in:
            self._places_in[bucket] = self._by_key(self._in_buckets[bucket])
        places = self._places_in[bucket]

        def updates(rows: Tensor) -> Tensor:
            every = self._spread(rows, place)
            whole = self._whole(every, places)
            return (whole if place is None else whole[place]).to(rows.device)

        return updates

    def _spread(self, rows: Tensor, place: Tensor | None) -> Tensor:
        """A bucket's rows as rows of all parameters, 0 for the others."""
        rows = rows.to(self.device)
        if place is None:
            return rows
        return rows.new_zeros(self._count, rows.shape[1]).index_copy(0, place, rows)

    def _all(self, found: list[_C.Measurement]) -> Tensor:
        own = zip(found, self._buckets, strict=True)
        parts = [self._spread(each.rows[:-1], place) for each, (_, place) in own]
        if not parts:
            return torch.zeros(self._count, 3, dtype=torch.float64, device=self.device)
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _split(self, rows: Tensor | None, total: Tensor) -> list[_C.Measurement]:
        """A measurement for each bucket; the total stands in the first."""
        found = []
        for number, (device, place) in enumerate(self._buckets or [(self.device, None)]):
            last = (total if number == 0 else torch.zeros_like(total))[None]
            own = rows if rows is None or place is None else rows[place]
            known = last if own is None else torch.cat([own, last])
            found.append(_C.Measurement(known.to(device)))
        return found


def statistics_of(
    known: WholeStatistics | None, groups: list[dict[str, Any]], process_groups: Sequence[Any] = ()
) -> WholeStatistics:
    """The statistics of an optimizer's gradients; `known`, if it is of the same parameters."""
    if known is not None and known.is_of(groups, process_groups):
        return known
    return WholeStatistics(groups, process_groups)


def totals_of(groups: Sequence[dict[str, Any]]) -> dict[torch.device, Tensor]:
    """As `measure`, for param_groups; over all processes with DTensors or process_groups."""
    params = params_in(groups)
    grads = gradient_of_each(params)
    named = [group for group in groups if group.get("process_groups")]
    if named or any_dtensor(params):
        return WholeStatistics(groups).totals_by_device(grads)
    return measure(grads)


def on_any_process(groups: Sequence[dict[str, Any]], here: bool) -> bool:
    """Whether something is so here, or on another process of the groups' process_groups.

    Without process_groups all processes find the same, and nothing is sent.
    """
    if not any(named_groups(groups)):
        return here
    whole = WholeStatistics(groups)
    rows = whole.measured([None] * len(whole.params))
    Statistics(*rows.unbind(-1)).max_abs.fill_(float(here))
    return bool(Statistics(*whole.total(rows).tolist()).max_abs)


def clip_gradients(groups: Sequence[dict[str, Any]], max_norm: float, norm_type: float) -> float:
    """torch.nn.utils.clip_grad_norm_ of param_groups; returns the norm as a number.

    With DTensors or process_groups all processes get the norm of the whole gradients and have to
    pass the same parameters; ValueError for a norm_type that is not above 0 there.
    """
    params = params_in(groups)
    if not any(named_groups(groups)) and not any_dtensor(params):
        return float(nn.utils.clip_grad_norm_(params, max_norm, norm_type))
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0 for sharded gradients, found {norm_type}")
    grads = gradient_of_each(params)
    whole = WholeStatistics(groups)
    rows = whole.measured([None] * len(grads))
    for row, grad in zip(rows, grads, strict=True):
        if grad is not None and grad.numel():
            absolute = grad.abs()
            own = Statistics(*row)
            if not isinf(norm_type):
                own.sum_squares.copy_(absolute.double().pow(norm_type).sum())
            own.max_abs.copy_(absolute.max())
    total = whole.total(rows)
    found = Statistics(*total.tolist())
    norm: float = found.max_abs if isinf(norm_type) else found.sum_squares ** (1.0 / norm_type)
    coefficient = max_norm / (norm + 1e-6)
    for grad in grads if not coefficient >= 1.0 else ():
        if grad is not None:
            grad.mul_(coefficient)
    return norm


def _device_of(process_groups: Iterable[Any]) -> torch.device:
    """Where a process without parameters gathers: on its GPU, if the first group needs that."""
    import torch.distributed as dist

    for group in process_groups:
        each = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
        backends = dict(each)
        cpu = backends.get("cpu")
        if torch.cuda.is_available() and backends.get("cuda", cpu) != cpu:
            return torch.device("cuda", torch.cuda.current_device())
        break
    return torch.device("cpu")


def _selection(indices: list[int], count: int, device: torch.device) -> Tensor | None:
    """The indices of some of `count` rows, in any order; None for all of them as they are."""
    same = indices == list(range(count))
    return None if same else torch.tensor(indices, dtype=torch.long, device=device)


def _warn_of_copies(parts: Tensor) -> None:
    """Warns where all processes have the same statistics, which different gradients never have.

    parts: [processes, rows, 3].
    """
    for squares in Statistics(*parts.unbind(-1)).sum_squares.T.tolist():
        if len(squares) > 1 and len(set(squares)) == 1 and 0 < squares[0] < float("inf"):
            warn(
                "all processes of process_groups have the same gradients, which are counted "
                f"{len(squares)} times. The argument is for processes that hold other parameters "
                "(pipeline stages, experts); leave it out for copies, as of DistributedDataParallel"
            )


def _joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """torch.cat, but for one tensor, of which it would make a copy: a launch on a GPU."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _added(rows: Tensor) -> Tensor:
    """The sum of rows [n, 3 k], [1, 3 k]."""
    if len(rows) == 1:
        return rows
    each = rows.view(len(rows), -1, 3).unbind(1)
    return _joined([_C.combine(own.contiguous())[-1:] for own in each], 1)


def _over_processes(parts: Tensor) -> Tensor:
    """Rows [n, 3 k] of those that processes have, [processes, n, 3 k]."""
    own = Statistics(*parts.view(*parts.shape[:2], -1, 3).unbind(-1))
    sums = own.sum_squares.sum(0), own.max_abs.amax(0), own.non_finite.sum(0)
    return torch.stack(sums, -1).flatten(1)


def _all_gather(rows: Tensor, group: Any) -> Tensor:
    found = rows.new_empty(group.size() * rows.numel())
    try:
        all_gather(found, rows.flatten(), group)
    except RuntimeError as error:
        if "No backend type associated" not in str(error):
            error.add_note(
                "amp_mp gathered statistics of gradients here: do all processes of this group "
                f"step, and has each the param_groups with process_groups, {EMPTY}?"
            )
            raise
        raise RuntimeError(
            f"the parameters are on {rows.device.type}, and the process group has no backend for "
            'it; with CPU offload call init_process_group(backend="cpu:gloo,cuda:nccl")'
        ) from error
    return found.view(group.size(), *rows.shape)
