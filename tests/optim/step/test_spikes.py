"""Steps that a gradient norm far above the others stops: skip_norm_above and raise_after_skips."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import raw_bytes, warns
from torch import nn

import amp_mp as amp
from amp_mp.scaling import NormSpike

SHAPES = [(16, 32), (32,), (7,)]


class History:
    """What a NormSpike is to decide: mean and deviation of log2 of norms, with math.log2."""

    def __init__(self, sigmas: float, window: int) -> None:
        self.sigmas, self.window = sigmas, window
        self.count, self.mean, self.variance, self.skipped = 0, 0.0, 0.0, 0

    def stops(self, norm: float) -> bool:
        distance = math.log2(norm) - self.mean
        limit = self.sigmas * max(math.sqrt(self.variance), 1 / 16)
        if self.count >= self.window / 2 and distance > limit:
            self.skipped += 1
            if self.skipped >= self.window:
                self.__init__(self.sigmas, self.window)  # type: ignore[misc]
            return True
        self.count = min(self.count + 1, self.window)
        self.mean += distance / self.count
        self.variance = (1 - 1 / self.count) * (self.variance + distance**2 / self.count)
        self.skipped = 0
        return False


def params_on(device: str, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=source).to(device, dtype)) for s in SHAPES]


def set_norm(params: list[nn.Parameter], norm: float, seed: int, scale: float = 1.0) -> None:
    """Gradients of about this norm, multiplied by the loss scale."""
    source = torch.Generator().manual_seed(seed)
    grads = [torch.randn(p.shape, generator=source) for p in params]
    size = torch.cat([g.flatten() for g in grads]).norm()
    for param, grad in zip(params, grads, strict=True):
        param.grad = (grad * (scale * norm / size)).to(param.device, param.dtype)


def norms(
    count: int, spikes: dict[int, float] | None = None, spread: float = 0.3
) -> Iterator[float]:
    source = torch.Generator().manual_seed(3)
    for step in range(count):
        norm = 2.0 ** (spread * float(torch.randn((), generator=source)))
        yield norm * (spikes or {}).get(step, 1.0)


def bytes_of(params: list[nn.Parameter], optimizer: Any) -> Any:
    return raw_bytes([[p.detach() for p in params], optimizer.state_dict()["state"]])


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (amp.optim.AdamW, {"lr": 1e-3}),
    "tiny": (amp.optim.AdamW, {"lr": 1e-3, "memory": "tiny"}),
    "LAMB": (amp.optim.LAMB, {"lr": 1e-3}),
    "SGD": (amp.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "Muon": (amp.optim.Muon, {}),
}


@pytest.mark.parametrize("limit", [1.5, NormSpike(6, 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_spike_changes_no_byte_and_the_next_step_is_taken(
    device: str, kind: str, limit: Any
) -> None:
    make, options = KINDS[kind]
    params = params_on(device)
    groups: Any = params
    if kind == "Muon":
        groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
    optimizer = make(groups, skip_norm_above=limit, **options)
    for step, norm in enumerate(norms(16, {14: 2.0**30}, 0.05)):
        before = bytes_of(params, optimizer)
        set_norm(params, norm, step)
        optimizer.step()
        report = optimizer.last_report(wait=True)
        assert report is not None
        assert report.skipped == (step == 14)
        assert report.grad_norm == pytest.approx(norm, rel=0.02)
        assert (before == bytes_of(params, optimizer)) == (step == 14)
        assert (report.overflows, report.spikes) == (0, int(step >= 14))


def test_decisions_are_those_of_the_definition(device: str) -> None:
    """300 norms that wander, fall, jump and stay; each decision by math.log2."""
    params = params_on(device, torch.float32)
    optimizer = amp.optim.SGD(params, lr=0.0, skip_norm_above=NormSpike(3, 30))
    wanted, found = History(3, 30), []
    levels = {100: 8.0, 180: 2.0**14, 181: 2.0**14, 230: 0.0}
    level, skips = 1.0, 0
    with warns("SGD has skipped 25 steps in a row, since step 1[08]1: the gradients' norm"):
        for step, norm in enumerate(norms(300)):
            level = level * levels.get(step, 1.0) if levels.get(step) != 0 else 1.0
            set_norm(params, norm * level, step)
            optimizer.step()
            measured = optimizer.grad_norm
            assert measured is not None
            found.append(optimizer.step_was_skipped)
            assert found[-1] == wanted.stops(measured), step
            skips += found[-1]
    report = optimizer.last_report()
    assert report is not None
    assert report.spikes == skips
    assert found[100:130] == [True] * 30  # eight times the norm is learned after a window
    assert not any(found[131:150])
    assert not any(found[:15])


def test_norms_of_zero_and_overflows_are_not_learned(device: str) -> None:
    params = params_on(device, torch.float32)
    optimizer = amp.optim.SGD(params, lr=0.0, skip_norm_above=NormSpike(6, 10))
    for step, norm in enumerate(norms(10)):
        set_norm(params, norm, step)
        optimizer.step()
    known = optimizer.state_dict()["param_groups"][0]["norm_history"]
    for bad in (0.0, float("inf"), float("nan")):
        for param in params:
            param.grad = torch.full_like(param, bad)
        optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["norm_history"] == known
    report = optimizer.last_report(wait=True)
    assert report is not None
    assert (report.overflows, report.spikes) == (2, 0)


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_resumed_run_decides_and_learns_the_same_bits(device: str, way: str) -> None:
    spikes = {24: 1e4, 31: 1e4}
    params = params_on(device)
    limit = NormSpike(5, 20)
    optimizer: Any = amp.optim.AdamW(params, lr=1e-3, skip_norm_above=limit)
    for step, norm in enumerate(norms(40, spikes)):
        if step == 25 and way == "state_dict":
            state = copy.deepcopy(optimizer.state_dict())
            twins = [nn.Parameter(p.detach().clone()) for p in params]
            other: Any = amp.optim.AdamW(twins, lr=1e-3, skip_norm_above=limit)
            other.load_state_dict(state)
        elif step == 25:
            twins, other = copy.deepcopy((params, optimizer))
        set_norm(params, norm, step)
        optimizer.step()
        if step >= 25:
            set_norm(twins, norm, step)
            other.step()
            assert other.step_was_skipped == optimizer.step_was_skipped == (step == 31)
    known, resumed = optimizer.state_dict(), other.state_dict()
    assert known["param_groups"] == resumed["param_groups"]
    assert known["param_groups"][0]["norm_history"][0] == 20
    assert bytes_of(params, optimizer) == bytes_of(twins, other)


@pytest.mark.parametrize("scaler", ["ours", "unscaled", "torch", "two optimizers", "policy"])
def test_the_loss_scale_takes_a_spike_for_a_clean_step(device: str, scaler: str) -> None:
    params = params_on(device, torch.float32)
    optimizer = amp.optim.SGD(params, lr=0.1, skip_norm_above=4.0, max_grad_norm=1.0)
    others = [optimizer]
    if scaler == "two optimizers":
        optimizer, last = (
            amp.optim.SGD(own, lr=0.1, skip_norm_above=4.0) for own in (params[:2], params[2:])
        )
        others = [optimizer, last]
    make: Any = torch.amp.GradScaler if scaler == "torch" else amp.GradScaler
    options = {"loss_scale": "Backoff"} if scaler == "policy" else {}
    scale = make(device, init_scale=1024.0, growth_interval=3, **options)
    scale.scale(torch.ones((), device=device))
    before = scale.get_scale()
    grown = []
    for step in range(3):
        set_norm(params, 40.0 if step == 1 else 1.0, step, scale.get_scale())
        kept = [p.detach().clone() for p in params]
        for own in others:
            if scaler == "unscaled":
                scale.unscale_(own)
            scale.step(own)
        scale.update()
        grown.append(scale.get_scale())
        assert optimizer.step_was_skipped == (step == 1)
        same = [torch.equal(a, b) for a, b in zip(kept, params, strict=True)]
        assert same == [step == 1] * 3 or scaler == "two optimizers"
    assert grown[0] == grown[1]
    assert grown[2] == (before if scaler == "policy" else 2 * before)


def test_the_norm_of_the_wrappers_is_unscaled(device: str) -> None:
    for wrap in ("FP16_Optimizer", "scale_loss"):
        param = nn.Parameter(torch.ones(64, dtype=torch.float16, device=device))
        inner = amp.optim.SGD([param], lr=0.1, skip_norm_above=2.0)
        for factor, taken in ((0.1, True), (1.0, False), (0.1, True)):  # norms .8 and 8
            kept = param.detach().clone()
            if wrap == "FP16_Optimizer":
                optimizer: Any = amp.FP16_Optimizer(inner, static_loss_scale=128.0, verbose=False)
                optimizer.backward((factor * param).sum())
                optimizer.step()
                optimizer.zero_grad()
            else:
                handle = amp.init(loss_scale=128.0)
                with handle.scale_loss((factor * param).sum(), inner) as loss:
                    loss.backward()
                inner.step()
                inner.zero_grad()
                handle.deactivate()
            assert torch.equal(param, kept) != taken, (wrap, factor)
            assert inner.grad_norm == pytest.approx(8 * factor, rel=1e-3)


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def step_twice(optimizer: Any, device: str) -> None:
    """A GPU's report is seen at the next step."""
    for _ in range(2):
        optimizer.step()
        finish(device)


def test_a_run_that_stands_still_ends(device: str) -> None:
    params = params_on(device)
    optimizer = amp.optim.AdamW(params, skip_norm_above=0.5, raise_after_skips=4)
    for step in range(3):
        set_norm(params, 2.0, step)
        optimizer.step()
        finish(device)
    set_norm(params, 0.25, 9)
    optimizer.step()
    finish(device)
    for step in range(3):
        set_norm(params, 2.0, step)
        optimizer.step()
        finish(device)
    seen = "4" if device == "cpu" else "[45]"  # a GPU may have decided the step that looks, too
    words = rf"skipped {seen} steps in a row, since step 5.*now [12]"
    with pytest.raises(RuntimeError, match=words):
        step_twice(optimizer, device)
    params[0].grad.fill_(float("nan"))
    finish(device)
    with pytest.raises(RuntimeError, match="in a row, since step 5"):
        optimizer.step()  # on a GPU for the step before
    finish(device)
    with pytest.raises(RuntimeError, match=r"since step 5.*gradients are inf or NaN"):
        optimizer.step()


def test_without_an_end_it_is_told_once(device: str) -> None:
    params = params_on(device)
    optimizer = amp.optim.SGD(params, lr=0.1, skip_norm_above=0.5)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(60):
            set_norm(params, 2.0, 1)
            optimizer.step()
            finish(device)
    texts = [str(w.message) for w in found if "in a row" in str(w.message)]
    assert len(texts) == 1
    assert "above skip_norm_above" in texts[0]
    assert "inf or NaN" not in texts[0]


def test_what_cannot_be_is_refused(device: str) -> None:
    params = params_on(device)
    for wrong in (0.0, -1, True, "3", float("nan")):
        with pytest.raises(ValueError, match="skip_norm_above must be"):
            amp.optim.SGD(params, skip_norm_above=wrong)
        with pytest.raises(ValueError, match="raise_after_skips must be"):
            amp.optim.SGD(params, raise_after_skips=wrong)
    with pytest.raises(ValueError, match="sigmas must be positive"):
        NormSpike(sigmas=0)
    with pytest.raises(ValueError, match="window must be 2 or more"):
        NormSpike(window=1)
    model = nn.Linear(4, 4).to(device)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.1, skip_norm_above=NormSpike())
    with pytest.raises(ValueError, match="attach: skip_norm_above needs the norm"):
        optimizer.attach(model)
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["norm_history"][0] == 1
    optimizer.skip_norm_above = None
    with optimizer.attach(model):
        optimizer.skip_norm_above = 1.0
        kept = model.weight.detach().clone()
        with pytest.raises(ValueError, match="attach: skip_norm_above"):
            model(torch.ones(2, 4, device=device)).sum().backward()
        assert torch.equal(model.weight, kept)
    state = optimizer.state_dict()
    state["param_groups"][0]["norm_history"] = (1.0, 2.0)
    with pytest.raises(ValueError, match="norm_history must be four numbers"):
        optimizer.load_state_dict(state)
