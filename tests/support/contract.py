"""What docs/between_steps.md promises of a parameter under AdamW, as a plain model in NumPy.

Arrays are in the order of memory. What the library does with it is not looked at.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import reference
import reference_formats as formats
from reference import Clock, Floats, Numbers
from rules import PRESETS, WITHOUT_ROWS, has_groups

LOW = ("bfloat16", "float16")


def permuted(x: Any, shape: tuple[int, ...], before: str, after: str) -> Any:
    """An array in the order of one layout ("rows" or "channels_last") in the order of another."""
    if before == after or len(shape) != 4:
        return x
    n, c, h, w = shape
    if after == "channels_last":
        return x.reshape(n, c, h, w).transpose(0, 2, 3, 1).reshape(-1)
    return x.reshape(n, h, w, c).transpose(0, 3, 1, 2).reshape(-1)


@dataclass
class Master:
    """A low-precision weight's float32 value: what rounding cut off from it, or all of it."""

    format: str
    second: Any  # beside the weight, one an element: remainders of a split, or float32 numbers
    layout: str

    def beside(self, weight: Any, dtype: str) -> Floats:
        """The numbers beside weights of these bits, in the order of the master's layout."""
        second = formats.packed(self.second) if self.format == "split20" else self.second
        return formats.decode([weight, second], self.format, dtype)


@dataclass
class State:
    """What an optimizer keeps of a parameter: its clock, and moments as numbers."""

    clock: Clock
    m: Floats
    v: Floats
    layout: str
    kinds: tuple[str, str]  # how m and v are stored


@dataclass
class Shown(State):
    """What a state dict shows of a parameter: the optimizer's state, and the weight's master."""

    master: Master | None = None


@dataclass
class Parameter:
    """One parameter with its master, and its state once it has taken part in a step."""

    shape: tuple[int, ...]
    dtype: str
    visible: Floats
    memory: str
    number: int = 0
    layout: str = "rows"
    held: State | None = field(default=None)
    bits: Master | None = field(default=None)  # belong to the weight, whatever happens to `held`
    is_written: bool = False  # by a script since its master was stored, as version counters show it

    @property
    def state(self) -> Shown | None:
        """What a state dict shows of it now."""
        return None if self.held is None else Shown(**vars(self.held), master=self.bits)

    def kinds(self) -> tuple[str, str]:
        """The formats of m and v: groups need rows of 32 in memory."""
        _, moment, square = PRESETS[self.memory]
        if len(self.shape) > 1:
            return moment, square
        return WITHOUT_ROWS.get(moment, moment), WITHOUT_ROWS.get(square, square)

    # The master.

    def master_format(self) -> str:
        """What the preset asks for, or split24 where two neighbours share no byte of split20."""
        format = PRESETS[self.memory][0]
        shares = format != "split20" or (self.layout == "rows" and has_groups(self.shape, 2))
        return format if shares else "split24"

    def master(self) -> Floats:
        """The number that the next step starts from."""
        self.drop_of_written()
        bits = self.bits
        if bits is None:
            return self.visible
        if bits.format != "float32":
            weight = formats.weight_bits(self.visible, self.dtype)
            weight = permuted(weight, self.shape, self.layout, bits.layout)
            found = bits.beside(weight, self.dtype)
            return permuted(found, self.shape, bits.layout, self.layout)
        second = permuted(bits.second, self.shape, bits.layout, self.layout)
        rounded = reference.store(second, self.dtype, saturating=True)
        same = rounded.view(np.uint32) == self.visible.view(np.uint32)
        return np.where(same, second, self.visible)

    def drop_of_written(self) -> None:
        """Where no optimizer has state for the weight, a script's write ends what was cut off."""
        if self.held is None and self.is_written:
            self.bits = None

    def keep(self, master: Floats, random: tuple[int, int, int] | None = None) -> None:
        """Stores a master, which writes the parameter; with a seed, step and number, of a step."""
        format = self.master_format()
        if self.dtype not in LOW:
            self.visible = master
        elif format == "float32":
            self.visible = reference.store(master, self.dtype, saturating=True)
            self.put(format, master)
        else:
            parts = formats.nearest(master, format, self.dtype)
            if random is not None:
                bits = formats.stream(master.size, *random, weights=True)
                parts = formats.encode(master, format, bits, self.dtype)
            self.visible = formats.decode(parts[:1], self.dtype)
            self.put(format, parts[1])

    def keep_beside(self, master: Floats) -> None:
        """Stores a master from which the parameter was rounded: the parameter stays.

        Half way between two weights the formats round differently: where this one would round to
        the other weight, it stores what is nearest to the value and rounds to this one.
        """
        format = self.master_format()
        self.put(format, formats.beside(master, self.visible, format, self.dtype))

    def put(self, format: str, second: Any) -> None:
        second = formats.unpacked(second) if format == "split20" else second
        self.bits, self.is_written = Master(format, second, self.layout), False

    def make_master(self) -> None:
        """The master in this parameter's format: the weight's, or where it has none the weight."""
        format = self.master_format()
        if self.dtype not in LOW:
            return
        self.drop_of_written()
        if self.bits is None:
            kind = {"float32": np.float32, "split32": np.int16}.get(format, np.int8)
            zeros = np.zeros(self.visible.shape, kind)
            second = self.visible if format == "float32" else zeros
            self.bits, self.is_written = Master(format, second, self.layout), False
        elif self.bits.format != format:
            self.keep_beside(self.master())

    def convert_master(self) -> None:
        """In another layout a weight may lose or get back what split20 needs."""
        if self.bits is not None and self.bits.format != self.master_format():
            self.keep_beside(self.master())

    def edit(self, seed: int, values: Floats) -> None:
        """`optimizer.masters` has stored these values; elements of equal bits stay."""
        changed = values.view(np.uint32) != self.master().view(np.uint32)
        if not changed.any():
            return
        if self.dtype not in LOW:
            self.visible = values
            return
        if self.held is None:
            self.gather(seed)
        self.convert_master()
        before, old = self.visible, self.bits
        assert old is not None
        second = permuted(old.second, self.shape, old.layout, self.layout)
        self.keep(values)
        assert self.bits is not None
        self.visible = np.where(changed, self.visible, before)
        self.bits.second = np.where(changed, self.bits.second, second)

    # The state.

    def gather(self, seed: int) -> None:
        """Before a step: state is made where there is none, and follows the layout."""
        if self.held is None:
            self.make_master()
            zeros = np.zeros_like(self.visible)
            self.held = State(Clock(), zeros, zeros, self.layout, self.kinds())
        if self.held.layout != self.layout:
            self.held = self.turned(self.held, seed, 0)
        self.convert_master()

    def turned(self, state: State, seed: int, number: int) -> State:
        """The state in the parameter's layout; groups are then made of other neighbours."""
        turn = (self.shape, state.layout, self.layout)
        m, v = (
            stored(x, kind, seed, 0, number) if kind in WITHOUT_ROWS else x
            for x, kind in zip(
                (permuted(x, *turn) for x in (state.m, state.v)), state.kinds, strict=True
            )
        )
        return State(state.clock, m, v, self.layout, state.kinds)

    def step(self, g: Floats, multiplier: np.float32, group: dict[str, Any]) -> None:
        """AdamW on the master; the moments and the master are stored in their formats."""
        state = self.held
        assert state is not None
        state.clock.tick(*group["betas"])
        names = ("lr", "betas", "eps", "weight_decay")
        numbers = Numbers(**{name: group[name] for name in names})
        w, m, v = reference.adam(
            g * multiplier, self.master(), state.m, state.v, None, state.clock, numbers, True
        )
        random = (group["seed"], state.clock.step, self.number)
        state.m, state.v = (stored(x, k, *random) for x, k in zip((m, v), state.kinds, strict=True))
        self.keep(w, random)

    def load(self, saved: Shown | None, group: dict[str, Any]) -> None:
        """A saved state comes in, in this parameter's formats.

        A file without one takes the moments away, and leaves the weight its master.
        """
        if saved is None:
            self.held = None
            return
        old = copy.deepcopy(saved)
        turn = (self.shape, old.layout, self.layout)
        random = (group["seed"], 0, self.number)
        moments = []
        for values, kind, was in zip((old.m, old.v), self.kinds(), old.kinds, strict=True):
            found = permuted(values, *turn)
            if kind != was or (kind in WITHOUT_ROWS and old.layout != self.layout):
                found = stored(found, kind, *random)
            moments.append(found)
        self.held = State(old.clock, moments[0], moments[1], self.layout, self.kinds())
        if old.master is None:
            return
        self.bits = old.master
        if self.bits.format != self.master_format():
            self.keep_beside(self.master())
        self.bits.second = permuted(self.bits.second, self.shape, self.bits.layout, self.layout)
        self.bits.layout, self.is_written = self.layout, False


def stored(values: Floats, kind: str, seed: int, step: int, number: int) -> Floats:
    """What a format keeps of float32 numbers."""
    if kind == "float32":
        return values
    bits = formats.stream(values.size, seed, step, number)
    return formats.decode(formats.encode(values, kind, bits), kind)


def step_all(
    params: list[tuple[Parameter, dict[str, Any], Floats | None]], max_norm: float | None
) -> bool:
    """One step over (parameter, its group, its gradient); returns whether it was skipped."""
    members = [(p, group, g) for p, group, g in params if g is not None or p.held is not None]
    for p, group, _ in members:
        p.gather(group["seed"])
    found = [reference.measure(g) if g is not None else (0.0, 0.0, 0.0) for _, _, g in members]
    if any(bad for _, _, bad in found):
        return True
    norm = math.sqrt(reference.combine([squares for squares, _, _ in found])) if found else 0.0
    multiplier = reference.multiplier(norm, 1.0, max_norm)
    for p, group, g in members:
        if g is not None:
            p.step(g, multiplier, group)
    return False
