"""A linear layer fitted to random numbers by L-BFGS, which calls a closure many times a step."""

# --dtype bfloat16 or float16 makes the model that; FP16_Optimizer gives it float32 masters and a
# scaled loss. float32/closure.py is the script before the two lines for that were written.

import argparse

import torch
from torch import nn

import amp_mp as amp

command_line = argparse.ArgumentParser(description=__doc__)
command_line.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
command_line.add_argument("--steps", type=int, default=5)
args = command_line.parse_args()
dtype = getattr(torch, args.dtype)

torch.manual_seed(0)
x = torch.randn(64, 1024).to(dtype)
y = torch.randn(64, 16)
model = nn.Linear(1024, 16)
if dtype != torch.float32:
    amp.prepare(model, dtype)
optimizer = torch.optim.LBFGS(model.parameters())
optimizer = amp.FP16_Optimizer(optimizer, static_loss_scale=128.0)


def closure() -> torch.Tensor:
    """Clear the gradients, compute them anew, return the loss."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).float(), y)
    # The model has the masters' newest values: the optimizer sees to it before each evaluation.
    optimizer.backward(loss)
    return loss


losses = [optimizer.step(closure).item() for _ in range(args.steps)]
print(f"{args.dtype}: loss {losses[0]:.6f} at first, {losses[-1]:.2e} at the last of {args.steps}")
