"""Adler-32 of tensors of which each process has a part.

The two sums of Adler-32 (RFC 1950) are linear in the bytes: with n bytes d_0, d_1, ... of the whole
tensor they are 1 + sum d_i and n + sum (n - i) d_i, modulo 65521. So the sums of the parts add up.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from amp_mp.model.pieces import Piece
from amp_mp.sharding.shards import Origin

MODULUS = 65521
_TOGETHER = 1 << 20  # bytes; each takes eight meanwhile
_WIDTH = 1 << 12  # elements of a row, where there are no rows


def sums_of(local: Tensor, origin: Origin, piece: Piece, dtype: torch.dtype) -> Tensor:
    """What a part adds to the two sums of one piece of the whole tensor: int64, [2].

    local: the part, contiguous. dtype: in which its bytes are counted. 1 and n are added where the
    piece's first element is.
    """
    flat = local.reshape(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=local.device)
    item = torch.empty(0, dtype=dtype).element_size()
    size = piece.numel * item
    for start, rows, length, first, stride in _runs(flat.numel(), origin, piece):
        if first == 0:
            sums += torch.tensor([1, size], device=local.device)
        together = max(1, _TOGETHER // (length * item))
        ramp = torch.arange(length * item, dtype=torch.float64, device=local.device)
        for row in range(0, rows, together):
            count = min(together, rows - row)
            part = flat[start + row * length : start + (row + count) * length]
            lines = part.to(dtype).view(torch.uint8).view(count, length * item)
            at = first + row * stride + stride * torch.arange(count, device=local.device)
            low = lines.sum(1, dtype=torch.int64)
            within = (lines.double() @ ramp).long()
            high = (size - item * at) % MODULUS * (low % MODULUS) - within
            sums += torch.stack([low.sum(), (high % MODULUS).sum()])
    return sums % MODULUS


def _runs(numel: int, origin: Origin, piece: Piece) -> Iterator[tuple[int, int, int, int, int]]:
    """Where a part of `numel` elements lies in a piece, in rows of equal length and distance.

    Each: the first element in the part, the number of rows, their length; the first element in the
    piece, and the distance of rows there.
    """
    if numel == 0:
        return
    length, stride = origin.row_length or numel, origin.row_stride or numel
    ahead = piece.first - origin.first  # of the piece's first element before the part's
    rows = range(
        max(0, -((length - 1 - ahead) // stride)),
        min(numel // length, -((-ahead - piece.numel) // stride)),
    )

    def is_whole(row: int) -> bool:
        return origin.row_length > 0 and 0 <= row * stride - ahead <= piece.numel - length

    inner = range(rows.start, rows.stop)
    if rows and not is_whole(rows[0]):
        yield from _in_lines(rows[0], length, stride, ahead, piece)
        inner = inner[1:]
    if inner and not is_whole(inner[-1]):
        yield from _in_lines(inner[-1], length, stride, ahead, piece)
        inner = inner[:-1]
    if inner:
        yield inner[0] * length, len(inner), length, inner[0] * stride - ahead, stride


def _in_lines(
    row: int, length: int, stride: int, ahead: int, piece: Piece
) -> Iterator[tuple[int, int, int, int, int]]:
    """What one row and a piece have in common, as lines of _WIDTH elements and a rest."""
    begin = max(row * stride - ahead, 0)
    end = min(row * stride - ahead + length, piece.numel)
    start = row * length + begin - (row * stride - ahead)
    lines = (end - begin) // _WIDTH
    if lines:
        yield start, lines, _WIDTH, begin, _WIDTH
    if rest := end - begin - lines * _WIDTH:
        yield start + lines * _WIDTH, 1, rest, begin + lines * _WIDTH, rest
