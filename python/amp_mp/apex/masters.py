"""Float32 masters: what an FP16_Optimizer asks of them, and those around any torch optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_mp import _C
from amp_mp.apex.gradients import copy_all_, gradients_of, make_gradient, set_aside
from amp_mp.dtypes import LOW_PRECISION, NATIVE
from amp_mp.optim.base import FusedOptimizer
from amp_mp.optim.state.masters import master_of
from amp_mp.optim.state.original_values import take_original
from amp_mp.optim.step.decide import decide, decide_inputs
from amp_mp.scaling.observe import measure, observe


class Masters(ABC):
    """The float32 masters of an optimizer's low-precision parameters, and the gradients.

    A list of lists has one list per param_group. `scale` is the loss scale that the model's
    gradients carry; the true gradients are those divided by it.
    """

    _optimizer: Optimizer

    def refresh(self) -> None:
        """Gives a master to every trainable low-precision parameter that has none.

        Raises TypeError, before anything is changed, for a trainable parameter that is neither
        float16, bfloat16 nor float32.
        """
        for index, params in enumerate(self.groups()):
            for position, param in enumerate(params):
                if param.requires_grad and param.dtype not in NATIVE:
                    raise TypeError(
                        f"parameter {position} of group {index} (shape {tuple(param.shape)}) has "
                        f"dtype {param.dtype}; FP16_Optimizer takes float16, bfloat16 and float32"
                    )

    def groups(self) -> list[list[Tensor]]:
        """The lists of parameters in the optimizer's param_groups, themselves."""
        return [group["params"] for group in self._optimizer.param_groups]

    def params(self) -> list[Tensor]:
        """All parameters in the optimizer's param_groups."""
        return [param for params in self.groups() for param in params]

    @abstractmethod
    def grouped_pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Every low-precision parameter that has a master, with this master."""

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """`grouped_pairs` in a single list."""
        return [pair for pairs in self.grouped_pairs() for pair in pairs]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's low-precision parameters."""
        return [[param for param, _ in pairs] for pairs in self.grouped_pairs()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their masters."""
        return [[master for _, master in pairs] for pairs in self.grouped_pairs()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The model's trainable float32 parameters, which need no masters."""
        kept = [[p for p in ps if self.model_param(p) is p] for ps in self.groups()]
        return [[p for p in ps if p.requires_grad and p.dtype == torch.float32] for ps in kept]

    def model_param(self, param: Tensor) -> Tensor:
        """The model's parameter that stands behind one in the param_groups."""
        return param

    def scaled_params(self) -> list[Tensor]:
        """The model's parameters whose gradients only FP16_Optimizer.backward makes useful."""
        model = [self.model_param(param) for param in self.params()]
        return [p for p in model if p.requires_grad and p.dtype in LOW_PRECISION]

    def label(self, param: Tensor) -> str:
        """A model parameter's place, and its name if it has one, for messages."""
        for number, group in enumerate(self._optimizer.param_groups):
            for position, own in enumerate(group["params"]):
                if self.model_param(own) is param:
                    names = group.get("param_names")
                    name = f" ({names[position]!r})" if names else ""
                    return f"parameter {position} of group {number}{name}"
        return "a parameter"

    def backward(self, scale: float, collects: bool) -> AbstractContextManager[None]:
        """A block for the backward pass, and for `collect` if it follows at once (`collects`)."""
        return nullcontext()

    @abstractmethod
    def collect(self, scale: float, checks: bool) -> tuple[bool, float]:
        """Takes over the model's gradients; with `checks` returns found_inf and the largest |g|."""

    @abstractmethod
    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clips the true gradients by their global norm and returns the norm."""

    def gradients(self) -> list[list[Tensor | None]]:
        """The true gradients."""
        return [[None if p.grad is None else p.grad.detach() for p in ps] for ps in self.groups()]

    def zero_grad(self, drop: bool) -> None:
        """Sets the gradients of masters and parameters to 0, or to None with `drop`."""
        for param in self.params():
            for each in {param, self.model_param(param)}:
                if each.grad is not None:
                    each.grad = None if drop else each.grad.detach().zero_()

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """The wrapped optimizer's step."""
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    @abstractmethod
    def to_model(self) -> None:
        """Rounds the masters into the model's parameters."""

    def snapshot(self, optimizer: dict[str, Any]) -> list[list[Tensor]]:
        """Copies of the masters; optimizer: a snapshot of the wrapped optimizer's state dict."""
        return [[m.detach().clone() for m in masters] for masters in self.fp32_from_fp16_groups]

    def check(self, saved: list[list[Tensor]]) -> None:
        """Raises ValueError if a snapshot of the masters has other groups or shapes."""
        shapes = [[tuple(m.shape) for m in group] for group in saved]
        own = [[tuple(m.shape) for m in group] for group in self.fp32_from_fp16_groups]
        if shapes != own:
            raise ValueError(
                f"state_dict: fp32_from_fp16 has masters of shapes {shapes}, "
                f"this optimizer has {own}; nothing was loaded"
            )

    @torch.no_grad()
    def load(self, saved: list[list[Tensor]]) -> None:
        """Copies a checked snapshot into the masters."""
        for masters, values in zip(self.fp32_from_fp16_groups, saved, strict=True):
            for master, value in zip(masters, values, strict=True):
                master.copy_(value)


class SwappedMasters(Masters):
    """Replaces an optimizer's low-precision parameters by float32 masters and keeps both."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._low: dict[Tensor, Tensor] = {}  # each master's parameter
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
        master = nn.Parameter(take_original(param) if own is None else own)
        if state is not None:
            kept = {k: v for k, v in state.items() if k not in ("master", "remainder")}
            self._optimizer.state[master] = {
                k: v.float() if isinstance(v, Tensor) and v.dtype in LOW_PRECISION else v
                for k, v in kept.items()
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
