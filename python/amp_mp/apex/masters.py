"""What an FP16_Optimizer needs of its masters, and the checks that both kinds share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from amp_mp.dtypes import NATIVE


class Masters(Protocol):
    """The masters and gradients of an FP16_Optimizer; the lists have one list per param_group."""

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's low-precision parameters."""

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their masters."""

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The model's float32 parameters, which need no masters."""

    def refresh(self) -> None:
        """Gives a master to every trainable low-precision parameter that has none."""

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every low-precision parameter with its master."""

    def model_param(self, param: Tensor) -> Tensor:
        """The model's parameter of one in the param_groups."""

    def backward(self, scale: float, collects: bool) -> AbstractContextManager[None]:
        """Surrounds backward on a loss times `scale`, and `collect` if it follows at once."""

    def collect(self, scale: float, checks: bool) -> tuple[bool, float]:
        """Takes the model's gradients over; with `checks` returns overflow and largest true |g|."""

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clips the true gradients by their global norm and returns the norm."""

    def gradients(self) -> list[list[Tensor | None]]:
        """The true gradients."""

    def drop_gradients(self) -> None:
        """Called when the gradients are zeroed."""

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """The wrapped optimizer's step."""

    def closure_done(self) -> None:
        """Called inside a step when its closure has made the gradients."""

    def to_model(self) -> None:
        """Rounds the masters into the model's parameters."""

    def snapshot(self, optimizer: dict[str, Any]) -> list[list[Tensor]]:
        """Copies of the masters; optimizer: a snapshot of the wrapped optimizer's state dict."""

    def check(self, saved: list[list[Tensor]]) -> None:
        """Raises ValueError if a snapshot of the masters has other groups or shapes."""

    def load(self, saved: list[list[Tensor]]) -> None:
        """Copies a checked snapshot into the masters."""


def check_masters(saved: list[list[Tensor]], masters: list[list[Tensor]]) -> None:
    """Raises ValueError if saved masters have other groups or shapes than the present ones."""
    shapes = [[tuple(m.shape) for m in group] for group in saved]
    own = [[tuple(m.shape) for m in group] for group in masters]
    if shapes != own:
        raise ValueError(
            f"state_dict: fp32_from_fp16 has masters of shapes {shapes}, "
            f"this optimizer has {own}; nothing was loaded"
        )


def check_dtypes(index: int, params: list[Tensor]) -> None:
    """Raises TypeError for a trainable parameter of a dtype that cannot have a master."""
    for position, param in enumerate(params):
        if param.requires_grad and param.dtype not in NATIVE:
            raise TypeError(
                f"parameter {position} of group {index} (shape {tuple(param.shape)}) has dtype "
                f"{param.dtype}; FP16_Optimizer takes float16, bfloat16 and float32"
            )
