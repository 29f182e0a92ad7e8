"""Optimizers with compact formats resume with the same bits, convert, and read torch's files."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import reference_formats as formats
import torch
from helpers import DTYPES, array, assert_same, raw_bytes, state_names, through_a_file
from rules import (
    MASTERED,
    MEMORIES,
    RULES,
    STORAGES,
    TWINS,
    Expected,
    cases,
    found_master,
    found_state,
)
from tiers import tiered
from torch import nn

import amp_mp as amp


def small_model(device: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 5)).to(device)
    return net if dtype == torch.float32 else amp.prepare(net, dtype)


def some_steps(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Returns how far a weight has gone in one of them, at most."""
    largest = 0.0
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        before = [p.detach().clone() for p in net.parameters()]
        for param in net.parameters():
            grad = torch.randn(param.shape, generator=generator) * 0.1
            param.grad = grad.bfloat16().to(param.device, param.dtype)
        optimizer.step()
        gone = [(p.detach() - b).abs().max() for p, b in zip(net.parameters(), before, strict=True)]
        largest = max(largest, *(float(x) for x in gone))
    return largest


KEPT = [*MEMORIES, "no master"]
# Each rule once; each way to keep it meets each dtype.
IN_TURN = zip(RULES, itertools.cycle(cases(KEPT, DTYPES)))


@pytest.mark.parametrize(
    ("rule", "memory", "dtype"),
    tiered(
        cases(RULES, KEPT, DTYPES),
        [(rule, *kept) for rule, kept in IN_TURN],
    ),
)
def test_resuming_gives_the_same_bits(device: str, rule: str, memory: str, dtype: str) -> None:
    """Into an optimizer with a seed of its own, which the file's replaces."""
    kind, numbers = RULES[rule]
    storage = {"memory": memory}
    if memory == "no master":
        storage = {"master": "none", "rounding": "stochastic"}

    def fresh(seed: int) -> tuple[nn.Module, amp.optim.FusedOptimizer]:
        net = small_model(device, DTYPES[dtype])
        return net, kind(net.parameters(), **numbers, **storage, seed=seed, max_grad_norm=1.0)

    whole, optimizer = fresh(2**35 + 7)
    some_steps(whole, optimizer, range(3))
    saved = {"model": whole.state_dict(), "optimizer": optimizer.state_dict()}
    saved = through_a_file(saved, True, device)
    some_steps(whole, optimizer, range(3, 6))
    resumed, again = fresh(0)
    some_steps(resumed, again, range(2))  # a state that is there already is replaced
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    before = raw_bytes(saved)
    some_steps(resumed, again, range(3, 6))
    assert raw_bytes(saved) == before, "stepping must not write into the loaded dictionary"
    assert raw_bytes(resumed.state_dict()) == raw_bytes(whole.state_dict())
    assert raw_bytes(again.state_dict()) == raw_bytes(optimizer.state_dict())


CONVERTED = {**MASTERED, "halves": {"exp_avg": "float16", "exp_avg_sq": "float16_root"}}


@pytest.mark.parametrize("source", CONVERTED)
@pytest.mark.parametrize("target", CONVERTED)
def test_loading_converts_to_the_formats_asked_for(device: str, source: str, target: str) -> None:
    """What was saved, decoded, encoded with the bits of step 0; the same formats byte for byte."""
    rule, seed = "adamw", 9

    def fresh(storage: str, seed: int) -> tuple[nn.Module, amp.optim.FusedOptimizer]:
        net, arguments = small_model(device), {**RULES[rule][1], **CONVERTED[storage]}
        return net, amp.optim.AdamW(net.parameters(), **arguments, seed=seed)

    net, optimizer = fresh(source, seed)
    some_steps(net, optimizer, range(3))
    loaded, other = fresh(target, 0)
    loaded.load_state_dict(net.state_dict())
    other.load_state_dict(through_a_file(optimizer.state_dict(), True, device))
    for number, (a, b) in enumerate(zip(net.parameters(), loaded.parameters(), strict=True)):
        wanted = [
            Expected(rule, p, number, state_names(other), **CONVERTED[storage])
            for p, storage in ((a, source), (b, target))
        ]
        for name in state_names(other):
            values = found_state(optimizer.state[a], name, wanted[0].formats[name])
            format = wanted[1].formats[name]
            if format not in ("float32", wanted[0].formats[name]):
                bits = formats.stream(values.size, seed, 0, number)
                values = formats.decode(formats.encode(values, format, bits), format)
            assert_same(found_state(other.state[b], name, format), values, name)
        master = found_master(optimizer.state[a], a, wanted[0].formats["master"])
        split = wanted[1].formats["master"]
        if split != wanted[0].formats["master"]:
            weight = array(a).reshape(-1)
            master = formats.beside(master, weight, split, "bfloat16")
            if split != "float32":
                parts = [(weight.view(np.uint32) >> 16).astype(np.uint16), master]
                master = formats.decode(parts, split, "bfloat16")
        assert_same(found_master(other.state[b], b, split), master, "master")
        assert raw_bytes([*other.state[b].values()]) == raw_bytes(
            [*optimizer.state[a].values()]
        ) or (source != target)
    some_steps(loaded, other, range(3, 4))


# Of TWINS, one for each of torch's state dicts.
READ_BY_BOTH = ["adamw", "amsgrad", "adam L2", "adadelta", "nadam decoupled", "radam", "adagrad"]
READ_BY_BOTH += ["rmsprop momentum", "centered", "momentum"]


def assert_alike(optimizer: Any, low: nn.Module, wide: nn.Module, update: float) -> None:
    """Five steps after they were: within 8 roundings a step, of the weight and of its update."""
    found = amp.float32_state_dict(low, optimizer)
    for name, weight in wide.state_dict().items():
        tolerance = 5 * 8 * 2.0**-24
        torch.testing.assert_close(found[name], weight, rtol=tolerance, atol=tolerance * update)


@pytest.mark.parametrize("name", READ_BY_BOTH)
def test_exact_continues_from_a_torch_checkpoint_and_back(device: str, name: str) -> None:
    kind, arguments = TWINS[name]
    ours, torchs = getattr(amp.optim, kind), getattr(torch.optim, kind)
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 5)).to(device)
    theirs = torchs(wide.parameters(), **arguments)
    some_steps(wide, theirs, range(5))

    low = amp.prepare(copy.deepcopy(wide), torch.bfloat16)  # keeps the exact originals
    mine = ours(low.parameters(), **arguments, memory="exact")
    mine.load_state_dict(through_a_file(theirs.state_dict(), True, device))
    update = some_steps(wide, theirs, range(5, 10))
    some_steps(low, mine, range(5, 10))
    assert_alike(mine, low, wide, update)

    back = copy.deepcopy(wide)
    back.load_state_dict(amp.float32_state_dict(low, mine))
    again = torchs(back.parameters(), **arguments)
    again.load_state_dict(through_a_file(mine.torch_state_dict(), True, device))
    update = some_steps(back, again, range(10, 15))
    some_steps(low, mine, range(10, 15))
    assert_alike(mine, low, back, update)


def test_torch_damps_no_first_step_of_a_state_made_beforehand(device: str) -> None:
    """Its SGD takes a momentum of zeros for one that has begun."""
    own, stock = (nn.Parameter(torch.zeros(2, device=device)) for _ in range(2))
    numbers = {"lr": 1.0, "momentum": 0.9, "dampening": 0.5}
    optimizer = amp.optim.SGD([own], **numbers)
    optimizer.init_state()
    theirs = torch.optim.SGD([stock], **numbers)
    theirs.load_state_dict(optimizer.torch_state_dict())
    for param, each in ((own, optimizer), (stock, theirs)):
        for _ in range(2):
            param.grad = torch.ones_like(param)
            each.step()
    assert torch.equal(own, stock)  # 1, then .9 + .5: sums of few bits
    assert own[0].item() == pytest.approx(-2.4)


@pytest.mark.parametrize("memory", ["lean", "tiny", "micro", "nano"])
def test_torch_reads_what_compact_formats_hold(device: str, memory: str) -> None:
    net = small_model(device)
    optimizer = amp.optim.AdamW(net.parameters(), memory=memory)
    some_steps(net, optimizer, range(3))
    wide = nn.Sequential(nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 5)).to(device)
    wide.load_state_dict(amp.float32_state_dict(net, optimizer))
    theirs = torch.optim.AdamW(wide.parameters())
    theirs.load_state_dict(optimizer.torch_state_dict())
    for number, (a, b) in enumerate(zip(net.parameters(), wide.parameters(), strict=True)):
        formats_ = Expected("adamw", a, number, state_names(optimizer), memory=memory).formats
        found = found_master(optimizer.state[a], a, formats_["master"])
        assert_same(found, array(b).reshape(-1), "master")
        assert theirs.state[b]["step"].item() == 3
        for name in state_names(optimizer):
            found = array(theirs.state[b][name]).reshape(-1)
            assert_same(found, found_state(optimizer.state[a], name, formats_[name]), name)
    some_steps(wide, theirs, range(3, 4))


@pytest.mark.parametrize("storage", STORAGES)
def test_float32_weights_go_out_and_in(device: str, storage: str) -> None:
    """Any float32 weights with float32 and split32 masters, their own with all."""
    net, other = small_model(device), small_model(device)
    arguments = {"lr": 0.1, **STORAGES[storage]}
    optimizers = [amp.optim.AdamW(n.parameters(), **arguments) for n in (net, other)]
    some_steps(net, optimizers[0], range(3))
    weights = amp.float32_state_dict(net, optimizers[0])
    assert {w.dtype for w in weights.values()} == {torch.float32}
    amp.load_float32_state_dict(other, optimizers[1], weights)
    assert raw_bytes(amp.float32_state_dict(other, optimizers[1])) == raw_bytes(weights)
    assert raw_bytes(other.state_dict()) == raw_bytes(net.state_dict())
    if storage in ("float32", "exact"):
        generator = torch.Generator().manual_seed(0)
        weights = {n: torch.randn(w.shape, generator=generator) for n, w in weights.items()}
        amp.load_float32_state_dict(other, optimizers[1], weights)
        assert raw_bytes(amp.float32_state_dict(other, optimizers[1])) == raw_bytes(weights)
    some_steps(other, optimizers[1], range(3, 4))


@pytest.mark.parametrize("storage", ["float32", "exact"])
def test_a_torch_checkpoint_loaded_after_the_weights_keeps_their_masters(
    device: str, storage: str
) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(40, 8, device=device)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    whole(torch.randn(4, 40, device=device)).square().sum().backward()
    theirs.step()
    low = amp.prepare(nn.Linear(40, 8, device=device), torch.bfloat16)
    ours = amp.optim.AdamW(low.parameters(), lr=1e-3, **STORAGES[storage])
    amp.load_float32_state_dict(low, ours, whole.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for name, value in amp.float32_state_dict(low, ours).items():
        assert torch.equal(value, whole.state_dict()[name])
