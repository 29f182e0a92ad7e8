"""A step on a GPU: launches are counted, and the host does not wait.

Runs where there is a GPU, and in any case on the pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from cuda_training import DEVICE, SHAPES, Training
from torch import Tensor, nn
from watching import watching

import amp_mp as amp

pytestmark = pytest.mark.usefixtures("cuda")


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


def test_a_step_without_scale_clip_and_check_is_two_launches() -> None:
    training = Training(check_overflow=False)
    training.optimizer.max_grad_norm = None
    training.optimizer.step()
    with watching() as seen:
        training.optimizer.step()
    assert (seen.kernels, seen.others, seen.waits) == (2, 0, 0)


HYPERBALL = partial(amp.optim.AdamW, hyperball=True)


@pytest.mark.parametrize(
    ("kind", "kernels"), [(amp.optim.LARS, 4), (amp.optim.LAMB, 5), (HYPERBALL, 5)]
)
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
    numbers = {"momentum": 0.9, "weight_decay": decay, "check_overflow": False}
    larc = amp.apex.parallel.LARC(amp.optim.SGD(params, lr=lr, **numbers))
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
    with pytest.raises(ValueError, match="lr must be one number"):
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
