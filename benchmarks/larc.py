"""LARC with momentum SGD: Apex's formula written in torch, LARC around optimizers, and fused.

OMP_NUM_THREADS=1 python benchmarks/larc.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import Candidate, in_place, medians, show
from torch import nn

import amp_mp as amp

LISTS = {"20 tensors of 1,000,000": [1_000_000] * 20, "500 tensors of 256": [256] * 500}
NUMBERS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
DECAY, TRUST, EPS = 1e-4, 0.02, 1e-8
TORCH = "the formula in torch"
# Bytes an element. Norms of gradient and weight 8, decay 12, ratio 8, SGD 20; fused 8 and 20.
APART, FUSED = 8 + 12 + 8 + 20, 8 + 20


def parameters(sizes: list[int], device: str) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(size, generator=source).to(device)) for size in sizes]
    for param in made:
        param.grad = torch.randn(param.shape, generator=source).to(device)
    return made


def in_torch(params: list[nn.Parameter]) -> Callable[[], Any]:
    """A ratio and two passes for each tensor, then the optimizer."""
    optimizer = torch.optim.SGD(params, **NUMBERS)

    @torch.no_grad()
    def step() -> None:
        for param in params:
            grad = param.grad
            assert grad is not None
            weight_norm, grad_norm = param.norm(), grad.norm()
            if weight_norm != 0 and grad_norm != 0:
                ratio = TRUST * weight_norm / (grad_norm + weight_norm * DECAY + EPS)
                ratio = min(ratio / NUMBERS["lr"], 1)
                grad.add_(param, alpha=DECAY).mul_(ratio)
        optimizer.step()

    return step


def around(kind: Any) -> Callable[[list[nn.Parameter]], Callable[[], Any]]:
    def made(params: list[nn.Parameter]) -> Callable[[], Any]:
        inner = kind(params, **NUMBERS, weight_decay=DECAY)
        return amp.apex.parallel.LARC(inner, TRUST, eps=EPS).step

    return made


def fused(params: list[nn.Parameter]) -> Callable[[], Any]:
    numbers = NUMBERS | {"weight_decay": DECAY, "trust_coefficient": TRUST}
    return amp.optim.LARS(params, **numbers, clip=True).step


STEPS: dict[str, tuple[Callable[[list[nn.Parameter]], Callable[[], Any]], int]] = {
    TORCH: (in_torch, APART),
    "LARC(torch.optim.SGD)": (around(torch.optim.SGD), APART),
    "LARC(amp.optim.SGD)": (around(partial(amp.optim.SGD, check_overflow=False)), APART),
    "LARS(clip=True)": (fused, FUSED),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for title, sizes in LISTS.items():
        candidates = [
            Candidate(name, make(parameters(sizes, arguments.device)), moved * sum(sizes))
            for name, (make, moved) in STEPS.items()
        ]
        candidates.append(in_place(sum(sizes), arguments.device))
        clock = time.process_time if arguments.device == "cpu" else time.perf_counter
        seconds = medians(candidates, arguments.rounds, arguments.device, clock=clock)
        show(title, candidates, seconds, TORCH)


if __name__ == "__main__":
    main()
