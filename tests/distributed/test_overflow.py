"""An inf, a NaN or a spike in one shard: no rank steps, no byte changes, all ranks say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import (
    Bag,
    Net,
    digests,
    disagreements,
    local,
    noise,
    parts_of,
    placed_as,
    set_grads,
    shard,
)
from ranks import on_ranks
from tiers import tiered
from torch import Tensor

import amp_mp as amp
from amp_mp.scaling import NormSpike

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

SHAPES = [(33,), (96, 64), (1, 33), (3, 64), (5,)]
SPLITS = [("fsdp", 2), ("hsdp", 4), ("rows", 2), ("columns fsdp", 4), ("rows fsdp", 4)]
INF, NAN = float("inf"), float("nan")
# Without staticmethod a partial binds self as a function does, from Python 3.14 on.
TORCHS = staticmethod(partial(torch.optim.AdamW, foreach=False))


class Loop:
    """A training loop's way to go from a loss to a step; `skipped` and `scale` are of the last."""

    skipped: Any = None  # None where there is no way to ask
    scale: float = 1.0
    halves = 1.0  # what an overflow multiplies the scale by

    def __init__(self, params: list[Any]) -> None:
        self.params = params
        self.optimizer = self.make()

    def make(self) -> Any:
        return amp.optim.AdamW(self.params, lr=0.01, memory="lean")

    def run(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.skipped = self.optimizer.step_was_skipped


class Clips(Loop):
    def make(self) -> Any:
        return amp.optim.AdamW(self.params, lr=0.01, memory="tiny", max_grad_norm=1.0)


class Scaled(Loop):
    """amp.GradScaler with an amp_mp optimizer."""

    halves = 0.5
    inner: Any = staticmethod(partial(amp.optim.AdamW, memory="exact"))

    def make(self) -> Any:
        self.scaler = amp.GradScaler("cpu", init_scale=2.0**40)
        return self.inner(self.params, lr=0.01)

    def run(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.look()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scale = self.scaler.get_scale()
        self.skipped = getattr(self.optimizer, "step_was_skipped", None)

    def look(self) -> None:
        """Between the backward pass and the step."""


class Unscaled(Scaled):
    """The same, where the script calls unscale_ to look at the gradients."""

    def look(self) -> None:
        self.scaler.unscale_(self.optimizer)


class ScaledTorch(Scaled):
    """amp.GradScaler with torch's optimizer."""

    inner = TORCHS


class UnscaledTorch(Unscaled):
    inner = TORCHS


class Wrapped(Loop):
    """amp.FP16_Optimizer around an amp_mp optimizer."""

    halves = 0.5
    inner: Any = amp.optim.AdamW

    def run(self, loss: Tensor) -> None:
        self.wrapper.backward(loss)
        self.wrapper.step()
        self.scale, self.skipped = self.wrapper.loss_scale, self.wrapper.overflow

    def make(self) -> Any:
        self.wrapper = amp.FP16_Optimizer(
            self.inner(self.params, lr=0.01),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 2.0**40},
            verbose=False,
        )
        return self.wrapper


class WrappedTorch(Wrapped):
    inner = TORCHS


class Handle(Loop):
    """handle.scale_loss, as scripts written for Apex have it."""

    handle: Any
    halves = 0.5

    def make(self) -> Any:
        return amp.optim.AdamW(self.params, lr=0.01)

    def run(self, loss: Tensor) -> None:
        with self.handle.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        self.scale = self.handle.loss_scaler.scale


@contextmanager
def started(kind: type[Loop]) -> Iterator[None]:
    """Casts on, for the loop that needs amp.init."""
    if kind is not Handle:
        yield
        return
    Handle.handle = amp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale="dynamic")
    try:
        yield
    finally:
        Handle.handle._deactivate()
        amp.casting.uninstall()


def loss_of(params: list[Any], grads: list[Tensor]) -> Tensor:
    """A loss whose gradients are `grads`; a rank's loss is of its own shards alone."""
    parts = []
    for param, grad in zip(params, grads, strict=True):
        own = param.to_local() if hasattr(param, "to_local") else param
        parts.append((own.float() * local(placed_as(param, grad))).sum())
    return torch.stack(parts).sum()


def overflows(layout: str, name: str) -> list[tuple[str, Any, float, bool, Any]]:
    """Overflows in each parameter's first and last element, then a step without.

    Returns for each: what overflowed, the loop's `skipped` and `scale`, whether any byte of this
    rank changed, and a digest of its tensors.
    """
    kind: type[Loop] = globals()[name]
    params = list(shard(Bag(SHAPES, torch.bfloat16), layout).parameters())
    parts, found = parts_of(params), []
    with started(kind):
        loop = kind(params)
        grads = [noise(shape, i) for i, shape in enumerate(SHAPES)]
        loop.run(loss_of(params, grads))  # makes the states
        cases = [(i, at, v) for i in range(len(SHAPES)) for at, v in ((0, NAN), (-1, INF))]
        for index, at, value in [*cases, (0, 0, 1.0)]:
            loop.optimizer.zero_grad()
            before = digests(params, loop.optimizer, parts)
            now = [grad.clone() for grad in grads]
            now[index].view(-1)[at] = value
            loop.run(loss_of(params, now))
            after = digests(params, loop.optimizer, parts)
            label = f"{value} in element {at} of parameter {index}"
            found.append((label, loop.skipped, loop.scale, before != after, after))
    return found


# Every loop and every split once or twice; `full`: each loop under each split.
LOOPS = [Loop, Clips, Scaled, Unscaled, ScaledTorch, UnscaledTorch, Wrapped, WrappedTorch, Handle]
IN_TURN = [(kind, *SPLITS[n % len(SPLITS)]) for n, kind in enumerate(LOOPS)]


@pytest.mark.parametrize(
    ("kind", "layout", "world"),
    tiered([(kind, *split) for kind in LOOPS for split in SPLITS], IN_TURN),
)
def test_no_rank_steps_on_one_ranks_overflow(kind: type[Loop], layout: str, world: int) -> None:
    ranks = on_ranks(world, overflows, layout, kind.__name__)
    scale = ranks[0][0][2] / kind.halves
    for cases in zip(*ranks, strict=True):
        label, skipped, *_ = cases[0]
        last = cases[0] == ranks[0][-1]
        assert [changed for *_, changed, _ in cases] == [last] * world, label
        assert [case[1] for case in cases] == [skipped] * world, label
        assert skipped in (None, not last), label
        scale *= 1.0 if last else kind.halves
        assert [case[2] for case in cases] == [scale] * world, label
        assert disagreements([held for *_, held in cases]) == [], label


def printed() -> str:
    """What FP16_Optimizer prints on this rank: what it wraps, and an overflow."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    with redirect_stdout(StringIO()) as out:
        optimizer = amp.FP16_Optimizer(torch.optim.SGD([weight], lr=1.0), dynamic_loss_scale=True)
        optimizer.backward(weight.sum() * INF)
        optimizer.step()
    return out.getvalue()


def test_rank_0_alone_prints() -> None:
    first, second = on_ranks(2, printed)
    assert "1 parameters with float32 masters" in first
    assert "OVERFLOW! Skipping step." in first
    assert second == ""


SPIKE, STEPS = 14, 18


def spiked(layout: str, kind: str, limit: Any) -> tuple[list[Any], Any, list[bool], Any]:
    """Reports, what was learned, which steps changed a byte, and digests.

    The spike multiplies gradients by a million: those of the last rank, or of all where others have
    the same ones.
    """
    model = shard(Net(torch.bfloat16), layout)
    params = list(model.parameters())
    optimizer = getattr(amp.optim, kind)(params, lr=1e-3, skip_norm_above=limit)
    optimizer.init_state()
    reports, changed = [], []
    for step in range(STEPS):
        before = digests(params, optimizer)
        set_grads(params, 100 * step)
        if step == SPIKE and (layout != "fsdp" or dist.get_rank() == dist.get_world_size() - 1):
            for param in params:
                local(param.grad).mul_(1e6)
        optimizer.step()
        reports.append(optimizer.last_report())
        changed.append(digests(params, optimizer) != before)
    known = optimizer.state_dict()["param_groups"][0].get("norm_history")
    return reports, known, changed, digests(params, optimizer)


CASES = [("fsdp", 2, "AdamW"), ("fsdp", 4, "LAMB"), ("tp fsdp", 4, "AdamW"), ("hsdp", 4, "SGD")]


@pytest.mark.parametrize(("layout", "world", "kind"), CASES)
def test_a_spike_on_one_process_stops_all(layout: str, world: int, kind: str) -> None:
    ranks = on_ranks(world, spiked, layout, kind, NormSpike(6, 20))
    for reports, known, changed, _ in ranks:
        assert changed == [step != SPIKE for step in range(STEPS)]
        assert [report.skipped for report in reports] == [step == SPIKE for step in range(STEPS)]
        assert (reports, known) == ranks[0][:2]
        assert (reports[-1].overflows, reports[-1].spikes) == (0, 1)
        norms = [report.grad_norm for report in reports[:SPIKE]]
        assert reports[SPIKE].grad_norm > 1e4 * max(norms)
        assert known[0] == STEPS - 1
    assert disagreements([held for *_, held in ranks]) == []


def test_a_fixed_limit_is_of_the_whole_norm() -> None:
    limit = 50.0
    ranks = on_ranks(2, spiked, "fsdp", "AdamW", limit)
    for reports, _, changed, _ in ranks:
        assert changed == [not report.skipped for report in reports]
        assert changed == [report.grad_norm <= limit for report in reports]
        assert reports == ranks[0][0]
