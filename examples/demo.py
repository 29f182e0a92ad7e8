"""Train one GPT in float32, under torch.autocast and with amp_mp, and compare the three.

All three start from the same weights and see the same batches:

  float32         float32 weights, torch's clipping and fused AdamW
  torch.autocast  the same under torch.autocast in bfloat16
  amp_mp          bfloat16 weights, amp_mp's AdamW, which clips inside the step

The runs take turns, ten steps each; one whose steps take five times as long as float32's ends after
two. The program prints a table, draws the loss curves in demo/loss.png and writes the numbers to
demo/result.json.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from curves import draw_curve, figure
from gpt_settings import Settings, SettingsError
from gpt_trainer import Run, Trainer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import amp_mp as amp
from amp_mp.casting.products import choose_products, describe_products

FOLDER = Path(__file__).resolve().parent.parent / "demo"
CHUNK = 10  # steps of one run before the next takes its turn: a disturbance then slows all of them
ARMS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32", "optimizer": "torch-adamw"},
    "torch.autocast": {"precision": "autocast", "optimizer": "torch-adamw"},
    "amp_mp": {"precision": "bfloat16", "optimizer": "adamw"},
}
BASELINE = "float32"
LOOKS = (("tab:blue", "-", "o"), ("tab:green", "-.", "s"), ("tab:orange", "--", "x"))


def compare(steps: int, slowest: float = 5.0, **common: Any) -> dict[str, Trainer]:
    """Train every arm, by turns; ``common`` are further settings of all arms.

    An arm whose steps take more than ``slowest`` times as long as float32's ends after two.
    """
    trainers = {name: Trainer(Settings(**arm, steps=steps, **common)) for name, arm in ARMS.items()}
    chosen = amp.build_info()["products"]["bfloat16"]  # by `prepare`, for the process
    with tqdm(total=len(ARMS) * steps, unit="step", dynamic_ncols=True) as bar:
        for start in range(0, steps, CHUNK):
            for name, trainer in trainers.items():
                # torch.autocast computes as it does in a script without amp_mp.
                products = "native" if name == "torch.autocast" else chosen
                choose_products("auto" if products == "undecided" else products, torch.bfloat16)
                times, least = trainer.run.step_seconds, trainers[BASELINE].run.step_seconds
                for _ in range(min(CHUNK, steps - start)):
                    if len(times) != 2 or min(times) <= slowest * min(least):
                        bar.set_description(f"{name:14} loss {trainer.step():.3f}", False)
                    bar.update()
    return trainers


def measurements(trainer: Trainer, baseline: Trainer) -> dict[str, float]:
    """The numbers of one run; difference and speed-up are relative to ``baseline``.

    A run that ended after two steps has no losses.
    """
    parameters = sum(p.numel() for p in trainer.model.parameters())
    losses: dict[str, float] = {}
    if trainer.run.validation:
        loss, loss_before = (t.run.validation[-1][1] for t in (trainer, baseline))
        losses = {
            "validation_loss": loss,
            "difference_percent": 100 * (loss / loss_before - 1),
        }
    seconds, seconds_before = (t.run.median_step_seconds() for t in (trainer, baseline))
    return {
        **losses,
        "step_milliseconds": 1000 * seconds,
        "speed_up": seconds_before / seconds,
        "bytes_per_parameter": trainer.training_bytes() / parameters,
    }


def table(results: dict[str, dict[str, float]]) -> Table:
    """One row per measurement, one column per arm."""
    rows = {
        "validation loss, nats per byte": "{validation_loss:.4f}",
        "difference to float32": "{difference_percent:+.2f} %",
        "median time per step": "{step_milliseconds:.1f} ms",
        "speed-up over float32": "{speed_up:.2f}x",
        "bytes per parameter": "{bytes_per_parameter:.1f}",
    }
    caption = "bytes per parameter: weights, optimizer state and gradients"
    result = Table("", *results, caption=caption, caption_justify="left")
    for column in result.columns[1:]:
        column.justify = "right"
    for title, form in rows.items():
        name = form[1:].split(":")[0]
        cells = (form.format(**c) if name in c else "stopped" for c in results.values())
        result.add_row(title, *cells)
    return result


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def draw(runs: dict[str, Run], caption: str, path: Path) -> None:
    """Save every run's losses, against the step and against the training time."""
    picture, (by_step, by_time) = figure(2)
    for (name, run), look in zip(runs.items(), LOOKS, strict=True):
        if not run.validation:
            continue  # it ended after two steps
        draw_curve(by_step, run.train_loss, run.validation, name, *look)
        # With the median step time, so that other work on the machine does not bend the curve.
        seconds = [run.median_step_seconds() * (k + 1) for k in range(len(run.train_loss))]
        draw_curve(by_time, run.train_loss, run.validation, name, *look, x=seconds)
    by_step.set(xlabel="step", ylabel="loss (nats per byte)", title="Loss by step")
    by_time.set(xlabel="steps x median time per step (seconds)", title="Loss by training time")
    by_step.legend()
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
    try:
        trainers = compare(**vars(command_line.parse_args()))
    except (SettingsError, FileNotFoundError) as error:
        command_line.error(str(error))
    results = {name: measurements(each, trainers[BASELINE]) for name, each in trainers.items()}
    print(f"processor: {processor()}\n{describe_products()}")
    Console().print(table(results))

    ours, autocast = results["amp_mp"], results["torch.autocast"]
    over_autocast = autocast["step_milliseconds"] / ours["step_milliseconds"]
    caption = (
        f"amp_mp against float32: {ours['difference_percent']:+.2f} % validation loss, "
        f"{ours['speed_up']:.2f} times the steps per second "
        f"({over_autocast:.2f} times those of torch.autocast)"
    )
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    draw({name: each.run for name, each in trainers.items()}, caption, FOLDER / "loss.png")
    print(f"picture: {FOLDER / 'loss.png'}")


if __name__ == "__main__":
    main()
