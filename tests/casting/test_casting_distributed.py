"""DDP and FSDP2 over two processes, and compiled graphs of processes with different tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import distributed
import pytest
import torch


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_distributed_models_train_as_alone(wrap: str, tmp_path: Path) -> None:
    path = str(tmp_path / "rank")
    torch.multiprocessing.spawn(distributed.train, (1, "alone", path), nprocs=1)
    torch.multiprocessing.spawn(distributed.train, (2, wrap, path), nprocs=2)
    alone = torch.load(f"{path}.alone.0")
    for rank in range(2):
        found = torch.load(f"{path}.{wrap}.{rank}")
        assert len(found) == len(alone)
        for a, b in zip(alone, found, strict=True):
            # The mean of two equal gradients is exact; a matrix product of the same numbers may add
            # up in another order, and then round to a neighbour in bfloat16.
            torch.testing.assert_close(b, a, rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("kind", ["FP16_Optimizer", "amp SGD"])
def test_masters_agree_on_ranks_that_started_from_different_seeds(
    kind: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "rank")
    torch.multiprocessing.spawn(distributed.prepared, (2, kind, path), nprocs=2)
    first, second = (torch.load(f"{path}.{kind}.{rank}") for rank in range(2))
    assert len(first) == len(second) == 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


COMPILED = """
import sys
import torch
import amp_mp as amp

amp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale=1.0)
amp.set_policy("aten::gelu", sys.argv[1])
gelu = torch.compile(torch.nn.functional.gelu, fullgraph=True)
print(gelu(torch.ones(64, dtype=torch.bfloat16)).dtype)
"""


def test_processes_with_different_tables_share_no_compiled_graph(tmp_path: Path) -> None:
    """The cache on disk is torch's: without a tag it hands out the other process's graph."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    found = [
        subprocess.run(
            [sys.executable, "-c", COMPILED, policy],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for policy in ("float32", "unchanged", "float32")
    ]
    assert found == ["torch.float32", "torch.bfloat16", "torch.float32"]
