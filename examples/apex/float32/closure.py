"""Fit a linear layer to random numbers with L-BFGS, which calls a closure many times per step."""

# The plain script; ../closure.py is its mixed-precision version. With --dtype bfloat16 this
# one trains too, but loses updates that are small beside a weight.

import argparse

import torch
from torch import nn

import amp_mp as amp

command_line = argparse.ArgumentParser(description=__doc__)
command_line.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
command_line.add_argument("--steps", type=int, default=5, help="optimizer steps")
args = command_line.parse_args()
dtype = getattr(torch, args.dtype)

torch.manual_seed(0)
x = torch.randn(64, 1024).to(dtype)
y = torch.randn(64, 16)
model = nn.Linear(1024, 16)
if dtype != torch.float32:
    amp.prepare(model, dtype)
optimizer = torch.optim.LBFGS(model.parameters())


def closure() -> torch.Tensor:
    """Compute the loss and its gradients."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).float(), y)
    loss.backward()
    return loss


losses = [optimizer.step(closure).item() for _ in range(args.steps)]
print(f"{args.dtype}: loss {losses[0]:.6f} at first, {losses[-1]:.2e} at the last of {args.steps}")
