"""checkpoint.save(wait=False) with a GPU: the copy in pinned memory, and captures.

Runs where there is a GPU, and in any case on the pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from checkpoints import LOW, under_way
from helpers import PRETEND_GPU
from offloading import pinned, without_memory
from torch import nn

import amp_mp as amp

pytestmark = pytest.mark.usefixtures("cuda")


@pytest.mark.skipif(not PRETEND_GPU, reason="asks the emulated CUDA runtime")
def test_the_copy_of_a_gpu_is_one_pinned_slab_that_is_freed(tmp_path: Path) -> None:
    """Of the exact size, in pieces of 256 bytes; small tensors are beside it."""
    model = nn.Linear(96, 64, device="cuda").to(LOW)
    optimizer = amp.optim.AdamW(model.parameters(), memory="exact")
    optimizer.init_state()
    before = pinned()
    with under_way(tmp_path / "c", model, optimizer):
        (slab,) = (Counter(pinned()) - Counter(before)).elements()
        assert slab == 96 * 64 * 12
    assert pinned() == before
    with without_memory(is_there=False), pytest.raises(RuntimeError, match="or pass wait=True"):
        amp.checkpoint.save(tmp_path / "c", model, optimizer, wait=False)
    amp.checkpoint.load(tmp_path / "c", model, optimizer)


def test_a_capture_is_refused(tmp_path: Path) -> None:
    model, weight = nn.Linear(8, 8, device="cuda"), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.add_(1)
        for wait in (True, False):
            with pytest.raises(RuntimeError, match="cannot be captured by a CUDA graph"):
                amp.checkpoint.save(tmp_path / "c", model, wait=wait)
    graph.replay()
    assert weight.tolist() == [1.0] * 3
    assert not (tmp_path / "c").exists()
