"""A receiver's names: each is a piece of one of the trainer's tensors."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice, pairwise
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
        self.placed: Tensor | None = None  # `firsts`, where changes were cut last
        self.pieces = [Piece(*each) for each in names(name, shape)]
        # An empty piece before the one that begins at the same element.
        key = [(piece.first, piece.numel) for piece in self.pieces]
        self._order = sorted(range(len(key)), key=key.__getitem__)
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

    @property
    def firsts(self) -> list[int]:
        """Where the pieces begin, ascending."""
        return [self.pieces[i].first for i in self._order]

    @property
    def device(self) -> torch.device | None:
        """Where `placed` is."""
        return None if self.placed is None else self.placed.device

    def empty(self, nothing: ChangedWeights) -> dict[str, ChangedWeights]:
        """All pieces, unchanged."""
        return {piece.name: nothing for piece in self.pieces}

    def begins(self, changed: ChangedWeights) -> Tensor:
        """Which change is the first of each piece, ascending; on the changes' device."""
        assert self.placed is not None
        return torch.searchsorted(changed.positions, self.placed.to(changed.positions.dtype))

    def cut(self, changed: ChangedWeights, begins: list[int]) -> dict[str, ChangedWeights]:
        """The changes of each piece. begins: what `begins` gave, on the host."""
        positions, values = changed
        assert self.placed is not None
        firsts = self.placed.to(positions.dtype)
        own = torch.bucketize(positions, firsts, out_int32=True, right=True).sub_(1)
        positions = positions - firsts.index_select(0, own)
        if max(piece.numel for piece in self.pieces) < 2**31:
            positions = positions.to(torch.int32)
        sizes = [end - begin for begin, end in pairwise([*begins, len(values)])]
        # Copies: a piece that is sent by pickle would carry all of the tensor's changes.
        parts = zip(_copies(positions, sizes), _copies(values, sizes), strict=True)
        found = {i: ChangedWeights(*part) for i, part in zip(self._order, parts, strict=True)}
        return {piece.name: found[i] for i, piece in enumerate(self.pieces)}


def cut_all(
    cuts: Mapping[str, Cut], taken: Mapping[str, ChangedWeights]
) -> dict[str, dict[str, ChangedWeights]]:
    """The pieces of all that was taken, by the trainer's names. Waits once for each device."""
    found: dict[str, dict[str, ChangedWeights]] = {}
    by_device: dict[torch.device, list[str]] = {}
    for name, changed in taken.items():
        if len(cuts[name].pieces) == 1:
            found[name] = {cuts[name].pieces[0].name: changed}
        else:
            by_device.setdefault(changed.positions.device, []).append(name)
    for device, names in by_device.items():
        if any(cuts[name].device != device for name in names):
            _place(list(cuts.values()), device)
        searched = [cuts[name].begins(taken[name]) for name in names]
        begins = iter(torch.cat(searched).tolist())
        for name, own in zip(names, searched, strict=True):
            found[name] = cuts[name].cut(taken[name], list(islice(begins, len(own))))
    return found


def _copies(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
    """Its parts of these sizes, in memory of their own."""
    parts = [tensor.new_empty(size) for size in sizes]
    torch.split_with_sizes_copy(tensor, sizes, out=parts)
    return parts


def _place(cuts: list[Cut], device: torch.device) -> None:
    """Copies all `firsts` to the device at once."""
    firsts = torch.tensor([first for cut in cuts for first in cut.firsts], device=device)
    for cut, own in zip(cuts, torch.split(firsts, [len(c.pieces) for c in cuts]), strict=True):
        cut.placed = own


def _listed(pieces: list[Piece]) -> str:
    ranges = [f"{p.name} of {p.first} to {p.first + p.numel}" for p in pieces[:4]]
    return ", ".join(ranges) + (f" and {len(pieces) - 4} more" if len(pieces) > 4 else "") or "none"
