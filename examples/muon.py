"""Train one GPT with AdamW and with Muon's options, with three seeds each, and compare them.

With one seed all start from the same weights, see the same batches and have the same learning
rates. AdamW is torch's, with float32 weights; Muon has bfloat16 weights and masters of
memory="exact", and is for the blocks' matrices, with AdamW for everything else. OPTIONS has what
each row of the table passes to it.

The program prints the table, draws the loss curves of the first seed in docs/figures/muon.png and
writes the numbers to docs/figures/muon.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from curves import draw_curve, figure
from gpt_settings import Settings, SettingsError
from gpt_trainer import Trainer
from progress import Bar
from rich.console import Console
from rich.table import Table

FIGURES = Path(__file__).resolve().parent.parent / "docs/figures"
BASELINE = "AdamW, float32"
# Entries of Muon's param_groups.
OPTIONS: dict[str, dict[str, Any]] = {
    "quintic": {"ns_coefficients": "quintic"},
    "polar_express, 5 steps": {"ns_coefficients": "polar_express", "ns_steps": 5},
    "polar_express": {"ns_coefficients": "polar_express"},
    "NorMuon": {"normalize": "rows"},
    "cautious": {"cautious": True},
}
STYLES = ("-", "-.", "--", ":")


def trainers_of(seed: int, **common: Any) -> dict[str, Trainer]:
    """A run of each row, not begun; ``common`` are further settings of all."""
    made = {BASELINE: Trainer(Settings("float32", "torch-adamw", seed=seed, **common))}
    for name, options in OPTIONS.items():
        made[name] = Trainer(Settings("bfloat16", "muon", seed=seed, **common))
        for group in made[name].optimizer.param_groups:
            group.update(options if group["use_muon"] else {})
    return made


def trained(steps: int, seeds: list[int], **common: Any) -> dict[str, list[Trainer]]:
    """Train every row with every seed."""
    runs: dict[str, list[Trainer]] = {}
    with Bar(total=(1 + len(OPTIONS)) * len(seeds) * steps, unit="step", dynamic_ncols=True) as bar:
        for seed in seeds:
            for name, trainer in trainers_of(seed, steps=steps, **common).items():
                runs.setdefault(name, []).append(trainer)
                for _ in range(steps):
                    bar.set_description(f"{name:22} loss {trainer.step():.3f}", False)
                    bar.update()
    return runs


def measurements(trainer: Trainer, baseline: Trainer) -> dict[str, float]:
    """The numbers of one run; ``steps_to_baseline``: to the baseline's last validation loss."""
    run, wanted = trainer.run, baseline.run.validation[-1][1]
    there = [step for step, loss in run.validation if loss <= wanted]
    return {
        "validation_loss": run.validation[-1][1],
        "steps_to_baseline": there[0] if there else float("inf"),
    }


def table(results: dict[str, list[dict[str, float]]]) -> Table:
    """One row for each way of training; means over the seeds, and their least and largest."""
    columns = ("", "validation loss", "least to largest", "steps to AdamW's last loss")
    result = Table(*columns, caption="losses are nats per byte", caption_justify="left")
    for name, runs in results.items():
        losses, steps = (
            [run[key] for run in runs] for key in ("validation_loss", "steps_to_baseline")
        )
        result.add_row(
            name,
            f"{statistics.mean(losses):.4f}",
            f"{min(losses):.4f} to {max(losses):.4f}",
            f"{statistics.mean(steps):.0f}",
        )
    return result


def main() -> None:
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Settings()
    command_line.add_argument("--steps", type=int, default=default.steps, help="steps of each run")
    command_line.add_argument("--seeds", type=int, default=3, help="runs of each row")
    command_line.add_argument("--width", type=int, default=128, help="of the model")
    command_line.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    command_line.add_argument("--threads", type=int, default=default.threads, help="CPU threads")
    command_line.add_argument("--out", type=Path, default=FIGURES, help="folder (docs/figures)")
    arguments = vars(command_line.parse_args())
    out, seeds = arguments.pop("out"), list(range(arguments.pop("seeds")))
    try:
        runs = trained(seeds=seeds, eval_every=25, **arguments)
    except (SettingsError, FileNotFoundError) as error:
        command_line.error(str(error))
    results = {
        name: [measurements(own, first) for own, first in zip(each, runs[BASELINE], strict=True)]
        for name, each in runs.items()
    }
    Console(width=110).print(table(results))
    out.mkdir(exist_ok=True)
    (out / "muon.json").write_text(json.dumps(results, indent=2) + "\n")
    picture, (axes,) = figure(1)
    for number, (name, (trainer, *_)) in enumerate(runs.items()):
        look = f"C{number}", STYLES[number % len(STYLES)], "osx^v*"[number % 6]
        draw_curve(axes, trainer.run.train_loss, trainer.run.validation, name, *look)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="One GPT with AdamW and with Muon")
    axes.legend(fontsize="small")
    picture.savefig(out / "muon.png")
    print(f"picture: {out / 'muon.png'}")


if __name__ == "__main__":
    main()
