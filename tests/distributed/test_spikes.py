"""A gradient spike on one process stops the step on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Net, digests, disagreements, local, set_grads, shard
from ranks import on_ranks

import amp_mp as amp
from amp_mp.scaling import NormSpike

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

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
