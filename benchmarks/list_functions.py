"""Speed of apex's norms and of amp_C's passes beside torch's: CPU time, in turns, on one thread.

torch's norms come first, because Apex's replace those of low precision for the whole process.

python benchmarks/list_functions.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from timing import Candidate, quartiles, samples
from torch import Tensor, nn

from amp_mp.apex import amp_C
from amp_mp.apex.contrib.clip_grad import clip_grad_norm_
from amp_mp.apex.multi_tensor_apply import multi_tensor_applier
from amp_mp.apex.normalization import FusedLayerNorm, FusedRMSNorm

Pair = tuple[Callable[[], object], Callable[[], object]]


def forward_and_backward(module: nn.Module, x: Tensor) -> Callable[[], object]:
    grad = torch.ones_like(x)
    return lambda: torch.autograd.grad(module(x), [x, *module.parameters()], grad)


def norms(rows: int, dtype: torch.dtype) -> dict[str, Pair]:
    x = torch.randn(rows, 1024).to(dtype).requires_grad_()
    pairs = {
        "LayerNorm": (FusedLayerNorm(1024), nn.LayerNorm(1024)),
        "RMSNorm": (FusedRMSNorm(1024), nn.RMSNorm(1024, 1e-5)),
    }
    return {
        f"{name}, forward and backward": (
            forward_and_backward(ours.to(dtype), x),
            forward_and_backward(torchs.to(dtype), x),
        )
        for name, (ours, torchs) in pairs.items()
    }


def passes(sizes: list[int], dtype: torch.dtype) -> dict[str, Pair]:
    x, y = ([torch.randn(n).to(dtype) for n in sizes] for _ in range(2))
    out = [torch.empty_like(t) for t in x]
    flag = torch.zeros(1, dtype=torch.int32)
    param = [nn.Parameter(t.clone()) for t in x]
    for p, g in zip(param, y, strict=True):
        p.grad = g.clone()

    def check(tensors: list[Tensor]) -> None:
        largest = torch.stack(torch._foreach_norm(tensors, torch.inf))
        flag.masked_fill_(~largest.isfinite().all(), 1)

    def scale() -> None:
        torch._foreach_copy_(out, torch._foreach_mul(x, 0.5))
        check(x)

    def axpby() -> None:
        torch._foreach_copy_(out, torch._foreach_add(torch._foreach_mul(x, 0.5), y, alpha=2.0))
        check([*x, *y])

    def call(op: Callable[..., object], lists: list[list[Tensor]], *args: object) -> object:
        return multi_tensor_applier(op, flag, lists, *args)

    return {
        "scale, with its check": (lambda: call(amp_C.multi_tensor_scale, [x, out], 0.5), scale),
        "axpby, with its check": (
            lambda: call(amp_C.multi_tensor_axpby, [x, y, out], 0.5, 2.0, -1),
            axpby,
        ),
        "l2norm": (
            lambda: call(amp_C.multi_tensor_l2norm, [x]),
            lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(x))),
        ),
        "clip_grad_norm_": (
            lambda: clip_grad_norm_(param, 1e9),
            lambda: nn.utils.clip_grad_norm_(param, 1e9),
        ),
    }


def spread(values: list[float]) -> str:
    return quartiles([1e3 * value for value in values], "{:.3f} ({:.3f}-{:.3f})")


def main(quick: bool) -> None:
    torch.set_num_threads(1)
    rounds = 5 if quick else 15
    large, small = ([100_000] * 5, [256] * 50) if quick else ([1_000_000] * 10, [256] * 500)
    print("| ms: median (quartiles) | dtype | amp_mp.apex | torch | torch / amp_mp |")
    print("|---|---|---|---|---|")
    of_dtypes = {d: norms(128 if quick else 4096, d) for d in (torch.float32, torch.bfloat16)}
    first = {
        (dtype, name): samples([Candidate("t", torchs, 1)], rounds, clock=time.process_time)["t"]
        for dtype, pairs in of_dtypes.items()
        for name, (_, torchs) in pairs.items()
        if dtype != torch.float32
    }
    for dtype, found in of_dtypes.items():
        for label, sizes in ((f"{len(large)} large", large), (f"{len(small)} small", small)):
            found |= {f"{name}, {label}": pair for name, pair in passes(sizes, dtype).items()}
        for name, (ours, torchs) in found.items():
            times = samples(
                [Candidate("a", ours, 1), Candidate("t", torchs, 1)],
                rounds,
                clock=time.process_time,
            )
            times["t"] = first.get((dtype, name), times["t"])
            ratio = statistics.median(times["t"]) / statistics.median(times["a"])
            kind = str(dtype).removeprefix("torch.")
            print(
                f"| {name} | {kind} | {spread(times['a'])} | {spread(times['t'])} | {ratio:.2f} |"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small tensors, few rounds")
    main(parser.parse_args().quick)
