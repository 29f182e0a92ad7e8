"""Fit a linear layer to random numbers with L-BFGS, which calls a closure many times per step."""

# With --dtype bfloat16 or float16 the model has that dtype, and FP16_Optimizer gives it float32
# masters and a scaled loss. With --plain there is no FP16_Optimizer.

import argparse

import torch
from torch import nn

import amp_mp as amp

command_line = argparse.ArgumentParser(description=__doc__)
command_line.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
command_line.add_argument("--plain", action="store_true", help="leave FP16_Optimizer out")
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
if not args.plain:
    optimizer = amp.FP16_Optimizer(optimizer, static_loss_scale=128.0)


def closure() -> torch.Tensor:
    """Compute the loss and its gradients."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).float(), y)
    if args.plain:
        loss.backward()
    else:
        # Before each evaluation the optimizer copies the newest masters to the model.
        optimizer.backward(loss)
    return loss


losses = [optimizer.step(closure).item() for _ in range(args.steps)]
print(f"{args.dtype}: loss {losses[0]:.6f} at first, {losses[-1]:.2e} at the last of {args.steps}")
