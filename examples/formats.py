"""Compare each memory= with float32 masters, over several seeds.

Two short jobs train the GPT of train_gpt.py and fine-tune the model of finetune_task.py. The long
ones train a smaller GPT: from scratch, with AdamW and with Muon, and further at small learning
rates. With the same seed, all formats start from the same weights and see the same batches. The
program prints a table for each job, and saves a picture and the numbers. The job "masters" trains
nothing: it moves weights by random updates. docs/formats.md and docs/muon.md have the results.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curves import smooth
from finetune_task import FineTune
from gpt_settings import Settings
from gpt_trainer import MAX_GRAD_NORM, Trainer
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure
from memory import state_bytes
from progress import Bar
from reference_adamw import ReferenceAdamW
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

import amp_mp as amp

REFERENCE = "reference"
PRESETS = ("exact", "lean", "tiny", "micro", "nano", "masterless")
# What an arm passes to its optimizer, besides REFERENCE, which is torch operations.
ARMS: dict[str, dict[str, Any]] = {preset: {"memory": preset} for preset in PRESETS} | {
    "nearest": {"memory": "masterless", "rounding": "nearest"},  # plain bfloat16
    "micro, m8": {"memory": "micro", "momentum_buffer": "m8"},
}
COLORS = dict(zip((REFERENCE, *ARMS), ("black", *TABLEAU_COLORS), strict=False))
# The largest allowed difference to the reference, in units of its spread over the seeds.
# All seeds are equally good, so a smaller difference is not a loss.
ALLOWED = dict.fromkeys(ARMS, 2) | {"lean": 1, "nano": 1}
del ALLOWED["exact"]  # has to have the reference's bits


@dataclass(frozen=True)
class Job:
    """What to train: `begin` makes the float32 model from a seed and a number of steps.

    The first arm is the one that the others are compared with. With `muon` the blocks' matrices
    take Muon, and `betas` are of AdamW for all others.
    """

    title: str
    unit: str  # of losses
    steps: int
    begin: Callable[[int, int], Trainer | FineTune]
    arms: tuple[str, ...] = (REFERENCE, *PRESETS)
    betas: tuple[float, float] = (0.9, 0.999)
    seeds: int = 3
    muon: bool = False


def gpt(seed: int, steps: int, **others: Any) -> Trainer:
    others |= {"seed": seed, "steps": steps, "eval_every": steps, "device": "cpu"}
    return Trainer(Settings("float32", **others))


SMALLER: dict[str, Any] = {"layers": 2, "width": 64, "batch": 4, "context": 32}
TRAINED_SEED, TRAINED_STEPS = 2**16, 1000  # no run's seed


@functools.cache
def trained() -> dict[str, Tensor]:
    """The weights of the smaller GPT after TRAINED_STEPS steps in float32."""
    task = gpt(TRAINED_SEED, TRAINED_STEPS, **SMALLER)
    for _ in range(TRAINED_STEPS):
        task.step()
    return task.model.state_dict()


def further(seed: int, steps: int, lr: float) -> Trainer:
    """Continue from `trained` at a small rate: at 6e-7 updates are below half of a last bit."""
    task = gpt(seed, steps, lr=lr, **SMALLER)
    task.model.load_state_dict(trained())
    return task


BYTES = "nats per byte"
FEW = (REFERENCE, "micro", "nano")
LONG = Job(
    "smaller GPT from scratch",
    BYTES,
    2000,
    functools.partial(gpt, **SMALLER),
    (REFERENCE, *PRESETS, "nearest"),
    betas=(0.9, 0.99),
    seeds=5,
)
JOBS = {
    "gpt": Job("GPT from scratch", BYTES, 150, gpt),
    "finetune": Job("pitch model, fine-tuned", "nats per frame", 150, FineTune),
    "long": LONG,
    "beta1": replace(LONG, title="beta1 .95", arms=FEW, betas=(0.95, 0.99), seeds=3),
    "batch": replace(
        LONG,
        title="batches 8 times as large",
        steps=1000,
        begin=functools.partial(gpt, **SMALLER | {"batch": 32}),
        arms=FEW,
        seeds=3,
    ),
}
JOBS |= {
    name: replace(
        LONG,
        title=f"smaller GPT, trained further at {lr:g}",
        begin=functools.partial(further, lr=lr),
        arms=arms,
        seeds=3,
    )
    for name, lr, arms in (
        ("further", 6e-7, (REFERENCE, "exact", "micro", "nano", "masterless", "nearest")),
        ("further_1e-6", 1e-6, FEW),
        ("further_1e-5", 1e-5, FEW),
    )
}
JOBS |= {
    f"muon_{width}": replace(
        LONG,
        title=f"smaller GPT of width {width}, Muon",
        steps=1000,
        begin=functools.partial(gpt, **SMALLER | {"width": width}),
        arms=("exact", "lean", "micro, m8", "micro", "nano"),
        seeds=3,
        muon=True,
    )
    for width in (64, 128)
}


@dataclass
class Run:
    """What an arm measured with one seed, and its final weights.

    `start` is the validation loss before the first step. `accuracy` has the share of held-out
    pitches found before and after fine-tuning; it is empty for the GPT. `size` is bytes per
    parameter, of all weights and all that the optimizer keeps.
    """

    train_loss: list[float] = field(default_factory=list)
    validation_loss: float = math.nan
    start: float = math.nan
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
    if arm == REFERENCE:
        task.optimizer = ReferenceAdamW(groups, originals, job.betas)
        return task
    options = ARMS[arm] | {"max_grad_norm": MAX_GRAD_NORM, "seed": seed}
    if not job.muon:
        task.optimizer = amp.optim.AdamW(groups, betas=job.betas, **options)
        return task
    task.optimizer = amp.optim.Muon(
        task.model,
        weight_decay=0.01,
        adjust_lr_fn="match_rms_adamw",
        split={"*.qkv.weight": 3},
        others={"betas": job.betas, "weight_decay": 0.0},
        **options,
    )
    return task


def train(job: Job, arm: str, seed: int, steps: int, bar: Bar) -> Run:
    """Train one arm with one seed and advance the progress bar."""
    task, run = begin(job, arm, seed, steps), Run()
    judges = [task.accuracy] if isinstance(task, FineTune) else []
    run.start = task.evaluate()
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
    """The numbers of each arm, and whether it is close enough to the first one, the reference."""
    reference = next(iter(runs.values()))
    wanted = [run.validation_loss for run in reference]
    result: dict[str, dict[str, Any]] = {}
    for arm, each in runs.items():
        found = [run.validation_loss for run in each]
        differences = [a - b for a, b in zip(found, wanted, strict=True)]
        row: dict[str, Any] = {
            "start": [run.start for run in each],
            "validation_loss": found,
            "mean": statistics.mean(found),
            "deviation": statistics.stdev(found) if len(found) > 1 else 0.0,
            "spread": max(found) - min(found),
            "differences": differences,
            "mean_difference": statistics.mean(differences),
            "to_reference": max(map(abs, differences)),
            "accuracy": [run.accuracy for run in each],
            "bytes_per_parameter": each[0].size,
            "differing_bytes": list(map(differing_bytes, zip(each, reference, strict=True))),
        }
        near = row["to_reference"] <= ALLOWED.get(arm, 0) * (max(wanted) - min(wanted))
        result[arm] = row | {"passed": near if arm in ALLOWED else not any(row["differing_bytes"])}
    return result


def table(job: Job, rows: Mapping[str, dict[str, Any]]) -> Table:
    """One row per arm; losses are means over the seeds, differences of two runs with one seed."""
    result = Table(
        Column("", no_wrap=True),
        *(
            "loss",
            "gained",
            "spread",
            "difference",
            "of each seed",
            "pitches, %",
            "B/param",
            "passed",
        ),
        title=job.title,
        caption="loss: of validation, at the end; gained: since before the first step\n"
        f"difference: to {job.arms[0]} with the same seed, mean and each; more is worse\n"
        "passed: exact has the reference's bits; lean and nano are within its spread, the others "
        "within twice that",
        caption_justify="left",
    )
    for arm, row in rows.items():
        pitches = [f"{100 * share:.1f}" for share in np.mean(row["accuracy"], axis=0)]
        seeds = (f"FAIL ({n} bytes)" if n else "PASS" for n in row["differing_bytes"])
        passed = " ".join(seeds) if arm == "exact" else ("FAIL", "PASS")[row["passed"]]
        compared = (
            f"{row['mean_difference']:+.5f}",
            " ".join(f"{each:+.5f}" for each in row["differences"]),
        )
        first = arm == job.arms[0]
        result.add_row(
            arm,
            f"{row['mean']:.5f}",
            f"{statistics.mean(row['start']) - row['mean']:.5f}",
            f"{row['spread']:.5f}",
            *(("", "") if first else compared),
            " -> ".join(pitches),
            f"{row['bytes_per_parameter']:.2f}",
            "" if first else passed,
        )
    return result


def draw(job: Job, runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Save a picture of the training losses, and below it of the differences to the reference."""
    picture = Figure(figsize=(7, 8), dpi=120, layout="constrained")
    above, below = picture.subplots(2, 1, sharex=True)
    curves = {a: np.array([smooth(run.train_loss) for run in r]) for a, r in runs.items()}
    reference = next(iter(curves.values()))
    for arm, curve in curves.items():
        for axes, y in ((above, curve), (below, curve - reference)):
            x = range(1, y.shape[1] + 1)
            style = "--" if arm == "exact" else "-"  # lies on top of the reference
            axes.plot(x, y.mean(0), style, color=COLORS[arm], label=arm)
            axes.fill_between(x, y.min(0), y.max(0), color=COLORS[arm], alpha=0.15)
            axes.grid(alpha=0.3)
    above.set(title=job.title, ylabel=f"training loss, smoothed ({job.unit})")
    below.set(xlabel="step", ylabel="difference to the reference of the same seed")
    above.legend(title="mean and range of the seeds")
    picture.savefig(path)


RATES = (1e-4, 1e-5, 5e-6, 3e-6, 1e-6)


def masters_alone(steps: int) -> dict[str, dict[str, tuple[float, float]]]:
    """How masters alone follow SGD's updates, of mean .3 and deviation 1 times the rate.

    By format and rate, of 100,000 bfloat16 weights of deviation .05: the error of the move beside
    float64's (both rms), and the share of the way gone in the mean.
    """
    torch.manual_seed(0)
    start = (0.05 * torch.randn(250, 400)).bfloat16()
    cases = [(form, rate) for form in ("split24", "split20") for rate in RATES]
    model = nn.ParameterList(start.clone() for _ in cases)
    groups = [{"params": [w], "master": form} for w, (form, _) in zip(model, cases, strict=True)]
    optimizer = amp.optim.SGD(groups)
    for group, (_, rate) in zip(optimizer.param_groups, cases, strict=True):
        group["lr"] = rate  # not in the constructor, which warns of small rates
    wanted = torch.zeros_like(start, dtype=torch.float64)
    for _ in range(steps):
        gradient = -(0.3 + torch.randn(start.shape)).bfloat16()
        wanted -= gradient
        for weight in model:
            weight.grad = gradient
        optimizer.step()
    result: dict[str, dict[str, tuple[float, float]]] = {}
    masters = amp.float32_state_dict(model).values()
    for (form, rate), master in zip(cases, masters, strict=True):
        found = (master.double() - start) / rate
        error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        figures = error.item(), (found.mean() / wanted.mean()).item()
        result.setdefault(form, {})[f"{rate:g}"] = figures
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = command_line.add_argument
    add(
        "--job",
        choices=(*JOBS, "masters", "all"),
        default="all",
        help="what to train (default: all)",
    )
    add("--seeds", type=int, default=0, help="runs per format; 0: each job's own number, 3 or 5")
    add("--steps", type=int, default=0, help="steps of a run; 0: each job's own number")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    add("--out", type=Path, default=Path("docs/figures"), help="folder (default: docs/figures)")
    options = command_line.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in (*JOBS, "masters") if options.job == "all" else [options.job]:
        stem = options.out / f"formats_{name}"
        numbers: Mapping[str, Any]
        if name == "masters":
            numbers = masters_alone(options.steps or 2000)
            report = Table("", *map("{:g}".format, RATES), title="error of the move (share gone)")
            for form, row in numbers.items():
                report.add_row(form, *(f"{error:.4f} ({gone:.3f})" for error, gone in row.values()))
        else:
            job = JOBS[name]
            runs = compare(job, options.seeds or job.seeds, options.steps or job.steps)
            numbers = summary(runs)
            report = table(job, numbers)
            draw(job, runs, stem.with_suffix(".png"))
        Console(width=150).print(report)
        stem.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
        print(f"numbers: {stem}.json")


if __name__ == "__main__":
    main()
