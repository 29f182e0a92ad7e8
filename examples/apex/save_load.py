"""Train, save, load into new objects and continue: the same steps as in an uninterrupted run."""

# With --dtype bfloat16 or float16 the model has that dtype, and FP16_Optimizer gives it float32
# masters and a scaled loss. With --plain there is no FP16_Optimizer.

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import amp_mp as amp

command_line = argparse.ArgumentParser(description=__doc__)
command_line.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
command_line.add_argument("--plain", action="store_true", help="leave FP16_Optimizer out")
command_line.add_argument(
    "--steps", type=int, default=100, help="steps before saving, and after loading"
)
args = command_line.parse_args()
dtype = getattr(torch, args.dtype)

torch.manual_seed(0)
x = torch.randn(64, 1024).to(dtype)
y = torch.randn(64, 16)


def build() -> tuple[nn.Module, Any]:
    """A new model and its optimizer."""
    model = nn.Linear(1024, 16)
    if dtype != torch.float32:
        amp.prepare(model, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if not args.plain:
        optimizer = amp.FP16_Optimizer(optimizer, static_loss_scale=128.0)
    return model, optimizer


def train(model: nn.Module, optimizer: Any) -> list[float]:
    """Train for args.steps steps and return the losses."""
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        if args.plain:
            loss.backward()
        else:
            optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


model, optimizer = build()
losses = train(model, optimizer)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "checkpoint.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    saved = torch.load(path, weights_only=True)
unbroken = losses + train(model, optimizer)

model, optimizer = build()
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
losses += train(model, optimizer)

print(f"{args.dtype}: loss {losses[0]:.6f} at first, {losses[-1]:.6f} after {2 * args.steps} steps")
print(f"the same losses as in an uninterrupted run: {losses == unbroken}")
