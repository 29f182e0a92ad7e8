"""The matrices in parameters, and in a step's directions."""

from collections.abc import Container, Mapping, Sequence
from math import prod, sqrt
from typing import Any, NamedTuple

from torch import Tensor

from amp_mp.optim.muon.newton_schulz import orthogonalise_
from amp_mp.optim.rule import Group, Shape
from amp_mp.sharding.shards import local_of


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
    shape, split = tuple(param.shape), group["split"]
    wrong = ""
    if len(shape) < 2:
        wrong = (
            "is no matrix; give it to AdamW, with use_muon=False in its param_group or with "
            "Muon(model, others=dict(lr=...)), which chooses the matrices itself"
        )
    elif len(shape) > 3 and not group["flatten"]:
        wrong = (
            "has more than three dimensions; with flatten=True in its param_group all but the "
            "first become the columns of one matrix"
        )
    elif (rows := shape[0] if group["flatten"] else shape[-2]) % split:
        wrong = f"has {rows} rows, which do not fall into {split} equal blocks; change split"
    if wrong:
        raise ValueError(f"{label} of shape {shape} {wrong}")


def factor_of_rate(group: Mapping[str, Any], shape: tuple[int, int]) -> float:
    """What the learning rate is multiplied by for matrices of a shape, as torch.optim.Muon's."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns)) if columns else 1.0


class Run(NamedTuple):
    """Matrices of one shape that lie one behind the other in a step's directions.

    shape, stride: of the one parameter whose memory is not in the order of its rows, else empty.
    """

    begin: int
    end: int
    matrix: Shape
    group: Group
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


class WholeMatrices:
    """Makes updates of directions where this process has all of each matrix."""

    def __init__(self, members: Sequence[tuple[Tensor, Group]], left_out: Container[int]) -> None:
        """members: parameters with their groups, in the order of the directions.

        left_out: numbers of members that are not for this object.
        """
        self._runs: list[Run] = []
        at = 0
        for number, (param, group) in enumerate(members):
            local, matrix = local_of(param), shape_of(group, param)
            end = at + local.numel()
            last = self._runs[-1] if self._runs and self._runs[-1].end == at else None
            if number in left_out or end == at:
                pass
            elif not local.is_contiguous():
                shape, stride = tuple(local.shape), local.stride()
                self._runs.append(Run(at, end, matrix, group, shape, stride))
            elif last and not last.stride and last.group is group and last.matrix == matrix:
                self._runs[-1] = last._replace(end=end)
            else:
                self._runs.append(Run(at, end, matrix, group))
            at = end

    def __call__(self, directions: Tensor) -> Tensor:
        """The same tensor, with updates in place of the directions."""
        for run in self._runs:
            own = directions[run.begin : run.end]
            if run.stride:
                own = own.as_strided(run.shape, run.stride)
            stack = own.reshape(-1, *run.matrix)
            group = run.group
            orthogonalise_(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
            if stack.data_ptr() != own.data_ptr():
                own.copy_(stack.view(own.shape))
        return directions
