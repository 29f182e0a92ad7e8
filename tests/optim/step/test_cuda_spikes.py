"""Spikes on a GPU: no kernel and no wait more than clipping takes, in CUDA graphs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_training import Training
from watching import watching

from amp_mp.scaling import NormSpike

pytestmark = pytest.mark.usefixtures("cuda")


@pytest.mark.parametrize("limit", [1000.0, NormSpike(6, 10)])
def test_a_spike_costs_no_kernel_and_no_wait(limit: Any) -> None:
    training = Training(skip_norm_above=limit, raise_after_skips=5)
    for _ in range(8):
        training.fill(0, False)
        training.step()
    for factor, skips in ((1e6, True), (1.0, False)):
        training.fill(0, False)
        for param in training.params:
            param.grad.mul_(factor)
        with watching() as seen:
            training.step()
        assert (seen.kernels, seen.waits) == (3, 0)
        assert training.optimizer.step_was_skipped == skips
    report = training.optimizer.last_report(wait=True)
    assert report is not None
    assert report.overflows == 0
    assert report.spikes >= 1
    assert training.scaler.get_scale() == 2.0**13  # ten clean steps, of which three double it


def test_replays_of_a_graph_learn() -> None:
    training = Training(skip_norm_above=NormSpike(6, 10))
    for _ in range(6):
        training.fill(0, False)
        training.optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    training.fill(0, False)
    with torch.cuda.graph(graph):
        training.optimizer.step()
    skipped = []
    for factor in (1.0, 1.0, 1e6, 1.0):
        training.fill(0, False)
        for param in training.params:
            param.grad.mul_(factor)
        graph.replay()
        skipped.append(training.optimizer.step_was_skipped)
    assert skipped == [False, False, True, False]
    assert training.optimizer.state_dict()["param_groups"][0]["norm_history"][0] == 9


def test_history_is_not_begun_in_a_graph() -> None:
    training = Training()
    training.step()
    training.optimizer.skip_norm_above = NormSpike()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="take a step before capturing"),
        torch.cuda.graph(graph),
    ):
        training.optimizer.step()
