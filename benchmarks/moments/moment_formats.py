"""How Adam's updates suffer from the formats in which its moments are stored, in simulation.

    OMP_NUM_THREADS=1 python benchmarks/moments/moment_formats.py --picture moment_formats.png

prints a table for each simulation and a summary, for the formats of this project and for those of
FlashOptim, bitsandbytes and torchao by their published formulas. It takes a few minutes on one
core; --quick takes seconds and is too small for conclusions. docs/moment_formats.md explains it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from moment_report import Record, Report
from moment_simulations import (
    Results,
    Setting,
    constant,
    drop,
    drop_times,
    stopped,
    stored_error,
    unequal,
)
from rich.console import Console
from simulated_formats import FORMATS, Format
from tqdm import tqdm

LOG_SDS = (0.0, 0.5, 1.0, 1.5, 2.0)
CONSTANT_STEPS, STORED_TIMES = 300, 20
QUICK = {"rows": 64, "steps": 150, "seeds": 1}
FULL = {"rows": 1000, "steps": 600, "seeds": 3}

Tick = Callable[[], Any]
Job = tuple[Record, int, Callable[[Tick], Results]]


def jobs(
    formats: list[Format], setting: Setting, beta2s: list[float], quick: bool
) -> Iterator[Job]:
    """What to simulate with one seed: the keys of the records, ticks, and the simulation."""
    for beta2 in beta2s:
        for sd in LOG_SDS:
            keys = {"simulation": "unequal", "beta2": beta2, "log_sd": sd}
            yield keys, setting.steps, partial(unequal, formats, setting, beta2, sd)
        times = (setting.steps // 2, setting.steps) if quick else drop_times(beta2)
        keys = {"simulation": "drop", "beta2": beta2}
        yield keys, times[1], partial(drop, formats, setting, beta2, times)
        keys = {"simulation": "stopped", "beta2": beta2}
        yield keys, setting.steps, partial(stopped, formats, setting, beta2)
        keys = {"simulation": "constant", "beta2": beta2}
        yield keys, CONSTANT_STEPS, partial(constant, formats, setting, beta2, CONSTANT_STEPS)
    for sd in LOG_SDS:
        keys = {"simulation": "stored_error", "log_sd": sd}
        yield keys, STORED_TIMES, partial(stored_error, formats, setting, sd, STORED_TIMES)


def simulate(
    formats: list[Format], settings: list[Setting], beta2s: list[float], quick: bool
) -> list[Record]:
    """All simulations with each setting, under a progress bar."""
    todo = [
        ({**keys, "seed": setting.seed}, ticks, run)
        for setting in settings
        for keys, ticks, run in jobs(formats, setting, beta2s, quick)
    ]
    records = []
    with tqdm(total=sum(ticks for _, ticks, _ in todo), unit="step", dynamic_ncols=True) as bar:
        for keys, _, run in todo:
            bar.set_description(keys["simulation"])
            with np.errstate(all="raise", under="ignore"):
                found = run(bar.update)
            records += [{**keys, "format": name, **results} for name, results in found.items()]
    return records


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="groups of 32 elements, a multiple of 8")
    parser.add_argument("--steps", type=int, help="of the runs on unequal and stopped gradients")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, help="how many; tables have the median")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=FORMATS, help="formats")
    parser.add_argument("--beta2", nargs="+", type=float, default=[0.999, 0.95])
    parser.add_argument("--size", type=float, default=1e-3, help="of a typical gradient")
    parser.add_argument("--quick", action="store_true", help="small runs that take seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures of all seeds")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG, PDF or SVG")
    result = parser.parse_args(arguments)
    for name, value in (QUICK if result.quick else FULL).items():
        if getattr(result, name) is None:
            setattr(result, name, value)
    if result.rows < 8 or result.rows % 8:
        parser.error(f"--rows must be a multiple of 8, found {result.rows}")
    if result.steps < 50:
        parser.error(f"--steps must be at least 50, found {result.steps}")
    if result.seeds < 1:
        parser.error(f"--seeds must be at least 1, found {result.seeds}")
    for beta2 in result.beta2:
        if not 0 < beta2 < 1:
            parser.error(f"--beta2 must be between 0 and 1, found {beta2:g}")
    return result


def main(arguments: list[str]) -> None:
    options = parsed(arguments)
    formats = [FORMATS[name] for name in FORMATS if options.only is None or name in options.only]
    seeds = range(options.seed, options.seed + options.seeds)
    settings = [Setting(options.rows, options.steps, seed, options.size) for seed in seeds]
    records = simulate(formats, settings, options.beta2, options.quick)
    report = Report(records)
    console = Console(width=150)
    for table in report.tables():
        console.print(table)
    if options.json:
        about = {
            format.name: {
                "first moment": format.first.name,
                "second moment": format.square.name,
                "bytes of both": format.bytes,
                "source": format.source,
            }
            for format in formats
        }
        chosen = {name: getattr(options, name) for name in ("rows", "steps", "beta2", "size")}
        content = {"settings": {**chosen, "seeds": list(seeds)}, "formats": about}
        options.json.write_text(json.dumps({**content, "records": records}, indent=1) + "\n")
    if options.picture:
        report.picture().savefig(options.picture)


if __name__ == "__main__":
    main(sys.argv[1:])
