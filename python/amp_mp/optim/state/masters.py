"""Float32 masters of low-precision parameters."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from amp_mp import _C
from amp_mp.optim.state.schema import MASTER, MASTER_ROWS
from amp_mp.sharding.shards import local_of

_MASTERS = _C.Masters(MASTER_ROWS)


def set_master(
    format: str, param: Tensor, state: dict[str, Any], values: Tensor | None = None
) -> None:
    """Gives a low-precision parameter a master of the format, holding `values` if there are any.

    Without values an existing master is kept, or converted if it has another format; "none" drops
    it. The parameter becomes the rounded values; a split rounds a value half way between two
    weights away from zero.
    values: beside a DTensor a DTensor placed as it is, or the part on this process.
    """
    _MASTERS.set(format, param, state, values)


def master_of(param: Tensor, state: dict[str, Any]) -> Tensor | None:
    """A low-precision parameter's master, a new float32 tensor of its shape and layout, or None.

    Where the parameter was written since the last step, the master is what was written. Beside a
    DTensor it is one, placed as the parameter is.
    """
    return _MASTERS.of(param, state)


def beside(param: Tensor, state: Mapping[str, Any]) -> Tensor | None:
    """What makes a low-precision parameter a master: a float32 one, remainders or None.

    Of a DTensor what is on this process, a plain tensor.
    """
    names = [entry.name for (_, weight), entry in MASTER.items() if weight == param.dtype]
    return next((local_of(state[name]) for name in names if state.get(name) is not None), None)
