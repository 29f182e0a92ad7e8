"""How masters and states are stored: names, presets, and what each array of a format is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C

MASTERS = ("float32", "split32", "split24", "none")
MOMENTS = ("float32", "bfloat16", "float16", "m8")
SQUARES = ("float32", "bfloat16", "float16", "float16_root", "ue8m8")
ROUNDINGS = ("nearest", "stochastic")
# What `memory=` stands for: a master, first moments, sums of squares.
PRESETS = {
    "exact": ("split32", "float32", "float32"),
    "lean": ("split24", "bfloat16", "ue8m8"),
    "tiny": ("split24", "m8", "ue8m8"),
}
SQUARE_NAMES = ("exp_avg_sq", "square_avg", "sum")
PLAIN_NAMES = ("max_exp_avg_sq", "grad_avg")  # a maximum and a difference bear no rounding noise
GROUP = 32  # elements that share a scale in m8

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float16_root": torch.float16,
    "ue8m8": torch.int16,
    "m8": torch.int8,
}
_REST_DTYPES = {"split32": torch.int16, "split24": torch.int8}
REST_FORMATS = {dtype: name for name, dtype in _REST_DTYPES.items()}


def known_formats(name: str) -> tuple[str, ...]:
    """The formats a state of that name may have."""
    if name in PLAIN_NAMES:
        return ("float32",)
    return SQUARES if name in SQUARE_NAMES else MOMENTS


def resolve(memory: str | None, chosen: Mapping[str, str | None]) -> dict[str, str]:
    """The format of the master and of each state: as chosen, else the preset's, else float32.

    Raises ValueError naming the argument.
    """
    if memory is not None and memory not in PRESETS:
        raise ValueError(f"memory must be one of {', '.join(PRESETS)}; found {memory!r}")
    master, moment, square = PRESETS[memory or "exact"]
    formats = {}
    for name, format in chosen.items():
        known = MASTERS if name == "master" else known_formats(name)
        if format is None:
            preset = master if name == "master" else square if name in SQUARE_NAMES else moment
            format = preset if memory and preset in known else "float32"
        if format not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; found {format!r}")
        formats[name] = format
    return formats


def has_groups(param: Tensor) -> bool:
    """Whether m8's groups of 32 fit a parameter's rows, the rows as they lie in memory.

    A group may not reach from one row into the next, whose gradients are of another size. One
    dimension alone (biases, norms) has no rows: its neighbours have nothing in common.
    """
    strides = [s for n, s in zip(param.shape, param.stride(), strict=True) if n > 1]
    return len(strides) > 1 and param.numel() > 0 and max(strides) % GROUP == 0


def format_of(declared: str, param: Tensor) -> str:
    """What a state declared so is stored as for this parameter."""
    return "bfloat16" if declared == "m8" and not has_groups(param) else declared


def native_name(format: str) -> str:
    """The kernels' name: bfloat16 states are always rounded stochastically."""
    return "bfloat16_stochastic" if format == "bfloat16" else format


def split_name(format: str, dtype: torch.dtype) -> str:
    """The kernels' name of a split beside weights of a dtype."""
    return f"{str(dtype).removeprefix('torch.')}_{format}"


def new_state(format: str, param: Tensor) -> tuple[Tensor, Tensor | None]:
    """A zero state in the format, shaped like the parameter, and its scales if it has them."""
    data = torch.zeros_like(param, dtype=_DTYPES[format], memory_format=torch.preserve_format)
    if format != "m8":
        return data, None
    return data, torch.zeros(param.numel() // GROUP, dtype=torch.bfloat16, device=param.device)


def new_rest(format: str, param: Tensor) -> Tensor:
    """Zero remainders of a split master."""
    dtype = _REST_DTYPES[format]
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def put(values: Tensor, data: Tensor, rest: Tensor | None, native: str, **random: int) -> None:
    """Stores float32 values of data's layout in arrays of a format."""
    like = torch.empty_like(data, dtype=torch.float32, memory_format=torch.preserve_format)
    like.copy_(values)
    if native == "ue8m8":
        like += 0.0  # -0.0 would be a negative number, a NaN there
    second = None if rest is None else flat(rest)
    _C.encode_(flat(like), flat(data), second, native, **random)


def get(data: Tensor, rest: Tensor | None, native: str) -> Tensor:
    """The float32 values, in data's layout."""
    values = torch.empty_like(data, dtype=torch.float32, memory_format=torch.preserve_format)
    second = None if rest is None else flat(rest)
    flat(values).copy_(_C.decode(flat(data), second, native))
    return values


def check_low_precision(master: str, params: Iterable[Any]) -> None:
    """Raises ValueError where a split master was asked for and no parameter can have one."""
    tensors = [p for p in params if isinstance(p, Tensor)]
    if master.startswith("split") and tensors and all(p.dtype == torch.float32 for p in tensors):
        raise ValueError(
            f"master={master!r} splits a float32 master into a low-precision weight and a "
            "remainder, but all parameters are float32; make the model low precision first with "
            "amp_mp.prepare(model, torch.bfloat16)"
        )
