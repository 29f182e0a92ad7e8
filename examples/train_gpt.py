"""Train a small byte-level GPT on the Python standard library's source, in any precision."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import load_text
from curves import draw_curve, figure
from gpt import GPT
from torch import nn
from torch.nn import functional
from tqdm import tqdm

import amp_mp as amp

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS = ("adamw", "adam", "sgd", "torch-adamw")
# An embedding row's gradient is a sum over every occurrence of its byte; a 16-bit sum of
# thousands of terms stops growing, so the embeddings stay float32 along with the norms.
KEEP_FLOAT32 = (nn.LayerNorm, nn.Embedding)
MAX_GRAD_NORM = 1.0
EVAL_WINDOWS = 256
# What has to be equal for a resumed run to continue exactly as an uninterrupted one.
MODEL_SETTINGS = ("layers", "width", "heads", "context", "precision")
RESUMED_EXACTLY = (*MODEL_SETTINGS, "optimizer", "steps", "lr", "batch", "seed")


class SettingsError(ValueError):
    """A setting has a bad value, or does not fit the machine, the text or the checkpoint."""


def _option(help: str, choices: Sequence[str] | None = None) -> dict[str, Any]:
    return {"help": help, "choices": choices}


@dataclass(frozen=True)
class Settings:
    """Everything that determines a run; each field is also a command-line option."""

    precision: str = field(
        default="bfloat16", metadata=_option("dtype of weights and activations", tuple(DTYPES))
    )
    optimizer: str = field(
        default="adamw",
        metadata=_option("torch-adamw is PyTorch's own fused AdamW, float32 only", OPTIMIZERS),
    )
    steps: int = field(default=250, metadata=_option("optimizer steps of the whole run"))
    lr: float = field(
        default=1.5e-3, metadata=_option("peak learning rate, between warm-up and cosine decay")
    )
    batch: int = field(default=32, metadata=_option("sequences per step"))
    context: int = field(default=64, metadata=_option("tokens (bytes) per sequence"))
    layers: int = field(default=4, metadata=_option("transformer blocks"))
    width: int = field(
        default=256, metadata=_option("size of the residual stream, a multiple of heads")
    )
    heads: int = field(default=2, metadata=_option("attention heads per block"))
    seed: int = field(default=0, metadata=_option("seed of the initial weights and the batches"))
    device: str = field(
        default="", metadata=_option("cpu, cuda, cuda:1, ...; by default cuda if there is one")
    )
    eval_every: int = field(default=50, metadata=_option("steps between validation losses"))
    checkpoint: Path | None = field(
        default=None, metadata=_option("file to save the run to, on the way and at the end")
    )
    checkpoint_every: int = field(default=100, metadata=_option("steps between checkpoints"))
    resume: bool = field(default=False, metadata=_option("continue from the checkpoint"))
    plot: Path | None = field(
        default=None, metadata=_option("file for a picture of the loss curve (.png or .svg)")
    )
    threads: int = field(default=0, metadata=_option("CPU threads; 0: as PyTorch chooses"))

    def validate(self) -> None:
        """Raise SettingsError, naming the setting, if a value makes no sense."""
        positive = ("steps", "lr", "batch", "context", "layers", "width", "heads")
        for name in (*positive, "eval_every", "checkpoint_every"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("seed", "threads"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} must not be negative, got {getattr(self, name)}")
        for name, choices in (("precision", DTYPES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in choices:
                raise SettingsError(f"{name} must be one of {', '.join(choices)}")
        if self.width % self.heads:
            raise SettingsError(f"width {self.width} is not divisible by heads {self.heads}")
        if self.optimizer == "torch-adamw" and self.precision != "float32":
            raise SettingsError("optimizer torch-adamw keeps no masters: use it with float32")
        if self.resume and self.checkpoint is None:
            raise SettingsError("resume needs a checkpoint to continue from")


@dataclass
class Run:
    """What a run measured; the lists are indexed by step, counted from the run's very start.

    Attributes:
        train_loss: training loss of every step, in nats per byte.
        validation: (steps done, validation loss in nats per byte).
        step_seconds: seconds of each step made by this process, evaluation excluded.
        steps_skipped: steps the optimizer left out because a gradient was not finite.
    """

    settings: Settings
    train_loss: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    steps_skipped: int = 0

    def median_step_seconds(self, warm_up: int = 5) -> float:
        """Median seconds per step without the first ``warm_up`` steps (if any more were made)."""
        return statistics.median(self.step_seconds[warm_up:] or self.step_seconds)


class Trainer:
    """A run in progress: the model, its optimizer and what was measured so far."""

    def __init__(self, settings: Settings) -> None:
        settings.validate()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        self.device = _device(settings.device)
        self.text, held_out = load_text(sysconfig.get_paths()["stdlib"])
        if min(len(self.text), len(held_out)) <= settings.context:
            raise SettingsError(f"context {settings.context} is longer than the text")
        last = len(held_out) - settings.context - 1
        windows = min(EVAL_WINDOWS, 1 + last // settings.context)
        self.held_out = self._windows(held_out, torch.linspace(0, last, windows).long())

        torch.manual_seed(settings.seed)
        self.model = GPT(settings.layers, settings.width, settings.heads, settings.context)
        self.model.to(self.device)
        if settings.precision != "float32":
            amp.prepare(self.model, DTYPES[settings.precision], keep_fp32=KEEP_FLOAT32)
        self.optimizer = _optimizer(settings, self.model)
        # bfloat16 has float32's range, so only float16 needs its gradients scaled.
        self.scaler = amp.GradScaler(self.device.type) if settings.precision == "float16" else None
        self.run = Run(settings)
        if settings.resume:
            self._load()

    @property
    def steps_done(self) -> int:
        """Steps since the very start of the run, those before a resume included."""
        return len(self.run.train_loss)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, each (batch, context): a function of seed and step only."""
        random = np.random.default_rng((self.settings.seed, step))
        last = len(self.text) - self.settings.context
        starts = random.integers(0, last, size=self.settings.batch)
        return self._windows(self.text, torch.from_numpy(starts))

    def step(self) -> float:
        """Train on the next batch, evaluate and save when due, and return the training loss."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done, self.settings.steps, self.settings.lr)
        loss = self._loss(*self.batch(self.steps_done))
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            if self.settings.optimizer == "torch-adamw":
                nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            self.optimizer.step()
        self.optimizer.zero_grad()
        run = self.run
        run.train_loss.append(loss.item())  # waits for the device
        run.step_seconds.append(time.perf_counter() - started)
        run.steps_skipped += getattr(self.optimizer, "step_was_skipped", False)
        finished = self.steps_done == self.settings.steps
        if finished or self.steps_done % self.settings.eval_every == 0:
            run.validation.append((self.steps_done, self.evaluate()))
        if self.steps_done % self.settings.checkpoint_every == 0:
            self.save()
        return run.train_loss[-1]

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean validation loss in nats per byte, over the same held-out windows every time."""
        parts = zip(*(t.split(self.settings.batch) for t in self.held_out), strict=True)
        total = sum(self._loss(*part).item() * len(part[0]) for part in parts)
        return total / len(self.held_out[0])

    def state_bytes(self) -> int:
        """Bytes of the weights and of everything the optimizer keeps for them."""
        tensors: list[torch.Tensor] = [*self.model.parameters()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def save(self) -> None:
        """Write the checkpoint, if one is asked for; a crash leaves the old one or the new one."""
        path = self.settings.checkpoint
        if path is None:
            return
        content = {
            "settings": {name: getattr(self.settings, name) for name in RESUMED_EXACTLY},
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "train_loss": self.run.train_loss,
            "validation": self.run.validation,
            "steps_skipped": self.run.steps_skipped,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renaming is atomic only within one file system, hence a temporary file alongside.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _load(self) -> None:
        path = self.settings.checkpoint
        if path is None or not path.is_file():
            raise FileNotFoundError(f"nothing to resume: no checkpoint at {path}")
        content = torch.load(path, map_location=self.device, weights_only=True)
        for name in RESUMED_EXACTLY:
            saved, wanted = content["settings"][name], getattr(self.settings, name)
            if saved != wanted:
                raise SettingsError(f"checkpoint {path} has {name} {saved}, this run {wanted}")
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(content["scaler"])
        self.run.train_loss = content["train_loss"]
        self.run.validation = content["validation"]
        self.run.steps_skipped = content["steps_skipped"]

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def _windows(
        self, text: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spans = starts[:, None] + torch.arange(self.settings.context + 1)
        tokens = text[spans].long().to(self.device)
        return tokens[:, :-1], tokens[:, 1:]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(f"device {name} cannot be used: {error}") from error
    return device


def _optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    # Decay pulls matrices towards zero; biases and norms have no reason to be there.
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if settings.optimizer == "torch-adamw":
        return torch.optim.AdamW(groups, settings.lr, fused=True)
    if settings.optimizer == "adamw":
        return amp.optim.AdamW(groups, settings.lr, max_grad_norm=MAX_GRAD_NORM)
    if settings.optimizer == "adam":
        return amp.optim.Adam(groups, settings.lr, max_grad_norm=MAX_GRAD_NORM)
    return amp.optim.SGD(groups, settings.lr, momentum=0.9, max_grad_norm=MAX_GRAD_NORM)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Learning rate of ``step`` (from 0): a linear warm-up, then a cosine down to a tenth."""
    warm_up = max(1, steps // 8)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train(settings: Settings, until: int | None = None) -> Run:
    """Train as ``settings`` say, showing a progress bar, and return what was measured.

    ``until`` stops after that many steps (of ``settings.steps``), as an interruption would, so
    that a later call with ``resume`` continues. Raises SettingsError for unusable settings and
    FileNotFoundError for a checkpoint or a text that is not there.
    """
    trainer = Trainer(settings)
    stop = settings.steps if until is None else min(until, settings.steps)
    with tqdm(total=stop, initial=trainer.steps_done, unit="step", dynamic_ncols=True) as bar:
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


def parser(**defaults: Any) -> argparse.ArgumentParser:
    """Command line with an option for each field of Settings, and its defaults but for these."""
    result = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for option in dataclasses.fields(Settings):
        flag = "--" + option.name.replace("_", "-")
        default = defaults.get(option.name, option.default)
        if isinstance(default, bool):
            result.add_argument(flag, action="store_true", help=option.metadata["help"])
        else:
            kind = Path if default is None else type(default)
            result.add_argument(flag, type=kind, default=default, **option.metadata)
    return result


def main() -> None:
    command_line = parser()
    settings = Settings(**vars(command_line.parse_args()))
    try:
        run = train(settings)
    except (SettingsError, FileNotFoundError) as error:
        command_line.error(str(error))
    print(f"validation loss {run.validation[-1][1]:.4f} after {settings.steps} steps")
    if settings.plot is not None:
        plot(run, settings.plot)
        print(f"loss curve in {settings.plot}")


if __name__ == "__main__":
    main()
