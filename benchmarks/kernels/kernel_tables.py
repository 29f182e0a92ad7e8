"""Prints what kernel_report.py finds, by rich where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from kernel_code import COUNTED, LIMITS, Kernel
from kernel_path import BANDWIDTH, Measured

T = TypeVar("T")


def progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, with a bar on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        for n, item in enumerate(items, 1):
            print(f"\r{what}: {n} of {total}", end="\n" if n == total else "", file=sys.stderr)
            yield item
        return
    console = Console(stderr=True)
    yield from track(items, what, total=total, console=console, transient=True)


def show(kernels: Sequence[Kernel], arch: str) -> None:
    """Tables of resources and of instructions."""
    columns = ["kernel", "registers", "spilt", "stack", "shared", "arguments", "threads"]
    rows: list[list[object]] = [
        [
            *(k.name, k.registers, f"{k.spill_stores}/{k.spill_loads}", k.stack, k.shared),
            *(k.arguments, k.threads, f"{k.blocks(arch)}/{k.asked}", k.warps(arch)),
            f"{k.warps(arch) / LIMITS[arch][0]:.0%}",
        ]
        for k in kernels
    ]
    show_table(f"sm_{arch}", [*columns, "blocks/asked", "warps", "occupancy"], rows)
    for title, counts in (("PTX", [k.ptx for k in kernels]), ("SASS", [k.sass for k in kernels])):
        pairs = zip(kernels, counts, strict=True)
        rows = [[k.name, *(c[what] for what in COUNTED)] for k, c in pairs if c is not None]
        if rows:
            show_table(f"instructions in {title}", ["kernel", *COUNTED], rows)


def show_paths(measured: Sequence[Measured], arch: str) -> None:
    """A table for aligned and one for unaligned arrays, and what was guessed.

    bytes: that an element reads and writes. wrong: bytes stored that are not the emulator's.
    """
    columns = ["rule", "preset", "registers", "warps", "instructions", "stalls", "rounds"]
    columns += ["bytes", "ms: bytes/ issue/waits", "share", "wrong", "guesses"]
    for skew, title in ((0, "aligned arrays"), (1, "arrays that are one element off")):
        rows: list[list[object]] = [
            [
                *(m.rule, m.preset, m.kernel.registers, m.kernel.warps(arch)),
                *(f"{m.path.instructions:.0f}", f"{m.path.stalls:.0f}", f"{m.path.rounds:g}"),
                *(f"{m.path.bytes:g}", _milliseconds(m.path.times(m.kernel.warps(arch)))),
                f"{m.path.share(m.kernel.warps(arch)):.0%}",
                *(m.path.wrong, len(m.path.guesses)),
            ]
            for m in measured
            if m.skew == skew
        ]
        if rows:
            on = f"on an H100, estimated: ms for 10^9 elements, share of {BANDWIDTH / 1e12:g} TB/s"
            show_table(f"main path, 8 elements a thread, {title}; {on}", columns, rows)
    for m in measured:
        for guess in m.path.guesses:
            print(f"guessed in {m.rule}, {m.preset}: {guess}")
        if m.path.wrong:
            print(f"WRONG: {m.rule}, {m.preset}: {m.path.wrong} bytes are not the emulator's")


def _milliseconds(seconds: Sequence[float]) -> str:
    return "/".join(f"{1e12 * one:.1f}" for one in seconds)


def show_library(seconds: dict[str, float], cubins: dict[str, int], rest: int | None) -> None:
    """Each source's time to compile and machine code; with it the library for one architecture."""
    rows: list[list[object]] = [
        [name, f"{seconds[name]:.1f}", f"{cubins[name] / 1e6:.2f}"] for name in cubins
    ]
    rows.append(["all of csrc/cuda", f"{sum(seconds.values()):.1f}", _megabytes(cubins, 0)])
    if rest is not None:
        rows.append(["library for one architecture, at most", "", _megabytes(cubins, rest)])
    show_table("compiling", ["source", "CPU seconds", "MB"], rows)


def _megabytes(cubins: dict[str, int], rest: int) -> str:
    return f"{(sum(cubins.values()) + rest) / 1e6:.2f}"


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """One table; separated by tabs where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"{title}\n" + "\n".join("\t".join(map(str, row)) for row in [columns, *rows]))
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        left = column in ("kernel", "rule", "preset", "source")
        table.add_column(column, justify="left" if left else "right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=140).print(table)
