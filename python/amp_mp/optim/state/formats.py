"""How masters and states are stored: the formats' names, presets and arrays."""

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
# What a state of each kind (rule.py, State) may be stored as.
KINDS = {"moment": MOMENTS, "square": SQUARES, "exact": ("float32",)}
GROUP = 32  # elements that share a scale in m8

# The dtype of each format's first array.
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float16_root": torch.float16,
    "ue8m8": torch.int16,
    "m8": torch.int8,
}
REST_DTYPES = {"split32": torch.int16, "split24": torch.int8}
REST_FORMATS = {dtype: name for name, dtype in REST_DTYPES.items()}


def resolve(
    memory: str | None, chosen: Mapping[str, str | None], kinds: Mapping[str, str]
) -> dict[str, str]:
    """The format of the master and of each state: as chosen, else the preset's, else float32.

    Args:
        memory: a preset's name, or None.
        chosen: formats by "master" or state name, None where none was chosen.
        kinds: what each state holds, by its name.

    Raises ValueError naming the argument.
    """
    if memory is not None and memory not in PRESETS:
        raise ValueError(f"memory must be one of {', '.join(PRESETS)}; found {memory!r}")
    presets = dict(zip(("master", "moment", "square"), PRESETS[memory or "exact"], strict=True))
    formats = {}
    for name, format in chosen.items():
        kind = kinds.get(name, "master")
        known = KINDS.get(kind, MASTERS)
        if format is None:
            format = presets.get(kind, "float32") if memory else "float32"
        if format not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; found {format!r}")
        formats[name] = format
    return formats


def has_groups(param: Tensor) -> bool:
    """Whether m8's groups of 32 fit into a parameter's rows as they lie in memory.

    A group must not reach from one row into the next, whose gradients have another size. A tensor
    of one dimension (a bias, a norm's weight) has no rows: its neighbours are unrelated.
    """
    strides = [s for n, s in zip(param.shape, param.stride(), strict=True) if n > 1]
    return len(strides) > 1 and param.numel() > 0 and max(strides) % GROUP == 0


def format_of(declared: str, param: Tensor) -> str:
    """The format in which a state of the declared format is stored for this parameter."""
    return "bfloat16" if declared == "m8" and not has_groups(param) else declared


def native_name(format: str) -> str:
    """The kernels' name of a format: bfloat16 states are always rounded stochastically."""
    return "bfloat16_stochastic" if format == "bfloat16" else format


def split_name(format: str, dtype: torch.dtype) -> str:
    """The kernels' name of a split beside weights of a dtype."""
    return f"{str(dtype).removeprefix('torch.')}_{format}"


def new_state(format: str, param: Tensor) -> tuple[Tensor, Tensor | None]:
    """A zero state in the format, shaped like the parameter, and its scales if it has them."""
    data = torch.zeros_like(param, dtype=DTYPES[format], memory_format=torch.preserve_format)
    if format != "m8":
        return data, None
    return data, torch.zeros(param.numel() // GROUP, dtype=torch.bfloat16, device=param.device)


def new_rest(format: str, param: Tensor) -> Tensor:
    """Zero remainders of a split master."""
    dtype = REST_DTYPES[format]
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def put(values: Tensor, data: Tensor, rest: Tensor | None, native: str, **random: int) -> None:
    """Stores float32 values of data's layout in arrays of a format."""
    like = torch.empty_like(data, dtype=torch.float32, memory_format=torch.preserve_format)
    like.copy_(values)
    if native == "ue8m8":
        like += 0.0  # the format has no sign: -0.0 would become a NaN
    second = None if rest is None else flat(rest)
    _C.encode_(flat(like), flat(data), second, native, **random)


def get(data: Tensor, rest: Tensor | None, native: str) -> Tensor:
    """The float32 values, in data's layout."""
    values = torch.empty_like(data, dtype=torch.float32, memory_format=torch.preserve_format)
    second = None if rest is None else flat(rest)
    flat(values).copy_(_C.decode(flat(data), second, native))
    return values


def check_low_precision(master: str, params: Iterable[Any]) -> None:
    """Raises ValueError for a split master where all parameters are float32."""
    tensors = [p for p in params if isinstance(p, Tensor)]
    if master.startswith("split") and tensors and all(p.dtype == torch.float32 for p in tensors):
        raise ValueError(
            f"master={master!r} splits a float32 master into a low-precision weight and a "
            "remainder, but all parameters are float32; make the model low precision first with "
            "amp_mp.prepare(model, torch.bfloat16)"
        )
