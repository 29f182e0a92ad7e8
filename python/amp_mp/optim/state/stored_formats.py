"""How masters and states may be stored: the formats' names, dtypes, presets and entries."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.dtypes import check_choice
from amp_mp.sharding.shards import is_dtensor, like, local_of
from amp_mp.text_table import dtype_name

# The native list of formats, csrc/core/format_list.h, and the names that users choose from: without
# "stochastic", and for splits without the weight's dtype.
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
# What a master, and a state of each kind, may be stored as (kinds: csrc/core/rules/declared.h).
KINDS = {"master": MASTERS, "moment": MOMENTS, "matrix_moment": MOMENTS, "square": SQUARES}
KINDS |= dict.fromkeys(("exact", "row"), ("float32",))
# The format of a split master, by the dtype of its remainders.
REMAINDER_FORMATS = {f["second_dtype"]: name for name, f in _SPLITS.items()}
# Formats whose elements share scales, which are an entry of their own.
GROUPED = tuple(name for name, f in _STATES.items() if f["group"] > 1)
PACKED = "bfloat16_split20"  # the native name of masters with two remainders in a byte
ROUNDINGS = ("nearest", "stochastic")
# What `memory=` stands for, by kind, and what holds without it. A preset without masters rounds
# weights at random: to nearest, an update below half of a weight's last bit would never count.
_EXACT = {"moment": "float32", "matrix_moment": "float32", "square": "float32"}
_TINY = {"moment": "m8", "matrix_moment": "i8", "square": "ue8m8"}
_MICRO = {**_TINY, "square": "log8"}
DEFAULT = {"master": "split32", **_EXACT}
PRESETS = {
    "float32": {"master": "float32", **_EXACT},
    "exact": DEFAULT,
    "lean": {
        "master": "split24",
        "moment": "bfloat16",
        "matrix_moment": "bfloat16",
        "square": "ue8m8",
    },
    "tiny": {"master": "split24", **_TINY},
    "micro": {"master": "split24", **_MICRO},
    "nano": {"master": "split20", **_MICRO},
    "masterless": {"master": "none", **_MICRO, "rounding": "stochastic"},
}

# Names of the entries of a parameter's state; csrc/torch/state/rule_table.h has the table.
CLOCK = _C.clock_entries()  # the numbers that a parameter's clock consists of
MASTER_ENTRIES = _C.master_entries()  # their dtypes, by name
SCALE = "_scale"  # how the entry ends that holds the scales of a grouped format's entry
CODED = tuple(_C.coded_endings())  # how the names of codes end, for any state

Chosen = Mapping[str, str | None]  # formats by "master" or a state's name
Kinds = Mapping[str, str]  # of states, by name


def resolve(memory: str | None, chosen: Chosen, kinds: Kinds) -> dict[str, str]:
    """The format of the master and of each state: as chosen, else that of `memory`, a preset.

    Raises ValueError naming the argument.
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


def rounding_of(memory: str | None) -> str:
    """How a preset rounds weights without a master, where the user does not say."""
    return PRESETS[memory].get("rounding", "nearest") if memory else "nearest"


def resolve_group(param_group: dict[str, Any], chosen: Chosen, kinds: Kinds) -> None:
    """Replaces the `memory` of a new param_group, and completes what it and single formats say."""
    own = {name: param_group.get(name) for name in chosen}
    memory = param_group.pop("memory", None)
    if memory is not None or any(own.values()):
        given = own if memory is not None else {name: own[name] or chosen[name] for name in own}
        stored = resolve(memory, given, kinds)
        param_group.update({n: s for n, s in stored.items() if memory or own[n]})
        if rounding := PRESETS.get(memory or "", {}).get("rounding"):
            param_group.setdefault("rounding", rounding)


def split_name(format: str, dtype: torch.dtype) -> str:
    """The kernels' name of a master's format beside weights of a dtype."""
    return f"{dtype_name(dtype)}_{format}"


def as_bytes(value: Tensor) -> Tensor:
    """A tensor's bytes, uint8 [*shape, bytes per element], in the same memory and placements."""
    if not is_dtensor(value):
        return value.unsqueeze(-1).view(torch.uint8)
    shown = local_of(value).unsqueeze(-1).view(torch.uint8)
    return like(shown, value, (*value.shape, shown.shape[-1]))
