"""Gradients on this process, of DTensors and plain tensors: read, written and set aside."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.sharding.shards import any_dtensor, is_dtensor, local_of, locals_of

# Why a verdict skips a step: an inf or NaN. Another number is a norm above skip_norm_above.
OVERFLOW = 1.0


class Statistics(NamedTuple):
    """A row of statistics by name (csrc/core/reduce.h): float64 [] each, or a number."""

    sum_squares: Any
    max_abs: Any  # the largest finite |x|
    non_finite: Any  # how many are inf or NaN


class Verdict(NamedTuple):
    """A step's verdict by name (csrc/core/decide.h): float64 [] each, on its device."""

    skip: Tensor  # OVERFLOW or another reason to skip the step; or 0
    multiplier: Tensor  # of the gradients
    norm: Tensor  # of the unscaled, unclipped gradients
    max_abs: Tensor  # largest finite unscaled |g|
    scale: Tensor  # that the gradients carried


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """The tensors' indices, device by device: a native pass takes the tensors of one device."""
    indices: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(i)
    return indices


def measure(tensors: Iterable[Tensor | None]) -> dict[torch.device, Tensor]:
    """The totals of plain tensors that are not None, one native read per device.

    float64 [3] per device: sum of squares, largest finite |x|, number of inf and NaN.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    return {d: _C.measure([given[i] for i in own])[-1] for d, own in by_device(given).items()}


def joined(a: Tensor, b: Tensor) -> Tensor:
    """The statistics, float64 [3], of everything that two rows have counted."""
    x, y = Statistics(*a), Statistics(*b)
    largest = torch.maximum(x.max_abs, y.max_abs)
    return torch.stack([x.sum_squares + y.sum_squares, largest, x.non_finite + y.non_finite])


def overflow_in(totals: Mapping[torch.device, Tensor], scale: float) -> tuple[bool, float]:
    """Whether totals count an inf or NaN, and their largest |x| / scale; waits for the device."""
    refuse_capture(totals)
    overflow, largest = False, 0.0
    for total in totals.values():
        found = Statistics(*total.tolist())
        overflow |= found.non_finite > 0
        largest = max(largest, found.max_abs)
    return overflow, largest / scale


def refuse_capture(devices: Iterable[torch.device]) -> None:
    """Raises RuntimeError where a CUDA graph captures what waits for the gradients' overflow."""
    if "cuda" in {d.type for d in devices} and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "this step asks on the host whether gradients overflow, which a CUDA graph cannot "
            "capture. Capture amp.GradScaler around an optimizer of amp_mp, or torch's with "
            "fused=True and capturable=True"
        )


def local_gradient(param: Any, label: str) -> Tensor | None:
    """A parameter's gradient; that of a DTensor is this process's part, placed as the parameter.

    A gradient that processes still have to add up, as a normalisation layer's under sequence
    parallelism, is redistributed first, and every process of the mesh has to take part. TypeError
    where the gradient of a DTensor is a plain tensor; label: what the error calls the parameter.
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


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """As gradient_of_each, without those that are None."""
    return [grad for grad in gradient_of_each(params) if grad is not None]


def gradient_of_each(params: Iterable[Tensor]) -> list[Tensor | None]:
    """The memory of each parameter's gradient, or None.

    A sparse gradient is coalesced in place and gives its values, a DTensor this process's shard.
    """
    found = []
    given = list(params)
    sharded = any_dtensor(given)
    for param in given:
        grad = writable_gradient(param) if sharded else param.grad
        found.append(values_of_sparse(param) if grad is not None and grad.is_sparse else grad)
    return found


def values_of_sparse(param: Tensor) -> Tensor:
    """The values of a parameter's sparse gradient, which is coalesced."""
    assert param.grad is not None
    param.grad = param.grad.coalesce()
    return param.grad.values()


def narrow_zeros(params: Iterable[Tensor]) -> None:
    """Gives low-precision parameters zeros of their dtype in place of float32 ones.

    Scaled losses leave float32 gradients, to which DistributedDataParallel would not add others.
    """
    for param in params:
        if param.grad is not None and param.grad_dtype is None and param.grad.dtype != param.dtype:
            param.grad = torch.zeros_like(param)


def unscale_gradients(
    params: list[Tensor], pairs: list[tuple[Tensor, Tensor]], multiplier: float
) -> None:
    """Multiplies the parameters' gradients in place, and those of `pairs` into float32 ones.

    pairs: parameters with their masters, whose gradients these become; or None. A parameter may be
    its own master: then a float32 gradient replaces its own.
    """
    own = params if multiplier != 1.0 else []
    sources = targets = gradients_of(own + [param for param, _ in pairs])
    for param, master in pairs:
        grad = param.grad
        if grad is None:
            master.grad = None
        elif grad.is_sparse:
            master.grad_dtype = None  # which allows any
            values = torch.empty_like(grad.values(), dtype=torch.float32)
            master.grad = torch.sparse_coo_tensor(
                grad.indices(), values, grad.shape, is_coalesced=True, check_invariants=False
            )
        elif master is param or master.grad is None or master.grad.is_sparse:
            master.grad_dtype = None
            master.grad = torch.empty_like(grad, dtype=torch.float32)
    if pairs:
        targets = gradients_of(own + [master for _, master in pairs])
    _copy_local_(targets, sources, multiplier)
    if pairs:
        _C.used_on_current_stream(sources)  # their memory may be freed now


def copy_all_(
    pairs: Iterable[tuple[Tensor, Tensor]], multiplier: float = 1.0, saturate: bool = False
) -> None:
    """target = source * multiplier for all pairs; saturate clamps float16 to +-65504."""
    if not (given := list(pairs)):
        return
    targets, sources = map(locals_of, zip(*given, strict=True))
    _copy_local_(targets, sources, multiplier, saturate)


def _copy_local_(
    targets: list[Tensor], sources: list[Tensor], multiplier: float, saturate: bool = False
) -> None:
    for own in by_device(targets).values():
        to, values = [targets[i] for i in own], [sources[i] for i in own]
        _C.copy_(to, values, multiplier=multiplier, saturate=saturate)
