"""Compare each memory= with float32 masters, over several seeds.

Two short jobs train the GPT of train_gpt.py and fine-tune the model of finetune_task.py. Two long
ones train a smaller GPT, from scratch and further at a small learning rate. With the same seed, all
formats start from the same weights and see the same batches. The program prints a table for each
job, and saves a picture and the numbers. docs/formats.md has the results.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curves import smooth
from finetune_task import FineTune
from gpt_settings import Settings
from gpt_trainer import MAX_GRAD_NORM, Trainer
from matplotlib.figure import Figure
from memory import state_bytes
from progress import Bar
from reference_adamw import ReferenceAdamW
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

import amp_mp as amp

REFERENCE = "reference"
COLORS = {
    REFERENCE: "black",
    "exact": "tab:blue",
    "lean": "tab:orange",
    "tiny": "tab:red",
    "micro": "tab:purple",
    "masterless": "tab:green",
    "nearest": "tab:brown",
}
NEAREST = {"memory": "masterless", "rounding": "nearest"}  # plain bfloat16: what a long run loses
PRESETS = tuple(arm for arm in COLORS if arm != "nearest")
LONG = (REFERENCE, "exact", "micro", "masterless", "nearest")
# The largest allowed difference to the reference, in units of its spread over the seeds.
# All seeds are equally good, so a smaller difference is not a loss.
ALLOWED = {"lean": 1, "tiny": 2, "micro": 2, "masterless": 2, "nearest": 2}


@dataclass(frozen=True)
class Job:
    """What to train: `begin` makes the float32 model from a seed and a number of steps."""

    title: str
    unit: str  # of losses
    steps: int
    begin: Callable[[int, int], Trainer | FineTune]
    arms: tuple[str, ...] = PRESETS
    beta2: float = 0.999


def gpt(seed: int, steps: int, **others: Any) -> Trainer:
    others |= {"seed": seed, "steps": steps, "eval_every": steps, "device": "cpu"}
    return Trainer(Settings("float32", **others))


SMALLER: dict[str, Any] = {"layers": 2, "width": 64, "batch": 4, "context": 32}
SMALL_RATE = 6e-7
TRAINED_SEED, TRAINED_STEPS = 2**16, 1000  # no run's seed


@functools.cache
def trained() -> dict[str, Tensor]:
    """The weights of the smaller GPT after TRAINED_STEPS steps in float32."""
    task = gpt(TRAINED_SEED, TRAINED_STEPS, **SMALLER)
    for _ in range(TRAINED_STEPS):
        task.step()
    return task.model.state_dict()


def further(seed: int, steps: int) -> Trainer:
    """Continue from `trained` at a rate that makes every update less than half of a last bit."""
    task = gpt(seed, steps, lr=SMALL_RATE, **SMALLER)
    task.model.load_state_dict(trained())
    return task


BYTES = "nats per byte"
JOBS = {
    "gpt": Job("GPT from scratch", BYTES, 150, gpt),
    "finetune": Job("pitch model, fine-tuned", "nats per frame", 150, FineTune),
    "long": Job(
        "smaller GPT from scratch",
        BYTES,
        2000,
        functools.partial(gpt, **SMALLER),
        LONG,
        beta2=0.99,
    ),
    "further": Job("smaller GPT, trained further", BYTES, 2000, further, LONG, beta2=0.99),
}


@dataclass
class Run:
    """What an arm measured with one seed, and its final weights.

    `accuracy` has the share of held-out pitches found before and after fine-tuning; it is empty for
    the GPT. `size` is bytes per parameter, of all weights and all that the optimizer keeps.
    """

    train_loss: list[float] = field(default_factory=list)
    validation_loss: float = math.nan
    accuracy: list[float] = field(default_factory=list)
    size: float = math.nan
    weights: list[Tensor] = field(default_factory=list)


def begin(job: Job, arm: str, seed: int, steps: int) -> Trainer | FineTune:
    """Make the job's bfloat16 model and the arm's optimizer."""
    task = job.begin(seed, steps)
    originals = {p: p.detach().clone() for p in task.model.parameters()}
    amp.prepare(task.model, torch.bfloat16)
    # Weight decay is for matrices; biases and norms should not be pulled towards zero.
    matrices = [p for p in originals if p.dim() > 1]
    vectors = [p for p in originals if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    formats = NEAREST if arm == "nearest" else {"memory": arm}
    betas = (0.9, job.beta2)
    task.optimizer = (
        ReferenceAdamW(groups, originals, betas)
        if arm == REFERENCE
        else amp.optim.AdamW(groups, betas=betas, **formats, max_grad_norm=MAX_GRAD_NORM, seed=seed)
    )
    return task


def train(job: Job, arm: str, seed: int, steps: int, bar: Bar) -> Run:
    """Train one arm with one seed and advance the progress bar."""
    task, run = begin(job, arm, seed, steps), Run()
    judges = [task.accuracy] if isinstance(task, FineTune) else []
    run.accuracy = [judge() for judge in judges]
    for _ in range(steps):
        run.train_loss.append(task.step())
        bar.set_description(f"{arm:10} seed {seed} loss {run.train_loss[-1]:.3f}", refresh=False)
        bar.update()
    run.validation_loss = task.evaluate()
    run.accuracy += [judge() for judge in judges]
    run.weights = [p.detach() for p in task.model.parameters()]
    parameters = sum(weight.numel() for weight in run.weights)
    run.size = state_bytes(task.model, task.optimizer) / parameters
    return run


def compare(job: Job, seeds: int, steps: int) -> dict[str, list[Run]]:
    """Train every arm with every seed; returns the runs by arm."""
    with Bar(total=len(job.arms) * seeds * steps, unit="step", dynamic_ncols=True) as bar:
        return {arm: [train(job, arm, s, steps, bar) for s in range(seeds)] for arm in job.arms}


def differing_bytes(runs: tuple[Run, Run]) -> int:
    """The number of bytes in which the final weights of two runs differ."""
    first, second = (torch.cat([w.flatten().view(torch.uint8) for w in r.weights]) for r in runs)
    return int((first != second).sum())


def summary(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """The numbers of each arm, and whether it is close enough to the reference."""
    wanted = [run.validation_loss for run in runs[REFERENCE]]
    result: dict[str, dict[str, Any]] = {}
    for arm, each in runs.items():
        found = [run.validation_loss for run in each]
        row: dict[str, Any] = {
            "validation_loss": found,
            "mean": statistics.mean(found),
            "deviation": statistics.stdev(found) if len(found) > 1 else 0.0,
            "spread": max(found) - min(found),
            "to_reference": max(abs(a - b) for a, b in zip(found, wanted, strict=True)),
            "accuracy": [run.accuracy for run in each],
            "bytes_per_parameter": each[0].size,
            "differing_bytes": list(map(differing_bytes, zip(each, runs[REFERENCE], strict=True))),
        }
        near = row["to_reference"] <= ALLOWED.get(arm, 0) * (max(wanted) - min(wanted))
        result[arm] = row | {"passed": near if arm in ALLOWED else not any(row["differing_bytes"])}
    return result


def table(job: Job, rows: Mapping[str, dict[str, Any]]) -> Table:
    """One row per arm; the loss is the mean over the seeds of the final validation loss."""
    names = ("loss", "sd", "spread", "to ref.", "pitches, %", "B/param", "passed")
    promises = (
        "passed: exact has the reference's bits; lean is within its spread, the others within "
        "twice that"
    )
    result = Table(Column(no_wrap=True), *names, title=job.title, caption=promises)
    for arm, row in rows.items():
        pitches = [f"{100 * share:.1f}" for share in np.mean(row["accuracy"], axis=0)]
        seeds = (f"FAIL ({n} bytes)" if n else "PASS" for n in row["differing_bytes"])
        passed = " ".join(seeds) if arm == "exact" else ("FAIL", "PASS")[row["passed"]]
        result.add_row(
            arm,
            *(f"{row[name]:.4f}" for name in ("mean", "deviation", "spread", "to_reference")),
            " -> ".join(pitches),
            f"{row['bytes_per_parameter']:.2f}",
            "" if arm == REFERENCE else passed,
        )
    return result


def draw(job: Job, runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Save a picture of the training losses, and below it of the differences to the reference."""
    picture = Figure(figsize=(7, 8), dpi=120, layout="constrained")
    above, below = picture.subplots(2, 1, sharex=True)
    curves = {a: np.array([smooth(run.train_loss) for run in r]) for a, r in runs.items()}
    for arm, curve in curves.items():
        for axes, y in ((above, curve), (below, curve - curves[REFERENCE])):
            x = range(1, y.shape[1] + 1)
            style = "--" if arm == "exact" else "-"  # lies on top of the reference
            axes.plot(x, y.mean(0), style, color=COLORS[arm], label=arm)
            axes.fill_between(x, y.min(0), y.max(0), color=COLORS[arm], alpha=0.15)
            axes.grid(alpha=0.3)
    above.set(title=job.title, ylabel=f"training loss, smoothed ({job.unit})")
    below.set(xlabel="step", ylabel="difference to the reference of the same seed")
    above.legend(title="mean and range of the seeds")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = command_line.add_argument
    add("--job", choices=(*JOBS, "all"), default="all", help="what to train (default: all)")
    add("--seeds", type=int, default=3, help="number of seeds, runs per format (default: 3)")
    add("--steps", type=int, default=0, help="steps of a run; 0: each job's own number")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    add("--out", type=Path, default=Path("docs/figures"), help="folder (default: docs/figures)")
    options = command_line.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for name in JOBS if options.job == "all" else [options.job]:
        runs = compare(JOBS[name], options.seeds, options.steps or JOBS[name].steps)
        rows = summary(runs)
        Console().print(table(JOBS[name], rows))
        stem = options.out / f"formats_{name}"
        draw(JOBS[name], runs, stem.with_suffix(".png"))
        stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        print(f"picture and numbers: {stem}.png and .json")


if __name__ == "__main__":
    main()
