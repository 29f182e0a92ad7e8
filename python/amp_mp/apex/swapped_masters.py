"""Float32 masters that replace the low-precision parameters of any torch optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.apex.gradients import copy_all_, gradients_of, make_gradient, set_aside
from amp_mp.apex.masters import Masters
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.state.masters import master_of, take_original
from amp_mp.optim.step.decide import decide, decide_inputs
from amp_mp.scaling.observe import measure, observe


class SwappedMasters(Masters):
    """Replaces an optimizer's low-precision parameters by float32 masters and keeps both."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._low: dict[Tensor, Tensor] = {}  # each master's parameter
        self._pending = False  # whether gradients of float32 parameters still carry the scale
        self.refresh()

    def refresh(self) -> None:
        """As Masters.refresh; the optimizer's state of a parameter moves to its master.

        At first these are all; later the parameters that were unfrozen or added.
        """
        super().refresh()
        for params in self.groups():
            for i, param in enumerate(params):
                if param.requires_grad and param.dtype in LOW_PRECISION:
                    params[i] = self._adopt(param)

    def _adopt(self, param: Tensor) -> Tensor:
        """A new master for the parameter, with its state."""
        state = self._optimizer.state.pop(param, None)
        fused = isinstance(self._optimizer, FusedOptimizer)
        own = master_of(param, state) if state and fused else None  # amp_mp's has one already
        master = nn.Parameter(take_original(param) if own is None else own)
        if state is not None:
            self._optimizer.state[master] = {
                name: _widened(value)
                for name, value in state.items()
                if name not in ("master", "remainder")
            }
        self._low[master] = param
        return master

    def grouped_pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """As in Masters."""
        low = self._low
        return [[(low[p], p) for p in params if p in low] for params in self.groups()]

    def model_param(self, param: Tensor) -> Tensor:
        """The parameter of a master; another parameter itself."""
        return self._low.get(param, param)

    def _float32_params(self) -> list[Tensor]:
        return [param for params in self.fp32_from_fp32_groups for param in params]

    @contextmanager
    def backward(self, scale: float, collects: bool) -> Iterator[None]:
        """As in Masters.

        float32 parameters are their own masters: gradients that earlier calls unscaled are set
        aside, so that each is divided by the scale exactly once. Where collecting is put off, they
        are scaled again, to be unscaled with the new ones.
        """
        self.refresh()
        own = [] if self._pending else self._float32_params()
        if not collects:
            grads = gradients_of(own)
            copy_all_(zip(grads, grads, strict=True), multiplier=scale)
            self._pending, own = True, []
        before = self._pending
        with set_aside(own):
            self._pending = True
            try:
                yield
            except BaseException:
                self._pending = before
                raise

    @torch.no_grad()
    def collect(self, scale: float, checks: bool) -> tuple[bool, float]:
        """Copies the model's gradients to the masters, divided by the scale.

        After an overflow that `checks` found, nothing is copied.
        """
        pairs, own = self.pairs(), gradients_of(self._float32_params())
        sources = gradients_of(p for p, _ in pairs) + own
        overflow, max_abs = observe(measure(sources), scale) if checks else (False, 0.0)
        if not overflow:
            for param, master in pairs:
                make_gradient(param, master)
            targets = gradients_of(m for _, m in pairs) + own
            copy_all_(zip(targets, sources, strict=True), multiplier=1.0 / scale)
            self._pending = False
        return overflow, max_abs

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float) -> float:
        """As in Masters; the 2-norm on one device takes two native passes."""
        masters = self.params()
        grads = gradients_of(masters)
        if norm_type != 2 or len({g.device for g in grads}) != 1:
            return float(nn.utils.clip_grad_norm_(masters, max_norm, norm_type))
        device = grads[0].device
        verdict = decide(device, [_C.measure(grads)], decide_inputs(device, max_norm=max_norm))
        _C.copy_(grads, grads, verdict=verdict)
        return float(verdict[2])

    def zero_grad(self, drop: bool) -> None:
        """As in Masters; nothing carries the scale any more."""
        super().zero_grad(drop)
        self._pending = False

    @torch.no_grad()
    def to_model(self) -> None:
        """Rounds the masters into the model's parameters; float16 saturates at +-65504."""
        copy_all_(self.pairs(), saturate=True)


def _widened(value: Any) -> Any:
    """A state of a low-precision parameter in float32, for its master."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value
