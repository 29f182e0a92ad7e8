"""Weights that are infinite, as masks have them: without weight decay they stay, as in torch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DTYPES, array, assert_same, on, random, state_names
from rules import RULES, TWINS, Expected, found_state
from tiers import tiered
from torch import Tensor, nn

import amp_mp as amp

INF = float("inf")
SIZE, STEPS = 70, 7


def weights(device: str, dtype: torch.dtype) -> Tensor:
    values = torch.as_tensor(random(SIZE, 1)).clone()
    values[3], values[40], values[69] = -INF, INF, -INF
    return on(device, values.numpy(), dtype)


MEMORIES = ["exact", "float32", "lean", "tiny", "micro", "nano", "masterless"]
DECAYS = [0.0, 0.01]
# Each rule twice, with and without decay, each time of another dtype and in another memory.
IN_TURN = [
    (rule, MEMORIES[(n + m) % 7], ("float32", "bfloat16")[(n // 7 + m) % 2], decay)
    for n, rule in enumerate(RULES)
    for m, decay in enumerate(DECAYS)
]


@pytest.mark.parametrize(
    ("rule", "memory", "dtype", "decay"),
    tiered(itertools.product(RULES, MEMORIES, ["float32", "bfloat16"], DECAYS), IN_TURN),
)
def test_infinite_weights_are_those_of_the_reference(
    device: str, rule: str, memory: str, dtype: str, decay: float
) -> None:
    kind, numbers = RULES[rule]
    numbers = {**numbers, "weight_decay": decay}
    param = nn.Parameter(weights(device, DTYPES[dtype]))
    before = param.detach().clone()
    optimizer = kind([param], **numbers, memory=memory)
    want = Expected(rule, param, states=state_names(optimizer), memory=memory)
    want.numbers = numbers
    for step in range(STEPS):
        param.grad = on(device, random(SIZE, 10 + step), DTYPES[dtype])
        want.step(array(param.grad), np.float32(1))
        optimizer.step()
    assert_same(array(param), want.visible, f"{rule}: weight")
    for name, values in want.states.items():
        found = found_state(optimizer.state[param], name, want.formats[name])
        assert_same(found, values, f"{rule}: {name}")
    if decay == 0:
        infinite = before.isinf()
        assert torch.equal(param[infinite], before[infinite])
        assert bool(param.isfinite().eq(~infinite).all())


@pytest.mark.parametrize("twin", TWINS)
def test_torch_keeps_them_too(twin: str) -> None:
    name, arguments = TWINS[twin]
    found = []
    for lib in (amp.optim, torch.optim):
        param = nn.Parameter(weights("cpu", torch.float32))
        optimizer: Any = getattr(lib, name)([param], **{**arguments, "weight_decay": 0.0})
        for step in range(STEPS):
            param.grad = on("cpu", random(SIZE, 10 + step), torch.float32)
            optimizer.step()
        found.append(param.detach())
    assert torch.equal(found[0].isinf(), found[1].isinf())
    assert torch.equal(found[0].sign(), found[1].sign())


@pytest.mark.parametrize("memory", ["exact", "float32", "lean", "tiny"])
def test_in_float16_a_step_makes_them_the_largest_number(device: str, memory: str) -> None:
    """Until its first step, and without a gradient, an infinite weight is infinite."""
    params = [nn.Parameter(weights(device, torch.float16)) for _ in range(2)]
    optimizer = amp.optim.AdamW(params, lr=0.01, memory=memory)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    infinite = params[1].isinf()
    assert int(infinite.sum()) == 3
    assert params[0][infinite].tolist() == [-65504.0, 65504.0, -65504.0]


def test_a_larc_without_decay_keeps_them(device: str) -> None:
    """One group has weight decay, the other none."""
    params = [nn.Parameter(weights(device, torch.float32)) for _ in range(2)]
    groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:]}]
    optimizer = amp.apex.parallel.LARC(torch.optim.SGD(groups, lr=0.1))
    for param in params:
        param.grad = torch.ones_like(param)
    before = params[1].detach().clone()
    optimizer.step()
    infinite = before.isinf()
    assert torch.equal(params[1][infinite], before[infinite])
    assert bool((params[1] != before)[~infinite].all())
