"""A whole optimizer step on bfloat16 or float16 gradients: torch's pipeline against amp_mp's.

Both keep low-precision weights, float32 masters and states, clip by the global norm, check for
overflow, and carry a loss scale. torch: cast the gradients to float32, GradScaler.unscale_,
clip_grad_norm_, fused AdamW on the masters, cast the weights back: 60 bytes a parameter. amp_mp:
measure, then one pass: 28 with memory="exact". Then Muon on matrices (muon_step.py). Other
libraries: peers.py.

    OMP_NUM_THREADS=1 python benchmarks/step.py
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import subprocess
from pathlib import Path

import muon_step
import torch
from timing import Candidate, in_place, medians, show
from torch_pipeline import SCALE, pipeline, scaled

import amp_mp as amp

TORCH_BYTES = 6 + 8 + 4 + 8 + 28 + 6  # cast, unscale, norm, clip, AdamW, cast back
MEASURE_BYTES = 2
# Gradient 2; then read and written: weight and remainder, moments.
STEP_BYTES = {
    "float32": 2 + 2 * (2 + 4 + 8),
    "exact": 2 + 2 * (2 + 2 + 8),
    "lean": 2 + 2 * (2 + 1 + 2 + 2),
    "tiny": 2 + 2 * (2 + 1 + 33 / 32 + 1 / 32 + 2),
    "micro": 2 + 2 * (2 + 1 + 33 / 32 + 1 / 32 + 1 + 1 / 32),
    "nano": 2 + 2 * (2 + 1 / 2 + 33 / 32 + 1 / 32 + 1 + 1 / 32),
}


def presets_of(dtype: torch.dtype) -> list[str]:
    """The values of memory= for weights of a dtype."""
    return [memory for memory in STEP_BYTES if dtype == torch.bfloat16 or memory != "nano"]


def weights(
    sizes: list[int], device: str, dtype: torch.dtype = torch.bfloat16
) -> list[torch.nn.Parameter]:
    """Parameters with gradients of the same dtype that carry the loss scale."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for size in sizes:
        shape = (size // 64, 64)  # rows, as a model's matrices have
        values = torch.randn(shape, generator=generator)
        param = torch.nn.Parameter((0.02 * values).to(device, dtype))
        grad = 1e-3 * SCALE * torch.randn(shape, generator=generator)
        param.grad = grad.to(device, dtype)
        params.append(param)
    return params


def torch_pipeline(sizes: list[int], device: str, dtype: torch.dtype = torch.bfloat16) -> Candidate:
    """What mixed precision with low-precision weights takes with torch alone."""
    model = weights(sizes, device, dtype)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    optimizer.step = functools.partial(optimizer.step)  # keeps GradScaler from its fused protocol
    optimizer._step_supports_amp_scaling = False  # unscale_ was called: no second check is wanted
    step = pipeline(model, masters, optimizer, device)
    return Candidate("torch", step, TORCH_BYTES * sum(sizes))


def our_step(
    sizes: list[int], device: str, memory: str = "exact", dtype: torch.dtype = torch.bfloat16
) -> Candidate:
    """The same by amp_mp."""
    model = weights(sizes, device, dtype)
    optimizer = amp.optim.AdamW(model, lr=1e-4, max_grad_norm=1.0, memory=memory)
    moved = round((MEASURE_BYTES + STEP_BYTES[memory]) * sum(sizes))
    return Candidate(f"amp_mp, {memory}", scaled(optimizer, device), moved)


def passes(sizes: list[int], device: str, dtype: torch.dtype = torch.bfloat16) -> list[Candidate]:
    """amp_mp's passes alone: the update in every format, measuring in every dtype.

    And the update with what a step does by default, which is to look for inf and NaN.
    """
    total = sum(sizes)
    found = []
    for memory in presets_of(dtype):
        for checks in (False, True):
            model = weights(sizes, device, dtype)
            optimizer = amp.optim.AdamW(model, lr=1e-4, memory=memory, check_overflow=checks)
            name = f"  AdamW.step {'checked' if checks else 'alone'}, {memory}"
            moved = round((STEP_BYTES[memory] + checks * MEASURE_BYTES) * total)
            found.append(Candidate(name, optimizer.step, moved))
    for measured, width in ((torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4)):
        grads = [p.grad.to(measured) for p in weights(sizes, device)]
        name = f"  measure alone, {str(measured).removeprefix('torch.')}"
        run = functools.partial(amp._C.measure, grads)
        found.append(Candidate(name, run, width * total))
    return found


def reading(elements: int, device: str) -> Candidate:
    """The machine's bandwidth for reading alone, as far as torch's sum reaches it."""
    x = torch.ones(elements, device=device)
    return Candidate("read (x.sum())", x.sum, 4 * elements)


def record(path: Path, results: dict[str, dict[str, float]], device: str) -> None:
    """Writes the medians with what is needed to read them later."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    driver = ""
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout
    content = {
        "commit": commit.strip(),
        "torch": torch.__version__,
        "build": amp.build_info(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "driver": driver.strip() or None,
        "seconds": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where (cpu)")
    parser.add_argument("--threads", type=int, default=1, help="threads for all candidates (1)")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16"], help="weights (bfloat16)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (15)")
    parser.add_argument("--json", type=Path, help="also write the medians to this file")
    arguments = parser.parse_args()
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), amp_mp {amp.build_info()}")
    results = {}
    for title, sizes, rounds in (
        ("50 tensors of 1,000,000", [1_000_000] * 50, arguments.rounds),
        ("500 tensors of 256", [256] * 500, 10 * arguments.rounds),
    ):
        base = torch_pipeline(sizes, device, dtype)
        candidates = [
            base,
            *(our_step(sizes, device, memory, dtype) for memory in presets_of(dtype)),
            *(passes(sizes, device, dtype) if sizes[0] > 10_000 else []),
            in_place(sum(sizes), device),
            reading(sum(sizes), device),
        ]
        results[title] = medians(candidates, rounds, device)
        show(title, candidates, results[title], base.name)
    muon_step.compare(4, 512, arguments.rounds, device)
    if arguments.json:
        record(arguments.json, results, device)


if __name__ == "__main__":
    main()
