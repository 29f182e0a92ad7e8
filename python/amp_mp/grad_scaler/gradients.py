"""What a GradScaler asks about the gradients of an optimizer, and adds up over devices."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_mp import _C
from amp_mp.dtypes import NATIVE
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.step.decide import decide, decide_inputs
from amp_mp.optim.step.gather import param_infos
from amp_mp.scaling.observe import by_device, measure
from amp_mp.sharding.gradients import GradientStatistics, local_gradient
from amp_mp.sharding.shards import local_of

LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def check_gradients(optimizer: FusedOptimizer) -> None:
    """Raises AssertionError, in torch's words, where no backward was called before the step."""
    grads = (p.grad for group in optimizer.param_groups for p in group["params"])
    if any(grad is not None for grad in grads):
        return
    optimizer.refuse_replaced()
    if optimizer.attachment is None or not optimizer.attachment.has_released():
        raise AssertionError(
            "No inf checks were recorded for this optimizer: none of its parameters has a "
            "gradient. Call scaler.scale(loss).backward() before scaler.step(optimizer)"
        )


def combined(
    states: list[dict[str, Any]], key: str, device: torch.device, combine: Callable[..., Tensor]
) -> Tensor | None:
    """The optimizers' numbers of all devices as one on this device; None if there are none."""
    found = [x for state in states for x in state.get(key, {}).values()]
    _C.used_on_current_stream(found)
    numbers = [x.to(device) for x in found]
    if len(numbers) > 1:
        return combine(torch.stack(numbers))
    return numbers[0] if numbers else None


def keep_found(state: dict[str, Any]) -> None:
    """Keeps what unscale_ has found, maybe on another stream, until the current one has used it."""
    _C.used_on_current_stream(list(state["found_inf_per_device"].values()))


def native_gradients(optimizer: Optimizer) -> list[Tensor | None] | None:
    """Of every parameter the gradient on this process, or None where it has none.

    None in place of the list if torch must handle a gradient (sparse, float64).
    """
    found: list[Tensor | None] = []
    for param, info in param_infos(optimizer.param_groups):
        grad = local_gradient(param, info.label)
        if grad is not None and not _is_native(grad):
            return None
        found.append(grad)
    return found


def _is_native(grad: Tensor) -> bool:
    return (
        type(grad) is Tensor
        and grad.dtype in NATIVE
        and grad.layout == torch.strided
        and any(grad.is_contiguous(memory_format=layout) for layout in LAYOUTS)
    )


def present_gradients(optimizer: Optimizer) -> list[Tensor]:
    """The memory of the gradients on this process."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [local_of(param.grad) for param in params if param.grad is not None]


def unscale(grads: list[Tensor], scale: Tensor) -> None:
    """Divides the gradients by the scale in place, one native pass per device."""
    for device, indices in by_device(grads).items():
        own = [grads[i] for i in indices]
        verdict = decide(device, None, decide_inputs(device, scale=scale))
        _C.copy_(own, own, verdict=verdict)


class WholeGradients:
    """Statistics of optimizers' gradients, over all processes that hold a part of them."""

    def __init__(self, process_groups: tuple[Any, ...]) -> None:
        self._process_groups = process_groups
        self._known: WeakKeyDictionary[Optimizer, GradientStatistics] = WeakKeyDictionary()

    def totals(
        self, optimizer: Optimizer, grads: list[Tensor | None]
    ) -> dict[torch.device, Tensor]:
        """float64 [3] a device, as scaling.measure; where other processes take part, on one device.

        grads: what native_gradients has returned.
        """
        known = self._known.get(optimizer)
        if known is None or not known.is_of(optimizer.param_groups):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            known = self._known[optimizer] = GradientStatistics(params, self._process_groups)
        if not known.is_needed:
            return measure([grad for grad in grads if grad is not None])
        total = known.total(grads)
        return {total.device: total}
