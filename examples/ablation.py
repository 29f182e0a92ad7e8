"""Take mixed precision apart: train an LSTM language model four ways and see what each part is for.

All four start from the same weights and see the same batches. Prints a table, saves a picture.
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
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import amp_mp as amp

PICTURE = Path(__file__).resolve().parent.parent / "demo" / "ablation.png"
WIDTH, EMBEDDING = 64, 32
BATCH, TIME = 16, 16
# A step of a large model averages over millions of bytes, in parts; each part's loss, and with it
# every gradient, is divided by their number. Here a part is 256 bytes of 4 million, and the
# optimizer steps after each: Adam's steps do not depend on what the loss was divided by.
PARTS = 2**14
# An update of 2e-4 to a weight of 0.5, which is a middling one here, is 2^-11 of it: at the edge of
# what float16 can hold. In any training updates get that small once the learning rate decays.
LARGEST_WEIGHT = 1.0
LEARNING_RATE = 2e-4
HELD_OUT = 40  # batches in the validation loss
LOOKED_AT = 50  # steps between two looks at gradients and updates


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
    """What an arm measured; the shares leave the embedding out, where absent bytes get nothing.

    Attributes:
        train_loss: of every step, in nats per byte.
        validation_loss: at the end, in nats per byte.
        zero_gradients: share of the gradients that were 0, at every look.
        unmoved_weights: share of the weights that a step left as they were, at every look.
    """

    train_loss: list[float] = field(default_factory=list)
    validation_loss: float = float("nan")
    zero_gradients: list[float] = field(default_factory=list)
    unmoved_weights: list[float] = field(default_factory=list)


class LanguageModel(nn.Module):
    """Embedding, LSTM and head over bytes; computes in the dtype of its weights.

    Products are a Tensor Core's: factors of that dtype, sums in float32, a result of that dtype.
    nn.LSTM is the same in float32; in float16 it would take several times as long on a CPU.
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
        # Widened once, and not for every byte: so its gradient is added up in float32.
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
    """Inputs and targets, (time, batch), somewhere in the text: the same for the same seed."""
    starts = np.random.default_rng(seed).integers(0, len(text) - TIME, size=BATCH)
    span = text[torch.from_numpy(starts) + torch.arange(TIME + 1)[:, None]].long()
    return span[:-1], span[1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(arm: Arm, steps: int, bar: tqdm) -> Run:
    """Train as ``arm`` says, moving the progress bar."""
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
    # Where the optimizer keeps the weights: in masters, or, in float32, in the model.
    kept: list[Tensor] = optimizer.param_groups[0]["params"]
    run = Run()
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(text, step))
        backward(loss / PARTS)
        looking = step % LOOKED_AT == LOOKED_AT - 1
        before = [weight.detach().clone() for weight in kept] if looking else []
        optimizer.step()
        if low and not arm.masters:
            # What float16 cannot hold is forgotten; all else is as with masters.
            with torch.no_grad():
                for weight, master in zip(model.parameters(), kept, strict=True):
                    master.copy_(weight)
        if looking:
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
    """Which part of the elements is true."""
    return float(torch.cat([each.flatten() for each in flags]).float().mean())


def compare(steps: int) -> dict[str, Run]:
    """Every arm's run, by name."""
    with tqdm(total=len(ARMS) * steps, unit="step", dynamic_ncols=True) as bar:
        return {arm.name: train(arm, steps, bar) for arm in ARMS}


def table(runs: dict[str, Run]) -> Table:
    """One row per arm."""
    result = Table(
        "", "validation loss", "to float32", "gradients 0", "weights not moved by a step"
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
    """Save every arm's training loss; the suffix of ``path`` decides the format."""
    picture, (axes,) = figure(1)
    for arm in ARMS:
        # Dashes, or the curve would hide float32's below it.
        style = "--" if arm.name == "mixed" else "-"
        loss = smooth(runs[arm.name].train_loss, 0.98)
        axes.plot(range(1, len(loss) + 1), loss, style, color=arm.color, label=arm.name)
    axes.set(xlabel="step", ylabel="training loss, smoothed (nats per byte)")
    axes.set_title("float32, mixed precision, and mixed precision with a part left out")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    command_line = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    command_line.add_argument("--steps", type=int, default=3000, help="steps of each arm")
    command_line.add_argument("--picture", type=Path, default=PICTURE)
    options = command_line.parse_args(arguments)
    torch.set_num_threads(1)  # the tensors are too small for more
    runs = compare(options.steps)
    Console().print(table(runs))
    draw(runs, options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
