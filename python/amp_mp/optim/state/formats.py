"""How masters and states are stored: the formats' names, presets and arrays."""

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.sharding.shards import local_of, shards_of

# The native list of formats, csrc/core/format_list.h, and the names that users choose from: of the
# stochastic forms the plain name is chosen, and splits are named without the weight's dtype.
NATIVE_FORMATS = {entry["name"]: entry for entry in _C.formats()}
_PLAIN = {name: f for name, f in NATIVE_FORMATS.items() if not name.endswith("_stochastic")}
_STATES = {name: f for name, f in _PLAIN.items() if {"moment", "square"} & set(f["kinds"])}
_SPLITS = {
    name.split("_")[1]: f
    for name, f in _PLAIN.items()
    if f["split"] and f["dtype"] != torch.float32
}
MASTERS = ("float32", *_SPLITS, "none")
MOMENTS = tuple(name for name, f in _STATES.items() if "moment" in f["kinds"])
SQUARES = tuple(name for name, f in _STATES.items() if "square" in f["kinds"])
# What a master, and a state of each kind (rule.py, State), may be stored as.
KINDS = {"master": MASTERS, "moment": MOMENTS, "square": SQUARES, "exact": ("float32",)}
# The dtype of a state's data, and of a split master's remainders with its name.
DTYPES = {name: f["dtype"] for name, f in _STATES.items()}
REST_FORMATS = {f["rest_dtype"]: name for name, f in _SPLITS.items()}
# Formats whose elements share scales, which are an entry of their own.
GROUPED = tuple(name for name, f in _STATES.items() if f["group"] > 1)
GROUP = NATIVE_FORMATS["m8"]["group"]  # elements that share a scale
WITHOUT_GROUPS = {"moment": "bfloat16", "square": "ue8m8"}  # where groups do not fit, by kind
ROUNDINGS = ("nearest", "stochastic")
# What `memory=` stands for, by kind, and what holds without it.
DEFAULT = {"master": "split32", "moment": "float32", "square": "float32"}
PRESETS = {
    "float32": {"master": "float32", "moment": "float32", "square": "float32"},
    "exact": DEFAULT,
    "lean": {"master": "split24", "moment": "bfloat16", "square": "ue8m8"},
    "tiny": {"master": "split24", "moment": "m8", "square": "ue8m8"},
    "micro": {"master": "split24", "moment": "m8", "square": "log8"},
}


def short_name(dtype: torch.dtype) -> str:
    """A dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def check_choice(name: str, found: Any, known: Collection[str]) -> None:
    """Raises ValueError naming the argument and what it may be."""
    if found not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; found {found!r}")


def resolve(
    memory: str | None, chosen: Mapping[str, str | None], kinds: Mapping[str, str]
) -> dict[str, str]:
    """The format of the master and of each state: as chosen, else the preset's.

    memory: a preset or None. chosen: formats by "master" or a state's name, or None. kinds: of the
    states, by name. Raises ValueError naming the argument.
    """
    if memory is not None:
        check_choice("memory", memory, PRESETS)
    preset = DEFAULT if memory is None else PRESETS[memory]
    formats = {}
    for name, format in chosen.items():
        kind = kinds.get(name, "master")
        found = preset.get(kind, "float32") if format is None else format
        check_choice(name, found, KINDS[kind])
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
    """Whether groups of 32 fit into a parameter's rows as they lie in memory.

    A group must not reach from one row into the next, whose gradients have another size. A tensor
    of one dimension (a bias, a norm's weight) has no rows: its neighbours are unrelated. Of a
    DTensor the whole tensor's rows count, so that all processes agree, and it must be cut between
    groups.
    """
    counts, shape, stride = shards_of(param), tuple(param.shape), local_of(param).stride()
    if max(counts, default=1) > 1:  # shards are row-major
        stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        between_rows = max(counts[1:], default=1) == 1 and stride[0] % GROUP == 0
        if not between_rows and shape[-1] % (GROUP * counts[-1]):
            return False
    strides = [s for n, s in zip(shape, stride, strict=True) if n > 1]
    return len(strides) > 1 and param.numel() > 0 and max(strides) % GROUP == 0


def format_of(declared: str, param: Tensor) -> str:
    """The format in which a state of the declared format is stored for this parameter."""
    if declared not in GROUPED or has_groups(param):
        return declared
    return next(f for kind, f in WITHOUT_GROUPS.items() if declared in KINDS[kind])


def native_name(format: str) -> str:
    """The kernels' name of a format: bfloat16 states are always rounded stochastically."""
    return "bfloat16_stochastic" if format == "bfloat16" else format


def split_name(format: str, dtype: torch.dtype) -> str:
    """The kernels' name of a master's format beside weights of a dtype."""
    return f"{short_name(dtype)}_{format}"


def new_state(format: str, param: Tensor) -> tuple[Tensor, Tensor | None]:
    """A zero state of the parameter's shape and its scales if it has them; a DTensor's shards."""
    entry, local = NATIVE_FORMATS[format], local_of(param)
    data = torch.zeros_like(local, dtype=entry["dtype"])
    if entry["rest_dtype"] is None:
        return data, None
    shape = scale_shape(param, tuple(local.shape))
    return data, torch.zeros(shape, dtype=entry["rest_dtype"], device=local.device)


def scale_shape(param: Tensor, part: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The shape of the groups' scales: one that can be split over processes as the parameter is.

    Where groups do not lie along the last dimension, nor within the rows of the first, it is flat.
    part: the shape of a shard; gives the shape of its scales.
    """
    whole = tuple(param.shape)
    shape = whole if part is None else part
    if param.numel() >= GROUP and local_of(param).is_contiguous():
        row = prod(whole[1:])
        if whole[-1] % GROUP == 0:
            return (*shape[:-1], shape[-1] // GROUP)
        if row % GROUP == 0:
            return (shape[0], row // GROUP)
    return (prod(shape) // GROUP,)


def new_rest(format: str, param: Tensor) -> Tensor:
    """Zero remainders of a split master; of a DTensor those on this process, a plain tensor."""
    return torch.zeros_like(local_of(param), dtype=_SPLITS[format]["rest_dtype"])


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether elements of equal index have equal offsets in memory; the shapes are equal."""
    if a.stride() == b.stride():
        return True
    pairs = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(x == y for n, x, y in pairs if n > 1)


def placed(value: Tensor, param: Tensor) -> Tensor:
    """The value where its parameter is: itself, or a copy of the parameter's layout and device."""
    if value.device == param.device and same_layout(value, param):
        return value
    return torch.empty_like(param, dtype=value.dtype).copy_(value)


def put(values: Tensor, data: Tensor, rest: Tensor | None, native: str, **random: int) -> None:
    """Stores values of data's shape in arrays of a format."""
    if values.dtype != torch.float32 or values.stride() != data.stride():
        values = torch.empty_like(data, dtype=torch.float32).copy_(values)
    given = flat(values.detach())
    if native in ("ue8m8", "log8"):
        given = given + 0.0  # these formats have no sign: -0.0 would become a NaN
    second = None if rest is None else flat(rest)
    _C.encode_(given, flat(data), second, native, **random)


def get(data: Tensor, rest: Tensor | None, native: str) -> Tensor:
    """The float32 values, in data's layout."""
    second = None if rest is None else flat(rest)
    return _C.decode(flat(data), second, native).as_strided(data.shape, data.stride())
