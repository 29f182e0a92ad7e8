"""Train a small byte-level GPT on the Python standard library's source, in any precision.

On several processes: torchrun --nproc_per_node 2 examples/train_gpt.py --parallel fsdp
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from curves import draw_curve, figure
from gpt_settings import Settings, SettingsError
from gpt_trainer import Run, Trainer
from parallel import leave
from progress import Bar
from torch import distributed


def train(settings: Settings, until: int | None = None) -> Run:
    """Train with these settings, show a progress bar, and return the measurements.

    ``until`` stops after that many of the ``settings.steps`` steps, as an interruption would. A
    later call with ``resume`` continues from there. Raises SettingsError for unusable settings and
    FileNotFoundError for a missing checkpoint or text.
    """
    trainer = Trainer(settings)
    quiet = trainer.processes.rank > 0
    stop = settings.steps if until is None else min(until, settings.steps)
    with Bar(
        total=stop, initial=trainer.steps_done, unit="step", dynamic_ncols=True, disable=quiet
    ) as bar:
        while trainer.steps_done < stop:
            shown = {"loss": f"{trainer.step():.3f}"}
            if trainer.scaler is not None:
                shown["scale"] = f"{trainer.scaler.get_scale():g}"
            rate = settings.batch * settings.context / trainer.run.step_seconds[-1]
            bar.set_postfix(shown | {"tokens/s": f"{rate:,.0f}"}, refresh=False)
            bar.update()
    trainer.save()
    return trainer.run


def plot(run: Run, path: Path) -> None:
    """Save a picture of the run's loss curve; the suffix of ``path`` decides the format."""
    settings = run.settings
    picture, (axes,) = figure(1)
    draw_curve(axes, run.train_loss, run.validation, settings.precision, "tab:blue")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.set_title(f"GPT, {settings.layers} layers of {settings.width}, {settings.optimizer}")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)


def parser() -> argparse.ArgumentParser:
    """A command line with one option for each field of Settings."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for option in dataclasses.fields(Settings):
        flag = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            result.add_argument(flag, action="store_true", help=option.metadata["help"])
        else:
            kind: Any = Path if option.default is None else type(option.default)
            result.add_argument(flag, type=kind, default=option.default, **option.metadata)
    return result


def main() -> None:
    command_line = parser()
    settings = Settings(**vars(command_line.parse_args()))
    try:
        run = train(settings)
    except (SettingsError, FileNotFoundError) as error:
        command_line.error(str(error))
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        print(f"validation loss {run.validation[-1][1]:.4f} after {settings.steps} steps")
        if settings.plot is not None:
            plot(run, settings.plot)
            print(f"loss curve in {settings.plot}")
    leave()


if __name__ == "__main__":
    main()
