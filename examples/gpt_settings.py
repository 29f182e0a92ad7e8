"""The settings of a GPT training run; each one is also a command-line option of train_gpt.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# "autocast" is torch.autocast in bfloat16: weights, gradients and optimizer state stay float32.
WEIGHT_DTYPES = {
    "float32": torch.float32,
    "autocast": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
OPTIMIZERS = ("adamw", "adam", "sgd", "muon", "torch-adamw")
PARALLEL = ("none", "ddp", "fsdp", "hsdp", "tp")
MEMORY = ("float32", "exact", "lean", "tiny", "micro", "nano", "masterless")


class SettingsError(ValueError):
    """A setting has a bad value, or does not fit the machine, the text or the checkpoint."""


def _option(help: str, choices: Sequence[str] | None = None) -> dict[str, Any]:
    return {"help": help, "choices": choices}


@dataclass(frozen=True)
class Settings:
    """Everything that determines a run."""

    precision: str = field(
        default="bfloat16",
        metadata=_option(
            "dtype of weights and activations; autocast: float32 weights under torch.autocast",
            tuple(WEIGHT_DTYPES),
        ),
    )
    optimizer: str = field(
        default="adamw",
        metadata=_option(
            "adamw, adam, sgd and muon are amp_mp's; torch-adamw is PyTorch's fused AdamW, for "
            "float32 weights only",
            OPTIMIZERS,
        ),
    )
    memory: str = field(
        default="exact",
        metadata=_option(
            "how amp_mp's optimizers store masters and moments of low-precision weights", MEMORY
        ),
    )
    steps: int = field(default=250, metadata=_option("optimizer steps of the whole run"))
    lr: float = field(
        default=1.5e-3,
        metadata=_option("largest learning rate, reached after a linear warm-up"),
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
        default=None,
        metadata=_option(
            "file to save the run to, during the run and at its end; a folder where the run is "
            "parallel, which any number of processes can resume"
        ),
    )
    checkpoint_every: int = field(default=100, metadata=_option("steps between checkpoints"))
    resume: bool = field(
        default=False, metadata=_option("continue from the checkpoint, up to steps")
    )
    plot: Path | None = field(
        default=None, metadata=_option("file for a picture of the loss curve (.png or .svg)")
    )
    parallel: str = field(
        default="none",
        metadata=_option(
            "how the processes of torchrun share the work: ddp copies the model, fsdp shards it "
            "(fully_shard), hsdp shards it within each replica, tp cuts every weight matrix",
            PARALLEL,
        ),
    )
    replicas: int = field(default=2, metadata=_option("copies of the model for parallel hsdp"))
    threads: int = field(default=0, metadata=_option("CPU threads; 0 leaves PyTorch's own choice"))

    def validate(self) -> None:
        """Raise SettingsError, naming the setting, if a value is invalid."""
        positive = ("steps", "lr", "batch", "context", "layers", "width", "heads", "replicas")
        for name in (*positive, "eval_every", "checkpoint_every"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("seed", "threads"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} must not be negative, got {getattr(self, name)}")
        known = {"precision": WEIGHT_DTYPES, "optimizer": OPTIMIZERS, "memory": MEMORY}
        for name, choices in (known | {"parallel": PARALLEL}).items():
            if getattr(self, name) not in choices:
                raise SettingsError(f"{name} must be one of {', '.join(choices)}")
        if self.width % self.heads:
            raise SettingsError(f"width {self.width} is not divisible by heads {self.heads}")
        float32 = WEIGHT_DTYPES[self.precision] == torch.float32
        if self.optimizer == "torch-adamw" and not float32:
            raise SettingsError(
                "optimizer torch-adamw keeps no masters: use it with precision float32 or autocast"
            )
        if self.optimizer == "torch-adamw" and self.parallel == "tp":
            raise SettingsError("optimizer torch-adamw cannot mix whole and sharded parameters")
        if self.resume and self.checkpoint is None:
            raise SettingsError("resume needs a checkpoint to continue from")
