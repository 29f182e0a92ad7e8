"""The matrices in parameters and in a step's directions, and how they are made orthogonal."""

from collections.abc import Container, Mapping, Sequence
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_mp.optim.rule import Group, Shape
from amp_mp.sharding.shards import local_of

Coefficients = tuple[float, float, float]
# A stack takes three to four times its own bytes while it is worked on, so large ones are cut.
STACK_BYTES = 1 << 28
# On a CPU a product of two large matrices fills the caches, and a stack of them would leave these.
LARGE_ON_CPU = 256


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


def orthogonalise_(stack: Tensor, coefficients: Coefficients, steps: int, eps: float) -> None:
    """Makes each matrix of a stack nearly orthogonal, in place.

    stack: bfloat16 [n, rows, columns]. Singular values become about 1. Queues products on the
    device and waits for nothing. On a CPU the bits do not depend on what else is in the stack.
    """
    rows, columns = stack.shape[1:]
    most = max(1, STACK_BYTES // max(1, 2 * rows * columns))
    if stack.device.type == "cpu" and min(rows, columns) >= LARGE_ON_CPU:
        most = 1
    with torch.autocast(stack.device.type, enabled=False):
        for begin in range(0, stack.shape[0], most):
            _orthogonalise_part_(stack[begin : begin + most], coefficients, steps, eps)


def _orthogonalise_part_(stack: Tensor, coefficients: Coefficients, steps: int, eps: float) -> None:
    a, b, c = coefficients
    is_one = stack.shape[0] == 1
    own = stack[0] if is_one else stack
    product, add_product = (torch.mm, torch.addmm) if is_one else (torch.bmm, torch.baddbmm)
    is_tall = own.shape[-2] > own.shape[-1]
    x = own.mT if is_tall else own
    # no singular value is above 1
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = product(x, x.mT)
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    if steps > 0:
        own.copy_(x.mT if is_tall else x)


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
