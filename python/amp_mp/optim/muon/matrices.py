"""The matrices that parameters consist of; those split over processes are made orthogonal by one.

csrc/torch/muon makes whole matrices orthogonal.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, cycle, groupby
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_mp._C import WholeMatrices, orthogonalise_
from amp_mp.optim.rule import Group, MakeUpdates, Shape
from amp_mp.sharding.shards import like, local_of, part, split_groups
from amp_mp.torch_private import foreach_copy_

Members = Sequence[tuple[Tensor, Group]]


class Block(NamedTuple):
    """Rows of a matrix that are `number` matrices for themselves, each of this shape.

    The singular values of their updates become about `factor`: how their rate differs from the
    parameter's.
    """

    number: int
    rows: int
    columns: int
    factor: float


def _matrix(group: Mapping[str, Any], param: Tensor) -> Shape:
    """Rows and columns of a parameter's matrices before they are cut into blocks.

    A tensor of three dimensions is a stack of matrices, unless the group flattens: then all but the
    first dimension are the columns.
    """
    shape = tuple(param.shape)
    return (shape[0], prod(shape[1:])) if group["flatten"] else (shape[-2], shape[-1])


def shape_of(group: Group, param: Tensor) -> Shape:
    """Rows and columns of the (first) blocks of a parameter's matrices, which set its rate."""
    (rows, columns), split = _matrix(group, param), group["split"]
    return rows // split if isinstance(split, int) else split[0], columns


def blocks_of(group: Group, param: Tensor) -> list[Block]:
    """What each matrix of a parameter consists of, from its first row to its last."""
    (rows, columns), split = _matrix(group, param), group["split"]
    whole = factor_of_rate(group, shape_of(group, param))
    sizes = [rows // split] * split if isinstance(split, int) else split
    return [
        Block(len(list(run)), size, columns, factor_of_rate(group, (size, columns)) / whole)
        for size, run in groupby(sizes)
    ]


def refuse_shape(group: Group, param: Tensor, label: str) -> None:
    """Raises ValueError, by name, for a parameter that is no matrix and no stack of them."""
    shape, split = tuple(param.shape), group.get("split", 1)
    wrong = ""
    if len(shape) < 2:
        wrong = (
            "is no matrix; give it to AdamW, with use_muon=False in its param_group or with "
            "Muon(model, others=dict(lr=...)), which chooses the matrices itself"
        )
    elif len(shape) > 3 and not group.get("flatten"):
        wrong = (
            "has more than three dimensions; with flatten=True in its param_group all but the "
            "first become the columns of one matrix"
        )
    else:
        rows = shape[0] if group.get("flatten") else shape[-2]
        if not isinstance(split, int):
            if sum(split) != rows:
                wrong = f"has {rows} rows, and the blocks of split {tuple(split)} {sum(split)}"
        elif rows % split:
            wrong = f"has {rows} rows, which do not fall into {split} equal blocks; change split"
    if wrong:
        raise ValueError(f"{label} of shape {shape} {wrong}")


def factor_of_rate(group: Mapping[str, Any], shape: Shape) -> float:
    """What the learning rate is multiplied by for matrices of a shape, as torch.optim.Muon's."""
    rows, columns = shape
    if not rows or not columns:
        return 1.0
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    ratio = sqrt(rows / columns)
    unclamped = group["adjust_lr_fn"] in ("spectral_unclamped", "sqrt")
    return ratio if unclamped else max(1.0, ratio)


def make_updates(members: Members) -> MakeUpdates:
    """What turns the directions of these parameters into updates, on this and other processes.

    Matrices in one piece are done where they are. One whose rows are split over one process group
    goes to a process of the group and back. What is split otherwise, every process gathers.
    """
    exchanged: dict[str, list[int]] = {}
    gathered: list[int] = []
    groups: dict[str, Any] = {}
    for index, (param, _) in enumerate(members):
        if not split_groups(param):
            continue
        group = _group_of_rows(param)
        if group is None:
            gathered.append(index)
        else:
            groups[group.group_name] = group
            exchanged.setdefault(group.group_name, []).append(index)
    elsewhere = {i for own in (gathered, *exchanged.values()) for i in own}
    whole = WholeMatrices(
        [local_of(param) for param, _ in members],
        [group for _, group in members],
        [None if i in elsewhere else blocks_of(group, p) for i, (p, group) in enumerate(members)],
    )
    if not elsewhere:
        return whole
    exchanges = [
        Exchange(members, whole.offsets, own, groups[name]) for name, own in exchanged.items()
    ]

    def all_of_them(directions: Tensor) -> Tensor:
        for exchange in exchanges:
            exchange(directions)
        for index in gathered:
            param, group = members[index]
            at, local = whole.offsets[index], local_of(param)
            own = directions[at : at + local.numel()].view(local.shape)
            given: Any = like(own, param)
            matrices = given.full_tensor().contiguous()
            WholeMatrices([matrices], [group], [blocks_of(group, param)])(matrices.view(-1))
            own.copy_(part(matrices, param))
        return whole(directions)

    return all_of_them


def _group_of_rows(param: Any) -> Any:
    """The process group over which the first dimension alone is split; None for other splits."""
    mesh = param.device_mesh
    found = None
    for dim, placement in enumerate(param.placements):
        if mesh.size(dim) == 1 or placement.is_replicate():
            continue
        if found is not None or not placement.is_shard(0):
            return None
        found = mesh.get_group(dim)
        if found.rank() != mesh.get_local_rank(dim):
            return None
    return found


class Piece(NamedTuple):
    """What one process has of one matrix: `size` elements; `at` is the first in its shard."""

    member: int  # the parameter's number
    rank: int
    at: int
    size: int


class Matrix(NamedTuple):
    """A matrix, its numbers, and its pieces in the order of ranks and so of elements."""

    shape: Shape
    factor: float
    group: Group
    pieces: list[Piece]


def _matrices(param: Tensor, group: Group, member: int, ranks: int) -> Iterator[Matrix]:
    """Those that a parameter consists of, in the order of their elements."""
    rows, row = param.shape[0], prod(param.shape[1:])
    chunk = -(-rows // ranks) * row  # as torch splits rows
    total = rows * row
    end = 0
    shapes = [
        (b.rows, b.columns, b.factor) for b in blocks_of(group, param) for _ in range(b.number)
    ]
    for own_rows, columns, factor in cycle(shapes):
        begin, end, pieces = end, end + own_rows * columns, []
        if begin == end or end > total:
            return
        for rank in range(ranks):
            first = min(rank * chunk, total)
            low, high = max(begin, first), min(end, min(first + chunk, total))
            if low < high:
                pieces.append(Piece(member, rank, low - first, high - low))
        yield Matrix((own_rows, columns), factor, group, pieces)


class Exchange:
    """Sends each matrix's pieces to the process that makes it orthogonal, and the result back.

    All processes of the group make the same plan: a matrix that lies on one process stays there,
    the others go to the process with the least work so far, the largest first.
    """

    def __init__(
        self, members: Members, offsets: list[int], indices: list[int], group: Any
    ) -> None:
        """indices: of the members that are split over the process group."""
        self._group = group
        ranks = group.size()
        self._rank = group.rank()
        matrices = [m for i in indices for m in _matrices(*members[i], i, ranks)]
        owned = list(zip(self._owners(matrices), matrices, strict=True))
        # What this process sends, in the order of owners, and gets, in the order of senders; each
        # in the order of matrices.
        sent = [(owner, p) for owner, m in owned for p in m.pieces if p.rank == self._rank]
        sent.sort(key=lambda each: each[0])
        self._from = [(offsets[p.member] + p.at, p.size) for _, p in sent]
        self._sent = [sum(p.size for o, p in sent if o == rank) for rank in range(ranks)]
        own = [matrix for owner, matrix in owned if owner == self._rank]
        got = sorted((p for matrix in own for p in matrix.pieces), key=lambda piece: piece.rank)
        self._received = [sum(p.size for p in got if p.rank == rank) for rank in range(ranks)]
        ends = accumulate((p.size for p in got), initial=0)
        places = {p: slice(at, at + p.size) for p, at in zip(got, ends, strict=False)}
        # The first of matrices of one kind, and where the pieces of all are in what it gets.
        self._stacks: list[tuple[Matrix, list[slice]]] = []
        for _, run in groupby(own, lambda m: (m.shape, m.factor, id(m.group))):
            alike = list(run)
            self._stacks.append((alike[0], [places[p] for m in alike for p in m.pieces]))

    def _owners(self, matrices: list[Matrix]) -> list[int]:
        work = [0] * self._group.size()
        owners = [0] * len(matrices)

        def cost(number: int) -> int:
            rows, columns = sorted(matrices[number].shape)
            return rows * rows * (2 * columns + rows)

        for number in sorted(range(len(matrices)), key=lambda n: (-cost(n), n)):
            held = matrices[number].pieces
            owner = held[0].rank if len(held) == 1 else work.index(min(work))
            owners[number] = owner
            work[owner] += cost(number)
        return owners

    def __call__(self, directions: Tensor) -> None:
        """Puts the updates in place of the directions."""
        mine = [directions[at : at + size] for at, size in self._from]
        sent = torch.cat(mine) if mine else directions[:0]
        received = sent.new_empty(sum(self._received))
        self._send(received, sent, self._received, self._sent)
        for kind, places in self._stacks:
            own = [received[place] for place in places]
            stack = torch.cat(own).view(-1, *kind.shape)
            orthogonalise_(stack, kind.group, kind.factor)
            made = stack.flatten().split_with_sizes([piece.numel() for piece in own])
            foreach_copy_(own, list(made))
        self._send(sent, received, self._sent, self._received)
        if mine:
            made = sent.split_with_sizes([size for _, size in self._from])
            foreach_copy_(mine, list(made))

    def _send(self, to: Tensor, source: Tensor, arriving: list[int], leaving: list[int]) -> None:
        """Exchanges elements, as many with each process as these say."""
        import torch.distributed as dist

        tensors = to.view(torch.uint8), source.view(torch.uint8)  # every backend carries bytes
        sizes = [2 * n for n in arriving], [2 * n for n in leaving]
        dist.all_to_all_single(*tensors, *sizes, group=self._group)
