"""Which weights have changed since they were last taken, and their new values."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, NATIVE, check_dtype
from amp_mp.model import moving
from amp_mp.module_names import plain_name, plain_names
from amp_mp.sharding.shards import is_dtensor, local_of, origin_of, why_unusable


class ChangedWeights(NamedTuple):
    """Weights of one parameter that have changed: where, and what they are now.

    positions: int32, or int64 where the tensor has 2^31 elements or more; ascending; counted in the
    row-major order of the parameter's shape, whatever its layout. values: as many, in the
    parameter's dtype, or in that of `Changes` for a float32 parameter. Both are copies, where the
    parameter is.
    """

    positions: Tensor
    values: Tensor


class Changes:
    """Notes which weights of a model change, in one bit a weight, so that only these are sent.

        changes = amp.Changes(model)  # the sampler has the model's weights now
        ...
        optimizer.step()              # once, or many times
        send(changes.take())          # {name: ChangedWeights(positions, values)}

    and at the receiver `amp.apply_changes(its_model, taken)`, after which its weights are the
    trainer's, bit for bit.

    Every step of amp_mp's optimizers, FP16_Optimizer and AveragedModel notes exactly the weights
    whose bits change. What anything else has written (a load, `clamp_`, `.data`, NumPy, a
    broadcast, `optimizer.masters`, torch's optimizers, a CUDA graph captured before) is found by a
    sum of each tensor's weights, and counts as the whole tensor; unless it is restored before
    `take`, which counts as no change.

    Args:
        model: its parameters are watched from now on, frozen ones too, each under the first of its
            names, as the plain model has them. It takes 1/8 byte a weight beside them.
        dtype: torch.float16 or torch.bfloat16, for float32 weights: a change is one of what they
            round to as by Tensor.to, and values are of that dtype. Default None: where one of its
            weights has changed, a float32 parameter (`prepare`'s norms) is given whole, in float32,
            as are those of other dtypes.

    Buffers are not watched. A model is watched by one object at a time, and as long as that lives.
    Copies and pickles of it watch the copied model and begin with all weights changed.

    Raises TypeError for what is no module, ValueError for another dtype, for a model of float32
    weights alone without one, for weights on the meta device, and where another object watches.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, found {model!r}")
        if dtype is not None:
            check_dtype(dtype, LOW_PRECISION)
        self.model, self.dtype = model, dtype
        self._watched: dict[str, _Watched] = {}
        present = _named_parameters(model)
        dtypes = {param.dtype for _, param in present.values()}
        if dtype is None and dtypes == {torch.float32}:
            raise ValueError(
                "all parameters are float32, and a step changes nearly all of their bits: name the "
                "dtype that the receiver has, as in Changes(model, torch.bfloat16)"
            )
        for name, (_, param) in present.items():
            if _C.changes_of(param) is not None:
                raise ValueError(
                    f"{name} is watched by another amp.Changes; take from that one and send to "
                    "every receiver, or delete it first"
                )
        for name, (owner, param) in present.items():
            self._watched[name] = _Watched(name, owner, param, dtype)

    @torch.no_grad()
    def take(self, *, global_positions: bool = False) -> dict[str, ChangedWeights]:
        """What has changed since the last call, since the object was made, or since `mark_all`.

        Parameters without a change are not in it. The bits are cleared, unless an error is raised.
        Each process gets its own part of a DTensor, and nothing is sent; positions count in its
        shard, or, with global_positions=True, in the whole tensor.

        On CUDA it waits for the device, once and once for each parameter. RuntimeError inside of
        AveragedModel.swap, while a CUDA graph is captured, and where FSDP2 has put whole weights in
        the place of shards.
        """
        looks = self._look()
        taken: dict[str, ChangedWeights] = {}
        for watched, is_all in looks:
            found = watched.changed(is_all, global_positions)
            if found is not None:
                taken[watched.name] = found
        for watched, _ in looks:
            watched.clear()
        return taken

    @torch.no_grad()
    def count(self) -> int:
        """How many weights `take` would give on this process. On CUDA it waits for the device."""
        return sum(watched.count(is_all) for watched, is_all in self._look())

    def share(self) -> float:
        """`count` over the number of weights on this process; 0.0 where it has none."""
        changed = self.count()  # first: it looks for parameters that have been replaced
        whole = sum(watched.local().numel() for watched in self._watched.values())
        return changed / whole if whole else 0.0

    def mark_all(self) -> None:
        """Has the next `take` give every weight, for a receiver that has begun anew."""
        for watched in self._watched.values():
            watched.is_all = True

    def _look(self) -> list[tuple["_Watched", bool]]:
        """The parameters as they are now, each with whether all of it counts as changed."""
        present = _named_parameters(self.model)
        own = [param for _, param in present.values()]
        _C.refuse_borrowed(own, "amp.Changes.take()", reads=True)
        _C.round_written_masters(own)
        for name, (owner, param) in present.items():
            known = self._watched.get(name)
            if known is not None and known.is_sharded and not is_dtensor(param):
                raise RuntimeError(
                    f"{name} is a whole tensor at present, and was a shard: FSDP2 leaves it so "
                    "after a forward pass without a backward pass; call model.reshard() first"
                )
            if known is not None and known.fits(param):
                continue
            if known is not None:  # or the parameter would have notes of another's
                known.notes = None
            self._watched[name] = _Watched(name, owner, param, self.dtype)
            self._watched[name].is_all = True
        self._watched = {name: self._watched[name] for name in present}
        looked = list(self._watched.values())
        _add_up(looked)
        return [(each, each.is_all or each.now != each.then) for each in looked]

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_copy, (self.model, self.dtype)


def _of_copy(model: nn.Module, dtype: torch.dtype | None) -> Changes:
    changes = Changes(model, dtype)
    changes.mark_all()
    return changes


class _Watched:
    """One parameter: its notes, where steps can make some, and the sum of its weights."""

    def __init__(
        self, name: str, owner: nn.Module, param: Tensor, dtype: torch.dtype | None
    ) -> None:
        if local_of(param).is_meta:
            raise ValueError(f"{name} is on the meta device and has no weights yet")
        if why := why_unusable(param):
            raise ValueError(f"{name} {why}")
        self.name, self.param, self.is_all = name, param, False
        self.is_sharded = is_dtensor(param)
        self.dtype = param.dtype if param.dtype in LOW_PRECISION else dtype
        self.dtype = self.dtype if param.dtype in NATIVE else None
        self.notes: _C.WeightChanges | None = None
        if self.dtype is not None:
            self.notes = _C.WeightChanges(param, self.dtype)
            _C.watch(param, owner, self.notes)
        self.shape, self.kind = param.shape, (param.dtype, local_of(param).device)
        # The sum of the weights at the last look, and what the noted steps have made of it.
        self.now = self.then = 0
        if self.notes is None:
            _add_up([self])
            self.then = self.now

    def local(self) -> Tensor:
        """The part on this process."""
        return (local_of(self.param) if self.is_sharded else self.param).detach()

    def fits(self, param: Tensor) -> bool:
        """Whether it watches this parameter as it is now."""
        if self.param is not param or self.shape != param.shape:
            return False
        same = self.kind == (param.dtype, self.local().device)
        return same and (self.notes is None or _C.changes_of(param) is self.notes)

    def numbers(self) -> Tensor:
        """What is added up: the weights, or the bytes of what no step notes, as 16-bit numbers."""
        local = self.local()
        if self.notes is not None:
            return local
        raw = local.contiguous().flatten().view(torch.uint8)
        return (raw.to(torch.int16) if raw.numel() % 2 else raw).view(torch.float16)

    def count(self, is_all: bool) -> int:
        """How many weights have changed."""
        if is_all or self.notes is None:
            return self.local().numel() if is_all else 0
        bits = self.notes.memory[1:].view(torch.uint8)
        return int(sum((bits & (1 << bit)).count_nonzero() for bit in range(8)))

    def changed(self, is_all: bool, global_positions: bool) -> ChangedWeights | None:
        """The changed weights; None without any."""
        local = self.local()
        whole = prod(self.param.shape) if global_positions else local.numel()
        dtype = torch.int32 if whole < 2**31 else torch.int64
        if is_all:
            places = torch.arange(local.numel(), dtype=dtype, device=local.device)
            values = local.flatten().clone()
        elif self.notes is None:
            return None
        else:
            places, values = _in_rows(local, self.notes.places().to(dtype))
        if places.numel() == 0:
            return None
        if self.dtype is not None:
            values = values.to(self.dtype)
        if global_positions:
            first, length, stride = origin_of(self.param)
            if length:
                places = places // length * stride + places % length
            places = places + first
        return ChangedWeights(places, values)

    def clear(self) -> None:
        """Begins anew with the weights that were looked at."""
        if self.notes is not None:
            self.notes.memory.zero_()
            self.notes.memory[:1].fill_(self.now)
        self.then, self.is_all = self.now, False


def _add_up(parameters: Iterable[_Watched]) -> None:
    """Sums the weights of each parameter, in one pass a device, and reads the sums of the notes."""
    by_device: dict[torch.device, list[_Watched]] = {}
    for each in parameters:
        by_device.setdefault(each.kind[1], []).append(each)
    for device, own in by_device.items():
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{own[0].name} is on {device}; amp_mp works on CPU and CUDA")
        sums = torch.zeros(len(own), dtype=torch.int64, device=device)
        places = [sums[i : i + 1] for i in range(len(own))]
        dtypes = [each.dtype or torch.float16 for each in own]
        _C.compare([each.numbers() for each in own], [None] * len(own), places, dtypes)
        noted = [each for each in own if each.notes is not None]
        thens = torch.cat([sums, *(each.notes.memory[:1] for each in noted if each.notes)]).tolist()
        for each, total in zip(own, thens, strict=False):
            each.now = total
        for each, total in zip(noted, thens[len(own) :], strict=True):
            each.then = total


def _in_rows(local: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Places in memory as positions in row-major order, ascending, and the values there."""
    if local.is_contiguous():
        return places, local.view(-1).index_select(0, places)
    strides, sizes = local.stride(), local.shape
    order = sorted(range(local.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))
    values = local.permute(order).reshape(-1).index_select(0, places)
    rows = torch.zeros_like(places)
    for dim in reversed(order):
        rows += places % sizes[dim] * prod(sizes[dim + 1 :])
        places = places // sizes[dim]
    rows, by_rows = rows.sort()
    return rows, values.index_select(0, by_rows)


def _named_parameters(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Parameter]]:
    """The parameters with their modules, by the names of the plain model."""
    names = plain_names(model)
    found, seen = {}, set[int]()
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                found[plain_name(names, f"{prefix}.{name}")] = (module, param)
    return found


@contextmanager
def noting(params: Iterable[Tensor]) -> Iterator[None]:
    """Notes what a block writes into the parameters that an amp.Changes watches."""
    watched = _C.watched(params)
    before = [local_of(param).detach().clone() for param, _ in watched]
    yield
    by_device: dict[torch.device, list[int]] = {}
    for index, copy in enumerate(before):
        by_device.setdefault(copy.device, []).append(index)
    for indices in by_device.values():
        notes = [watched[i][1] for i in indices]
        after = [local_of(watched[i][0]).detach() for i in indices]
        memory, dtypes = [each.memory for each in notes], [each.dtype for each in notes]
        _C.compare(after, [before[i] for i in indices], memory, dtypes)


@torch.no_grad()
def apply_changes(model: nn.Module, taken: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Puts changed weights into another model: those that `Changes.take` gave, from any device.

    model: has parameters of these names, in the values' dtype or in float32. In a DTensor, and in a
    plain parameter beside it, positions count in the part on this process.

    Raises TypeError for what is no module and for a dtype that would round the values; ValueError
    for unknown names, positions outside of the parameter, and another number of values. Nothing is
    changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {model!r}")
    present = _named_parameters(model)
    if unknown := sorted(taken.keys() - present.keys()):
        raise ValueError(
            f"{len(unknown)} of {len(taken)} names are not those of the model's parameters: "
            f"{', '.join(unknown[:5])}; the model has {', '.join(list(present)[:5])}"
        )
    writes = []
    for name, (positions, values) in taken.items():
        local = local_of(present[name][1]).detach()
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
            places = positions.to(local.device, torch.int64)
            writes.append((name, local, places, values.to(local.device, local.dtype)))
    ends = [torch.stack(places.aminmax()).cpu() for _, _, places, _ in writes]
    for (name, local, _, _), (first, last) in zip(writes, map(Tensor.tolist, ends), strict=True):
        if not 0 <= first <= last < local.numel():
            raise ValueError(
                f"{name} has positions from {first} to {last}, and {local.numel()} weights here; "
                "positions of a whole tensor belong to models that are not sharded"
            )
    moving.leave_out(present[name][0] for name in taken if not present[name][1].requires_grad)
    for _, local, places, values in writes:
        if local.is_contiguous():
            local.view(-1).index_copy_(0, places, values)
        else:
            local[torch.unravel_index(places, local.shape)] = values
