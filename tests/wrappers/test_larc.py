"""LARC around other optimizers: Apex's formula, what users put around it, and whole scripts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DTYPES, raw_bytes, through_a_file
from torch import Tensor, nn
from wrapping import INNER

import amp_mp as amp

SHAPES = [(17, 33), (33,), (5, 33), (5,), (0, 3)]


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(1)
    made = [torch.randn(s, generator=source).to(device, dtype) for s in SHAPES]
    made[3].zero_()  # a bias as it begins: no norm to adapt to
    return [nn.Parameter(p) for p in made]


def fill(params: list[nn.Parameter], step: int, size: float = 1.0) -> None:
    source = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(params):
        grad = torch.randn(p.shape, generator=source) * size * 10.0 ** (number - 2)
        p.grad = grad.to(p.device, p.dtype)


def adapted(
    weight: Tensor, grad: Tensor | None, lr: float, decay: float, trust: float, clip: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Apex's formula in float64, and the size of the two numbers that it adds."""
    assert grad is not None
    w, g = (x.detach().cpu().double().numpy() for x in (weight, grad))
    norm, of_grad = np.linalg.norm(w), np.linalg.norm(g)
    if norm == 0 or of_grad == 0:
        return g, np.abs(g)
    ratio = trust * norm / (of_grad + decay * norm + 1e-8)
    ratio = min(ratio / lr, 1.0) if clip else ratio
    return (g + decay * w) * ratio, (np.abs(g) + np.abs(decay * w)) * ratio


class Recorder(torch.optim.Optimizer):
    """Keeps the gradients and weight decays that its step has seen."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})
        self.seen: list[Tensor] = []
        self.decays: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        self.seen = [p.grad.clone() for p in params if p.grad is not None]
        self.decays = [group.get("weight_decay") for group in self.param_groups]
        return "stepped"


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_apexs(device: str, clip: bool, decay: float, dtype: str) -> None:
    params = parameters(device, DTYPES[dtype])
    inner = Recorder(params, weight_decay=decay)
    larc = amp.apex.parallel.LARC(inner, trust_coefficient=0.02, clip=clip)
    fill(params, 0)
    params[2].grad.zero_()  # type: ignore[union-attr]
    wanted = [adapted(p, p.grad, 0.1, decay, 0.02, clip) for p in params]
    assert larc.step() == "stepped"
    unit = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
    for p, found, (want, size) in zip(params, inner.seen, wanted, strict=True):
        assert p.grad is not None
        assert raw_bytes(p.grad) == raw_bytes(found)
        # Roundings of decay, ratio, product, sum and product to float32, then to the gradient's
        # type, whose subnormal numbers are multiples of 2^-24 in float16.
        bound = size * (unit + 5 * 2**-24) + 2.0**-25 * (dtype == "float16")
        assert (np.abs(found.double().cpu().numpy() - want) <= bound).all()
    assert inner.decays == [0.0]
    assert larc.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_fused_form_is_the_same(device: str, momentum: float) -> None:
    """LARS(clip=True) computes with the same formula and writes no gradient."""
    numbers = {"lr": 0.05, "momentum": momentum, "weight_decay": 0.01}
    ours, theirs = parameters(device), parameters(device)
    larc = amp.apex.parallel.LARC(torch.optim.SGD(ours, **numbers), trust_coefficient=0.1)
    lars = amp.optim.LARS(theirs, **numbers, trust_coefficient=0.1, clip=True)
    for step in range(10):
        for params, optimizer in ((ours, larc), (theirs, lars)):
            fill(params, step)
            optimizer.step()
        # Each step rounds the gradient and the weight a few times, in another order.
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=(step + 1) * 1e-6, atol=(step + 1) * 1e-6)


@pytest.mark.parametrize("kind", ["torch", "amp_mp"])
def test_a_grad_scaler_unscales_first_and_skips_every_byte(device: str, kind: str) -> None:
    make = torch.optim.SGD if kind == "torch" else amp.optim.SGD
    ours, plain = parameters(device), parameters(device)
    numbers: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    scaled = amp.apex.parallel.LARC(make(ours, **numbers))
    alone = amp.apex.parallel.LARC(make(plain, **numbers))
    scaler = amp.GradScaler(device, init_scale=1024.0)
    for step in range(4):
        fill(ours, step, 1024.0)
        scaler.scale(torch.zeros((), device=device))
        if step == 2:
            ours[1].grad[3] = float("inf")  # type: ignore[index]
            before = raw_bytes([ours, scaled.state_dict()])
            scaler.step(scaled)
            assert raw_bytes([ours, scaled.state_dict()]) == before
        else:
            fill(plain, step)
            scaler.step(scaled)
            alone.step()
        assert scaled.param_groups[0]["weight_decay"] == 0.1
        scaler.update(1024.0)
    assert raw_bytes(ours) == raw_bytes(plain)


def test_clipping_comes_before(device: str) -> None:
    """Unscale, clip to a norm, LARC: the order of the words in a training script."""
    params, plain = parameters(device), parameters(device)
    larc = amp.apex.parallel.LARC(torch.optim.SGD(params, 0.1), clip=False, trust_coefficient=0.5)
    scaler = amp.GradScaler(device, init_scale=256.0)
    fill(params, 0, 256.0)
    scaler.scale(torch.zeros((), device=device))
    scaler.unscale_(larc)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(larc)
    fill(plain, 0)
    torch.nn.utils.clip_grad_norm_(plain, 1.0)
    for p, q in zip(params, plain, strict=True):
        want = q.detach().cpu().double().numpy() - 0.1 * adapted(q, q.grad, 0.1, 0.0, 0.5, False)[0]
        np.testing.assert_allclose(p.detach().cpu().numpy(), want, rtol=1e-5, atol=1e-6)


def test_apexs_fp16_optimizer_around_it(device: str) -> None:
    """Masters are float32 tensors; LARC sees their gradients, unscaled."""
    torch.manual_seed(1)
    net = nn.Linear(17, 5).to(device)
    reference = copy.deepcopy(net)
    net.half()
    larc = amp.apex.parallel.LARC(torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.1))
    optimizer = amp.FP16_Optimizer(larc, static_loss_scale=64.0)
    alone = amp.apex.parallel.LARC(torch.optim.SGD(reference.parameters(), 0.1, weight_decay=0.1))
    x = torch.randn(4, 17, device=device).half()
    optimizer.backward(net(x).float().square().mean())
    optimizer.step()
    reference.half().float()(x.float()).square().mean().backward()
    alone.step()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=2e-3, atol=2e-3)


def test_schedulers_groups_and_state_dicts_are_the_inner_optimizers(device: str) -> None:
    params = parameters(device)
    inner = torch.optim.SGD(params[:2], lr=0.1, momentum=0.9)
    larc = amp.apex.parallel.LARC(inner)
    schedule = torch.optim.lr_scheduler.StepLR(larc, 1, gamma=0.5)
    larc.add_param_group({"params": params[2:], "weight_decay": 0.5})
    assert len(inner.param_groups) == len(larc.param_groups) == 2
    calls = []
    larc.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(2):
        fill(params, step)
        larc.step()
        schedule.step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.025)
    assert len(calls) == 2
    assert raw_bytes(larc.state_dict()) == raw_bytes(inner.state_dict())
    larc.zero_grad()
    assert all(p.grad is None for p in params)

    again = parameters(device)
    other = amp.apex.parallel.LARC(torch.optim.SGD(again[:2], lr=1.0, momentum=0.9))
    other.add_param_group({"params": again[2:]})
    other.load_state_dict(copy.deepcopy(larc.state_dict()))
    for p, q in zip(params, again, strict=True):
        q.data.copy_(p)
    for optimizer, own in ((larc, params), (other, again)):
        fill(own, 7)
        optimizer.step()
    assert raw_bytes(params) == raw_bytes(again)


def test_a_closure_is_called_once(device: str) -> None:
    params = parameters(device)
    inner = Recorder(params)
    calls = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append(1)
        fill(params, 0)
        return 3.5

    assert amp.apex.parallel.LARC(inner).step(closure) == 3.5
    assert len(calls) == 1
    assert inner.seen


def test_a_failing_step_leaves_weight_decay_as_it_was(device: str) -> None:
    class Failing(Recorder):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no")

    params = parameters(device)
    larc = amp.apex.parallel.LARC(Failing(params, weight_decay=0.3))
    fill(params, 0)
    with pytest.raises(RuntimeError, match=r"^no$"):
        larc.step()
    assert larc.param_groups[0]["weight_decay"] == 0.3


def test_what_would_go_wrong_in_silence_is_refused(device: str) -> None:
    params = parameters(device)
    with pytest.raises(TypeError, match=r"^optimizer must be a torch.optim.Optimizer .*list"):
        amp.apex.parallel.LARC(params)  # type: ignore[arg-type]
    larc = amp.apex.parallel.LARC(torch.optim.SGD(params, 0.1))
    with pytest.raises(TypeError, match=r"other than LARC, found LARC"):
        amp.apex.parallel.LARC(larc)
    for name in ("trust_coefficient", "eps"):
        with pytest.raises(ValueError, match=rf"^{name} must not be negative, found -1"):
            amp.apex.parallel.LARC(torch.optim.SGD(params, 0.1), **{name: -1})
    with pytest.raises(ValueError, match=r"max_grad_norm.*clip_grad_norm_ before"):
        amp.apex.parallel.LARC(amp.optim.SGD(params, 0.1, max_grad_norm=1.0))


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    larc = amp.apex.parallel.LARC(torch.optim.SGD(embedding.parameters(), 0.1))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"gradient of parameter 0 of group 0.*sparse.*dense"):
        larc.step()


def test_an_attached_optimizer_is_refused(device: str) -> None:
    net = nn.Linear(3, 2).to(device)
    inner = amp.optim.SGD(net.parameters(), 0.1)
    larc = amp.apex.parallel.LARC(inner)
    with (
        inner.attach(net),
        pytest.raises(ValueError, match=r"attached to the backward pass"),
    ):
        larc.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("inner", INNER)
def test_a_copy_made_after_a_scheduler_steps_its_own_parameters(inner: str, copied: Any) -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    larc = amp.apex.parallel.LARC(INNER[inner]([weight]), 0.05, clip=False)
    calls: list[int] = []
    larc.register_step_post_hook(lambda *_: calls.append(1))
    torch.optim.lr_scheduler.StepLR(larc, 5)
    weight.grad = torch.ones(4, 3)
    larc.step()
    other = copied(larc)
    assert (other.trust_coefficient, other.clip) == (0.05, False)
    calls.clear()
    mine = other.param_groups[0]["params"][0]
    mine.grad = torch.full((4, 3), 2.0)
    original, before = raw_bytes([weight, larc.state_dict()]), raw_bytes(mine)
    other.step()
    assert raw_bytes([weight, larc.state_dict()]) == original
    assert raw_bytes(mine) != before
    assert calls == []  # as a copy of torch's optimizers, it has no hooks
    weight.grad = torch.full((4, 3), 2.0)
    larc.step()
    assert raw_bytes([weight, larc.state_dict()]) == raw_bytes([mine, other.state_dict()])


@pytest.mark.parametrize("inner", INNER)
def test_a_checkpoint_is_loaded_into_larc(tmp_path: Path, inner: str) -> None:
    def made(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        net: nn.Module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        if inner.startswith("amp"):
            amp.prepare(net, torch.bfloat16)
        return net, amp.apex.parallel.LARC(INNER[inner](net.parameters()))

    def train(net: nn.Module, larc: Any) -> None:
        x = torch.ones(2, 5, dtype=next(net.parameters()).dtype)
        net(x).float().square().mean().backward()
        larc.step()
        larc.zero_grad()

    net, larc = made(1)
    train(net, larc)
    amp.checkpoint.save(tmp_path / "step", net, larc)
    train(net, larc)
    again, other = made(2)
    amp.checkpoint.load(tmp_path / "step", again, other)
    train(again, other)
    assert raw_bytes([net.state_dict(), larc.state_dict()]) == raw_bytes(
        [again.state_dict(), other.state_dict()]
    )


def scaled_by(name: str, device: str, larc: Any, weight: nn.Parameter, grad: Tensor) -> None:
    """One step on float16 gradients that carry a scale of 2^16."""
    scale = 2.0**16
    if name == "handle.scale_loss":
        policy = amp.scaling.Static(scale)
        with amp.init(dtype=torch.float16, device_type="cpu", loss_scale=policy) as handle:
            with handle.scale_loss((weight.float() * grad).sum(), larc) as loss:
                loss.backward()
            larc.step()
        return
    kind = amp.GradScaler if name == "amp.GradScaler" else torch.amp.GradScaler
    scaler = kind(device, init_scale=scale)
    scaler.scale((weight.float() * grad).sum()).backward()
    scaler.step(larc)
    scaler.update()


SCALERS = ["amp.GradScaler", "torch.amp.GradScaler", "handle.scale_loss"]


@pytest.mark.parametrize("size", [2e-8, 1e-4])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 1e-9])
@pytest.mark.parametrize("scaler", SCALERS)
def test_float16_gradients_are_unscaled_in_float32(
    scaler: str, decay: float, clip: bool, size: float
) -> None:
    """At 2e-8 a true gradient is below the smallest float16."""
    torch.manual_seed(1)
    master, grad = torch.randn(32, 16) * 1e-4, torch.randn(32, 16) * size
    weight = nn.Parameter(master.half())
    inner = amp.optim.SGD([weight], 0.1, weight_decay=decay, master="float32")
    larc = amp.apex.parallel.LARC(inner, clip=clip)
    inner.init_state()
    before = inner.state[weight]["master"].clone()
    # float16 gradients are what the product's backward rounds.
    given = (grad * 2.0**16).half().float() / 2.0**16
    scaled_by(scaler, "cpu", larc, weight, given)
    found = (inner.state[weight]["master"] - before).double()
    want = -0.1 * torch.from_numpy(adapted(before, given, 0.1, decay, 0.02, clip)[0])
    # The masters are about 1e-4: their float32 roundings are up to 2^-24 * 4e-4 each.
    error, bound = (found - want).abs(), want.abs() * 2.0**-10 + 2.0**-24 * 5e-4
    assert (error <= bound).all()
    if size == 1e-4 or not clip:
        cosine = torch.nn.functional.cosine_similarity(found.flatten(), want.flatten(), dim=0)
        assert cosine > 0.99999


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("scaler", SCALERS)
def test_an_overflow_changes_no_byte(scaler: str, inner: str) -> None:
    weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float16))
    larc = amp.apex.parallel.LARC(INNER[inner]([weight]))
    scaled_by(scaler, "cpu", larc, weight, torch.full((4, 3), 0.25))
    larc.zero_grad()
    before = raw_bytes([weight, larc.state_dict()])
    scaled_by(scaler, "cpu", larc, weight, torch.full((4, 3), 64.0))  # times 2^16 is inf
    assert raw_bytes([weight, larc.state_dict()]) == before
    larc.zero_grad()
    scaled_by(scaler, "cpu", larc, weight, torch.full((4, 3), 0.25))
    assert raw_bytes([weight, larc.state_dict()]) != before
