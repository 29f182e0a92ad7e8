"""What amp_mp knows of torch's versions that are not running."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import amp_mp as amp

GATHERED = r"gathered now.* call reshard\(\) on the module first"


def test_parameters_that_fully_shard_has_gathered_are_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model: Any = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
        model.unshard()
        with pytest.raises(TypeError, match=GATHERED):
            amp.optim.AdamW(model.parameters())
        model.reshard()
        amp.optim.AdamW(model.parameters())
    finally:
        dist.destroy_process_group()


def test_they_are_refused_as_torch_2_11_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, other = nn.Linear(2, 2).parameters()
    group = SimpleNamespace(fsdp_params=[SimpleNamespace(_unsharded_param=gathered)])
    known = [None, *(SimpleNamespace(_fsdp_param_group=each) for each in (None, group))]
    states = {number: (lambda state=state: state) for number, state in enumerate(known)}
    monkeypatch.setattr(_composable_state, "_module_state_mapping", states)
    amp.optim.AdamW([other])
    with pytest.raises(TypeError, match=GATHERED):
        amp.optim.AdamW([gathered])
