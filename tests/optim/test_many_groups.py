"""One param_group for each parameter: each parameter is looked at once, however many there are."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from interrupting import run_traced
from torch import nn

import amp_mp as amp
from amp_mp.apex.optimizers import FusedAdam

KINDS = {
    "AdamW": (amp.optim.AdamW, {}),
    "SGD": (amp.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": (amp.optim.RMSprop, {"centered": True}),
    "LAMB": (amp.optim.LAMB, {}),
    "Muon": (amp.optim.Muon, {}),
    "FusedAdam": (FusedAdam, {}),
}


def groups_of(device: str, count: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    made = [nn.Parameter(torch.ones(4, 4, device=device, dtype=dtype)) for _ in range(count)]
    return [{"params": [param], "lr": 0.1, "lr_scale": 0.5} for param in made]


def instructions(act: Any) -> int:
    """How many instructions of amp_mp's Python functions an act runs."""
    # Python 3.12 traces instructions only where some frame had asked for it before settrace.
    sys._getframe().f_trace_opcodes = True
    counted = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal counted
        if "amp_mp" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return count

    run_traced(act, count)
    return counted


@pytest.mark.parametrize("name", KINDS)
def test_construction_grows_with_the_number_of_groups(device: str, name: str) -> None:
    kind, arguments = KINDS[name]
    kind(groups_of(device, 2), **arguments)  # what a first use imports
    found = [
        instructions(lambda n=n: kind(groups_of(device, n), **arguments)) for n in (20, 40, 80)
    ]
    assert found[2] - found[1] == 2 * (found[1] - found[0])


@pytest.mark.parametrize(
    ("inner", "wrapped"),
    [(amp.optim.AdamW, False), (amp.optim.AdamW, True), (torch.optim.AdamW, True)],
)
def test_a_group_that_is_added_costs_the_same_beside_any_others(
    device: str, inner: Any, wrapped: bool
) -> None:
    made, low = [], torch.bfloat16
    for count in (20, 80):
        optimizer = inner(groups_of(device, count, low), lr=0.1)
        if wrapped:
            optimizer = amp.FP16_Optimizer(optimizer, verbose=False)
        added = groups_of(device, 2, low)
        optimizer.add_param_group(added[0])
        made.append(instructions(lambda o=optimizer, g=added[1]: o.add_param_group(g)))
        if wrapped:  # the group has its master
            assert len(optimizer.fp32_from_fp16_groups[-1]) == 1
    assert made[0] == made[1]


def test_a_parameter_of_another_group_is_refused_as_torch_does(device: str) -> None:
    groups = groups_of(device, 3)
    optimizer = amp.optim.AdamW(groups[:2])
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": groups[0]["params"]})
    assert len(optimizer.param_groups) == 2
