"""The reader of gradients: those on this process, of DTensors and plain tensors, and statistics."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.sharding.reduction import Reduction
from amp_mp.sharding.shards import is_dtensor, local_of


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """The tensors' indices, device by device: a native pass takes the tensors of one device."""
    indices: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(i)
    return indices


def measure(tensors: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """The totals of plain tensors, one native read per device.

    float64 [3] per device: sum of squares, largest finite |x|, number of inf and NaN.
    """
    indices = by_device(tensors)
    return {d: _C.measure([tensors[i] for i in own])[-1] for d, own in indices.items()}


def overflow_in(totals: Mapping[torch.device, Tensor], scale: float) -> tuple[bool, float]:
    """Whether totals count an inf or NaN, and their largest |x| / scale; waits for the device."""
    refuse_capture(totals)
    overflow = any(bool(total[2] > 0) for total in totals.values())
    return overflow, max((float(total[1]) for total in totals.values()), default=0.0) / scale


def refuse_capture(devices: Iterable[torch.device]) -> None:
    """Raises RuntimeError where a CUDA graph captures what waits for the gradients' overflow."""
    if "cuda" in {d.type for d in devices} and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "this step asks on the host whether gradients overflow, which a CUDA graph cannot "
            "capture. Capture amp.GradScaler around an optimizer of amp_mp, or torch's with "
            "fused=True and capturable=True"
        )


def local_gradient(param: Any, label: str) -> Tensor | None:
    """A parameter's gradient on this process, placed as the parameter is; a plain one's gradient.

    A gradient that is a sum still to be made, as of a normalisation layer under sequence
    parallelism, is redistributed first, which every process of the mesh has to do. TypeError where
    the gradient of a DTensor is a plain tensor; label: the parameter's.
    """
    return None if param.grad is None else local_of(_placed(param, label))


def writable_gradient(param: Any, label: str | None = None) -> Tensor | None:
    """As local_gradient, but what is written into it is written into `.grad`.

    A gradient that is placed otherwise than its parameter is replaced.
    """
    if param.grad is None or not is_dtensor(param):
        grad: Tensor | None = param.grad
        return grad
    placed = _placed(param, label)
    if placed is not param.grad:
        param.grad = placed
    return local_of(placed)


def _placed(param: Any, label: str | None) -> Any:
    grad = param.grad
    if not is_dtensor(param):
        return grad
    if not is_dtensor(grad):
        label = label or f"a parameter of shape {tuple(param.shape)}"
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
        self.is_needed = self._reduction.is_needed

    def is_of(self, groups: list[dict[str, Any]]) -> bool:
        """Whether these param_groups hold the same parameters still."""
        return _C.same_items([group["params"] for group in groups], self._params)

    def totals(self, grads: Sequence[Tensor | None]) -> dict[torch.device, Tensor]:
        """As `measure`, of all processes; where several have a part, on one device."""
        if not self.is_needed:
            return measure([grad for grad in grads if grad is not None])
        total = self.total(grads)
        return {total.device: total}

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


def statistics_of(
    known: GradientStatistics | None,
    groups: list[dict[str, Any]],
    process_groups: Sequence[Any] = (),
) -> GradientStatistics:
    """The statistics of an optimizer's gradients; `known`, if it is of the same parameters."""
    if known is not None and known.is_of(groups):
        return known
    return GradientStatistics([p for group in groups for p in group["params"]], process_groups)
