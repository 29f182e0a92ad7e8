"""Train an LSTM language model in float16 with and without masters and loss scaling, and compare.

The four runs start from the same weights and see the same batches: float32, mixed precision, and
mixed precision without loss scaling or without float32 masters. The program prints a table and
saves a picture of the loss curves. docs/benchmarks.md explains the result.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import load_text
from curves import figure, smooth
from progress import Bar
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import amp_mp as amp

PICTURE = Path(__file__).resolve().parent.parent / "demo" / "ablation.png"
WIDTH, EMBEDDING = 64, 32
BATCH, TIME = 16, 16
# A step of a large model averages over millions of bytes, computed in parts, and the loss of each
# part is divided by the number of parts. Here a part is 256 bytes of 4 million. The optimizer steps
# after every part, which is fair because Adam's steps do not depend on a factor of the loss.
PARTS = 2**14
# An update of 2e-4 to a typical weight of 0.5 is 2^-11 of it, the precision of float16. In every
# training updates become that small after the learning rate has decayed.
LARGEST_WEIGHT = 1.0
LEARNING_RATE = 2e-4
HELD_OUT = 40  # batches in the validation loss
STATISTICS_EVERY = 50  # steps between two counts of zero gradients and unchanged weights


@dataclass(frozen=True)
class Arm:
    """One way to train, and its color in the picture."""

    name: str
    dtype: torch.dtype
    masters: bool
    loss_scaling: bool
    color: str


ARMS = (
    Arm("float32", torch.float32, masters=False, loss_scaling=False, color="tab:blue"),
    Arm("mixed", torch.float16, masters=True, loss_scaling=True, color="tab:orange"),
    Arm("no loss scaling", torch.float16, masters=True, loss_scaling=False, color="tab:red"),
    Arm("no masters", torch.float16, masters=False, loss_scaling=True, color="tab:green"),
)


@dataclass
class Run:
    """What an arm measured.

    Attributes:
        train_loss: training loss of every step, in nats per byte.
        validation_loss: validation loss at the end, in nats per byte.
        zero_gradients: share of gradient elements that were 0, every STATISTICS_EVERY steps.
        unmoved_weights: share of weights that the step did not change, at the same steps.

    The shares do not include the embedding, where bytes that are not in the batch get no gradient.
    """

    train_loss: list[float] = field(default_factory=list)
    validation_loss: float = float("nan")
    zero_gradients: list[float] = field(default_factory=list)
    unmoved_weights: list[float] = field(default_factory=list)


class LanguageModel(nn.Module):
    """Embedding, LSTM and output layer over bytes; computes in the dtype of its weights.

    Matrix products work as on a Tensor Core: factors of that dtype, sums in float32, a result of
    that dtype. nn.LSTM computes the same in float32; in float16 it would be several times slower
    on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, EMBEDDING)
        self.input = nn.Linear(EMBEDDING, 4 * WIDTH)
        self.recurrent = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 256)
        for layer in (self.input, self.recurrent, self.head):
            nn.init.uniform_(layer.weight, -LARGEST_WEIGHT, LARGEST_WEIGHT)
        nn.init.zeros_(self.input.bias)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (time, batch, 256), float32, of the bytes after ``tokens`` (time, batch)."""
        dtype = self.head.weight.dtype
        inputs = (self.tokens(tokens).float() @ self.input.weight.float().T).to(dtype)
        # Converted once and not for every byte, so that its gradient is summed in float32.
        recurrent = self.recurrent.weight.float().T
        hidden = cell = torch.zeros(tokens.shape[1], WIDTH, dtype=dtype)
        outputs = []
        for each in (inputs + self.input.bias).unbind(0):
            gates = each + (hidden.float() @ recurrent).to(dtype)
            enter, forget, new, leave = gates.chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            outputs.append(hidden)
        logits = (torch.stack(outputs).float() @ self.head.weight.float().T).to(dtype)
        return (logits + self.head.bias).float()


def batch(text: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (time, batch), from random places; the same for the same seed."""
    starts = np.random.default_rng(seed).integers(0, len(text) - TIME, size=BATCH)
    span = text[torch.from_numpy(starts) + torch.arange(TIME + 1)[:, None]].long()
    return span[:-1], span[1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(arm: Arm, steps: int, bar: Bar) -> Run:
    """Train one arm and advance the progress bar."""
    text, held_out = load_text(sysconfig.get_paths()["stdlib"])
    torch.manual_seed(0)
    model = LanguageModel()
    backward: Callable[[Tensor], None] = Tensor.backward
    low = arm.dtype != torch.float32
    if low:
        amp.prepare(model, arm.dtype)
    optimizer: Any = torch.optim.Adam(model.parameters(), LEARNING_RATE, eps=1e-8 / PARTS)
    if low:
        optimizer = amp.FP16_Optimizer(optimizer, 1.0, arm.loss_scaling, verbose=False)
        backward = optimizer.backward
    # The tensors that the optimizer updates: the masters, or the model's own float32 weights.
    kept: list[Tensor] = optimizer.param_groups[0]["params"]
    run = Run()
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(text, step))
        backward(loss / PARTS)
        counting = step % STATISTICS_EVERY == STATISTICS_EVERY - 1
        before = [weight.detach().clone() for weight in kept] if counting else []
        optimizer.step()
        if low and not arm.masters:
            # The master loses what float16 cannot store; everything else is as with masters.
            with torch.no_grad():
                for weight, master in zip(model.parameters(), kept, strict=True):
                    master.copy_(weight)
        if counting:
            gradients = [w.grad for w in model.parameters() if w.grad is not None][1:]
            run.zero_gradients.append(share([grad == 0 for grad in gradients]))
            weights = list(zip(before, kept, strict=True))[1:]
            run.unmoved_weights.append(share([old == new for old, new in weights]))
        run.train_loss.append(loss.item())
        bar.set_description(f"{arm.name:15} loss {run.train_loss[-1]:.3f}", refresh=False)
        bar.update()
    with torch.no_grad():
        losses = [loss_of(model, *batch(held_out, k)).item() for k in range(HELD_OUT)]
    run.validation_loss = sum(losses) / HELD_OUT
    return run


def share(flags: list[Tensor]) -> float:
    """The share of elements that are True."""
    return float(torch.cat([each.flatten() for each in flags]).float().mean())


def compare(steps: int) -> dict[str, Run]:
    """Train every arm; returns the runs by name."""
    with Bar(total=len(ARMS) * steps, unit="step", dynamic_ncols=True) as bar:
        return {arm.name: train(arm, steps, bar) for arm in ARMS}


def table(runs: dict[str, Run]) -> Table:
    """One row per arm."""
    result = Table(
        "", "validation loss", "to float32", "gradients 0", "weights unchanged by a step"
    )
    result.columns[0].no_wrap = True
    for column in result.columns[1:]:
        column.justify = "right"
    for name, run in runs.items():
        difference = run.validation_loss - runs["float32"].validation_loss
        shares = (np.mean(each or [np.nan]) for each in (run.zero_gradients, run.unmoved_weights))
        losses = (f"{run.validation_loss:.3f}", f"{difference:+.3f}")
        result.add_row(name, *losses, *(f"{100 * each:.1f} %" for each in shares))
    return result


def draw(runs: dict[str, Run], path: Path) -> None:
    """Save a picture of the training losses; the suffix of ``path`` decides the format."""
    picture, (axes,) = figure(1)
    for arm in ARMS:
        # Dashed, because this curve lies on top of float32's.
        style = "--" if arm.name == "mixed" else "-"
        loss = smooth(runs[arm.name].train_loss, 0.98)
        axes.plot(range(1, len(loss) + 1), loss, style, color=arm.color, label=arm.name)
    axes.set(xlabel="step", ylabel="training loss, smoothed (nats per byte)")
    axes.set_title("float32, mixed precision, and mixed precision with a part left out")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_line.add_argument("--steps", type=int, default=3000, help="steps of each arm")
    command_line.add_argument(
        "--picture", type=Path, default=PICTURE, help="file for the picture (.png or .svg)"
    )
    options = command_line.parse_args(arguments)
    torch.set_num_threads(1)  # more threads do not help with such small tensors
    runs = compare(options.steps)
    Console().print(table(runs))
    draw(runs, options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
