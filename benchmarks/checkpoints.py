"""Time of saving and loading a checkpoint: amp.checkpoint, and torch.optim.AdamW with torch's DCP.

    OMP_NUM_THREADS=1 python benchmarks/checkpoints.py --tensors 50 --size 1024

All write to the same disk, with fsync, and take turns. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from timing import Candidate, medians
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import amp_mp as amp

LOW = ("exact", "lean", "tiny", "micro")
KINDS = ("torch", "float32", *LOW)
LABELS = {
    "torch": "torch.optim.AdamW, `dcp.save` and `dcp.load`, float32",
    "float32": "amp_mp, float32 weights",
    **{kind: f'amp_mp, bfloat16 weights, `memory="{kind}"`' for kind in LOW},
}


def made(kind: str, tensors: int, size: int) -> tuple[nn.Module, Any]:
    """A model of square matrices and its optimizer, which has state already."""
    shapes = [torch.randn(size, size) for _ in range(tensors)]
    model = nn.ParameterList(nn.Parameter(values) for values in shapes)
    if kind == "torch":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer
    if kind != "float32":
        amp.prepare(model, torch.bfloat16)
    memory = "exact" if kind == "float32" else kind
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3, memory=memory)
    optimizer.init_state()
    return model, optimizer


def save(kind: str, model: nn.Module, optimizer: Any, path: Path) -> None:
    """One save; torch's calls replace the directory's files in place."""
    if kind == "torch":
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    else:
        amp.checkpoint.save(path, model, optimizer)


def load(kind: str, model: nn.Module, optimizer: Any, path: Path) -> None:
    """One load, into the model and optimizer that were saved."""
    if kind == "torch":
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        amp.checkpoint.load(path, model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of each")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    pairs = {kind: made(kind, arguments.tensors, arguments.size) for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        paths = {kind: Path(folder, kind) for kind in KINDS}
        times = {}
        for call in (save, load):
            candidates = [
                Candidate(kind, lambda k=kind, c=call: c(k, *pairs[k], paths[k]), 0)  # type: ignore[misc]
                for kind in KINDS
            ]
            times[call.__name__] = medians(candidates, arguments.rounds, warm_up=1)
        print("| | MiB on disk | save, s | load, s |\n|---|---|---|---|")
        for kind in KINDS:
            size = sum(file.stat().st_size for file in paths[kind].iterdir()) / 2**20
            seconds = (f"{times[name][kind]:.2f}" for name in ("save", "load"))
            print(f"| {LABELS[kind]} | {size:.0f} | {' | '.join(seconds)} |")


if __name__ == "__main__":
    main()
