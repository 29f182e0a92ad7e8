"""DDP and FSDP2 over two processes, and compiled graphs of processes with different tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import distributed
import pytest
import torch
from ranks import on_ranks
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[Tensor]]]:
    """What distributed.run finds in each of two processes."""
    return on_ranks(2, distributed.run)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_distributed_models_train_as_alone(ranks: list[dict[str, list[Tensor]]], wrap: str) -> None:
    for found in ranks:
        assert len(found[wrap]) == len(found["alone"])
        for a, b in zip(found["alone"], found[wrap], strict=True):
            # The mean of two equal gradients is exact; a matrix product of the same numbers may add
            # up in another order, and then round to a neighbour in bfloat16.
            torch.testing.assert_close(b, a, rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("kind", ["FP16_Optimizer", "amp SGD"])
def test_masters_agree_on_ranks_that_started_from_different_seeds(
    ranks: list[dict[str, list[Tensor]]], kind: str
) -> None:
    first, second = (found[kind] for found in ranks)
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


@pytest.mark.full
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
