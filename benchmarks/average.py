"""One update of an exponential average of a model's weights: torch's AveragedModel and amp_mp's.

torch averages float32 weights; over bfloat16 weights its average would stand still. amp_mp averages
float32 weights too, and the masters of bfloat16 weights as each format stores them.

    OMP_NUM_THREADS=1 python benchmarks/average.py
"""

from __future__ import annotations

import argparse
import time

import torch
from timing import Candidate, in_place, medians, show
from torch import nn
from torch.optim import swa_utils

import amp_mp as amp

DECAY = 0.9999
# Read, and for the average written too: the average, and the next value.
FORMATS = {"float32": 2 * 4 + 6, "split32": 2 * 4 + 4, "split24": 2 * 4 + 3, "none": 2 * 4 + 2}


def model_of(sizes: list[int], device: str) -> nn.Module:
    """A float32 model with a parameter of each size."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(size // 64, 64, generator=generator)) for size in sizes]
    return nn.ParameterList(params).to(device)


def torchs(sizes: list[int], device: str) -> Candidate:
    """torch's, over float32 weights."""
    model = model_of(sizes, device)
    fn = swa_utils.get_ema_multi_avg_fn(DECAY)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=fn)
    averaged.update_parameters(model)
    return Candidate(
        "torch, float32 weights", lambda: averaged.update_parameters(model), 12 * sum(sizes)
    )


def ours(sizes: list[int], device: str, master: str | None) -> Candidate:
    """amp_mp's: over float32 weights, or over bfloat16 weights with such masters."""
    model = model_of(sizes, device)
    name, moved = "amp_mp, float32 weights", 12
    if master is not None:
        amp.prepare(model, torch.bfloat16)
        name, moved = f"amp_mp, bfloat16, master={master!r}", FORMATS[master]
    optimizer = amp.optim.SGD(model.parameters(), lr=1e-3, master=master)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    averaged = amp.AveragedModel(model, optimizer, decay=DECAY)
    averaged.update()
    return Candidate(name, averaged.update, moved * sum(sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where (cpu)")
    parser.add_argument("--threads", type=int, default=1, help="threads for all candidates (1)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (15)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), amp_mp {amp.build_info()}")
    for title, sizes, rounds in (
        ("20 tensors of 1,000,000", [1_000_000] * 20, arguments.rounds),
        ("500 tensors of 256", [256] * 500, 10 * arguments.rounds),
    ):
        base = torchs(sizes, arguments.device)
        candidates = [
            base,
            *(ours(sizes, arguments.device, master) for master in (None, *FORMATS)),
            in_place(sum(sizes), arguments.device),
        ]
        clock = time.process_time if arguments.device == "cpu" else time.perf_counter
        seconds = medians(candidates, rounds, arguments.device, clock=clock)
        show(title, candidates, seconds, base.name)


if __name__ == "__main__":
    main()
