"""docs/distributed.md: its tables are what the code counts, its code and its commands run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sharded_memory
import torch
import torch.distributed as dist
from ranks import LARGE, on_ranks
from tiers import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import amp_mp as amp

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/distributed.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


def test_the_tables_are_what_the_example_prints() -> None:
    assert sharded_memory.table() in PAGE
    assert sharded_memory.table(replicas=8) in PAGE


def test_the_bytes_a_parameter_are_what_is_counted() -> None:
    rows = re.findall(
        r"^\| (?:float32|bfloat16) shards[^|]* \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.M
    )
    counted = []
    for row in amp.diagnose.sharded_memory(10**6, 1).rows:
        beside = (row.weights + row.masters + row.states) / 10**6
        counted.append((f"{beside:.2g}", f"{beside + row.gradients / 10**6:.2g}"))
    assert rows == counted


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm2(self.first(self.norm1(x)).relu()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def trained(names: dict[str, Any], code: str, folder: Path) -> list[float]:
    """The losses of three steps with the model and the optimizer of a block of the page."""
    os.chdir(folder)
    exec(code, names)
    model, optimizer = names["model"], names["optimizer"]
    dtype = next(model.blocks[0].first.parameters()).dtype
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
    losses = []
    for _ in range(3):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_block(number: int, folder: Path) -> list[float]:
    """Runs one of the page's blocks with the names that it needs."""
    names = {
        **{"torch": torch, "amp": amp, "dist": dist, "device": torch.device("cpu")},
        **{"fully_shard": fully_shard, "MixedPrecisionPolicy": MixedPrecisionPolicy},
        **{"ZeroRedundancyOptimizer": ZeroRedundancyOptimizer, "model": Model()},
        "mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
    }
    names["stage"] = names["model"]
    if "step_1000" in PYTHON[number]:
        trained(names, PYTHON[1], folder)
        optimizer: Any = names["optimizer"]
        names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return trained(names, PYTHON[number], folder)


@pytest.mark.parametrize("number", range(len(PYTHON)))
@pytest.mark.slow
@pytest.mark.xdist_group("distributed")
def test_the_code_of_the_page_trains(number: int, tmp_path: Path) -> None:
    for losses in on_ranks(2, run_block, number, tmp_path):
        assert losses[2] < losses[0]


# Starting torchrun takes seconds, so `make test` runs one of its commands.
SOME = [block for block in COMMANDS if "torchrun" not in block or "--memory tiny" in block]
BLOCKS = COMMANDS if LARGE else [full(b) if "torchrun" in b else b for b in SOME]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
@pytest.mark.slow
@pytest.mark.xdist_group("distributed")
def test_the_commands_of_the_page_run(block: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        launch = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}[
            program
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, *launch, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert "validation loss" in done.stdout or "| 405 B |" in done.stdout
