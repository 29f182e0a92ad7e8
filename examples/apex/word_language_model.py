"""Train an LSTM language model on the source of Python's standard library, byte by byte."""

# With --fp16 the model is float16, and FP16_Optimizer gives it float32 masters and a scaled loss.
# With --plain there is no FP16_Optimizer. The gradients of the optimizer's own parameters are
# clipped; of FP16_Optimizer these are the masters, whose gradients are not scaled.
# (optimizer.clip_master_grads(args.clip) does the same natively and returns -1 after an overflow.)

import argparse
import math
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

import amp_mp as amp

sys.path.append(str(next(f for f in Path(__file__).resolve().parents if f.name == "examples")))
from corpus import load_text

command_line = argparse.ArgumentParser(description=__doc__)
command_line.add_argument("--fp16", action="store_true", help="float16 weights and activations")
command_line.add_argument("--plain", action="store_true", help="leave FP16_Optimizer out")
command_line.add_argument("--static-loss-scale", type=float, default=128.0)
command_line.add_argument(
    "--dynamic-loss-scale",
    action="store_true",
    help="use a dynamic loss scale instead of the static one",
)
command_line.add_argument("--steps", type=int, default=300, help="optimizer steps")
command_line.add_argument("--width", type=int, default=48, help="size of the hidden state")
command_line.add_argument("--batch", type=int, default=16, help="sequences per step")
command_line.add_argument(
    "--bptt", type=int, default=16, help="bytes through which gradients flow back"
)
command_line.add_argument("--lr", type=float, default=8.0, help="learning rate")
command_line.add_argument("--clip", type=float, default=0.25, help="largest norm of all gradients")
args = command_line.parse_args()

History = tuple[torch.Tensor, torch.Tensor] | None


class Model(nn.Module):
    """Maps tokens (time, batch) to the float32 logits (time, batch, 256) of the next bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor, history: History) -> tuple[torch.Tensor, History]:
        x, history = self.lstm(self.tokens(tokens), history)
        return self.head(x).float(), history


torch.manual_seed(0)
# Each sequence of a batch continues the one before, so the LSTM keeps its history.
text = load_text(sysconfig.get_paths()["stdlib"])[0]
text = text[: len(text) // args.batch * args.batch].view(args.batch, -1).T
model = Model(args.width)
if args.fp16:
    amp.prepare(model, torch.float16)
optimizer = torch.optim.SGD(model.parameters(), args.lr)
if not args.plain:
    optimizer = amp.FP16_Optimizer(optimizer, args.static_loss_scale, args.dynamic_loss_scale)

losses = []
history: History = None
for step in range(args.steps):
    part = text[step * args.bptt : (step + 1) * args.bptt + 1].long()
    optimizer.zero_grad()
    outputs, history = model(part[:-1], history)
    history = (history[0].detach(), history[1].detach())
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), part[1:].flatten())
    if args.plain:
        loss.backward()
    else:
        optimizer.backward(loss)
    nn.utils.clip_grad_norm_(amp.apex.amp.master_params(optimizer), args.clip)
    optimizer.step()
    losses.append(loss.item())
    if (step + 1) % 100 == 0:
        mean = sum(losses[-100:]) / 100
        print(f"step {step + 1}: loss {mean:.3f}, perplexity {math.exp(mean):.2f}")
