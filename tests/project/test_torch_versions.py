"""What amp_mp knows of torch's versions: those that are not running, and the way to another ABI."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed import _composable_state

import amp_mp as amp

ROOT = Path(__file__).resolve().parents[2]
DESIGN = (ROOT / "docs/design.md").read_text()
LAYOUTS = {
    "torch 2.11": lambda group: SimpleNamespace(_fsdp_param_group=group),
    "since torch 2.12": lambda group: SimpleNamespace(_fsdp_param_groups=[group]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_that_fully_shard_has_gathered_is_refused(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered, other = nn.Linear(2, 2).parameters()
    state: Any = LAYOUTS[layout](
        SimpleNamespace(fsdp_params=[SimpleNamespace(_unsharded_param=gathered)])
    )
    without_group = SimpleNamespace(_fsdp_param_group=None)
    states = {0: lambda: without_group, 1: lambda: None, 2: lambda: state}
    monkeypatch.setattr(_composable_state, "_module_state_mapping", states)
    amp.optim.AdamW([other])
    with pytest.raises(TypeError, match=r"gathered now.* call reshard\(\) on the module first"):
        amp.optim.AdamW([gathered])


def test_the_way_to_the_stable_abi_lists_what_the_step_and_the_state_use() -> None:
    """All names of torch's, and the uses of functions and of the members that are named."""
    section = DESIGN.partition("## Towards torch's stable ABI\n")[2].partition("\n## ")[0]
    rows = "\n".join(re.findall(r"^\|[^|]*\|(.*)\|$", section, re.MULTILINE)[2:])
    listed = dict(re.findall(r"`([\w:]+)`(?: (\d+))?", rows))
    folders = [ROOT / "csrc/torch/step", ROOT / "csrc/torch/state"]
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
