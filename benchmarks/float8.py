"""Weights as float8: amp.float8_of against a copy of the weights, and against plain torch.

The weights are bfloat16 matrices of Llama's shapes like N(0, .02). The copy is into memory that is
there, and moves 4 bytes a weight where float8 moves 3, to new memory. Plain torch finds the largest
of each block, divides and casts; it has no edge blocks, and makes NaN of blocks of zeros.
Candidates take turns. With one thread the times are CPU time.

    OMP_NUM_THREADS=1 python benchmarks/float8.py
    python benchmarks/float8.py --quick    # the code, not the speed
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from changes import MS, SIZES, shapes, table
from rich.console import Console
from timing import Candidate, quartiles, samples
from torch import Tensor

import amp_mp as amp

FORMS = ("float8_128x128", "float8_128x128_power", "mxfp8")


def plain(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales of whole 128 x 128 blocks."""
    rows, columns = weight.shape
    blocks = weight.view(rows // 128, 128, columns // 128, 128).float()
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(rows, columns), scales.view(rows // 128, columns // 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where (cpu)")
    parser.add_argument("--threads", type=int, default=1, help="threads for all candidates (1)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (15)")
    parser.add_argument("--quick", action="store_true", help="tiny tensors, few rounds")
    arguments = parser.parse_args()
    device, rounds = arguments.device, 2 if arguments.quick else arguments.rounds
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), amp_mp {amp.build_info()}")
    source = torch.Generator(device).manual_seed(0)
    sizes = [(128, 256)] if arguments.quick else shapes(*SIZES[device])
    weights = [
        torch.randn(size, generator=source, device=device).mul_(0.02).bfloat16() for size in sizes
    ]
    count = sum(weight.numel() for weight in weights)
    codes, scales = plain(weights[0])
    ours = amp.float8_of(weights[0], "float8_128x128")
    assert torch.equal(ours.scales, scales)
    assert torch.equal(ours.codes.view(torch.uint8), codes.view(torch.uint8))

    def each(run: Callable[[Tensor], object]) -> Callable[[], None]:
        def run_each() -> None:
            for weight in weights:
                run(weight)

        return run_each

    copies = {weight: weight.clone() for weight in weights}
    copy = Candidate("copy", each(lambda weight: copies[weight].copy_(weight)), 4 * count)
    candidates = [copy]
    for form in FORMS:
        candidates.append(Candidate(form, each(partial(amp.float8_of, form=form)), 3 * count))
    candidates.append(Candidate("float8_128x128 in plain torch", each(plain), 3 * count))
    alone = device == "cpu" and arguments.threads == 1
    clock = time.process_time if alone else time.perf_counter
    found = samples(candidates, rounds, device, clock=clock)
    made = table(
        f"{count:,} bfloat16 weights as float8, ms: median (quartiles) of {rounds} in turns",
        *("", "ms", "to a copy"),
    )
    for name, seconds in found.items():
        ratio = [s / c for s, c in zip(seconds, found["copy"], strict=True)]
        made.add_row(name, quartiles([1e3 * s for s in seconds], MS), quartiles(ratio))
    Console(width=150).print(made)


if __name__ == "__main__":
    main()
