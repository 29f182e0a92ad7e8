"""Train one GPT with AdamW in float32 and with Muon in three precisions, and compare the four.

All start from the same weights, see the same batches and have the same learning rates:

  AdamW, float32  float32 weights, torch's clipping and fused AdamW
  Muon, float32   float32 weights; Muon for the blocks' matrices, AdamW for everything else
  Muon, exact     the same with bfloat16 weights and split masters
  Muon, lean      the same with split masters of 24 bits and bfloat16 moments

The program prints a table, draws the loss curves in docs/muon.png and writes the numbers to
docs/muon.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from curves import draw_curve, figure
from gpt_settings import Settings, SettingsError
from gpt_trainer import Trainer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

DOCS = Path(__file__).resolve().parent.parent / "docs"
BASELINE = "AdamW, float32"
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {"precision": "float32", "optimizer": "torch-adamw"},
    "Muon, float32": {"precision": "float32", "optimizer": "muon"},
    "Muon, exact": {"precision": "bfloat16", "optimizer": "muon", "memory": "exact"},
    "Muon, lean": {"precision": "bfloat16", "optimizer": "muon", "memory": "lean"},
}
LOOKS = (
    ("black", "-", "o"),
    ("tab:blue", "-.", "s"),
    ("tab:green", "--", "x"),
    ("tab:orange", ":", "^"),
)


def trained(steps: int, **common: Any) -> dict[str, Trainer]:
    """Train every arm; ``common`` are further settings of all arms."""
    trainers = {}
    with tqdm(total=len(ARMS) * steps, unit="step", dynamic_ncols=True) as bar:
        for name, arm in ARMS.items():
            trainers[name] = trainer = Trainer(Settings(**arm, steps=steps, **common))
            for _ in range(steps):
                bar.set_description(f"{name:14} loss {trainer.step():.3f}", False)
                bar.update()
    return trainers


def measurements(trainer: Trainer, baseline: Trainer) -> dict[str, float]:
    """The numbers of one run; ``steps_to_baseline``: to the baseline's last validation loss."""
    run, wanted = trainer.run, baseline.run.validation[-1][1]
    parameters = sum(p.numel() for p in trainer.model.parameters())
    there = [step for step, loss in run.validation if loss <= wanted]
    return {
        "validation_loss": run.validation[-1][1],
        "steps_to_baseline": there[0] if there else float("inf"),
        "bytes_per_parameter": trainer.training_bytes() / parameters,
    }


def table(results: dict[str, dict[str, float]]) -> Table:
    """One row per measurement, one column per arm."""
    rows = {
        "validation loss, nats per byte": "{validation_loss:.4f}",
        "steps to AdamW's last loss": "{steps_to_baseline:.0f}",
        "bytes per parameter": "{bytes_per_parameter:.1f}",
    }
    caption = "bytes per parameter: weights, optimizer state and gradients"
    result = Table("", *results, caption=caption, caption_justify="left")
    for title, form in rows.items():
        result.add_row(title, *(form.format(**column) for column in results.values()))
    return result


def main() -> None:
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Settings()
    command_line.add_argument("--steps", type=int, default=default.steps, help="steps of each run")
    command_line.add_argument("--seed", type=int, default=default.seed, help="of the runs")
    command_line.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    command_line.add_argument("--threads", type=int, default=default.threads, help="CPU threads")
    command_line.add_argument("--out", type=Path, default=DOCS, help="folder (docs)")
    arguments = vars(command_line.parse_args())
    out = arguments.pop("out")
    try:
        trainers = trained(eval_every=25, **arguments)
    except (SettingsError, FileNotFoundError) as error:
        command_line.error(str(error))
    results = {name: measurements(each, trainers[BASELINE]) for name, each in trainers.items()}
    Console().print(table(results))
    out.mkdir(exist_ok=True)
    (out / "muon.json").write_text(json.dumps(results, indent=2) + "\n")
    picture, (axes,) = figure(1)
    for (name, trainer), look in zip(trainers.items(), LOOKS, strict=True):
        draw_curve(axes, trainer.run.train_loss, trainer.run.validation, name, *look)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="One GPT with AdamW and with Muon")
    axes.legend(fontsize="small")
    picture.savefig(out / "muon.png")
    print(f"picture: {out / 'muon.png'}")


if __name__ == "__main__":
    main()
