"""Train one GPT in float32, under torch.autocast and with amp_mp, and compare the three.

All three start from the same weights and see the same batches:

  float32         float32 weights, torch's clipping and fused AdamW
  torch.autocast  the same under torch.autocast in bfloat16
  amp_mp          bfloat16 weights, amp_mp's AdamW, which clips inside the step

The runs take turns: three times a step each, then ten. A run is stopped after three steps if the
fastest of them took five times as long as the fastest of float32's three. The program prints a
table, draws the losses in demo/loss.png and writes the numbers to demo/result.json.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from curves import figure, smooth
from gpt_settings import Settings, SettingsError
from gpt_trainer import Run, Trainer
from progress import Bar
from rich.console import Console
from rich.table import Table

import amp_mp as amp
from amp_mp.casting.products import choose_products, describe_products

FOLDER = Path(__file__).resolve().parent.parent / "demo"
CHUNK = 10  # steps of one run before the next takes its turn: a disturbance then slows all of them
# Single steps in turn before an arm may be stopped. Other work slows one of them now and then, and
# all three of one arm hardly ever; a hopeless arm's can take ten seconds each.
TRIAL = 3
HOPELESS = 5.0  # times float32's time
ARMS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32", "optimizer": "torch-adamw"},
    "torch.autocast": {"precision": "autocast", "optimizer": "torch-adamw"},
    "amp_mp": {"precision": "bfloat16", "optimizer": "adamw"},
}
BASELINE = "float32"
COLORS = ("tab:blue", "tab:green", "tab:orange")


def compare(steps: int, **common: Any) -> dict[str, Trainer]:
    """Train every arm that is not hopeless, by turns; ``common`` are further settings of all."""
    trainers = {name: Trainer(Settings(**arm, steps=steps, **common)) for name, arm in ARMS.items()}
    chosen = amp.build_info()["products"]["bfloat16"]["layers"]  # by `prepare`, for the process
    chosen = "auto" if chosen == "undecided" else chosen
    form = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
    going, done = dict(trainers), 0
    with Bar(total=len(ARMS) * steps, dynamic_ncols=True, bar_format=form) as bar:
        while done < steps:
            turn = 1 if done < TRIAL else min(CHUNK, steps - done)
            for name, trainer in going.items():
                # torch.autocast computes as it does in a script without amp_mp.
                choose_products("native" if name == "torch.autocast" else chosen, torch.bfloat16)
                for _ in range(turn):
                    bar.set_description(f"{name:14} loss {trainer.step():.3f}", False)
                    bar.update()
                if done >= TRIAL:
                    bar.set_postfix_str(f"about {remaining(going.values(), steps)} left")
            done += turn
            if done == TRIAL:
                least = {name: min(each.run.step_seconds) for name, each in trainers.items()}
                limit = HOPELESS * least[BASELINE]
                going = {name: each for name, each in trainers.items() if least[name] <= limit}
                bar.total -= (len(trainers) - len(going)) * (steps - done)
    choose_products(chosen, torch.bfloat16)
    return trainers


def remaining(trainers: Iterable[Trainer], steps: int) -> str:
    """The time that these arms together still need."""
    return Bar.format_interval(
        sum((steps - each.steps_done) * each.run.median_step_seconds() for each in trainers)
    )


def stopped(run: Run) -> bool:
    """Whether a run ended before its last step."""
    return len(run.train_loss) < run.settings.steps


def announce(trainers: Iterable[str], **settings: Any) -> str:
    """What is trained, for how long, and where the results go."""
    chosen = Settings(**settings)
    return (
        f"Trains a GPT of {chosen.layers} layers of width {chosen.width} on the source of Python's "
        f"standard library,\n{chosen.steps} steps of {chosen.batch} x {chosen.context} bytes in "
        f"each of {', '.join(trainers)}.\nResults go to {FOLDER}: loss.png and result.json."
    )


def measurements(trainer: Trainer, baseline: Trainer) -> dict[str, float]:
    """The numbers of one run; difference and speed-up are relative to ``baseline``.

    A run that was stopped has no losses, but the number of its steps.
    """
    parameters = sum(p.numel() for p in trainer.model.parameters())
    losses: dict[str, float] = {}
    if stopped(trainer.run):
        losses = {"stopped_after_steps": trainer.steps_done}
    else:
        loss, loss_before = (t.run.validation[-1][1] for t in (trainer, baseline))
        losses = {
            "validation_loss": loss,
            "difference_percent": 100 * (loss / loss_before - 1),
        }
    lower, upper = trainer.run.quartiles()
    seconds, seconds_before = (t.run.median_step_seconds() for t in (trainer, baseline))
    return {
        **losses,
        "step_milliseconds": 1000 * seconds,
        "from": 1000 * lower,
        "to": 1000 * upper,
        "speed_up": seconds_before / seconds,
        "bytes_per_parameter": trainer.training_bytes() / parameters,
    }


def table(results: dict[str, dict[str, float]]) -> Table:
    """One row per measurement, one column per arm."""
    rows = {
        "validation loss, nats per byte": "{validation_loss:.4f}",
        "difference to float32": "{difference_percent:+.2f} %",
        "median time per step": "{step_milliseconds:.1f} ms",
        "half of the steps": "{from:.0f} to {to:.0f} ms",
        "speed-up over float32": "{speed_up:.2f}x",
        "bytes per parameter": "{bytes_per_parameter:.1f}",
    }
    caption = "bytes per parameter: weights, optimizer state and gradients"
    if any("stopped_after_steps" in column for column in results.values()):
        caption += (
            f"\nstopped: after {TRIAL} steps, all slower than {HOPELESS:g} times float32's fastest"
        )
    result = Table("", *results, caption=caption, caption_justify="left")
    for column in result.columns[1:]:
        column.justify = "right"
    for title, form in rows.items():
        name = form[1:].split(":")[0]
        cells = (form.format(**c) if name in c else "stopped" for c in results.values())
        result.add_row(title, *cells)
    return result


def summary(results: dict[str, dict[str, float]]) -> str:
    """What amp_mp's run is beside the others, and which of them were stopped."""
    ours, autocast = results["amp_mp"], results["torch.autocast"]
    after = f"stopped after {TRIAL} steps"
    loss = after
    if "stopped_after_steps" not in ours:
        loss = f"{ours['difference_percent']:+.2f} % validation loss"
    which = f", {after}" if "stopped_after_steps" in autocast else ""
    over_autocast = autocast["step_milliseconds"] / ours["step_milliseconds"]
    return (
        f"amp_mp against float32: {loss}, {ours['speed_up']:.2f} times the steps per second "
        f"({over_autocast:.2f} times those of torch.autocast{which})"
    )


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def smoothed(run: Run) -> list[tuple[list[int], list[float]]]:
    """Training and validation losses with their steps, averaged with the same weights per step."""
    at, validation = map(list, zip(*run.validation, strict=True))
    between = at[1] - at[0] if len(at) > 1 else 1
    steps = list(range(1, len(run.train_loss) + 1))
    return [(steps, smooth(run.train_loss)), (at, smooth(validation, 0.9**between))]


def draw(runs: dict[str, Run], caption: str, path: Path) -> None:
    """Save every run's losses: their distance from float32's by the step, and by training time.

    By the step itself the three lie upon one another. Solid lines are training losses, dashed ones
    validation losses, both smoothed over as many steps.
    """
    picture, (apart, by_time) = figure(2, sharey=False)
    before = runs[BASELINE]
    for (name, run), color in zip(runs.items(), COLORS, strict=True):
        if stopped(run):
            continue
        # With the median step time, so that other work on the machine does not bend the curve.
        second = run.median_step_seconds()
        for kind, (at, losses), (_, others) in zip(
            ("training", "validation"), smoothed(run), smoothed(before), strict=True
        ):
            style = {"color": color, "linestyle": "-" if kind == "training" else "--"}
            percent = [100 * (a / b - 1) for a, b in zip(losses, others, strict=True)]
            apart.plot(at, percent, label=f"{name}, {kind}", **style)
            by_time.plot([second * step for step in at], losses, **style)
    apart.set(xlabel="step", ylabel="percent", title="Loss, in percent above float32's (smoothed)")
    by_time.set(
        xlabel="steps x median time per step (seconds)",
        ylabel="nats per byte",
        title="Loss by training time (smoothed)",
    )
    if apart.lines:
        apart.legend()
    picture.supxlabel(caption, fontsize="medium")
    picture.savefig(path)


def main() -> None:
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Settings()
    command_line.add_argument("--steps", type=int, default=default.steps, help="steps of each run")
    command_line.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    command_line.add_argument("--threads", type=int, default=default.threads, help="CPU threads")
    chosen = vars(command_line.parse_args())
    try:
        print(announce(ARMS, **chosen), flush=True)
        trainers = compare(**chosen)
    except (SettingsError, FileNotFoundError) as error:
        command_line.error(str(error))
    results = {name: measurements(each, trainers[BASELINE]) for name, each in trainers.items()}
    print(f"processor: {processor()}\n{describe_products()}")
    Console().print(table(results))
    caption = summary(results)
    print(caption)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    draw({name: each.run for name, each in trainers.items()}, caption, FOLDER / "loss.png")
    print(f"picture: {FOLDER / 'loss.png'}")


if __name__ == "__main__":
    main()
