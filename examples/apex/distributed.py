"""Fit a linear layer in two processes: each has its own data, and gradients are averaged."""

# With --dtype bfloat16 or float16 the model has that dtype, and FP16_Optimizer gives it float32
# masters and a scaled loss. With --plain there is no FP16_Optimizer.

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn

import amp_mp as amp

RANKS = 2


def train(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    """Train in one process; args.save is the folder for its losses and weights."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)  # the same model on each rank, but different data
    model = nn.Linear(1024, 16)
    torch.manual_seed(1 + rank)
    x = torch.randn(64, 1024).to(dtype)
    y = torch.randn(64, 16)
    if dtype != torch.float32:
        amp.prepare(model, dtype)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if not args.plain:
        optimizer = amp.FP16_Optimizer(optimizer, static_loss_scale=128.0)

    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        if args.plain:
            loss.backward()
        else:
            # Gradients are averaged before they reach the masters, so all ranks make the same step
            # or all skip it.
            optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    print(f"rank {rank}, {args.dtype}: loss {losses[0]:.6f} at first, {losses[-1]:.6f} at the end")
    if args.save:
        torch.save({"losses": losses, "model": model.state_dict()}, args.save / f"{rank}.pt")
    distributed.barrier()
    # Not a plain return: a process that shuts down normally can hang, because a thread of gloo then
    # waits for Python's lock.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    command_line = argparse.ArgumentParser(description=__doc__)
    command_line.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "float16")
    )
    command_line.add_argument("--plain", action="store_true", help="leave FP16_Optimizer out")
    command_line.add_argument("--steps", type=int, default=500, help="optimizer steps")
    command_line.add_argument("--save", type=Path, help="folder for the results of both processes")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (command_line.parse_args(), f"file://{folder}/rendezvous")
        multiprocessing.spawn(train, arguments, nprocs=RANKS)
