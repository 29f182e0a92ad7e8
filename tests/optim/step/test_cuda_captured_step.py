"""A step captured in a CUDA graph and replayed is the eager one.

Runs where there is a GPU, and in any case on the pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from cuda_training import DEVICE, Training, captured, graph_of, refused_capture
from helpers import PRETEND_GPU, raw_bytes, warns
from tiers import full
from torch import Tensor, nn
from twins import Twins, shapes_of
from watching import watching

import amp_mp as amp
from amp_mp import _C
from amp_mp.scaling import NormSpike

pytestmark = pytest.mark.usefixtures("cuda")


def overflows_at(step: int) -> bool:
    return step % 7 == 3 or step % 11 == 5


@pytest.mark.parametrize(
    ("loss_scale", "memory", "rate_dtype"),
    [
        full((None, None, torch.float32)),
        full(("Backoff", "exact", torch.float64)),
        ("LogMax", "tiny", torch.float32),
    ],
)
def test_a_captured_step_replayed_is_the_eager_one(
    loss_scale: Any, memory: str | None, rate_dtype: torch.dtype
) -> None:
    rates = [torch.full((), 1e-2, dtype=rate_dtype, device=DEVICE) for _ in range(2)]
    graphed, eager = (
        Training(loss_scale, memory, rate, rounding="nearest", seed=5) for rate in rates
    )
    graph = captured(graphed, eager)
    if PRETEND_GPU:
        assert graph.launches == 4
    skipped = 0
    for step in range(2, 202):
        for rate in rates:
            rate.fill_(1e-2 / (1 + step))
        for training in (graphed, eager):
            training.fill(step, overflows_at(step))
        graph.replay()
        eager.step()
        if step % 25 == 0 or step > 195:
            assert graphed.state() == eager.state(), step
        ours, theirs = (t.optimizer.last_report(wait=True) for t in (graphed, eager))
        assert ours == theirs
        assert ours is not None
        assert ours.skipped == overflows_at(step)
        assert graphed.scaler.get_scale() == eager.scaler.get_scale()
        skipped += ours.skipped
    assert 30 < skipped < 80


@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.Adam, amp.optim.LAMB])
def test_a_replay_reads_the_weight_decay_that_is_a_tensor(kind: Any) -> None:
    """Against an eager optimizer whose groups get numbers; two groups, one with a plain number."""
    decay = torch.full((), 0.1, device=DEVICE)
    graphed, eager = (Training(kind=kind, weight_decay=d) for d in (decay, decay.item()))
    for training in (graphed, eager):
        groups = training.optimizer.param_groups
        moved = groups[0]["params"].pop()
        training.optimizer.add_param_group({"params": [moved], "weight_decay": 0.3})
    graph = captured(graphed, eager)
    for step in range(2, 12):
        decay.fill_(0.0 if step == 5 else 0.5 / step)
        eager.optimizer.param_groups[0]["weight_decay"] = decay.item()
        for training in (graphed, eager):
            training.fill(step, overflows_at(step))
        graph.replay()
        eager.step()
        assert graphed.state() == eager.state(), step


@pytest.mark.parametrize("memory", ["exact", "micro"])
@pytest.mark.parametrize("kind", [amp.optim.Adadelta, amp.optim.NAdam, amp.optim.RAdam])
def test_a_captured_step_counts_for_every_rule(kind: Any, memory: str) -> None:
    """RAdam's rectification begins in a replay, and NAdam's mu_product goes on in them."""
    graphed, eager = (Training(memory=memory, kind=kind, weight_decay=0.1) for _ in range(2))
    graph = captured(graphed, eager, steps=1)
    for step in range(1, 20):
        for training in (graphed, eager):
            training.fill(step, overflows_at(step))
        graph.replay()
        eager.step()
        assert graphed.state() == eager.state(), step
    steps = eager.optimizer.state[eager.params[0]]["step"].item()
    assert steps == 1 + sum(not overflows_at(step) for step in range(1, 20))


def test_replays_skip_without_scaler_and_clipping() -> None:
    """As a step does by default; the next eager step says so."""
    params = [nn.Parameter(torch.ones(70, device=DEVICE)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = amp.optim.AdamW(params, lr=0.1)
    optimizer.step()
    graph = graph_of(optimizer)
    before = raw_bytes([params, optimizer.state_dict()["state"]])
    params[1].grad[5] = float("nan")
    graph.replay()
    assert optimizer.step_was_skipped
    assert raw_bytes([params, optimizer.state_dict()["state"]]) == before
    with warns("AdamW has skipped step [23]: gradients"):
        optimizer.step()
        torch.cuda.synchronize()
        optimizer.step()
    params[1].grad[5] = 1.0
    graph.replay()
    assert not optimizer.step_was_skipped
    assert raw_bytes(params) != before


def test_a_whole_iteration_captured_trains_as_eagerly() -> None:
    def trained(captures: bool) -> tuple[list[Tensor], float]:
        torch.manual_seed(2)
        layers = [nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)]
        model = amp.prepare(nn.Sequential(*layers).to(DEVICE), torch.float16)
        rate = torch.full((), 1e-3, device=DEVICE)
        optimizer = amp.optim.AdamW(model.parameters(), lr=rate, max_grad_norm=1.0, memory="exact")
        scaler = amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=10)
        batch = torch.randn(16, 32, device=DEVICE, dtype=torch.float16)

        def iteration() -> None:
            scaler.scale(model(batch).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizer.zero_grad()
                iteration()
        torch.cuda.current_stream().wait_stream(stream)
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        if captures:
            with torch.cuda.graph(graph):
                iteration()
        source = torch.Generator().manual_seed(4)
        for step in range(40):
            batch.copy_(torch.randn(16, 32, generator=source))
            batch[0, 0] = float("inf") if step % 9 == 4 else 0.0
            rate.fill_(1e-3 / (1 + step))
            if captures:
                graph.replay()
            else:
                optimizer.zero_grad()
                iteration()
        return [p.detach().float() for p in model.parameters()], scaler.get_scale()

    (found, scale), (wanted, eager_scale) = trained(True), trained(False)
    assert scale == eager_scale
    rtol, atol = (0.0, 0.0) if PRETEND_GPU else (2e-3, 1e-4)  # a GPU's products may differ
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("memory", ["float32", "exact", "lean", "tiny", "micro"])
def test_a_replayed_step_goes_on_from_what_was_written(memory: str) -> None:
    """As an eager step does: zeros, a clamp, other numbers, through `.data` too, and a count."""
    graphed, eager = Training(memory=memory), Training(memory=memory)
    graph = captured(graphed, eager)
    for step in range(2, 20):
        for training in (graphed, eager):
            param = training.params[step % len(training.params)].data.view(-1)
            if step % 3 == 0:
                param[::2].zero_()
            elif step % 3 == 1:
                param.clamp_(-0.05, 0.05)
            else:
                param[1::3].copy_(torch.linspace(-1, 1, param[1::3].numel(), device=DEVICE))
            if step == 9:
                training.optimizer.state[training.params[0]]["step"].zero_()
            training.fill(step, overflows_at(step))
        graph.replay()
        eager.step()
        assert graphed.state() == eager.state(), step


def test_a_capture_that_would_leave_something_out_is_refused() -> None:
    training = Training()
    with refused_capture(RuntimeError, "take a step before capturing"):
        training.optimizer.step()
    training.fill(0, False)
    training.step()
    before = training.state()
    grad, training.params[1].grad = training.params[1].grad, None
    with refused_capture(ValueError, r"parameter 1 of group 0 has no gradient.*freeze it"):
        training.step()
    training.scaler = Training().scaler
    training.params[1].grad = grad
    training.params[1].requires_grad_(False)
    for name, where in (("lr", "cpu"), ("weight_decay", "cpu"), ("weight_decay", DEVICE)):
        group = training.optimizer.param_groups[0]
        number = group[name]
        group[name] = torch.tensor(0.1, dtype=torch.bfloat16, device=where)
        with refused_capture(ValueError, rf"{name} .*is not on cuda:0 in float32.*put it there"):
            training.optimizer.step()
        group[name] = number
    assert training.state()[:2] == before[:2]


def test_a_parameter_that_never_had_a_gradient_cannot_be_captured() -> None:
    params = [nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(2)]
    params[0].grad = torch.ones_like(params[0])
    optimizer = amp.optim.AdamW(params)
    optimizer.step()
    with refused_capture(ValueError, r"shape \(3,\) has had no gradient yet"):
        optimizer.step()
    params[1].requires_grad_(False)
    graph_of(optimizer)


def test_casts_of_a_captured_parameter_are_never_stale() -> None:
    model = nn.Linear(8, 8, bias=False, device=DEVICE)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.5)
    data = torch.eye(8, device=DEVICE)

    def product() -> Tensor:
        with amp.autocast(DEVICE, dtype=torch.bfloat16, keep_casts=True):
            return model(data).float()

    product().sum().backward()
    optimizer.step()
    product()
    assert model.weight in _C.casting.cached()
    graph = graph_of(optimizer)
    assert model.weight not in _C.casting.cached()
    for _ in range(3):
        graph.replay()
        assert torch.equal(product(), model.weight.detach().bfloat16().float().t())


def test_a_new_weight_at_a_captured_ones_address_is_cached() -> None:
    def captured_and_freed() -> set[int]:
        """Where weights were that a graph has stepped."""
        params = [nn.Parameter(torch.ones(8, 8, device=DEVICE)) for _ in range(100)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = amp.optim.SGD(params, lr=0.5)
        optimizer.step()
        graph_of(optimizer)
        assert not is_cached_after_use(params[0])
        return {param._cdata for param in params}

    def is_cached_after_use(param: Tensor) -> bool:
        with amp.autocast(DEVICE, dtype=torch.bfloat16, keep_casts=True):
            torch.mm(param, param)
        return param in _C.casting.cached()

    addresses, made = captured_and_freed(), []
    gc.collect()
    while not made or made[-1]._cdata not in addresses:
        made.append(nn.Parameter(torch.ones(8, 8, device=DEVICE)))
        assert len(made) < 10_000, "no tensor gets one of the addresses"
    assert is_cached_after_use(made[-1])


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
    graph = graph_of(twins.ours.optimizer)
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
        graphs.append((decay, graph_of(twins.ours.optimizer)))
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
    graph = graph_of(twins.ours.optimizer)
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
    graph_of(twins.ours.optimizer)
    for step in range(1, 3):
        twins.fill(step)
        twins.step()
        twins.check(step)


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
    training.fill(0, False)
    graph = graph_of(training.optimizer)
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
    with refused_capture(RuntimeError, "take a step before capturing"):
        training.optimizer.step()
