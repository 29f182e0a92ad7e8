"""Which weights have changed since they were last taken, and their new values."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, check_dtype
from amp_mp.model import checksums
from amp_mp.model.pieces import Cut, Piece, PiecesOf, cut_all
from amp_mp.model.watched import ChangedWeights, Names, Watched
from amp_mp.sharding.shards import is_dtensor, local_of


class Taken(dict[str, ChangedWeights]):
    """What `Changes.take` gives, by the receiver's names.

    version: the number of this `take`, which is the receiver's version when all processes' parts
    have been put in. base: a receiver must have this version or a later one; None where every
    weight is in it.
    """

    base: int | None
    version: int


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
    `take`, which counts as no change. Moving the model to another device keeps the notes.

    Args:
        model: its parameters are watched from now on, frozen ones too, each under the first of its
            names, as the plain model has them. It takes 1/8 byte a weight beside them.
        dtype: torch.float16 or torch.bfloat16, for float32 weights: a change is one of what they
            round to as by Tensor.to, and values are of that dtype. Default None: where one of its
            weights has changed, a float32 parameter (`prepare`'s norms) is given whole, in float32,
            as are those of other dtypes.
        buffers: also watches persistent buffers, as state_dict() has them, by a copy of each.
            Default False.
        names: what the receiver calls a parameter, as a function of its name and whole shape that
            returns `Piece`s: several where it splits what the trainer has in one, as single
            experts, or q, k and v. Positions then count in the receiver's tensors. Default None:
            the trainer's names.

    A model is watched by one object at a time, and as long as that lives. Copies and pickles of it
    watch the copied model and begin with all weights changed.

    Raises TypeError for what is no module, ValueError for another dtype, for a model of float32
    weights alone without one, for weights on the meta device, for pieces that leave out elements or
    have some twice, and where another object watches.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        buffers: bool = False,
        names: PiecesOf | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, found {model!r}")
        if dtype is not None:
            check_dtype(dtype, LOW_PRECISION)
        self.model, self.dtype, self._buffers, self._names = model, dtype, buffers, names
        self._version = self._base = 0  # of the last take or begin, and of the last that was given
        self._marks = 0  # how often mark_all was called
        self._watched: dict[str, Watched] = {}
        self._cuts: dict[str, Cut] = {}
        self._kept: tuple[_Look, int] | None = None
        present = Names.of(model, buffers)
        params = {n: t for n, (_, t) in present.tensors.items() if isinstance(t, nn.Parameter)}
        if dtype is None and {param.dtype for param in params.values()} == {torch.float32}:
            raise ValueError(
                "all parameters are float32, and a step changes nearly all of their bits: name the "
                "dtype that the receiver has, as in Changes(model, torch.bfloat16)"
            )
        for name, param in params.items():
            if _C.changes_of(param) is not None:
                raise ValueError(
                    f"{name} is watched by another amp.Changes; take from that one and send to "
                    "every receiver, or delete it first"
                )
        self._cut_up(present)
        for name, (owner, tensor) in present.tensors.items():
            self._watched[name] = Watched(name, owner, tensor, dtype)
        with torch.no_grad():
            _Look(list(self._watched.values())).end()

    @property
    def version(self) -> int:
        """The number of the last `take` or `begin`; 0 at first."""
        return self._version

    @property
    def aliases(self) -> dict[str, list[str]]:
        """The other names of tied weights, by the first, under which `take` has them."""
        found: dict[str, list[str]] = {}
        for name, first in Names.of(self.model, self._buffers).first.items():
            if name != first:
                found.setdefault(first, []).append(name)
        return found

    @torch.no_grad()
    def take(
        self, *, global_positions: bool = False, every: bool = False, keep: bool = False
    ) -> Taken:
        """What has changed since the last call, since the object was made, or since `mark_all`.

        Several steps together give each weight that one of them has changed, also if another has
        changed it back. Each process gets its own part of a DTensor, and nothing is sent.

        Args:
            global_positions: positions count in the whole tensor. Default False: in the part of a
                DTensor on this process. With `names` they always count in the receiver's tensors.
            every: all names of state_dict(), in its order, those of tied weights and of watched
                buffers too; where nothing has changed, with empty tensors. Default False: only what
                has changed, each tensor under its first name.
            keep: the changes stay noted until `given`, so that after a failure the next call has
                them and later ones. Default False: they have been given when this returns.

        On CUDA it waits for the device once, and once more where `names` splits tensors. The
        changes stay noted where an error is raised: RuntimeError inside of AveragedModel.swap,
        while a CUDA graph is captured, and where FSDP2 has put whole weights in the place of
        shards.
        """
        present = self._follow()
        everywhere = global_positions or self._names is not None
        look = _Look(list(self._watched.values()), everywhere)
        is_whole = all(each.has_all_changed for each in self._watched.values())
        found = look.take()
        wanted = present.first if every else {name: name for name in found}
        pieces = cut_all(self._cuts, {n: found[own] for n, own in wanted.items() if own in found})
        taken = Taken()
        for name, own in wanted.items():
            taken.update(pieces.get(name) or self._cuts[name].empty(self._watched[own].nothing()))
        self._version += 1
        taken.base, taken.version = None if is_whole else self._base, self._version
        self._kept = (look, self._marks)
        if keep:
            look.hold()
        else:
            self._end()
        return taken

    @torch.no_grad()
    def given(self) -> None:
        """Says that what the last `take(keep=True)` gave has arrived; the next is without it.

        On CUDA it waits for the device. RuntimeError without such a `take`, and if a step has
        changed weights since then: the next `take` then has those of both.
        """
        if self._kept is None:
            raise RuntimeError(
                "there is nothing to be confirmed: given() belongs to take(keep=True), once"
            )
        if not self._kept[0].is_current():
            raise RuntimeError(
                "a step has changed weights since take(keep=True), and its changes cannot be told "
                "from those; call given() before the next step, or leave it out: the next take() "
                "has both"
            )
        self._end()

    @torch.no_grad()
    def begin(self) -> None:
        """Says that the receiver has the weights as they are now, by other means than `take`."""
        self._follow()
        self._kept = (_Look(list(self._watched.values())), self._marks)
        self._version += 1
        self._end()

    def _end(self) -> None:
        """Lets the notes begin anew after the look that is kept."""
        assert self._kept is not None
        look, marks = self._kept
        look.end(marks == self._marks)
        self._kept = None
        self._base = self._version

    @torch.no_grad()
    def count(self) -> int:
        """How many weights `take` would give on this process. On CUDA it waits for the device."""
        self._follow()
        _Look(list(self._watched.values()))
        return sum(each.count for each in self._watched.values())

    def share(self) -> float:
        """`count` over the number of weights on this process; 0.0 where it has none."""
        changed = self.count()  # first: it looks for parameters that have been replaced
        whole = sum(each.local().numel() for each in self._watched.values())
        return changed / whole if whole else 0.0

    def mark_all(self) -> None:
        """Has the next `take` give every weight, for a receiver that has begun anew."""
        self._marks += 1
        for watched in self._watched.values():
            watched.is_all = True

    @torch.no_grad()
    def checksums(self) -> dict[str, tuple[int, int]]:
        """What this process adds to the Adler-32 of each whole tensor's bytes, as they are now.

        By the names of `take(every=True)`; bytes are those of the dtype that is given. Added over
        the processes that hold different parts, replicas once, modulo 65521, the two numbers are
        the lower and the upper half of the checksum: of a model that is not sharded,
        zlib.adler32(bytes) == upper << 16 | lower. Tensors without elements are left out. The sums
        tell a wrong base or a fault in transport, and keep nobody from forging.
        """
        present = self._follow()
        names, sums = list[str](), list[Tensor]()
        for name, own in present.first.items():
            watched = self._watched[own]
            local = watched.local().contiguous()
            origin, _ = watched.counting(local, global_positions=True)
            for piece in self._cuts[name].pieces:
                if piece.numel:
                    names.append(piece.name)
                    sums.append(checksums.sums_of(local, origin, piece, watched.given_dtype))
        by_device: dict[torch.device, list[int]] = {}
        for index, each in enumerate(sums):
            by_device.setdefault(each.device, []).append(index)
        found = dict[str, tuple[int, int]].fromkeys(names, (0, 0))
        for indices in by_device.values():
            for index, (low, high) in zip(
                indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True
            ):
                found[names[index]] = (low, high)
        return found

    def _follow(self) -> Names:
        """Watches the model's tensors as they are now. Returns their names."""
        present = Names.of(self.model, self._buffers)
        own = [t for _, t in present.tensors.values() if isinstance(t, nn.Parameter)]
        _C.refuse_borrowed(own, "amp.Changes.take()", reads=True)
        _C.round_written_masters(own)
        self._cut_up(present)
        for name, (owner, tensor) in present.tensors.items():
            known = self._watched.get(name)
            if known is not None and known.is_sharded and not is_dtensor(tensor):
                raise RuntimeError(
                    f"{name} is a whole tensor at present, and was a shard: FSDP2 leaves it so "
                    "after a forward pass without a backward pass; call model.reshard() first"
                )
            if known is not None and known.fits(tensor):
                continue
            if known is not None:  # or the parameter would have notes of another's
                known.notes = None
            self._watched[name] = Watched(name, owner, tensor, self.dtype)
            self._watched[name].is_all = True
        self._watched = {name: self._watched[name] for name in present.tensors}
        for each in self._watched.values():
            if each.copy is not None:
                each.note_copy()
        return present

    def _cut_up(self, present: Names) -> None:
        """Asks for the receiver's names of what has no pieces yet."""
        for name, own in present.first.items():
            shape = present.tensors[own][1].shape
            if name not in self._cuts or self._cuts[name].shape != shape:
                self._cuts[name] = Cut(name, shape, self._names or _own_name)
        self._cuts = {name: self._cuts[name] for name in present.first}
        firsts = (name for name, own in present.first.items() if name == own)
        owners: dict[str, str] = {}
        for name in firsts:
            for piece in self._cuts[name].pieces:
                if owners.setdefault(piece.name, name) != name:
                    raise ValueError(
                        f"names gives {piece.name!r} to a piece of {owners[piece.name]} and to one "
                        f"of {name}; each of the receiver's tensors is one piece"
                    )

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_copy, (self.model, self.dtype, self._buffers, self._names)


def _own_name(name: str, shape: torch.Size) -> list[Piece]:
    return [Piece(name, tuple(shape))]


def _of_copy(
    model: nn.Module, dtype: torch.dtype | None, buffers: bool, names: PiecesOf | None
) -> Changes:
    changes = Changes(model, dtype, buffers=buffers, names=names)
    changes.mark_all()
    return changes


class _Look:
    """What all watched tensors are at one time. It reads each once, and waits once a device."""

    def __init__(self, watched: list[Watched], global_positions: bool | None = None) -> None:
        """global_positions: how positions count if `take` will be called, else None."""
        self._watched, self._global = watched, global_positions
        by_device: dict[torch.device, list[tuple[Watched, Tensor]]] = {}
        for each in watched:
            local = each.local()
            by_device.setdefault(local.device, []).append((each, local))
        for device, own in by_device.items():
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"{own[0][0].name} is on {device}; amp_mp works on CPU and CUDA")
        self._looked: list[_C.Looked] = []
        # The weights that `take` reads, which would be kept until `given` if it did not drop them.
        self._weights = list(by_device.values())
        for own in by_device.values():
            weights, notes = [each.numbers(w) for each, w in own], [each.notes for each, _ in own]
            counting = []
            if global_positions is not None:
                counting = [each.counting(w, global_positions) for each, w in own]
            looked = _C.Looked(weights, notes, counting)
            for (each, local), numbers in zip(own, looked.found, strict=True):
                each.looked_at(local, *numbers)
            self._looked.append(looked)
        self._sums = [each.now for each in watched]

    def take(self) -> dict[str, ChangedWeights]:
        """What has changed, by name, in the order of the watched tensors. Once."""
        assert self._global is not None
        found: dict[str, ChangedWeights] = {}
        for own, looked in zip(self._weights, self._looked, strict=True):
            some = [i for i, (w, _) in enumerate(own) if w.count and not w.has_all_changed]
            gathered = looked.gather(some, [own[i][1] for i in some])
            for i, each in zip(some, gathered, strict=True):
                watched, local = own[i]
                changed = ChangedWeights(*each)
                in_order = local.is_contiguous()
                found[watched.name] = changed if in_order else watched.in_rows(changed)
        self._weights = []
        for watched in self._watched:
            if watched.has_all_changed and watched.count:
                found[watched.name] = watched.all_changed(self._global)
        return {each.name: found[each.name] for each in self._watched if each.name in found}

    def hold(self) -> None:
        """Has the next look give again all that was given whole.

        The receiver may have it already; a write that is taken back would be no change to the sum.
        """
        for each in self._watched:
            each.is_all = each.has_all_changed

    def is_current(self) -> bool:
        """Whether no step has changed a weight since. Waits for the devices."""
        return all(looked.is_current() for looked in self._looked)

    def end(self, unmarks: bool = True) -> None:
        """Lets the notes begin anew with the weights that were looked at."""
        for looked in self._looked:
            looked.clear()
        for each, now in zip(self._watched, self._sums, strict=True):
            each.then = now
            each.is_all = each.is_all and not unmarks


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
