"""The gradients of DTensors and plain tensors on this process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.sharding.reduction import Reduction
from amp_mp.sharding.shards import is_dtensor, local_of


def local_gradient(param: Any, label: str) -> Tensor | None:
    """A parameter's gradient on this process, placed as the parameter is; a plain one's gradient.

    A gradient that is a sum still to be made, as of a normalisation layer under sequence
    parallelism, is redistributed first, which every process of the mesh has to do. TypeError where
    the gradient of a DTensor is a plain tensor; label: the parameter's.
    """
    return None if param.grad is None else local_of(_placed(param, label))


def place_gradient(param: Any, label: str | None = None) -> None:
    """Replaces a gradient that is placed otherwise than its parameter; as local_gradient."""
    if param.grad is not None and is_dtensor(param):
        placed = _placed(param, label or f"a parameter of shape {tuple(param.shape)}")
        if placed is not param.grad:
            param.grad = placed


def _placed(param: Any, label: str) -> Any:
    grad = param.grad
    if not is_dtensor(param):
        return grad
    if not is_dtensor(grad):
        raise TypeError(
            f"the gradient of {label} is a plain tensor, but the parameter is a DTensor; set "
            ".grad to a DTensor with the parameter's mesh and placements"
        )
    if grad.placements == param.placements:
        return grad
    return grad.redistribute(placements=param.placements)


class GradientStatistics:
    """Statistics of the gradients of these parameters, over all processes that hold a part."""

    def __init__(self, params: Sequence[Tensor], process_groups: Sequence[Any] = ()) -> None:
        self._params = list(params)
        self._device = local_of(params[0]).device if params else torch.device("cpu")
        self._reduction = Reduction(self._params, process_groups, self._device)

    def is_of(self, groups: list[dict[str, Any]]) -> bool:
        """Whether these param_groups hold the same parameters still."""
        return _C.same_items([group["params"] for group in groups], self._params)

    @property
    def is_needed(self) -> bool:
        """Whether other processes hold a part of anything."""
        return self._reduction.is_needed

    def total(self, grads: Sequence[Tensor | None]) -> Tensor:
        """float64 [3]. grads: of each parameter, this process's part, or None."""
        return self._reduction.total(self._measured(grads))

    def total_of(self, rows: Tensor) -> Tensor:
        """float64 [3]. rows: float64 [n, 3], what was measured of each parameter's gradient."""
        return self._reduction.total(rows)

    def of_tensors(self, *lists: Sequence[Tensor | None]) -> Tensor:
        """float64 [n, 3 k], a row for each parameter: what its whole tensor in each list has.

        lists: k of them, of gradients or other tensors of the parameters' shapes; as for total.
        They are measured and gathered together.
        """
        rows = self._measured([each for tensors in lists for each in tensors])
        beside = rows.view(len(lists), -1, 3).transpose(0, 1).flatten(1)
        return self._reduction.of_tensors(beside)

    def _measured(self, grads: Sequence[Tensor | None]) -> Tensor:
        rows = torch.zeros(len(grads), 3, dtype=torch.float64, device=self._device)
        for device in {grad.device for grad in grads if grad is not None}:
            own = [g if g is not None and g.device == device else None for g in grads]
            rows += _C.measure(own)[:-1].to(self._device)
        return rows
