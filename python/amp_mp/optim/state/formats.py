"""How masters and states are stored: the formats' names, presets and arrays."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C

# The native list of formats, csrc/core/format_list.h, and the names that users choose from: of the
# stochastic forms the plain name is chosen, and splits are named without the weight's dtype.
NATIVE_FORMATS = {entry["name"]: entry for entry in _C.formats()}
_PLAIN = {name: f for name, f in NATIVE_FORMATS.items() if not name.endswith("_stochastic")}
_STATES = {name: f for name, f in _PLAIN.items() if {"moment", "square"} & set(f["kinds"])}
_SPLITS = {name: f for name, f in _PLAIN.items() if f["split"] and f["dtype"] != torch.float32}
MASTERS = ("float32", *dict.fromkeys(name.split("_")[1] for name in _SPLITS), "none")
MOMENTS = tuple(name for name, f in _STATES.items() if "moment" in f["kinds"])
SQUARES = tuple(name for name, f in _STATES.items() if "square" in f["kinds"])
# What a master, and a state of each kind (rule.py, State), may be stored as.
KINDS = {"master": MASTERS, "moment": MOMENTS, "square": SQUARES, "exact": ("float32",)}
# The dtype of a state's data, and the split that the dtype of a remainder stands for: signed beside
# bfloat16 weights, unsigned beside float16.
DTYPES = {name: f["dtype"] for name, f in _STATES.items()}
REST_FORMATS = {f["rest_dtype"]: name.split("_")[1] for name, f in _SPLITS.items()}
GROUP = NATIVE_FORMATS["m8"]["group"]  # elements that share a scale
ROUNDINGS = ("nearest", "stochastic")
# What `memory=` stands for, by kind, and what holds without it.
DEFAULT = {"master": "split32", "moment": "float32", "square": "float32"}
PRESETS = {
    "float32": {"master": "float32", "moment": "float32", "square": "float32"},
    "exact": DEFAULT,
    "lean": {"master": "split24", "moment": "bfloat16", "square": "ue8m8"},
    "tiny": {"master": "split24", "moment": "m8", "square": "ue8m8"},
}


def resolve(
    memory: str | None, chosen: Mapping[str, str | None], kinds: Mapping[str, str]
) -> dict[str, str]:
    """The format of the master and of each state: as chosen, else the preset's.

    memory: a preset or None. chosen: formats by "master" or a state's name, or None. kinds: of the
    states, by name. Raises ValueError naming the argument.
    """
    if memory is not None and memory not in PRESETS:
        raise ValueError(f"memory must be one of {', '.join(PRESETS)}; found {memory!r}")
    preset = DEFAULT if memory is None else PRESETS[memory]
    formats = {}
    for name, format in chosen.items():
        kind = kinds.get(name, "master")
        found = preset.get(kind, "float32") if format is None else format
        if found not in KINDS[kind]:
            raise ValueError(f"{name} must be one of {', '.join(KINDS[kind])}; found {found!r}")
        formats[name] = found
    return formats


def resolve_group(
    param_group: dict[str, Any], chosen: Mapping[str, str | None], kinds: Mapping[str, str]
) -> None:
    """Replaces the `memory` of a new param_group, and completes the formats that it names."""
    own = {name: param_group.get(name) for name in chosen}
    memory = param_group.pop("memory", None)
    if memory is not None or any(own.values()):
        given = own if memory is not None else {name: own[name] or chosen[name] for name in own}
        stored = resolve(memory, given, kinds)
        param_group.update({n: s for n, s in stored.items() if memory or own[n]})


def has_groups(param: Tensor) -> bool:
    """Whether m8's groups of 32 fit into a parameter's rows as they lie in memory.

    A group must not reach from one row into the next, whose gradients have another size. A tensor
    of one dimension (a bias, a norm's weight) has no rows: its neighbours are unrelated.
    """
    strides = [s for n, s in zip(param.shape, param.stride(), strict=True) if n > 1]
    return len(strides) > 1 and param.numel() > 0 and max(strides) % GROUP == 0


def format_of(declared: str, param: Tensor) -> str:
    """The format in which a state of the declared format is stored for this parameter."""
    grouped = NATIVE_FORMATS[declared]["group"] > 1
    return "bfloat16" if grouped and not has_groups(param) else declared


def native_name(format: str) -> str:
    """The kernels' name of a format: bfloat16 states are always rounded stochastically."""
    return "bfloat16_stochastic" if format == "bfloat16" else format


def split_name(format: str, dtype: torch.dtype) -> str:
    """The kernels' name of a master's format beside weights of a dtype."""
    return f"{str(dtype).removeprefix('torch.')}_{format}"


def new_state(format: str, param: Tensor) -> tuple[Tensor, Tensor | None]:
    """A zero state in the format, shaped like the parameter, and its scales if it has them."""
    entry = NATIVE_FORMATS[format]
    data = torch.zeros_like(param, dtype=entry["dtype"])
    if entry["rest_dtype"] is None:
        return data, None
    count = param.numel() // entry["group"]
    return data, torch.zeros(count, dtype=entry["rest_dtype"], device=param.device)


def new_rest(format: str, param: Tensor) -> Tensor:
    """Zero remainders of a split master, for a low-precision parameter."""
    return torch.zeros_like(param, dtype=_SPLITS[split_name(format, param.dtype)]["rest_dtype"])


def belongs(rest: Tensor, param: Tensor) -> bool:
    """Whether remainders were made beside weights of the parameter's dtype."""
    name = split_name(REST_FORMATS.get(rest.dtype, ""), param.dtype)
    return name in _SPLITS and _SPLITS[name]["rest_dtype"] == rest.dtype


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def put(values: Tensor, data: Tensor, rest: Tensor | None, native: str, **random: int) -> None:
    """Stores float32 values of data's layout in arrays of a format."""
    like = torch.empty_like(data, dtype=torch.float32).copy_(values)
    if native == "ue8m8":
        like += 0.0  # the format has no sign: -0.0 would become a NaN
    second = None if rest is None else flat(rest)
    _C.encode_(flat(like), flat(data), second, native, **random)


def get(data: Tensor, rest: Tensor | None, native: str) -> Tensor:
    """The float32 values, in data's layout."""
    values = torch.empty_like(data, dtype=torch.float32)
    second = None if rest is None else flat(rest)
    flat(values).copy_(_C.decode(flat(data), second, native))
    return values
