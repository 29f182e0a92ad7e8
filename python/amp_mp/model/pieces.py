"""A receiver's names: each is a piece of one of the trainer's tensors."""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from amp_mp.model.watched import ChangedWeights


class Piece(NamedTuple):
    """A receiver's tensor: a range of a trainer's whole tensor in row-major order.

    name, shape: the receiver's. first: the trainer's element that is the piece's element 0.
    """

    name: str
    shape: tuple[int, ...]
    first: int = 0

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


PiecesOf = Callable[[str, torch.Size], Iterable[Piece]]


class Cut:
    """The pieces of one tensor, in the order in which they were named."""

    def __init__(self, name: str, shape: torch.Size, names: PiecesOf) -> None:
        self.shape = shape
        self.pieces = [Piece(*each) for each in names(name, shape)]
        self._order = sorted(range(len(self.pieces)), key=lambda i: self.pieces[i].first)
        self._firsts: Tensor | None = None
        at = 0
        for piece in (self.pieces[i] for i in self._order):
            if piece.first != at:
                break
            at += piece.numel
        else:
            if at == prod(shape):
                return
        raise ValueError(
            f"names({name!r}, {tuple(shape)}) gave {_listed(self.pieces)}; the pieces must have "
            f"each of the {prod(shape)} elements once, and element {at} begins none or several"
        )

    def firsts(self, device: torch.device) -> Tensor:
        """Where the pieces begin, ascending, int64."""
        if self._firsts is None or self._firsts.device != device:
            firsts = [self.pieces[i].first for i in self._order]
            self._firsts = torch.tensor(firsts, device=device)
        return self._firsts

    def begins(self, changed: ChangedWeights) -> Tensor:
        """Which of the changes is the first of each piece; queued on the changes' device."""
        firsts = self.firsts(changed.positions.device).to(changed.positions.dtype)
        return torch.searchsorted(changed.positions, firsts)

    def empty(self, nothing: ChangedWeights) -> dict[str, ChangedWeights]:
        """All pieces, unchanged."""
        return {piece.name: nothing for piece in self.pieces}

    def cut(
        self, changed: ChangedWeights, begins: Tensor, on_host: list[int]
    ) -> dict[str, ChangedWeights]:
        """The changes of each piece. begins: as before, and the same numbers on the host."""
        positions, values = changed
        ends = [*on_host[1:], len(positions)]
        counts = begins.diff(append=begins.new_tensor([len(positions)]))
        own = self.firsts(positions.device).repeat_interleave(counts, output_size=len(positions))
        positions = positions - own.to(positions.dtype)
        if max(piece.numel for piece in self.pieces) < 2**31:
            positions = positions.to(torch.int32)
        found = {}
        for i, begin, end in zip(self._order, on_host, ends, strict=True):
            found[i] = ChangedWeights(positions[begin:end], values[begin:end])
        return {piece.name: found[i] for i, piece in enumerate(self.pieces)}


def cut_all(
    cuts: Mapping[str, Cut], taken: Mapping[str, ChangedWeights]
) -> dict[str, dict[str, ChangedWeights]]:
    """The pieces of all that was taken, by the trainer's names. Waits once for each device."""
    found: dict[str, dict[str, ChangedWeights]] = {}
    searched: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, changed in taken.items():
        if len(cuts[name].pieces) == 1:
            found[name] = {cuts[name].pieces[0].name: changed}
        else:
            own = searched.setdefault(changed.positions.device, [])
            own.append((name, cuts[name].begins(changed)))
    for each in searched.values():
        on_host = torch.cat([begins for _, begins in each]).tolist()
        for name, begins in each:
            own_begins, on_host = on_host[: len(begins)], on_host[len(begins) :]
            found[name] = cuts[name].cut(taken[name], begins, own_begins)
    return found


def _listed(pieces: list[Piece]) -> str:
    ranges = [f"{p.name} of {p.first} to {p.first + p.numel}" for p in pieces[:4]]
    return ", ".join(ranges) + (f" and {len(pieces) - 4} more" if len(pieces) > 4 else "") or "none"
