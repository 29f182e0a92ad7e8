"""How an optimizer stores its numbers, and what that costs: four arms, some seeds each, two jobs.

The jobs are train_gpt.py's GPT and finetune_task.py's fine-tune. All arms of a seed start from the
same weights and see the same batches. Prints tables, saves a picture and the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curves import smooth
from finetune_task import FineTune
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from tqdm import tqdm
from train_gpt import KEEP_FLOAT32, MAX_GRAD_NORM, Settings, Trainer

import amp_mp as amp
from amp_mp import _C
from amp_mp.optim.state.memory_report import report_memory

REFERENCE = "reference"
COLORS = {REFERENCE: "black", "exact": "tab:blue", "lean": "tab:orange", "tiny": "tab:red"}
# How far from the reference an arm may end, in spreads of the reference over the seeds: another
# seed's result is as good, so a difference within that is no loss.
ALLOWED = {"lean": 1, "tiny": 2}


@dataclass(frozen=True)
class Job:
    """What to train: `begin` makes it, in float32, from a seed and a number of steps."""

    title: str
    unit: str  # of losses
    steps: int
    begin: Callable[[int, int], Trainer | FineTune]
    keep_fp32: tuple[type[nn.Module], ...] | None = None  # amp.prepare's


def gpt(seed: int, steps: int, **others: Any) -> Trainer:
    others |= {"seed": seed, "steps": steps, "eval_every": steps, "device": "cpu"}
    return Trainer(Settings("float32", **others))


JOBS = {
    "gpt": Job("GPT from scratch", "nats per byte", 150, gpt, KEEP_FLOAT32),
    "finetune": Job("pitch model, fine-tuned", "nats per frame", 150, FineTune),
}


@dataclass
class Run:
    """What an arm measured with one seed, and the weights it ended with.

    `accuracy` is the share of held-out pitches found, before and after, of a fine-tune only; `size`
    the bytes a parameter of the weights, float32 ones too, and of all that the optimizer keeps.
    """

    train_loss: list[float] = field(default_factory=list)
    validation_loss: float = math.nan
    accuracy: list[float] = field(default_factory=list)
    size: float = math.nan
    weights: list[Tensor] = field(default_factory=list)


class ReferenceAdamW(torch.optim.Optimizer):
    """AdamW on float32 masters by torch's elementwise operations; "exact" has to give its bits.

    No fused operations (addcmul, lerp): they round once where the formula rounds twice. Constants
    are doubles, rounded as they meet a tensor. `masters` are low-precision parameters' true values.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], masters: Mapping[Any, Tensor]) -> None:
        defaults = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self.powers = [1.0, 1.0]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if parameter.dtype != torch.float32:
                state["master"] = masters[parameter]
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One update of every parameter; all need a gradient."""
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        # The order of the sum decides the norm's last bits, so it is taken from where "exact" does.
        norm = math.sqrt(_C.measure(gradients)[-1, 0].item())
        multiplier = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
        self.powers = [p * b for p, b in zip(self.powers, self.defaults["betas"], strict=True)]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            decay, step_size = 1 - lr * group["weight_decay"], lr / (1 - self.powers[0])
            root = 1 / math.sqrt(1 - self.powers[1])
            for parameter in group["params"]:
                state = self.state[parameter]
                w, m, v = state.get("master", parameter), state["exp_avg"], state["exp_avg_sq"]
                g = parameter.grad.float() * multiplier
                m.copy_(m * beta1 + g * (1 - beta1))
                v.copy_(v * beta2 + g * g * (1 - beta2))
                # torch's own float32 root is rounded wrongly for one number in five (MKL's).
                deviation = v.double().sqrt().float() * root + group["eps"]
                w.copy_(w * decay - m / deviation * step_size)
                if w is not parameter:
                    parameter.copy_(away_from_zero(w))


def away_from_zero(x: Tensor) -> Tensor:
    """Finite float32 to the nearest bfloat16; of two as near, the larger in magnitude."""
    return ((x.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def begin(job: Job, arm: str, seed: int, steps: int) -> Trainer | FineTune:
    """The job with a bfloat16 model and the arm's optimizer, before its first step."""
    task = job.begin(seed, steps)
    originals = {p: p.detach().clone() for p in task.model.parameters()}
    amp.prepare(task.model, torch.bfloat16, keep_fp32=job.keep_fp32)
    # Decay pulls matrices towards zero; biases and norms have no reason to be there.
    matrices = [p for p in originals if p.dim() > 1]
    vectors = [p for p in originals if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    task.optimizer = (
        ReferenceAdamW(groups, originals)
        if arm == REFERENCE
        else amp.optim.AdamW(groups, memory=arm, max_grad_norm=MAX_GRAD_NORM, seed=seed)
    )
    return task


def train(job: Job, arm: str, seed: int, steps: int, bar: tqdm[Any]) -> Run:
    """Train as the arm does, moving the progress bar."""
    task, run = begin(job, arm, seed, steps), Run()
    judges = [task.accuracy] if isinstance(task, FineTune) else []
    run.accuracy = [judge() for judge in judges]
    for _ in range(steps):
        run.train_loss.append(task.step())
        bar.set_description(f"{arm:9} seed {seed} loss {run.train_loss[-1]:.3f}", refresh=False)
        bar.update()
    run.validation_loss = task.evaluate()
    run.accuracy += [judge() for judge in judges]
    run.weights = [p.detach() for p in task.model.parameters()]
    run.size = report_memory(task.optimizer).bytes_per_parameter
    return run


def compare(job: Job, seeds: int, steps: int) -> dict[str, list[Run]]:
    """Each arm's runs, one a seed."""
    with tqdm(total=len(COLORS) * seeds * steps, unit="step", dynamic_ncols=True) as bar:
        return {arm: [train(job, arm, s, steps, bar) for s in range(seeds)] for arm in COLORS}


def differing_bytes(runs: tuple[Run, Run]) -> int:
    """How many bytes of the weights are not the same at the end."""
    first, second = (torch.cat([w.flatten().view(torch.uint8) for w in r.weights]) for r in runs)
    return int((first != second).sum())


def summary(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """Each arm's figures, and whether it is as close to the reference as it should be."""
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
    """One row per arm; losses are validation losses at the end, their mean over the seeds."""
    names = ("loss", "sd", "spread", "to ref.", "pitches, %", "B/param", "passed")
    promises = "exact: the reference's bits; lean: within its spread; tiny: within twice that"
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
    """Save the training losses, and below them how far each arm is from the reference."""
    picture = Figure(figsize=(7, 8), dpi=120, layout="constrained")
    above, below = picture.subplots(2, 1, sharex=True)
    curves = {a: np.array([smooth(run.train_loss) for run in r]) for a, r in runs.items()}
    for arm, curve in curves.items():
        for axes, y in ((above, curve), (below, curve - curves[REFERENCE])):
            x = range(1, y.shape[1] + 1)
            style = "--" if arm == "exact" else "-"  # it would hide the reference below it
            axes.plot(x, y.mean(0), style, color=COLORS[arm], label=arm)
            axes.fill_between(x, y.min(0), y.max(0), color=COLORS[arm], alpha=0.15)
            axes.grid(alpha=0.3)
    above.set(title=job.title, ylabel=f"training loss, smoothed ({job.unit})")
    below.set(xlabel="step", ylabel="difference to the reference of the same seed")
    above.legend(title="mean and range of the seeds")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    command_line = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    command_line.add_argument("--job", choices=(*JOBS, "both"), default="both")
    command_line.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    command_line.add_argument("--steps", type=int, default=0, help="of a run; 0: each job's own")
    command_line.add_argument("--threads", type=int, default=torch.get_num_threads())
    command_line.add_argument("--out", type=Path, default=Path("docs"), help="folder for results")
    options = command_line.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for name in JOBS if options.job == "both" else [options.job]:
        runs = compare(JOBS[name], options.seeds, options.steps or JOBS[name].steps)
        rows = summary(runs)
        Console().print(table(JOBS[name], rows))
        stem = options.out / f"formats_{name}"
        draw(JOBS[name], runs, stem.with_suffix(".png"))
        stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        print(f"picture and figures: {stem}.png and .json")


if __name__ == "__main__":
    main()
