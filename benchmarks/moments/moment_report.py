"""Tables and a picture of what the simulations of moment_simulations.py found.

A record is one format in one simulation with one seed: what was simulated, and the results. Where
there are several seeds, tables have the median.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table
from simulated_formats import FORMATS, OURS

Record = dict[str, Any]

COLORS = {
    "exact": "black",
    "lean": "tab:blue",
    "tiny": "tab:green",
    "micro": "tab:red",
    "cube": "yellowgreen",
    "FlashOptim": "tab:orange",
    "bitsandbytes-8bit": "tab:purple",
    "torchao-8bit": "tab:cyan",
    "torchao-4bit": "tab:gray",
    "torchao-fp8": "tab:pink",
}


def short(x: float) -> str:
    """Three digits, thousands with commas, a power of ten above a million."""
    if abs(x) < 0.0005:
        return "0.000"
    if abs(x) < 1000:
        return f"{x:#.3g}".removesuffix(".")
    if abs(x) >= 1e6:
        return f"{x:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{float(f'{x:.3g}'):,.0f}"


class Report:
    """The records of a run, with tables and a picture of them."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.formats = list(dict.fromkeys(record["format"] for record in records))
        self.beta2s = self._all("beta2", "unequal")
        self.log_sds = self._all("log_sd", "unequal")

    def _all(self, key: str, simulation: str) -> list[float]:
        found = (each[key] for each in self.records if each["simulation"] == simulation)
        return list(dict.fromkeys(found))

    def values(self, simulation: str, result: str, name: str, **keys: float) -> list[float]:
        """A result of a format, for each seed."""
        wanted = {"simulation": simulation, "format": name, **keys}
        return [each[result] for each in self.records if wanted.items() <= each.items()]

    def median(self, simulation: str, result: str, name: str, **keys: float) -> float:
        return float(np.median(self.values(simulation, result, name, **keys)))

    def _table(self, title: str, columns: dict[str, tuple[Any, ...]]) -> Table:
        """A row for each format; a column's tuple is what `_cell` takes."""
        table = Table(title=title, title_justify="left")
        table.add_column("format")
        for header in columns:
            table.add_column(header, justify="right")
        for name in self.formats:
            table.add_row(name, *(self._cell(name, *how) for how in columns.values()))
        return table

    def _cell(
        self, name: str, simulation: str, results: tuple[str, ...], keys: Record, factor: float = 1
    ) -> str:
        return ", ".join(
            short(factor * self.median(simulation, result, name, **keys)) for result in results
        )

    def tables(self) -> Iterator[Table]:
        """One for each simulation, and the summaries, one for each beta2."""
        both = [(beta2, log_sd) for beta2 in self.beta2s for log_sd in self.log_sds]
        for title, result, factor in (
            ("largest update over exact Adam's", "largest", 1),
            ("energy of the updates' errors x 1,000", "nmse", 1000),
        ):
            columns = {
                f"{beta2:g}\nlog-sd {log_sd:g}": (
                    "unequal",
                    (result,),
                    {"beta2": beta2, "log_sd": log_sd},
                    factor,
                )
                for beta2, log_sd in both
            }
            yield self._table(f"Groups of unequal elements: {title}, by beta2", columns)
        columns = {}
        for beta2 in self.beta2s:
            for time, prefix in (("falling", ""), ("settled", "settled_")):
                results = (f"{prefix}mean", f"{prefix}sd")
                columns[f"{beta2:g}\n{time}"] = ("drop", results, {"beta2": beta2})
        yield self._table("Gradients drop tenfold: v over exact Adam's, mean and sd", columns)
        yield self._table(
            f"Gradients stop: largest update later (exact Adam: {self._stopped_exactly()})",
            {f"{b:g}": ("stopped", ("largest",), {"beta2": b}) for b in self.beta2s},
        )
        yield self._table(
            "First moments stored once: energy of the errors x 10,000, by log-sd",
            {
                f"{sd:g}": ("stored_error", ("nmse",), {"log_sd": sd}, 10000)
                for sd in self._all("log_sd", "stored_error")
            },
        )
        columns = {}
        for beta2 in self.beta2s:
            for moment in ("first", "square"):
                results = (moment, f"{moment}_sd")
                columns[f"{beta2:g}\n{moment}"] = ("constant", results, {"beta2": beta2})
        yield self._table("Constant gradients: moments over exact Adam's, mean and sd", columns)
        yield from map(self.summary, self.beta2s)

    def _stopped_exactly(self) -> str:
        return ", ".join(
            short(self.median("stopped", "exact", self.formats[0], beta2=b)) for b in self.beta2s
        )

    def summary(self, beta2: float) -> Table:
        """All simulations with one beta2, a row for each format."""
        table = Table(title=f"Summary, beta2 = {beta2:g}", title_justify="left")
        ends = [sd for sd in self.log_sds if sd in (0, 1.5, 2)]
        at = "log-sd " + " / ".join(f"{sd:g}" for sd in ends)
        table.add_column("format")
        for header in (
            "bytes of\nboth\nmoments",
            "v / exact, sd\nafter tenfold drop:\nfalling",
            "\n\nsettled",
            f"largest update\n/ exact's,\n{at}",
            f"update error\nx 1,000,\n{at}",
            "gradients\nstop: largest\nupdate",
        ):
            table.add_column(header, justify="right")
        for name in self.formats:
            table.add_row(
                name,
                f"{FORMATS[name].bytes:.3g}",
                self._cell(name, "drop", ("mean", "sd"), {"beta2": beta2}),
                self._cell(name, "drop", ("settled_mean", "settled_sd"), {"beta2": beta2}),
                *(
                    " / ".join(
                        self._cell(
                            name, "unequal", (result,), {"beta2": beta2, "log_sd": sd}, factor
                        )
                        for sd in ends
                    )
                    for result, factor in (("largest", 1), ("nmse", 1000))
                ),
                self._cell(name, "stopped", ("largest",), {"beta2": beta2}),
            )
        return table

    def picture(self) -> Figure:
        """Largest update and updates' error against log-sd; bars from lowest to highest seed."""
        result = Figure(figsize=(2.2 + 5.2 * len(self.beta2s), 8.4), dpi=120, layout="constrained")
        FigureCanvasAgg(result)
        grid = result.subplots(2, len(self.beta2s), sharex=True, sharey="row", squeeze=False)
        for column, beta2 in enumerate(self.beta2s):
            grid[0, column].set_title(f"beta2 = {beta2:g}")
            grid[1, column].set_xlabel("how unequal a group's elements are: log-sd of their sizes")
            self._draw(grid[0, column], "largest", beta2)
            self._draw(grid[1, column], "nmse", beta2)
        grid[0, 0].set_ylabel("largest update / exact Adam's")
        grid[1, 0].set_ylabel("energy of the updates' errors / of exact updates")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        result.legend(handles, labels, loc="outside right center", title="format, bytes")
        return result

    def _draw(self, axes: Axes, result: str, beta2: float) -> None:
        for place, name in enumerate(self.formats):
            if name == "exact" and result == "nmse":
                continue  # float32's own rounding: 1e-12
            seeds = np.array(
                [
                    self.values("unequal", result, name, beta2=beta2, log_sd=sd)
                    for sd in self.log_sds
                ]
            )
            middle = np.median(seeds, axis=1)
            ours = FORMATS[name].source.startswith(OURS)
            axes.errorbar(
                np.array(self.log_sds) + 0.012 * (place - len(self.formats) / 2),
                middle,
                yerr=[middle - seeds.min(axis=1), seeds.max(axis=1) - middle],
                color=COLORS[name],
                linestyle="-" if ours else "--",
                linewidth=2.2 if ours else 1.2,
                marker="o" if ours else "x",
                capsize=2,
                label=f"{name}, {FORMATS[name].bytes:.3g}",
            )
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
