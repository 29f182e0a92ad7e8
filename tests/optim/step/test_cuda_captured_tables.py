"""A CUDA graph keeps the tables of the step that it holds, whatever eager steps do to theirs.

The oracle is the same optimizer on a CPU, bit for bit.
"""

from __future__ import annotations

import gc

import pytest
import torch
from twins import Twins, shapes_of

pytestmark = pytest.mark.usefixtures("cuda")


def captured(twins: Twins) -> torch.cuda.CUDAGraph:
    """The next step in a graph; the host's is not made."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twins.ours.optimizer.step()
    return graph


@pytest.mark.parametrize("tensors", [4, 30])
@pytest.mark.parametrize("changes_first", [False, True])
def test_a_graph_keeps_its_table_while_eager_steps_change_theirs(
    tensors: int, changes_first: bool
) -> None:
    """Captured with these numbers, gradients and parameters, replayed with them."""
    twins = Twins(shapes_of(tensors), weight_decay=0.1)
    twins.fill(0)
    twins.step()
    if changes_first:
        twins.each_group(betas=(0.7, 0.95), weight_decay=0.3)
    numbers = {k: twins.ours.optimizer.param_groups[0][k] for k in ("lr", "betas", "weight_decay")}
    twins.fill(1)
    static = [[p.grad for p in side.params] for side in twins.sides]
    graph = captured(twins)
    for round_ in range(3):
        twins.each_group(**numbers)
        for side, grads in zip(twins.sides, static, strict=True):
            for param, grad in zip(side.params, grads, strict=True):
                param.grad = grad
        twins.fill(10 + round_, in_place=True)
        graph.replay()
        twins.theirs.optimizer.step()
        twins.check(("replay", round_))
        for side in twins.sides:
            for param in side.params:
                param.grad = None
        for eager in range(3):
            twins.each_group(lr=0.1 / (1 + eager), betas=(0.5, 0.9 + 0.01 * round_))
            twins.fill(20 + eager, without={eager} if round_ else set())
            twins.step()
            twins.check(("eager", round_, eager))


def test_two_graphs_of_one_optimizer_and_steps_between() -> None:
    twins = Twins(shapes_of(30))
    twins.fill(0)
    twins.step()
    graphs = []
    for decay in (0.1, 0.4):
        twins.each_group(weight_decay=decay)
        graphs.append((decay, captured(twins)))
    for round_ in range(4):
        for decay, graph in graphs:
            twins.each_group(weight_decay=decay)
            twins.fill(round_, in_place=True)
            graph.replay()
            twins.theirs.optimizer.step()
            twins.check((round_, decay))
        twins.each_group(weight_decay=0.7)
        twins.step()
        twins.check(round_)


def test_a_graph_is_replayed_after_its_optimizer_is_gone() -> None:
    """The states are kept, as the parameters are; the tables are nobody's."""
    twins = Twins(shapes_of(30))
    for step in range(2):
        twins.fill(step)
        twins.step()
    graph = captured(twins)
    kept = list(twins.ours.optimizer.state.values())
    del twins.ours.optimizer
    gc.collect()
    others = [Twins(shapes_of(30), lr=0.5) for _ in range(3)]  # may get the tables' memory
    for step in range(2, 5):
        for other in others:
            other.fill(step)
            other.step()
        twins.fill(step, in_place=True)
        graph.replay()
        twins.theirs.optimizer.step()
        for param, twin in zip(twins.ours.params, twins.theirs.params, strict=True):
            assert torch.equal(param.cpu(), twin)
    assert len(kept) == 30


def test_a_capture_that_is_thrown_away_uploads_nothing() -> None:
    """What a capture would have uploaded has not been."""
    twins = Twins(shapes_of(30))
    twins.fill(0)
    twins.step()
    twins.each_group(weight_decay=0.3)
    captured(twins)
    for step in range(1, 3):
        twins.fill(step)
        twins.step()
        twins.check(step)
