"""Train one GPT in float32 and in bfloat16, from the same weights on the same batches, and compare.

Prints a table; the loss curves go to demo/loss.png, the table's figures to demo/result.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from curves import draw_curve, figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from train_gpt import Run, Settings, SettingsError, Trainer

FOLDER = Path(__file__).resolve().parent.parent / "demo"
CHUNK = 10  # steps of one run before the other's turn: whatever disturbs the machine hits both


def compare(steps: int, device: str, threads: int) -> tuple[Trainer, Trainer]:
    """Train in float32 with PyTorch's own optimizer and in bfloat16 with amp_mp's, by turns."""
    common: dict[str, Any] = {"steps": steps, "device": device, "threads": threads}
    float32 = Trainer(Settings(precision="float32", optimizer="torch-adamw", **common))
    bfloat16 = Trainer(Settings(precision="bfloat16", optimizer="adamw", **common))
    with tqdm(total=2 * steps, unit="step", dynamic_ncols=True) as bar:
        for start in range(0, steps, CHUNK):
            for trainer in (float32, bfloat16):
                for _ in range(min(CHUNK, steps - start)):
                    loss = trainer.step()
                    bar.set_description(f"{trainer.settings.precision:8} loss {loss:.3f}", False)
                    bar.update()
    return float32, bfloat16


def figures(trainer: Trainer, baseline: Trainer) -> dict[str, float]:
    """The figures of one run, some of them relative to ``baseline``'s."""
    parameters = sum(p.numel() for p in trainer.model.parameters())
    loss, loss_before = (t.run.validation[-1][1] for t in (trainer, baseline))
    seconds, seconds_before = (t.run.median_step_seconds() for t in (trainer, baseline))
    return {
        "validation_loss": loss,
        "difference_percent": 100 * (loss / loss_before - 1),
        "step_milliseconds": 1000 * seconds,
        "speed_up": seconds_before / seconds,
        "state_mebibytes": trainer.state_bytes() / 2**20,
        "state_bytes_per_parameter": trainer.state_bytes() / parameters,
        "steps_skipped": trainer.run.steps_skipped,
    }


def table(results: dict[str, dict[str, float]]) -> Table:
    """One row per figure, one column per precision."""
    rows = {
        "validation loss (nats per byte)": "{validation_loss:.4f}",
        "difference": "{difference_percent:+.2f} %",
        "time per step (median)": "{step_milliseconds:.1f} ms",
        "speed-up": "{speed_up:.2f}x",
        "weights + optimizer state": "{state_mebibytes:.1f} MiB",
        "  per parameter": "{state_bytes_per_parameter:.1f} bytes",
        "steps skipped": "{steps_skipped}",
    }
    result = Table("", *results)
    for column in result.columns[1:]:
        column.justify = "right"
    for title, form in rows.items():
        result.add_row(title, *(form.format(**column) for column in results.values()))
    return result


def draw(runs: dict[str, Run], caption: str, path: Path) -> None:
    """Save both runs' losses against the step and against the training time."""
    picture, (by_step, by_time) = figure(2)
    looks = (("tab:blue", "-", "o"), ("tab:orange", "--", "x"))
    for (name, run), look in zip(runs.items(), looks, strict=True):
        draw_curve(by_step, run.train_loss, run.validation, name, *look)
        # By the median step: what else the machine was doing meanwhile is not the run's.
        seconds = [run.median_step_seconds() * (k + 1) for k in range(len(run.train_loss))]
        draw_curve(by_time, run.train_loss, run.validation, name, *look, x=seconds)
    by_step.set(xlabel="step", ylabel="loss (nats per byte)", title="Loss by step")
    by_time.set(xlabel="steps x median time per step (seconds)", title="Loss by training time")
    by_step.legend()
    picture.supxlabel(caption, fontsize="medium")
    picture.savefig(path)


def main() -> None:
    command_line = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Settings()
    command_line.add_argument("--steps", type=int, default=default.steps, help="steps of each run")
    command_line.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    command_line.add_argument("--threads", type=int, default=default.threads, help="CPU threads")
    try:
        float32, bfloat16 = compare(**vars(command_line.parse_args()))
    except (SettingsError, FileNotFoundError) as error:
        command_line.error(str(error))
    results = {
        trainer.settings.precision: figures(trainer, float32) for trainer in (float32, bfloat16)
    }
    Console().print(table(results))

    result = results["bfloat16"]
    caption = (
        f"bfloat16 against float32: {result['difference_percent']:+.2f} % validation loss, "
        f"{result['speed_up']:.2f} times the steps per second"
    )
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    draw({"float32": float32.run, "bfloat16": bfloat16.run}, caption, FOLDER / "loss.png")
    print(f"picture: {FOLDER / 'loss.png'}")


if __name__ == "__main__":
    main()
