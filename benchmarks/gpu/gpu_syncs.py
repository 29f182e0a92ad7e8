"""Does the host ever wait in a training step with loss scaling and clipping? How many launches?

scale, backward, step and update are traced; a call that waits for the device is a wait, and so is
a copy to the host. step and update are also traced alone, for their launches. Exit status 1 if
there is a wait, or more than three launches of step and update. `--device cpu` tries the code.

    python benchmarks/gpu/gpu_syncs.py
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_counts import as_dict, count
from torch import nn

import amp_mp as amp

LAUNCHES = 3  # measure, decide, apply
Work = Callable[[], None]


def trainer(dtype: torch.dtype, memory: str, device: str) -> tuple[Work, Work]:
    """The two halves of a small model's training step in dtype: up to the gradients, and after.

    Gradients are new tensors every time.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)]
    model = amp.prepare(nn.Sequential(*layers).to(device), dtype)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, memory=memory)
    scaler = amp.GradScaler(device, init_scale=2.0**10)
    data = torch.randn(32, 64, device=device, dtype=dtype)

    def backward() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(data).float().square().mean()
        scaler.scale(loss).backward()

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return backward, step


def check(device: str) -> dict[str, dict[str, Any]]:
    """Counts of one step, the sixth, for both dtypes and every way of storing.

    step_launches, step_kernels: without forward and backward, of the seventh.
    """
    found = {}
    dtypes, memories = (
        (torch.bfloat16, torch.float16),
        ("float32", "exact", "lean", "tiny", "micro"),
    )
    for dtype, memory in [*itertools.product(dtypes, memories), (torch.bfloat16, "nano")]:
        backward, step = trainer(dtype, memory, device)

        def whole(backward: Work = backward, step: Work = step) -> None:
            backward()
            step()

        for _ in range(5):
            whole()
        counts = as_dict(*count(device, whole))
        backward()
        (alone,) = count(device, step)
        counts |= {"step_launches": alone.launches, "step_kernels": alone.kernels}
        found[f"{str(dtype).removeprefix('torch.')} {memory}"] = counts
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="where (cuda)")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    arguments = parser.parse_args()
    found = check(arguments.device)
    for name, counts in found.items():
        print(
            f"{name:<18} {counts['launches']:3d} launches, {counts['step_launches']} in the step, "
            f"{counts['waits']} waits, {counts['to_host']} copies to the host"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found) + "\n")
    if arguments.device == "cuda" and not all(c["step_launches"] for c in found.values()):
        raise SystemExit("no kernel was traced: the profiler does not work here")
    raise SystemExit(any(map(too_much, found.values())))


def too_much(counts: dict[str, Any]) -> bool:
    """Whether the host waits, or step and update launch more than they should."""
    return bool(counts["waits"] or counts["to_host"] or counts["step_launches"] > LAUNCHES)


if __name__ == "__main__":
    main()
