"""Float32 masters of low-precision parameters, and what a parameter's first one is made of."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.state.schema import MASTER_ROWS

_masters = _C.Masters(MASTER_ROWS)  # whose signatures say what these do
set_master, master_of, beside = _masters.set, _masters.of, _masters.beside


@dataclass
class FirstValues:
    """What amp_mp.model keeps of prepared parameters.

    This package does not import that one, which puts its two functions here when it is imported.
    take: a parameter's float32 values, of a DTensor this process's part; None: its own are all.
    tensors_of: what is kept for it until then.
    """

    take: Callable[[Tensor], Tensor | None]
    tensors_of: Callable[[Tensor], tuple[Tensor, ...]]


first_values = FirstValues(take=lambda param: None, tensors_of=lambda param: ())
