"""The matrices that parameters consist of; csrc/torch/muon makes them orthogonal."""

from collections.abc import Mapping
from math import prod, sqrt
from typing import Any

from torch import Tensor

from amp_mp.optim.rule import Group, Shape


def shape_of(group: Group, param: Tensor) -> Shape:
    """Rows and columns of the matrices that a parameter consists of.

    A tensor of three dimensions is a stack of matrices, unless the group flattens: then all but the
    first dimension are the columns. split cuts a matrix's rows into equal blocks, each a matrix.
    """
    shape = tuple(param.shape)
    if group["flatten"]:
        shape = (shape[0], prod(shape[1:]))
    return shape[-2] // group["split"], shape[-1]


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
    elif (rows := shape[0] if group.get("flatten") else shape[-2]) % split:
        wrong = f"has {rows} rows, which do not fall into {split} equal blocks; change split"
    if wrong:
        raise ValueError(f"{label} of shape {shape} {wrong}")


def factor_of_rate(group: Mapping[str, Any], shape: tuple[int, int]) -> float:
    """What the learning rate is multiplied by for matrices of a shape, as torch.optim.Muon's."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns)) if columns else 1.0
