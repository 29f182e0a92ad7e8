"""A step on a GPU: launches are counted, the host does not wait, and CUDA graphs replay it.

Runs where there is a GPU, and in any case on the pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cuts
import numpy as np
import pytest
import torch
from helpers import PRETEND_GPU, raw_bytes
from torch import Tensor, nn
from watching import watching

import amp_mp as amp
from amp_mp import _C

DEVICE = "cuda"
SHAPES = [(33, 64), (64,), (7,), (0,), (3, 32)]
pytestmark = pytest.mark.usefixtures("cuda")


@pytest.fixture(params=["cuda"])
def cuda(request: pytest.FixtureRequest) -> str:
    """In the names of all tests here, for those who choose by device."""
    return request.param


class Training:
    """A few parameters, an optimizer and a scaler; gradients are written where they are."""

    def __init__(
        self,
        loss_scale: Any = None,
        memory: str | None = None,
        lr: Any = 1e-2,
        kind: Any = amp.optim.AdamW,
        **arguments: Any,
    ) -> None:
        source = torch.Generator().manual_seed(3)
        low = torch.bfloat16
        self.params = [
            nn.Parameter(torch.randn(s, generator=source).to(DEVICE, low)) for s in SHAPES
        ]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        self.optimizer = kind(self.params, lr=lr, memory=memory, max_grad_norm=1.0, **arguments)
        self.scaler = amp.GradScaler(
            DEVICE, init_scale=2.0**10, growth_interval=3, loss_scale=loss_scale
        )
        self.scaler.scale(torch.ones((), device=DEVICE))

    def fill(self, step: int, overflows: bool) -> None:
        """Scaled gradients, the same for every training at that step and scale."""
        source = torch.Generator().manual_seed(100 + step)
        scale = self.scaler._scale
        for p in self.params:
            values = torch.randn(p.shape, generator=source).to(DEVICE)
            p.grad.copy_(values * scale * 2.0 ** -(step % 5))
        if overflows:
            self.params[step % 3].grad.view(-1)[-1] = float("inf")

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> Any:
        state = self.optimizer.state_dict()["state"]
        return raw_bytes([[p.detach() for p in self.params], state, self.scaler.state_dict()])


def overflows_at(step: int) -> bool:
    return step % 7 == 3 or step % 11 == 5


@pytest.mark.parametrize("memory", [None, "exact", "tiny"])
@pytest.mark.parametrize("loss_scale", [None, "Backoff", "LogMax", 1024.0])
def test_a_step_is_three_launches_and_no_wait(loss_scale: Any, memory: str | None) -> None:
    training = Training(loss_scale, memory)
    for step in range(3):
        training.fill(step, step == 1)
        training.step()
    training.fill(3, False)
    with watching() as seen:
        training.step()
    assert (seen.kernels, seen.others, seen.waits) == (3, 0, 0)


def test_a_step_without_scale_and_clip_is_two_launches() -> None:
    training = Training()
    training.optimizer.max_grad_norm = None
    training.optimizer.step()
    with watching() as seen:
        training.optimizer.step()
    assert (seen.kernels, seen.others, seen.waits) == (2, 0, 0)


@pytest.mark.parametrize(("kind", "kernels"), [(amp.optim.LARS, 4), (amp.optim.LAMB, 6)])
def test_rules_that_look_at_norms_launch_a_few_more(kind: Any, kernels: int) -> None:
    param = nn.Parameter(torch.ones(50, 40, device=DEVICE))
    param.grad = torch.ones_like(param)
    optimizer = kind([param], lr=0.1)
    optimizer.step()
    with watching() as seen:
        optimizer.step()
    assert (seen.kernels, seen.others, seen.waits) == (kernels, 0, 0)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("device_lr", [False, True])
def test_larc_around_a_fused_step_measures_once_and_waits_for_nothing(
    device_lr: bool, decay: float
) -> None:
    params = [nn.Parameter(torch.randn(s, device=DEVICE)) for s in SHAPES]
    for p in params:
        p.grad = torch.randn_like(p)
    lr: Any = torch.tensor(0.1, device=DEVICE) if device_lr else 0.1
    larc = amp.optim.LARC(amp.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=decay))
    larc.step()
    with watching() as seen:
        larc.step()
    # One measure of gradients and weights with its sums; decide and apply.
    assert (seen.kernels, seen.waits) == (4, 0)


def test_asking_waits_once_and_what_is_known_costs_nothing() -> None:
    training = Training()
    assert training.optimizer.last_report() is None
    training.fill(0, False)
    training.step()
    first = training.optimizer.last_report(wait=True)
    assert first is not None
    assert (first.number, first.skipped, first.loss_scale) == (1, False, 1024.0)
    total = torch.cat([p.grad.flatten().double() for p in training.params]).norm() / 1024
    assert first.grad_norm == pytest.approx(total.item(), rel=1e-6)
    with watching() as seen:
        assert training.optimizer.grad_norm == first.grad_norm
        assert not training.optimizer.step_was_skipped
        assert training.optimizer.last_report() == first
        assert training.scaler.get_scale() == 1024.0
    assert (seen.kernels, seen.others, seen.waits) == (0, 0, 0)
    training.fill(1, True)
    training.step()
    assert training.optimizer.step_was_skipped
    assert training.optimizer.grad_norm == float("inf")
    assert training.scaler.get_scale() == 512.0
    report = training.optimizer.last_report()
    assert report is not None
    assert report.number == 2


@pytest.mark.parametrize(
    ("loss_scale", "memory", "rate_dtype"),
    [
        (None, None, torch.float32),
        ("Backoff", "exact", torch.float64),
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
    for step in range(2):
        for training in (graphed, eager):
            training.fill(step, False)
            training.step()
    assert graphed.state() == eager.state()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
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


@pytest.mark.parametrize("memory", ["exact", "micro"])
@pytest.mark.parametrize("kind", [amp.optim.Adadelta, amp.optim.NAdam, amp.optim.RAdam])
def test_a_captured_step_counts_for_every_rule(kind: Any, memory: str) -> None:
    """RAdam's rectification begins in a replay, and NAdam's mu_product goes on in them."""
    graphed, eager = (Training(memory=memory, kind=kind, weight_decay=0.1) for _ in range(2))
    for training in (graphed, eager):
        training.fill(0, False)
        training.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for step in range(1, 20):
        for training in (graphed, eager):
            training.fill(step, overflows_at(step))
        graph.replay()
        eager.step()
        assert graphed.state() == eager.state(), step
    steps = eager.optimizer.state[eager.params[0]]["step"].item()
    assert steps == 1 + sum(not overflows_at(step) for step in range(1, 20))


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
    """As an eager step does: zeros, a clamp, other numbers, through `.data` too."""
    graphed, eager = Training(memory=memory), Training(memory=memory)
    for step in range(2):
        for training in (graphed, eager):
            training.fill(step, False)
            training.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for step in range(2, 20):
        for training in (graphed, eager):
            param = training.params[step % len(training.params)].data.view(-1)
            if step % 3 == 0:
                param[::2].zero_()
            elif step % 3 == 1:
                param.clamp_(-0.05, 0.05)
            else:
                param[1::3].copy_(torch.linspace(-1, 1, param[1::3].numel(), device=DEVICE))
            training.fill(step, overflows_at(step))
        graph.replay()
        eager.step()
        assert graphed.state() == eager.state(), step


def test_a_captured_step_without_scaling_follows_its_rate() -> None:
    rates = [torch.full((), 0.5, device=DEVICE) for _ in range(2)]
    pairs = []
    for rate in rates:
        param = nn.Parameter(torch.ones(40, device=DEVICE))
        param.grad = torch.full_like(param, 0.25)
        pairs.append((param, amp.optim.SGD([param], lr=rate, momentum=0.9)))
        pairs[-1][1].step()
    (graphed, captured), (eager, stepped) = pairs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in range(20):
        for rate in rates:
            rate.fill_(0.5 / (2 + step))
        graph.replay()
        stepped.step()
        assert torch.equal(graphed, eager)


@contextmanager
def refused_capture(error: type[Exception], match: str) -> Iterator[None]:
    with pytest.raises(error, match=match), torch.cuda.graph(torch.cuda.CUDAGraph()):
        yield


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
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with refused_capture(ValueError, r"lr .*is on the CPU.*put it on cuda:0"):
        training.optimizer.step()
    assert training.state()[:2] == before[:2]


def test_a_parameter_that_never_had_a_gradient_cannot_be_captured() -> None:
    params = [nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(2)]
    params[0].grad = torch.ones_like(params[0])
    optimizer = amp.optim.AdamW(params)
    optimizer.step()
    with refused_capture(ValueError, r"shape \(3,\) has had no gradient yet"):
        optimizer.step()
    params[1].requires_grad_(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()


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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
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
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
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


def test_a_rate_elsewhere_is_read_when_the_step_is_queued() -> None:
    param, twin = (nn.Parameter(torch.ones(5, device=DEVICE)) for _ in range(2))
    for p in (param, twin):
        p.grad = torch.full_like(p, 0.5)
    rate = torch.tensor(0.25, dtype=torch.float64)
    first, second = amp.optim.SGD([param], lr=rate), amp.optim.SGD([twin], lr=0.25)
    first.step()
    second.step()
    rate.fill_(0.5)
    second.param_groups[0]["lr"] = 0.5
    first.step()
    second.step()
    assert torch.equal(param, twin)
    first.param_groups[0]["lr"] = torch.tensor([0.1, 0.2])
    with pytest.raises(ValueError, match="lr must be one number of dtype Float or Double"):
        first.step()
    assert torch.equal(param, twin)


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.LAMB])
def test_a_device_without_a_gradient_waits_for_its_first(kind: Any, other: str) -> None:
    if other == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    param, late = (nn.Parameter(torch.ones(4, 32, device=d)) for d in ("cuda:0", other))
    twin = nn.Parameter(torch.ones(4, 32, device=DEVICE))
    both, alone = (kind(own, lr=0.1, max_grad_norm=0.5) for own in ([late, param], [twin]))
    for _ in range(2):
        param.grad = twin.grad = torch.ones_like(twin)
        both.step()
        alone.step()
    torch.testing.assert_close(param, twin, rtol=1e-6, atol=0)
    assert float(both.grad_norm) == pytest.approx(float(alone.grad_norm), rel=1e-12)
    assert (late == 1).all()
    late.grad = torch.ones_like(late)
    both.step()
    assert (late != 1).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.LAMB])
def test_two_devices_have_one_verdict(kind: Any) -> None:
    source = torch.Generator().manual_seed(1)
    values = [torch.randn(40, 32, generator=source) for _ in range(4)]
    grads = [torch.randn(40, 32, generator=source) * 64 for _ in range(4)]

    def trained(devices: list[str], overflow: int | None) -> tuple[list[Tensor], Any]:
        params = [nn.Parameter(v.to(d)) for v, d in zip(values, devices, strict=True)]
        rate = torch.tensor(0.01, device=devices[0])
        optimizer = kind(params, lr=rate, max_grad_norm=0.5)
        scaler = amp.GradScaler(DEVICE, init_scale=64.0)
        for step in range(3):
            scaler.scale(torch.ones((), device=devices[0]))
            for p, g in zip(params, grads, strict=True):
                p.grad = g.to(p.device)
            if overflow is not None and step == 1:
                params[overflow].grad[3, 5] = float("nan")
            scaler.step(optimizer)
            scaler.update()
        outcome = optimizer.step_was_skipped, optimizer.grad_norm, scaler.get_scale()
        return [p.detach().cpu() for p in params], outcome

    for overflow in (None, 0, 3):
        one, alone = trained(["cuda:0"] * 4, overflow)
        two, together = trained(["cuda:0", "cuda:0", "cuda:1", "cuda:1"], overflow)
        assert alone[0] == together[0]
        assert alone[1] == pytest.approx(together[1], rel=1e-12)
        assert alone[2] == together[2]
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_on_a_side_stream() -> None:
    here, there = Training(memory="exact"), Training(memory="exact")
    stream = torch.cuda.Stream()
    for step in range(4):
        here.fill(step, step == 2)
        here.step()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            there.fill(step, step == 2)
            there.step()
            assert there.optimizer.step_was_skipped == (step == 2)
        torch.cuda.current_stream().wait_stream(stream)
    assert here.state() == there.state()


@pytest.mark.parametrize("memory", ["float32", "exact", "lean", "tiny", "micro"])
def test_a_model_moved_to_the_device_after_two_steps_is_trained_there(memory: str) -> None:
    """Bit for bit as one that was there from the start; model.cuda() keeps its parameters."""
    torch.manual_seed(0)
    late = torch.nn.Linear(64, 32, bias=False).bfloat16()
    early = copy.deepcopy(late).cuda()
    optimizers = [amp.optim.AdamW(m.parameters(), lr=0.1, memory=memory) for m in (late, early)]
    for step in range(4):
        if step == 2:
            late.cuda()
        grad = torch.randn(32, 64).bfloat16()
        for model, optimizer in zip((late, early), optimizers, strict=True):
            model.weight.grad = grad.to(model.weight.device)
            optimizer.step()
    assert torch.equal(late.weight, early.weight)
    for name, value in optimizers[0].state[late.weight].items():
        assert torch.equal(value, optimizers[1].state[early.weight][name]), name


def test_gathered_norms_need_no_host() -> None:
    """Measured and added on the device; where all have gradients nothing is copied either."""
    shape = (40, 96)
    halves = cuts.Blocks(
        DEVICE, shape, cuts.cuts(shape, [16], []), "lamb_", "bfloat16", ("m8", "log8"), split=True
    )
    halves.set_gradients(torch.from_numpy(np.ones(40 * 96, np.float32)))
    measured, weights = halves.slots.measure(), halves.slots.measure_weights()
    verdict = torch.tensor([0.0, 1, 0, 0, 1], dtype=torch.float64, device=DEVICE)
    given: list[Tensor] = []

    def gather_updates(rows: Tensor) -> Tensor:
        given.append(rows)
        return rows

    operator = _C.operators["lamb_"]
    with watching() as seen:
        operator(
            halves.slots,
            [halves.hyper],
            verdict,
            measured,
            weights=weights,
            gather_updates=gather_updates,
        )
    # decide, moments, their sums, the rules with the gathered norms, apply
    assert (seen.kernels, seen.others, seen.waits) == (5, 0, 0)
    assert (given[0][:, 0] > 0).all()
