"""Training of the small GPT: model, optimizer, batches, evaluation and checkpoints of one run."""

from __future__ import annotations

import math
import os
import statistics
import sysconfig
import time
from dataclasses import dataclass, field
from typing import Any

import gpt_checkpoint
import numpy as np
import torch
from corpus import load_text
from gpt import GPT
from gpt_settings import WEIGHT_DTYPES, Settings, SettingsError
from memory import gradient_bytes, state_bytes
from parallel import join
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

import amp_mp as amp

MAX_GRAD_NORM = 1.0
EVAL_WINDOWS = 256
# A resumed run continues exactly as an uninterrupted one only if these settings are the same. With
# more steps the learning rates are from here on those of the longer run.
MODEL_SETTINGS = ("layers", "width", "heads", "context", "precision")
RESUMED_EXACTLY = (*MODEL_SETTINGS, "optimizer", "memory", "steps", "lr", "batch", "seed")


@dataclass
class Run:
    """What a run measured. The lists have an entry for each step since the run began.

    Attributes:
        train_loss: training loss of every step, in nats per byte.
        validation: pairs (steps done, validation loss in nats per byte).
        step_seconds: duration of each step, without evaluation and checkpoints; after a resume
            only the steps since then.
        steps_skipped: number of steps that the optimizer skipped because a gradient was not finite.
        gradient_bytes: size of all gradients between backward and zero_grad.
    """

    settings: Settings
    train_loss: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    steps_skipped: int = 0
    gradient_bytes: int = 0

    def median_step_seconds(self, warm_up: int = 5) -> float:
        """Median seconds per step. The first ``warm_up`` steps do not count if there are more."""
        return statistics.median(self.step_seconds[warm_up:] or self.step_seconds)

    def quartiles(self, warm_up: int = 5) -> tuple[float, float]:
        """Half of the steps took between these seconds; of the same steps as the median."""
        counted = self.step_seconds[warm_up:] or self.step_seconds
        lower, _, upper = statistics.quantiles(counted * 2, n=4)  # a single step is enough
        return lower, upper


class Trainer:
    """A run in progress: the model, its optimizer and the measurements so far."""

    def __init__(self, settings: Settings) -> None:
        settings.validate()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        self.device = _device(settings.device)
        self.processes = join(settings, self.device)
        self.text, held_out = load_text(sysconfig.get_paths()["stdlib"])
        if min(len(self.text), len(held_out)) <= settings.context:
            raise SettingsError(f"context {settings.context} is longer than the text")
        last = len(held_out) - settings.context - 1
        windows = min(EVAL_WINDOWS, 1 + last // settings.context)
        self.held_out = self._windows(held_out, torch.linspace(0, last, windows).long())

        torch.manual_seed(settings.seed)
        self.model = GPT(settings.layers, settings.width, settings.heads, settings.context)
        self.model.to(self.device)
        dtype = WEIGHT_DTYPES[settings.precision]
        self.processes.shard(self.model, _policy(settings))  # before prepare
        if dtype != torch.float32:
            amp.prepare(self.model, dtype)
        self.network = self.processes.wrap(self.model)  # after prepare
        self.optimizer = _optimizer(settings, self.model)
        # bfloat16 has float32's range, so only float16 needs loss scaling.
        self.scaler = amp.GradScaler(self.device.type) if dtype == torch.float16 else None
        self.run = Run(settings)
        if settings.resume:
            self._load()

    @property
    def steps_done(self) -> int:
        """Steps since the run began, including those before a resume."""
        return len(self.run.train_loss)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, chosen by the seed and the step, for all processes.

        Each has the shape (batch, context).
        """
        random = np.random.default_rng((self.settings.seed, step))
        last = len(self.text) - self.settings.context
        starts = random.integers(0, last, size=self.settings.batch)
        return self._windows(self.text, torch.from_numpy(starts))

    def step(self) -> float:
        """Train on the next batch, evaluate and save when due, and return the training loss."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done, self.settings.steps, self.settings.lr)
        loss = self._loss(*map(self.processes.own, self.batch(self.steps_done)))
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            if self.settings.optimizer == "torch-adamw":
                nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            self.optimizer.step()
        run = self.run
        run.gradient_bytes = run.gradient_bytes or gradient_bytes(self.model)
        self.optimizer.zero_grad()
        run.train_loss.append(self.processes.mean(loss))  # waits for the device
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
        """Mean validation loss in nats per byte, over the same held-out windows every time.

        Every process computes all of it, so that all of them run the model equally often.
        """
        parts = zip(*(t.split(self.settings.batch) for t in self.held_out), strict=True)
        total = sum(self._loss(*part).item() * len(part[0]) for part in parts)
        return total / len(self.held_out[0])

    def training_bytes(self) -> int:
        """Bytes of weights, optimizer state and gradients, measured; call it after a step."""
        return state_bytes(self.model, self.optimizer) + self.run.gradient_bytes

    def save(self) -> None:
        """Write the checkpoint if the settings name one: every process of a parallel run."""
        path = self.settings.checkpoint
        if path is None:
            return
        gpt_checkpoint.save(
            path,
            self.model,
            self.optimizer,
            folder=self.processes.kind != "none" or path.is_dir(),
            settings={name: getattr(self.settings, name) for name in RESUMED_EXACTLY},
            scaler=self.scaler.state_dict() if self.scaler is not None else None,
            train_loss=self.run.train_loss,
            validation=self.run.validation,
            steps_skipped=self.run.steps_skipped,
        )

    def _load(self) -> None:
        path = self.settings.checkpoint
        content = gpt_checkpoint.load(
            path, self.model, self.optimizer, self.device, self._check_settings
        )
        if self.scaler is not None:
            self.scaler.load_state_dict(content["scaler"])
        self.run.train_loss = content["train_loss"]
        self.run.validation = content["validation"]
        self.run.steps_skipped = content["steps_skipped"]

    def _check_settings(self, content: dict[str, Any]) -> None:
        for name in RESUMED_EXACTLY:
            saved, wanted = content["settings"][name], getattr(self.settings, name)
            if saved != wanted and not (name == "steps" and wanted > saved):
                path = self.settings.checkpoint
                raise SettingsError(f"checkpoint {path} has {name} {saved}, this run {wanted}")
        if (done := len(content["train_loss"])) >= self.settings.steps:
            raise SettingsError(f"the checkpoint's run has all its steps, {done}: raise steps")

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        casts = self.settings.precision == "autocast"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=casts):
            logits = self.network(inputs)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _windows(
        self, text: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spans = starts[:, None] + torch.arange(self.settings.context + 1)
        tokens = text[spans].long().to(self.device)
        return tokens[:, :-1], tokens[:, 1:]


def _policy(settings: Settings) -> MixedPrecisionPolicy:
    """How fully_shard gathers weights: float32 shards of an "autocast" run in bfloat16."""
    if settings.precision == "autocast":
        return MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device == torch.device("cuda") and "LOCAL_RANK" in os.environ:  # set by torchrun
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(f"device {name} cannot be used: {error}") from error
    return device


def _optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    # Weight decay is for matrices; biases and norms should not be pulled towards zero.
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if settings.optimizer == "torch-adamw":
        return torch.optim.AdamW(groups, settings.lr, fused=True)
    options: dict[str, Any] = {"max_grad_norm": MAX_GRAD_NORM, "memory": settings.memory}
    if settings.optimizer == "adamw":
        return amp.optim.AdamW(groups, settings.lr, **options)
    if settings.optimizer == "adam":
        return amp.optim.Adam(groups, settings.lr, **options)
    if settings.optimizer == "muon":  # for the blocks' matrices, with AdamW's rate
        return amp.optim.Muon(
            model,
            settings.lr,
            weight_decay=0.01,
            adjust_lr_fn="match_rms_adamw",
            split={"*.qkv.weight": 3},
            others={"lr": settings.lr, "weight_decay": 0.0},
            **options,
        )
    return amp.optim.SGD(groups, settings.lr, momentum=0.9, **options)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Learning rate of ``step`` (from 0): linear warm-up to ``peak``, then cosine to a tenth."""
    warm_up = max(1, steps // 8)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
