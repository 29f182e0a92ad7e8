"""Fit a small network in several processes, with Apex's calls alone.

Run it as `torchrun --nproc-per-node 2 -m amp_mp.apex simple_distributed.py`, or in one process as
`python -m amp_mp.apex simple_distributed.py`.
"""

import argparse
import os
import sys

import torch
from apex import amp
from apex.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", "0")), type=int)
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--steps", default=100, type=int)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--seed", default=0, type=int)
parser.add_argument("--overflow-at", default=-1, type=int, help="a step whose gradients are inf")
parser.add_argument("--save", default="", metavar="PATH", help="checkpoint to write at the end")
parser.add_argument("--resume", default="", metavar="PATH", help="checkpoint to go on from")
args = parser.parse_args()

args.distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
if args.device == "cuda":
    torch.cuda.set_device(args.local_rank)
if args.distributed:
    backend = "nccl" if args.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend=backend, init_method="env://")

N, D_in, D_out = 64, 1024, 16

# Each process has data of its own; the models become that of the first process.
torch.manual_seed(args.seed + args.local_rank)
x = torch.randn(N, D_in, device=args.device)
y = torch.randn(N, D_out, device=args.device)

model = torch.nn.Linear(D_in, D_out).to(args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)

start = 0
if args.resume:
    checkpoint = torch.load(args.resume, map_location=args.device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    start = checkpoint["step"]

if args.distributed:
    model = DistributedDataParallel(model)

loss_fn = torch.nn.MSELoss()

losses = []
for step in range(start, args.steps):
    optimizer.zero_grad()
    y_pred = model(x)
    loss = loss_fn(y_pred.float(), y)
    if step == args.overflow_at:
        loss = loss * float("inf")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    losses.append(loss.item())

if args.local_rank == 0:
    print("final loss = ", losses[-1])
    if args.save:
        own = model.module if args.distributed else model
        state = {"model": own.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "amp": amp.state_dict(), "step": args.steps}, args.save)
weights = [param.detach().clone() for param in amp.master_params(optimizer)]
if args.distributed:
    for weight in weights:
        sent = weight.clone()
        torch.distributed.broadcast(sent, 0)
        assert torch.equal(sent, weight), "processes have different weights"
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo can keep a process from ending
