"""Honest timing on a noisy machine: candidates interleaved in one run, medians, bytes counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Candidate:
    """Something to time: what it is called, what it does, how many bytes it has to move."""

    name: str
    run: Callable[[], object]
    moved: int


def samples(
    candidates: list[Candidate],
    rounds: int,
    device: str = "cpu",
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call of each candidate: all of them once a round, in turn."""
    finish = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times: dict[str, list[float]] = {c.name: [] for c in candidates}
    for number in range(warm_up + rounds):
        for candidate in candidates:
            finish()
            start = clock()
            candidate.run()
            finish()
            elapsed = clock() - start
            if number >= warm_up:
                times[candidate.name].append(elapsed)
    return times


def medians(
    candidates: list[Candidate],
    rounds: int,
    device: str = "cpu",
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds per call of each candidate: the median of its samples."""
    found = samples(candidates, rounds, device, warm_up, clock)
    return {name: statistics.median(values) for name, values in found.items()}


def in_place(elements: int, device: str = "cpu") -> Candidate:
    """The machine's in-place bandwidth: a float32 array, every element read and written once."""
    x = torch.ones(elements, device=device)
    return Candidate("in place (x *= 1)", lambda: x.mul_(1.0), 8 * elements)


def show(title: str, candidates: list[Candidate], seconds: dict[str, float], base: str) -> None:
    """One table: time, bytes, GB/s, share of the in-place bandwidth, speed against `base`."""
    from rich.console import Console  # timing alone needs no rich
    from rich.table import Table

    rates = {c.name: c.moved / seconds[c.name] / 1e9 for c in candidates}
    ceiling = next((rate for name, rate in rates.items() if name.startswith("in place")), None)
    table = Table(title=title, title_justify="left")
    for column in ("", "ms", "MB moved", "GB/s", "of in-place", f"speed against {base}"):
        table.add_column(column, justify="left" if not column else "right")
    for c in candidates:
        table.add_row(
            c.name,
            f"{1e3 * seconds[c.name]:.3f}",
            f"{c.moved / 1e6:.1f}",
            f"{rates[c.name]:.1f}",
            f"{rates[c.name] / ceiling:.0%}" if ceiling else "",
            f"{seconds[base] / seconds[c.name]:.2f}x",
        )
    Console(width=110).print(table)


def kept_bytes(model: torch.nn.Module, forward: Callable[..., object], *given: object) -> int:
    """Bytes that forward(*given) keeps for the backward pass, besides the model's own tensors."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}
    alive = []  # or another tensor would get the memory

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(*given)
    return sum(found.values())


def quartiles(values: list[float], form: str = "{:.2f} ({:.2f} to {:.2f})") -> str:
    """The median, and in parentheses the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return form.format(middle, low, high)
