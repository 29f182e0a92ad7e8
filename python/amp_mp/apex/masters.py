"""Float32 masters: what an FP16_Optimizer asks of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_mp.dtypes import LOW_PRECISION, NATIVE
from amp_mp.sharding.shards import other_rank


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
        for values in saved:
            for value in values:
                if (rank := other_rank(value)) is not None:
                    raise ValueError(
                        f"state_dict: fp32_from_fp16 has the masters' parts of rank {rank}; load "
                        "on each rank the file that the same rank has saved; nothing was loaded"
                    )
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
