"""The native library's signatures. What each does, and its errors: csrc/torch/ops.h."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Tensors = Sequence[Tensor | None]

VERDICT_SIZE: int

def build_info() -> dict[str, Any]:
    """What this library was built for: torch, CUDA, instruction set in use, compiler."""

class Hyper:
    """The numbers of one param_group, all double."""

    def __init__(
        self,
        *,
        lr: float,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        lr_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None: ...

def format_names() -> list[str]:
    """How states may be stored."""

class Slots:
    """The tensors an optimizer updates on one device, checked once."""

    def __init__(
        self,
        *,
        params: Sequence[Tensor],
        masters: Tensors,
        states: Sequence[Sequence[Tensor]],
        formats: Sequence[str],
        clocks: Sequence[Tensor],
        groups: Sequence[int],
        names: Sequence[str],
    ) -> None: ...
    def __len__(self) -> int: ...
    def measure(self) -> Tensor:
        """`measure` of the parameters' gradients, absent ones counting as empty."""

def measure(tensors: Tensors) -> Tensor:
    """float64 [n + 1, 3]: sum of squares, largest finite |x|, non-finite count; last: total."""

def decide_(
    verdict: Tensor,
    *,
    statistics: Tensor | None = None,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_norm: float = 0.0,
) -> None:
    """Fills verdict, float64 [5]: found_inf, multiplier, norm, max_abs, scale."""

def copy_(
    to: Sequence[Tensor],
    from_: Sequence[Tensor],
    *,
    verdict: Tensor | None = None,
    multiplier: float = 1.0,
    saturate: bool = False,
) -> None:
    """to[i] = from_[i] * multiplier; nothing where the verdict says overflow."""

def update_scale_(policy: Tensor, found_inf: Tensor, max_abs: Tensor | None = None) -> None:
    """Advances a loss-scale policy's float64 state; found_inf float32 [1], max_abs float64 [1]."""

def holds(dicts: Sequence[dict[str, Any]], keys: Sequence[str], values: Sequence[Tensors]) -> bool:
    """Whether dicts[i][keys[k]] is values[k][i] for all i and k; None means absent."""

def same_items(lists: Sequence[Sequence[Tensor]], items: Sequence[Tensor]) -> bool:
    """Whether the lists, one after the other, hold exactly these objects."""

def adamw_(slots: Slots, hypers: Sequence[Hyper], verdict: Tensor) -> None: ...
def adam_(slots: Slots, hypers: Sequence[Hyper], verdict: Tensor) -> None: ...
def sgd_(slots: Slots, hypers: Sequence[Hyper], verdict: Tensor) -> None: ...
def scaled_sgd_(slots: Slots, hypers: Sequence[Hyper], verdict: Tensor) -> None: ...
def plain_sgd_(slots: Slots, hypers: Sequence[Hyper], verdict: Tensor) -> None: ...
def adagrad_(slots: Slots, hypers: Sequence[Hyper], verdict: Tensor) -> None: ...
def rmsprop_(slots: Slots, hypers: Sequence[Hyper], verdict: Tensor) -> None: ...
def plain_rmsprop_(slots: Slots, hypers: Sequence[Hyper], verdict: Tensor) -> None: ...
def lion_(slots: Slots, hypers: Sequence[Hyper], verdict: Tensor) -> None: ...

class casting:  # noqa: N801 (a submodule)
    """The op-policy table: csrc/torch/autocast.h and cast_cache.h."""

    @staticmethod
    def policy_names() -> list[str]: ...
    @staticmethod
    def set_policy(device: str, op: str, policy: str) -> str: ...
    @staticmethod
    def policies(device: str) -> dict[str, str]: ...
    @staticmethod
    def uninstall() -> None: ...
    @staticmethod
    def clear_cache() -> None: ...
    @staticmethod
    def optimizer_stepped() -> None: ...
    @staticmethod
    def cached() -> dict[Tensor, Tensor]: ...
    @staticmethod
    def set_trace(mode: int) -> None: ...
    @staticmethod
    def take_log() -> list[tuple[str, str, str, str, bool]]: ...
