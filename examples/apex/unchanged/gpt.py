"""Train a small GPT on text in several processes, with Apex's calls alone.

Run it as `torchrun --nproc-per-node 2 -m amp_mp.apex gpt.py --opt-level O2`.
"""

import argparse
import os
import sys

import torch
from apex import amp
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", "0")), type=int)
parser.add_argument("--opt-level", default="O2")
parser.add_argument("--steps", default=40, type=int)
parser.add_argument("--accumulate", default=1, type=int, help="losses a step")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--seed", default=0, type=int)
args = parser.parse_args()

WIDTH, HEADS, LAYERS, CONTEXT, ROWS = 32, 2, 2, 32, 16
TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 40


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = FusedLayerNorm(WIDTH), FusedLayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """(rows, context, width)."""
        rows, context, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, context, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, context, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits of the next character."""

    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = FusedLayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids):
        """(rows, context) of ids."""
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))


world_size = int(os.environ.get("WORLD_SIZE", "1"))
if args.device == "cuda":
    torch.cuda.set_device(args.local_rank)
if world_size > 1:
    backend = "nccl" if args.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend=backend, init_method="env://")

letters = sorted(set(TEXT))
ids = torch.tensor([letters.index(letter) for letter in TEXT], device=args.device)
torch.manual_seed(args.seed + args.local_rank)  # the first process's weights are sent to all
model = GPT(len(letters)).to(args.device)
optimizer = FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
if world_size > 1:
    model = DistributedDataParallel(model)

generator = torch.Generator().manual_seed(args.seed + args.local_rank)
losses = []
for _ in range(args.steps):
    optimizer.zero_grad()
    for part in range(args.accumulate):
        starts = torch.randint(len(ids) - CONTEXT - 1, (ROWS,), generator=generator)
        batch = torch.stack([ids[i : i + CONTEXT + 1] for i in starts.tolist()])
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss = loss / args.accumulate
        last = part == args.accumulate - 1
        with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
            scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    losses.append(loss.item() * args.accumulate)

weights = [param.detach().float().clone() for param in amp.master_params(optimizer)]
if args.local_rank == 0:
    print(f"loss {losses[0]:.4f} at first, {sum(losses[-5:]) / 5:.4f} at the end")
if world_size > 1:
    for weight in weights:
        sent = weight.clone()
        torch.distributed.broadcast(sent, 0)
        assert torch.equal(sent, weight), "processes have different weights"
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo can keep a process from ending
