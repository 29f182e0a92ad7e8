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
        lr: float = 0.0,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        lr_decay: float = 0.0,
        trust: float = 0.0,
        seed: int = 0,
        nesterov: bool = False,
        maximize: bool = False,
        clip: bool = False,
        always_adapt: bool = False,
    ) -> None:
        """TypeError for another name."""

def format_names() -> list[str]:
    """How numbers may be stored: csrc/core/formats.h."""

class Slots:
    """The tensors an optimizer updates on one device, checked once."""

    def __init__(
        self,
        *,
        params: Sequence[Tensor],
        masters: Tensors,
        states: Sequence[Sequence[Tensor]],
        scales: Tensors,
        formats: Sequence[Sequence[str]],
        stochastic: Sequence[bool],
        clocks: Sequence[Tensor],
        groups: Sequence[int],
        numbers: Sequence[int],
        firsts: Sequence[int],
        names: Sequence[str],
    ) -> None: ...
    def __len__(self) -> int: ...
    def measure(self) -> Tensor:
        """`measure` of the parameters' gradients, absent ones counting as empty."""

def measure(tensors: Tensors) -> Tensor:
    """float64 [n + 1, 3]: sum of squares, largest finite |x|, non-finite count; last: total."""

def combine(rows: Tensor) -> Tensor:
    """`measure`'s result, float64 [n + 1, 3], for tensors whose rows [n, 3] are known."""

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

def encode_(
    x: Tensor,
    data: Tensor,
    rest: Tensor | None,
    format: str,
    *,
    seed: int = 0,
    step: int = 0,
    number: int = 0,
) -> None:
    """Stores x, float32, in a format's one or two arrays; all contiguous."""

def decode(data: Tensor, rest: Tensor | None, format: str) -> Tensor:
    """float32, shaped like data."""

class Gemm:
    """cublasGemmEx of a cuBLAS that is loaded already, such as "libcublas.so.13"."""

    def __init__(self, library: str) -> None:
        """RuntimeError where no such library is loaded, or it has no such function."""

def accumulate_weight_grad_(
    grad_weight: Tensor,
    grad_output: Tensor,
    input: Tensor,
    gemm: Gemm | None = None,
    handle: int = 0,
) -> None:
    """grad_weight [out, in] += grad_output [..., out]^T input [..., in], summed in float32."""

def accumulates(leaf: Tensor) -> bool | None:
    """In a backward: whether the gradient is added to .grad, or returned; None: not asked for."""

# statistics: slots.measure(), for the rules that look at norms: lars_, lamb_, novograd_.
def adamw_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def amsgrad_adamw_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def adam_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def amsgrad_adam_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def sgd_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def scaled_sgd_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def plain_sgd_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def lars_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def adagrad_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def rmsprop_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def plain_rmsprop_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def centered_rmsprop_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def lion_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def lamb_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...
def novograd_(
    slots: Slots, hypers: Sequence[Hyper], verdict: Tensor, statistics: Tensor | None = None
) -> None: ...

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
