"""Does the host ever wait in a training step with loss scaling and clipping? Exit status 1 if so.

scale, backward, step and update are traced; a call that waits for the device is a wait, and so is
a copy to the host. `--device cpu` tries the code.

    python benchmarks/gpu/gpu_syncs.py
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_counts import Counts, as_dict, count
from torch import nn

import amp_mp as amp


def trainer(dtype: torch.dtype, memory: str, device: str) -> Callable[[], None]:
    """A training step of a small model in dtype; gradients are new tensors every time."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)]
    model = amp.prepare(nn.Sequential(*layers).to(device), dtype)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, memory=memory)
    scaler = amp.GradScaler(device, init_scale=2.0**10)
    data = torch.randn(32, 64, device=device, dtype=dtype)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(data).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def check(device: str) -> dict[str, Counts]:
    """Counts of one step, the sixth, for both dtypes and every way of storing."""
    found = {}
    dtypes = (torch.bfloat16, torch.float16)
    for dtype, memory in itertools.product(dtypes, ("float32", "exact", "lean", "tiny", "micro")):
        step = trainer(dtype, memory, device)
        for _ in range(5):
            step()
        found[f"{str(dtype).removeprefix('torch.')} {memory}"] = count(step, device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="where (cuda)")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    arguments = parser.parse_args()
    found = check(arguments.device)
    for name, counts in found.items():
        print(
            f"{name:<18} {counts.launches:3d} launches, {counts.waits} waits, {counts.to_host} "
            "copies to the host"
        )
    if arguments.json:
        content = {name: as_dict(counts) for name, counts in found.items()}
        arguments.json.write_text(json.dumps(content) + "\n")
    if arguments.device == "cuda" and not all(counts.launches for counts in found.values()):
        raise SystemExit("no kernel was traced: the profiler does not work here")
    raise SystemExit(any(counts.waits or counts.to_host for counts in found.values()))


if __name__ == "__main__":
    main()
