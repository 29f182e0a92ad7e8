"""The table of a parameter's state: every entry that it may have under an optimizer's rules.

Checking, loading, saving, checkpoints and the native step look entries up here. An entry's name
says what its tensor holds. A plain name (`exp_avg`) holds nothing but numbers, in the precision of
its dtype. Codes have names of their own (`exp_avg_m8`), because some ways of loading convert dtypes
in silence: torch's distributed checkpoint would make a code a number.
"""

import sys
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION
from amp_mp.optim.rule import OwnNumber, Rule, kinds_of
from amp_mp.optim.state.formats import (
    DTYPES,
    GROUPED,
    KINDS,
    MASTERS,
    NATIVE_FORMATS,
    split_name,
)
from amp_mp.sharding.shards import like, local_of
from amp_mp.text_table import dtype_name

# The numbers that a parameter's clock consists of (core/rules/base.h, Clock), and how many each
# entry has. The last two are names of Clock::own.
CLOCK = {"step": 1, "beta_powers": 2, "layer": 1, "mu_product": 1}


class Entry(NamedTuple):
    """An entry of a parameter's state.

    state: what it is a part of: the state of this name, the "master", or "step", the clock.
    format: how that is stored; "" where the dtype says it.
    dtype: of the tensor in `optimizer.state`; None: float32, bfloat16 or float16.
    shown: the dtype in a state dict; None: any floating-point dtype is read. Where it differs from
    `dtype` the state dict shows bytes (as_bytes).
    like: what has the same shape: "param", "scale" (a number for each group), "row" (one for each
    row of the parameter's matrices) or "number".
    scale: the entry of the scales; "" without groups.
    """

    name: str
    state: str
    format: str
    dtype: torch.dtype | None
    shown: torch.dtype | None
    like: str
    scale: str = ""

    @property
    def in_bytes(self) -> bool:
        """Whether a state dict shows bytes: gloo and NCCL carry no 16-bit integers."""
        return self.shown != self.dtype and self.dtype == torch.int16


class Schema(NamedTuple):
    """The entries that a parameter's state may have under some rules.

    entries: by name. refused: by name, entries of formats that their state cannot have, and what is
    wrong with them.
    """

    entries: dict[str, Entry]
    refused: dict[str, str]


def _coded(name: str, state: str, format: str, dtype: torch.dtype, scale: str = "") -> Entry:
    shown = torch.uint8 if dtype == torch.int16 else dtype
    return Entry(name, state, format, dtype, shown, "param", scale)


def _master_entry(format: str, weight: torch.dtype) -> Entry:
    if format == "float32":
        return Entry("master", "master", "float32", torch.float32, None, "param")
    # Remainders beside weights of the other dtype are other numbers, hence another name.
    end = "" if weight == torch.bfloat16 else f"_{dtype_name(weight)}"
    dtype = NATIVE_FORMATS[split_name(format, weight)]["rest_dtype"]
    assert dtype is not None
    return _coded(f"remainder{8 * dtype.itemsize}{end}", "master", format, dtype)


# How a master is stored: by format and the weight's dtype. Then the entries by name.
MASTER = {(f, dtype): _master_entry(f, dtype) for dtype in LOW_PRECISION for f in MASTERS[:-1]}
MASTER_ENTRIES = {entry.name: entry for entry in MASTER.values()}


@cache
def entry_name(name: str, format: str) -> str:
    """The entry that holds a state in a format: `exp_avg`, `exp_avg_m8`."""
    plain = dtype_name(DTYPES[format])
    end = "" if format == plain else f"_{format.removeprefix(f'{plain}_')}"
    # A step looks entries up by the thousand, and a dict compares other objects letter by letter.
    return sys.intern(name + end)


@cache
def scale_name(entry: str) -> str:
    """The entry that holds the scales of a grouped format's entry."""
    return sys.intern(f"{entry}_scale")


def is_coded(entry: str) -> bool:
    """Whether an entry has the name of codes, of any state."""
    names = [entry_name("", format) for format in DTYPES]
    return entry.endswith(tuple(name for name in names if name))


@cache
def rows_of(name: str) -> tuple[Entry, ...]:
    """Every entry that may hold the data of a state, of any kind; one of them does."""
    rows = {name: Entry(sys.intern(name), name, "", None, None, "param")}
    for format, dtype in DTYPES.items():
        entry = entry_name(name, format)
        scale = scale_name(entry) if format in GROUPED else ""
        rows.setdefault(entry, _coded(entry, name, format, dtype, scale))
    return tuple(rows.values())


@cache
def schema_of(rules: tuple[Rule, ...]) -> Schema:
    """The table for an optimizer that may use these rules."""
    found = [Entry(name, "step", "", torch.float64, None, "number") for name in CLOCK]
    found += MASTER.values()
    refused = {}
    for name, kind in kinds_of(rules).items():
        for row in rows_of(name):
            if row.format and row.format not in KINDS[kind]:
                can = ", ".join(KINDS[kind])
                refused[row.name] = f"is stored as {row.format!r}, but can be {can} only"
                continue
            found.append(row._replace(like="row") if kind == "row" else row)
            if row.scale:
                dtype = NATIVE_FORMATS[row.format]["rest_dtype"]
                found.append(Entry(row.scale, name, row.format, dtype, dtype, "scale"))
    return Schema({entry.name: entry for entry in found}, refused)


@cache
def required(rules: tuple[Rule, ...]) -> tuple[str, ...]:
    """The states and numbers that every parameter has after a step under any of the rules."""
    named = []
    for rule in rules:
        own = {rule.own.name} if rule.own is not None else set()
        named.append(own | {each.name for each in rule.states if not each.late})
    return tuple(sorted(set.intersection(*named)))


def as_bytes(value: Tensor) -> Tensor:
    """A tensor's bytes, uint8 [*shape, bytes per element], in the same memory and placements."""
    shown = local_of(value).unsqueeze(-1).view(torch.uint8)
    return like(shown, value, (*value.shape, shown.shape[-1]))


# The same for native code: format, the weight's dtype (None: any), the entry and its dtype.
MASTER_ROWS: list[tuple[Any, ...]] = [("float32", None, "master", torch.float32)]
MASTER_ROWS += [(f, w, e.name, e.dtype) for (f, w), e in MASTER.items() if f != "float32"]


@cache
def layout_of(rule: Rule) -> _C.RuleLayout:
    """The same for native code: which entries of a parameter's state a rule reads and writes."""
    states = []
    for state in rule.states:
        rows = {row.format: row for row in rows_of(state.name)}
        stored = ((f, dtype, rows.get(f, rows[""])) for f, dtype in DTYPES.items())
        formats = [(f, dtype, row.name, row.scale or None) for f, dtype, row in stored]
        states.append((state.name, state.initial, state.late, state.kind == "row", formats))
    own = rule.own or OwnNumber("layer", 0.0)
    options = () if rule.directions is None else rule.directions.options
    return _C.RuleLayout(
        op=rule.operator,
        states=states,
        masters=MASTER_ROWS,
        clock=("step", "beta_powers", own.name),
        own_start=own.start,
        own_is_kept=rule.own is not None,
        numbers=list(rule.numbers),
        options=["memory", "master", "rounding", *rule.names, *options],
        directions=rule.directions,
        needs_norms=rule.needs_norms,
    )
