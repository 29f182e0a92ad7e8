"""The masters of an FP16_Optimizer around any torch optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.apex.gradients import (
    clip_gradients,
    copy_all_,
    gradients_of,
    make_gradient,
    measure_gradients,
    set_aside,
)
from amp_mp.apex.masters import Masters
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.state.formats import MASTER_ENTRIES
from amp_mp.optim.state.masters import master_of
from amp_mp.optim.state.original_values import take_original
from amp_mp.optim.step.decide import decide, decide_inputs
from amp_mp.optim.step.replaced import ReplacedCheck
from amp_mp.scaling.observe import observe
from amp_mp.sharding.shards import like, local_of


class SwappedMasters(Masters):
    """Replaces an optimizer's low-precision parameters by float32 masters and keeps both."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._low: dict[Tensor, Tensor] = {}  # each master's parameter
        self._rounded: dict[Tensor, int] = {}  # version of each master when it was rounded last
        self._replaced = ReplacedCheck()
        self._pending = False  # whether gradients of float32 parameters still carry the scale
        self.refresh()

    def refresh(self) -> None:
        """As in Masters; the optimizer's state of a parameter moves to its master."""
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
        master = nn.Parameter(like(local_of(take_original(param) if own is None else own), param))
        if state is not None:
            kept = {k: v for k, v in state.items() if k not in MASTER_ENTRIES}
            if not fused:  # amp_mp's says in which format each is stored
                kept = {
                    k: v.float() if isinstance(v, Tensor) and v.dtype in LOW_PRECISION else v
                    for k, v in kept.items()
                }
            self._optimizer.state[master] = kept
        self._low[master] = param
        self._rounded[master] = master._version
        return master

    def grouped_pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """As in Masters."""
        low = self._low
        return [[(low[p], p) for p in params if p in low] for params in self.groups()]

    def model_param(self, param: Tensor) -> Tensor:
        """The parameter of a master; another parameter itself."""
        return self._low.get(param, param)

    @torch.no_grad()
    def _follow(self) -> None:
        """Remakes masters from parameters that were written: where a master does not round to one.

        A master that was written itself, by loading or by hand, stays: it is rounded into the
        parameter after the step.
        """
        kept = [(p, m) for p, m in self.pairs() if self._rounded.get(m) == m._version]
        for device in {m.device for _, m in kept}:
            pairs = [(local_of(p), local_of(m)) for p, m in kept if m.device == device]
            params, masters = [p for p, _ in pairs], [m for _, m in pairs]
            _C.average_(masters, [None] * len(pairs), params, masters, 0.0)
        self._rounded |= {m: m._version for _, m in kept}

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """As in Masters, from what is in the parameters."""
        self._follow()
        return super().step(closure)

    def _float32_params(self) -> list[Tensor]:
        return [param for params in self.fp32_from_fp32_groups for param in params]

    @contextmanager
    def backward(self, scale: float, collects: bool) -> Iterator[None]:
        """As in Masters, with float32 parameters' gradients divided by the scale exactly once.

        Those that earlier calls unscaled are set aside; where collecting is put off, they are
        scaled again, to be unscaled with the new ones.
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
        """Copies the gradients to the masters, divided by the scale; on overflow copies nothing."""
        pairs, own = self.pairs(), gradients_of(self._float32_params())
        sources = gradients_of(p for p, _ in pairs) + own
        if not sources:
            self._replaced.check([{"params": list(map(self.model_param, self.params()))}])
        overflow, max_abs = False, 0.0
        if checks:
            params = [*(p for p, _ in pairs), *self._float32_params()]
            overflow, max_abs = observe(measure_gradients(params), scale)
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
            return clip_gradients(masters, max_norm, norm_type)
        device = grads[0].device
        total = measure_gradients(masters)[device]
        verdict = decide(device, [total[None]], decide_inputs(device, max_norm=max_norm))
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
        self._rounded = {m: m._version for _, m in self.pairs()}
