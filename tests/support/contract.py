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
from rules import PRESETS, WITHOUT_ROWS

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
class State:
    """What an optimizer keeps of a parameter: moments as numbers, and what stores the master."""

    clock: Clock
    m: Floats
    v: Floats
    memory: str
    rest: Any = None  # of a split
    stored: Any = None  # a float32 master
    layout: str = "rows"
    kinds: tuple[str, str] = ("float32", "float32")  # how m and v are stored


@dataclass
class Parameter:
    """One parameter, and its state once it has taken part in a step."""

    shape: tuple[int, ...]
    dtype: str
    visible: Floats
    memory: str
    number: int = 0
    layout: str = "rows"
    state: State | None = field(default=None)

    def kinds(self) -> tuple[str, str]:
        """The formats of m and v: groups need rows of 32 in memory."""
        _, moment, square = PRESETS[self.memory]
        if len(self.shape) > 1:
            return moment, square
        return WITHOUT_ROWS.get(moment, moment), WITHOUT_ROWS.get(square, square)

    def master(self) -> Floats:
        """The number that the next step starts from."""
        state = self.state
        format = PRESETS[state.memory if state else self.memory][0]
        if self.dtype not in LOW or state is None:
            return self.visible
        turn = (self.shape, state.layout, self.layout)
        if format == "float32":
            stored = permuted(state.stored, *turn)
            rounded = reference.store(stored, self.dtype, saturating=True)
            same = rounded.view(np.uint32) == self.visible.view(np.uint32)
            return np.where(same, stored, self.visible)
        parts = [self.bits(), permuted(state.rest, *turn)]
        return formats.decode(parts, format, self.dtype)

    def bits(self) -> Any:
        if self.dtype == "float16":
            return self.visible.astype(np.float16).view(np.uint16)
        return (self.visible.view(np.uint32) >> 16).astype(np.uint16)

    def keep(self, state: State, master: Floats) -> None:
        """Stores a master, which writes the parameter."""
        format = PRESETS[state.memory][0]
        if self.dtype not in LOW:
            self.visible = master
        elif format == "float32":
            state.stored = master
            self.visible = reference.store(master, self.dtype, saturating=True)
        else:
            parts = formats.encode(master, format, weight=self.dtype)
            state.rest, self.visible = parts[1], formats.decode(parts[:1], self.dtype)

    def edit(self, seed: int, values: Floats) -> None:
        """`optimizer.masters` has stored these values; elements of equal bits stay."""
        changed = values.view(np.uint32) != self.master().view(np.uint32)
        if not changed.any():
            return
        if self.state is None and self.dtype in LOW:
            self.gather(seed)
        before = self.visible
        if self.dtype not in LOW:
            self.visible = values
            return
        state = self.state
        assert state is not None
        turn = (self.shape, self.layout, state.layout)
        old = state.rest, state.stored
        self.keep(state, values)
        self.visible = np.where(changed, self.visible, before)
        for name, was in zip(("rest", "stored"), old, strict=True):
            if was is not None:
                new = permuted(getattr(state, name), *turn)
                setattr(state, name, np.where(permuted(changed, *turn), new, was))

    def gather(self, seed: int) -> None:
        """Before a step: state is made where there is none, and follows the layout."""
        if self.state is None:
            zeros = np.zeros_like(self.visible)
            state = State(Clock(), zeros, zeros, self.memory, kinds=self.kinds())
            state.layout = self.layout
            self.keep(state, self.visible)
            self.state = state
        state = self.state
        if state.layout != self.layout:
            self.state = self.turned(state, seed, 0)

    def turned(self, state: State, seed: int, number: int) -> State:
        """The state in the parameter's layout; groups are then made of other neighbours."""
        turn = (self.shape, state.layout, self.layout)
        m, v = (
            stored(x, kind, seed, 0, number) if kind in WITHOUT_ROWS else x
            for x, kind in zip(
                (permuted(x, *turn) for x in (state.m, state.v)), state.kinds, strict=True
            )
        )
        new = State(state.clock, m, v, state.memory, layout=self.layout, kinds=state.kinds)
        new.rest = None if state.rest is None else permuted(state.rest, *turn)
        new.stored = None if state.stored is None else permuted(state.stored, *turn)
        return new

    def step(self, g: Floats, multiplier: np.float32, group: dict[str, Any]) -> None:
        """AdamW on the master; the moments and the master are stored in their formats."""
        state = self.state
        assert state is not None
        state.clock.tick(*group["betas"])
        names = ("lr", "betas", "eps", "weight_decay")
        numbers = Numbers(**{name: group[name] for name in names})
        w, m, v = reference.adam(
            g * multiplier, self.master(), state.m, state.v, None, state.clock, numbers, True
        )
        random = (group["seed"], state.clock.step, self.number)
        state.m, state.v = (stored(x, k, *random) for x, k in zip((m, v), state.kinds, strict=True))
        self.keep(state, w)

    def load(self, saved: State | None, group: dict[str, Any]) -> None:
        """A saved state comes in, in this parameter's formats; without one a step makes it."""
        if saved is None:
            self.state = None
            return
        old = copy.deepcopy(saved)
        state = State(old.clock, old.m, old.v, self.memory, layout=self.layout, kinds=self.kinds())
        turn = (self.shape, old.layout, self.layout)
        random = (group["seed"], 0, self.number)
        for name, kind, was in zip("mv", state.kinds, old.kinds, strict=True):
            values = permuted(getattr(old, name), *turn)
            if kind != was or (kind in WITHOUT_ROWS and old.layout != self.layout):
                values = stored(values, kind, *random)
            setattr(state, name, values)
        wanted, found = PRESETS[self.memory][0], PRESETS[old.memory][0]
        old.rest = None if old.rest is None else permuted(old.rest, *turn)
        old.stored = None if old.stored is None else permuted(old.stored, *turn)
        old.layout = self.layout
        self.state = old
        if wanted == found or self.dtype not in LOW:
            state.rest, state.stored = old.rest, old.stored
        else:
            self.keep(state, self.master())
        self.state = state


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
    members = [(p, group, g) for p, group, g in params if g is not None or p.state is not None]
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
