"""The matrices that parameters consist of; csrc/torch/muon makes them orthogonal."""

from collections.abc import Mapping
from itertools import groupby
from math import prod, sqrt
from typing import Any, NamedTuple

from torch import Tensor

from amp_mp.optim.rule import Group, Shape


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
    return ratio if group["adjust_lr_fn"] == "sqrt" else max(1.0, ratio)
