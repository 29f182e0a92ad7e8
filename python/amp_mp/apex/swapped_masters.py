"""Float32 masters that replace the low-precision parameters of any torch optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.apex.gradients import copy_all_, gradients_of, scaled_backward
from amp_mp.apex.masters import check_dtypes, check_masters
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.state.masters import master_of, take_original
from amp_mp.optim.step.decide import decide, decide_inputs
from amp_mp.scaling.observe import measure, observe


class SwappedMasters:
    """Replaces an optimizer's low-precision parameters by float32 masters and keeps both lists.

    Raises TypeError, before anything is changed, for a trainable parameter that is neither float16,
    bfloat16 nor float32.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._low: dict[Tensor, Tensor] = {}  # each master's parameter
        self.fp16_groups: list[list[Tensor]] = []  # the model's low-precision parameters
        self.fp32_from_fp16_groups: list[list[Tensor]] = []  # their masters
        self.fp32_from_fp32_groups: list[list[Tensor]] = []  # the model's float32 parameters
        self._pending = False  # whether gradients of float32 parameters still carry the scale
        self.refresh()

    def refresh(self) -> None:
        """Gives a master, and the parameter's state, to every low-precision parameter without one.

        At first these are all; later the parameters that were unfrozen or added.
        """
        groups = [group["params"] for group in self._optimizer.param_groups]
        for index, params in enumerate(groups):
            check_dtypes(index, params)
        for params in groups:
            for i, param in enumerate(params):
                if param.requires_grad and param.dtype in LOW_PRECISION:
                    params[i] = self._adopt(param)
        self.fp32_from_fp16_groups = [[p for p in ps if p in self._low] for ps in groups]
        self.fp16_groups = [[self._low[m] for m in ms] for ms in self.fp32_from_fp16_groups]
        self.fp32_from_fp32_groups = [
            [p for p in ps if p.requires_grad and p not in self._low] for ps in groups
        ]

    def _adopt(self, param: Tensor) -> Tensor:
        state = self._optimizer.state.pop(param, None)
        fused = isinstance(self._optimizer, FusedOptimizer)
        own = master_of(param, state) if state and fused else None  # amp_mp's has one already
        master = nn.Parameter(take_original(param) if own is None else own)
        if state is not None:
            for name in ("master", "remainder"):
                state.pop(name, None)
            self._optimizer.state[master] = {k: _widen(v) for k, v in state.items()}
        self._low[master] = param
        return master

    def are_complete(self) -> bool:
        """Whether every parameter of the groups is known and has its master."""
        known = zip(
            self._optimizer.param_groups,
            self.fp32_from_fp16_groups,
            self.fp32_from_fp32_groups,
            strict=False,
        )
        return len(self.fp16_groups) == len(self._optimizer.param_groups) and all(
            sum(p.requires_grad for p in group["params"]) == len(masters) + len(whole)
            for group, masters, whole in known
        )

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every low-precision parameter with its master."""
        groups = zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True)
        return [pair for low, masters in groups for pair in zip(low, masters, strict=True)]

    def float32_params(self) -> list[Tensor]:
        """Every float32 parameter."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    def model_param(self, param: Tensor) -> Tensor:
        """The model's parameter of one in the param_groups."""
        return self._low.get(param, param)

    @contextmanager
    def backward(self, scale: float, collects: bool) -> Iterator[None]:
        """Surrounds backward on a loss times `scale`, and `collect` if it follows at once.

        float32 parameters are their own masters: gradients that earlier calls unscaled are set
        aside, so that each is divided by the scale exactly once. Where collecting is put off, they
        are scaled again, to be unscaled with the new ones.
        """
        if not self.are_complete():
            self.refresh()
        own = [] if self._pending else self.float32_params()
        if not collects:
            grads = gradients_of(own)
            copy_all_(grads, grads, multiplier=scale)
            self._pending, own = True, []
        before = self._pending
        with scaled_backward(own):
            self._pending = True
            try:
                yield
            except BaseException:
                self._pending = before
                raise

    @torch.no_grad()
    def collect(self, scale: float, checks: bool) -> tuple[bool, float]:
        """Copies the model's gradients to the masters, divided by the scale.

        With `checks` returns whether there was an overflow, and then copies nothing, and the
        largest true |g|.
        """
        pairs, own = self.pairs(), gradients_of(self.float32_params())
        sources = gradients_of(p for p, _ in pairs) + own
        if checks:
            found = observe(measure(sources), scale)
            if found[0]:
                return found
        for param, master in pairs:
            _make_gradient(param, master)
        targets = gradients_of(m for _, m in pairs) + own
        copy_all_(targets, sources, multiplier=1.0 / scale)
        self._pending = False
        return found if checks else (False, 0.0)

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clips the masters' gradients by their global norm and returns the norm."""
        masters = [p for group in self._optimizer.param_groups for p in group["params"]]
        grads = gradients_of(masters)
        if norm_type != 2 or len({g.device for g in grads}) != 1:
            return float(nn.utils.clip_grad_norm_(masters, max_norm, norm_type))
        device = grads[0].device
        verdict = decide(device, [_C.measure(grads)], decide_inputs(device, max_norm=max_norm))
        _C.copy_(grads, grads, verdict=verdict)
        return float(verdict[2])

    def gradients(self) -> list[list[Tensor | None]]:
        """The masters' gradients, detached."""
        return [
            [None if p.grad is None else p.grad.detach() for p in group["params"]]
            for group in self._optimizer.param_groups
        ]

    def drop_gradients(self) -> None:
        """Nothing carries the scale any more."""
        self._pending = False

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """The wrapped optimizer's step on the masters."""
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def closure_done(self) -> None:
        """The masters have their gradients already."""

    @torch.no_grad()
    def to_model(self) -> None:
        """Rounds the masters into the model's parameters; float16 saturates at +-65504."""
        pairs = self.pairs()
        copy_all_([low for low, _ in pairs], [master for _, master in pairs], saturate=True)

    def snapshot(self, optimizer: dict[str, Any]) -> list[list[Tensor]]:
        """Copies of the masters."""
        return [
            [master.detach().clone() for master in group] for group in self.fp32_from_fp16_groups
        ]

    def check(self, saved: list[list[Tensor]]) -> None:
        """Raises ValueError if a snapshot of the masters has other groups or shapes."""
        check_masters(saved, self.fp32_from_fp16_groups)

    @torch.no_grad()
    def load(self, saved: list[list[Tensor]]) -> None:
        """Copies a checked snapshot into the masters."""
        for own, group in zip(self.fp32_from_fp16_groups, saved, strict=True):
            for master, value in zip(own, group, strict=True):
                master.copy_(value)


def _widen(value: Any) -> Any:
    """A state of a low-precision parameter in float32, for its master."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value


def _make_gradient(param: Tensor, master: Tensor) -> None:
    """Gives the master a gradient of the parameter's kind, to be filled: dense, sparse or None."""
    grad = param.grad
    if grad is None:
        master.grad = None
    elif grad.is_sparse:
        values = torch.empty_like(grad.values(), dtype=torch.float32)
        master.grad = torch.sparse_coo_tensor(
            grad.indices(), values, grad.shape, is_coalesced=True, check_invariants=False
        )
    elif master.grad is None or master.grad.is_sparse:
        master.grad = torch.empty_like(master, memory_format=torch.preserve_format)
