"""What amp_mp knows of torch's versions: those that are not running, and the way to another ABI."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
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

ROOT = Path(__file__).resolve().parents[2]
DESIGN = (ROOT / "docs/design.md").read_text()
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


def test_the_way_to_the_stable_abi_lists_what_the_step_and_the_state_use() -> None:
    """All names of torch's, and the uses of functions and of the members that are named."""
    section = DESIGN.partition("## Towards torch's stable ABI\n")[2].partition("\n## ")[0]
    rows = "\n".join(re.findall(r"^\|[^|]*\|(.*)\|$", section, re.MULTILINE)[2:])
    listed = dict(re.findall(r"`([\w:]+)`(?: (\d+))?", rows))
    folders = [ROOT / "csrc/torch" / name for name in ("step", "state", "weights")]
    code = "\n".join(without_comments(path) for folder in folders for path in folder.iterdir())
    names = Counter(re.findall(r"\b(?:(?:at|c10|torch)::[\w:]*\w|TORCH_\w+|THP\w+)", code))
    members = Counter(re.findall(r"(?:\.|->)(\w+)(?:<[\w:]+>)?\(", code))
    assert {name for name in listed if re.search("::|^T[OH]", name)} == {*names}
    counts = {name: int(count) for name, count in listed.items() if count}
    assert counts == {name: (names + members)[name] for name in counts}


def without_comments(path: Path) -> str:
    """Without includes and texts, too."""
    left_out = r'//.*|/\*[\s\S]*?\*/|"(?:\\.|[^"\\\n])*"|^ *#include.*$'
    return re.sub(left_out, "", path.read_text(), flags=re.MULTILINE)
