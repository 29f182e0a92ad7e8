"""No rank ever parts from the others: long runs in which everything happens, from a seed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from layouts import (
    NORM_ERROR,
    Bag,
    differences,
    digests,
    disagreements,
    noise,
    parts_of,
    placed_as,
    shard,
)
from ranks import LARGE, on_ranks
from tiers import tiered
from torch import Tensor

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

STEPS = 200
# The last one stays plain under tensor parallelism. Four ranks hold parts of (3, 64): one nothing.
SHAPES = [(32, 64), (33,), (3, 64), (5, 64), (1, 33), (7,)]
LATE = {2: 20, 5: 60}  # parameters without a gradient before this step
SPLITS = ["fsdp", "hsdp", "columns fsdp", "rows fsdp"]


@dataclass
class Event:
    """What a script does in one step."""

    lr: float | None = None
    clip: float | None = None  # 0 is none at all
    overflow: tuple[int, int, float] | None = None  # the parameter, the element, inf or NaN
    freezes: int | None = None  # this parameter, or unfreezes it
    without: set[int] = field(default_factory=set)  # parameters that get no gradient


def script(seed: int, clips: bool) -> list[Event]:
    """The same on every rank. Parameter 0 always trains, since scalers refuse to check nothing."""
    choose = random.Random(seed)
    events = []
    for step in range(STEPS):
        event = Event(without={i for i, first in LATE.items() if step < first})
        if choose.random() < 0.1:
            event.lr = choose.choice([1e-3, 3e-3, 1e-2])
        if clips and choose.random() < 0.1:
            event.clip = choose.choice([0.0, 0.5, 4.0])
        if choose.random() < 0.15:
            index = choose.randrange(len(SHAPES))
            element = choose.randrange(torch.Size(SHAPES[index]).numel())
            event.overflow = index, element, choose.choice([float("inf"), float("nan")])
        if choose.random() < 0.1:
            event.freezes = choose.randrange(1, len(SHAPES))
        if choose.random() < 0.1:
            event.without.add(choose.randrange(1, len(SHAPES)))
        events.append(event)
    return events


def gradients(params: list[Any], event: Event, step: int, scale: float) -> None:
    """Sets each parameter's part of the seeded gradient, which carries the loss scale."""
    for index, param in enumerate(params):
        param.grad = None
        if index in event.without or not param.requires_grad:
            continue
        grad = noise(tuple(param.shape), step * len(SHAPES) + index) * scale
        if event.overflow is not None and event.overflow[0] == index:
            grad.view(-1)[event.overflow[1]] = event.overflow[2]
        param.grad = placed_as(param, grad.to(param.dtype))


def train(params: list[Any], preset: str, seed: int, clips: bool) -> tuple[Any, list[Any]]:
    """The optimizer after the script, and what this rank saw after each step.

    That is: the verdict, the loss scale, the step counts, the norm, and digests of all tensors.
    """
    optimizer = amp.optim.AdamW(params, lr=1e-3, memory=preset, check_overflow=True)
    scaler = amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    parts, seen = parts_of(params), []
    for step, event in enumerate(script(seed, clips)):
        if event.lr is not None:
            optimizer.param_groups[0]["lr"] = event.lr
        if event.clip is not None:
            optimizer.max_grad_norm = event.clip or None
        if event.freezes is not None:
            params[event.freezes].requires_grad_(not params[event.freezes].requires_grad)
        scaler.scale(torch.ones(()))
        gradients(params, event, step, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        counts = [int(optimizer.state[p]["step"]) for p in params if p in optimizer.state]
        verdict = (optimizer.step_was_skipped, scaler.get_scale(), counts)
        held = digests(params, optimizer, parts)
        seen.append((verdict, optimizer.grad_norm, held))
    return optimizer, seen


def run(layout: str, preset: str, seed: int, clips: bool) -> tuple[list[Any], list[Any], list[str]]:
    """What a rank saw, the verdicts of one process, and where the rank ended elsewhere.

    Where gradients are clipped, one process may differ in the last bits, as its norm does.
    """
    split = list(shard(Bag(SHAPES, torch.bfloat16), layout).parameters())
    whole: list[Tensor] = list(Bag(SHAPES, torch.bfloat16).parameters())
    optimizer, seen = train(split, preset, seed, clips)
    plain, alone = train(whole, preset, seed, clips)
    parts = [] if clips else differences(split, optimizer, whole, plain)
    return seen, [(verdict, norm) for verdict, norm, _ in alone], parts


SEEDS = range(20 if LARGE else 2)


@pytest.mark.parametrize(
    ("layout", "seed"),
    tiered(itertools.product(SPLITS, SEEDS), [("rows fsdp", 1)]),
)
def test_no_rank_parts_from_the_others(layout: str, seed: int) -> None:
    preset = ["lean", "nano", "exact", "tiny", "float32", "micro"][seed % 6]
    clips = seed % 2 == 1
    ranks = on_ranks(4, run, layout, preset, seed, clips, limit_s=200)
    for step, seen in enumerate(zip(*(seen for seen, *_ in ranks), strict=True)):
        verdict, norm, _ = seen[0]
        assert all(own == verdict for own, *_ in seen), f"step {step}: the verdicts differ"
        assert all(own == norm for _, own, _ in seen), f"step {step}: the norms differ"
        parted = disagreements([held for *_, held in seen])
        assert parted == [], f"step {step}: {parted}"
    seen, alone, _ = ranks[0]
    assert [verdict for verdict, *_ in seen] == [verdict for verdict, _ in alone]
    if not clips:  # the weights are the same, but so the gradients were anyway
        assert [n for _, n, _ in seen] == pytest.approx([n for _, n in alone], rel=NORM_ERROR)
    assert [parts for *_, parts in ranks] == [[]] * 4
