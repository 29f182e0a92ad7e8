"""FusedOptimizer.attach: gradients stepped and freed, or measured, as soon as they are there."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from helpers import raw_bytes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef

import amp_mp as amp
from amp_mp import _C

LOW = torch.bfloat16
SCALE = 2.0**10
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (amp.optim.AdamW, {"weight_decay": 0.1}),
    "Adam": (amp.optim.Adam, {"check_overflow": True}),
    "SGD": (amp.optim.SGD, {"momentum": 0.9}),
    "Adadelta": (amp.optim.Adadelta, {}),
    "NAdam": (amp.optim.NAdam, {}),
    "RAdam": (amp.optim.RAdam, {"betas": (0.8, 0.9)}),
    "Adagrad": (amp.optim.Adagrad, {}),
    "Adamax": (amp.optim.Adamax, {}),
    "RMSprop": (amp.optim.RMSprop, {}),
    "Lion": (amp.optim.Lion, {}),
    "LAMB": (amp.optim.LAMB, {}),
    "LARS": (amp.optim.LARS, {"momentum": 0.9}),
    "NovoGrad": (amp.optim.NovoGrad, {}),
}


class Tied(nn.Module):
    """A weight used twice, a normalisation and a bias: matrices, vectors, one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.last = nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor, inner_alone: bool = False) -> Tensor:
        hidden = self.inner(self.inner(x).tanh())
        if inner_alone:
            return self.norm(hidden)
        return self.last(self.norm(hidden.to(self.norm.weight.dtype)).to(x.dtype))


def model(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    net = Tied().to(device)
    return net if dtype == torch.float32 else amp.prepare(net, dtype)


def loss_of(net: nn.Module, step: int) -> Tensor:
    weight = next(net.parameters())
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
    return net(x.to(weight.device, weight.dtype)).float().square().mean()


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return raw_bytes([dict(net.named_parameters()), optimizer.state_dict()])


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


# Release: the same bits.


@pytest.mark.parametrize(
    ("dtype", "memory"),
    [
        (torch.float32, None),
        (LOW, None),
        (LOW, "exact"),
        (LOW, "lean"),
        (LOW, "tiny"),
        (LOW, "micro"),
    ],
)
def test_released_gradients_make_the_ordinary_step_bit_for_bit(
    device: str, dtype: torch.dtype, memory: str | None
) -> None:
    found = []
    for release in (True, False):
        net = model(device, dtype)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, memory=memory)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        if release:
            optimizer.attach(net, release=True)
        for step in range(4):
            train(net, optimizer, 1, step)
            schedule.step()
        assert seen == ["before", "after"] * 4
        assert not optimizer.step_was_skipped
        assert optimizer.grad_norm is None
        found.append(state_of(net, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_steps_the_same_released(device: str, name: str) -> None:
    kind, arguments = RULES[name]
    found, norms = [], []
    for release in (True, False):
        net = model(device, LOW)
        groups = [{"params": [p]} for p in net.parameters()]
        groups[1]["lr"] = 0.003  # the numbers of a parameter's own group count
        optimizer = kind(groups, lr=0.01, **arguments)
        if release:
            optimizer.attach(net, release=True)
        train(net, optimizer, 3)
        found.append(state_of(net, optimizer))
        norms.append(optimizer.grad_norm)
    assert found[0] == found[1]
    assert norms[0] == norms[1]


def test_cached_casts_are_written_by_released_steps(apex: str) -> None:
    """float32 weights that autocast has cast: the next forward sees the new ones."""
    found = []
    for release in (True, False):
        net = model(apex)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.1)
        if release:
            optimizer.attach(net, release=True)
        train(net, optimizer, 3)
        found.append(raw_bytes([list(net.parameters()), loss_of(net, 9)]))
    assert found[0] == found[1]


def test_a_closure_runs_and_its_backward_steps(device: str) -> None:
    found = []
    for release in (True, False):
        net = model(device)
        optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
        if release:
            optimizer.attach(net, release=True)

        def closure(net: nn.Module = net) -> Tensor:
            loss = loss_of(net, 0)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        found.append(raw_bytes([list(net.parameters()), loss]))
    assert found[0] == found[1]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["release", "measure"])
def test_checkpointed_modules_are_recomputed_before_their_parameters_move(
    device: str, mode: str, reentrant: bool
) -> None:
    found = []
    for attached in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        net.to(device)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, check_overflow=True)
        if attached:
            optimizer.attach(net, **{mode: True})
        for _ in range(2):
            x = torch.ones(4, 16, device=device, requires_grad=True)
            for block in net:
                x = checkpoint(block, x, use_reentrant=reentrant)
            x.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([state_of(net, optimizer), optimizer.grad_norm])
    assert found[0] == found[1]


def test_every_backward_steps(device: str) -> None:
    net, twin = model(device), model(device)
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1, check_overflow=True)
    ordinary = amp.optim.SGD(twin.parameters(), lr=0.1, check_overflow=True)
    optimizer.attach(net, release=True)
    squares = 0.0
    for step in range(2):
        loss_of(net, step).backward()
        train(twin, ordinary, 1, step)
        squares += ordinary.grad_norm**2
    optimizer.step()
    assert state_of(net, optimizer) == state_of(twin, ordinary)
    assert optimizer.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-12)


# Memory.


@pytest.mark.parametrize("measures", [False, True])
def test_there_is_never_more_than_one_gradient(device: str, measures: bool) -> None:
    """By the parameters and by the tensors themselves, also where others still refer to them."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(n, n + 32) for n in range(32, 256, 32)]).to(device)
    params = list(net.parameters())
    seen: list[TensorWeakRef] = []
    peaks: list[int] = []

    def count(param: Tensor) -> None:
        assert param.grad is not None
        seen.append(TensorWeakRef(param.grad))
        held = sum(p.grad.nbytes for p in params if p.grad is not None)
        alive = sum(grad.nbytes for ref in seen if (grad := ref()) is not None)
        peaks.append(max(held, alive))

    for param in params:
        param.register_post_accumulate_grad_hook(count)  # before the optimizer's
    optimizer = amp.optim.AdamW(params, check_overflow=measures)
    optimizer.attach(net, release=True)
    for _ in range(2):
        net(torch.ones(4, 32, device=device)).sum().backward()
        assert all(p.grad is None for p in params)
        optimizer.step()
    assert len(peaks) == 2 * len(params)
    assert max(peaks) == max(p.nbytes for p in params)


# Loss scaling.


def overflow_at(param: Tensor, steps: list[int]) -> None:
    """The parameter's gradients at these backwards get an inf."""
    calls = iter(range(1000))

    def hook(grad: Tensor) -> Tensor:
        if next(calls) in steps:
            grad = grad.clone()
            grad.view(-1)[-1] = math.inf
        return grad

    param.register_hook(hook)


@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.LAMB])
def test_an_overflow_stops_its_parameter_alone_and_halves_the_scale(device: str, kind: Any) -> None:
    net, twin = model(device, LOW), model(device, LOW)
    optimizer = kind(net.parameters(), lr=0.01, memory="lean")
    plain = kind(twin.parameters(), lr=0.01, memory="lean")
    scaler = amp.GradScaler(device, init_scale=SCALE, growth_interval=2)
    optimizer.attach(net, release=True, scaler=scaler)
    overflow_at(net.inner.weight, [2])
    scales = []
    for step in range(4):
        before = raw_bytes([net.inner.weight, optimizer.state[net.inner.weight]])
        scaler.scale(loss_of(net, step)).backward()
        loss_of(twin, step).backward()
        if step == 2:
            assert raw_bytes([net.inner.weight, optimizer.state[net.inner.weight]]) == before
            twin.inner.weight.grad = None
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        plain.zero_grad()
        assert optimizer.step_was_skipped == (step == 2)
        assert (optimizer.grad_norm == math.inf) == (step == 2)
        # The scales are powers of two: unscaled in the step, gradients have the plain run's bits.
        assert state_of(net, optimizer) == state_of(twin, plain)
        scales.append(scaler.get_scale() / SCALE)
    assert scales == [1, 2, 1, 1]
    assert [optimizer.state[p]["step"].item() for p in net.parameters()] == [3, 4, 4, 4, 4]


def test_the_scaler_gets_what_measuring_at_once_gives(device: str) -> None:
    net, twin = model(device), model(device)
    scaler = amp.GradScaler(device, init_scale=SCALE, loss_scale="LogMax")
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
    optimizer.attach(net, release=True, scaler=scaler)
    ordinary = amp.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        scale = scaler.get_scale()
        scaler.scale(loss_of(net, step)).backward()
        (loss_of(twin, step) * scale).backward()
        totals = optimizer.measure_gradients()
        assert raw_bytes(totals) == raw_bytes(ordinary.measure_gradients())
        ordinary.grad_scale = scale
        ordinary.step()
        ordinary.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        (total,) = totals.values()
        assert optimizer.grad_norm == pytest.approx(math.sqrt(total[0]) / scale, rel=1e-15)
        assert scaler.get_scale() != scale
        assert raw_bytes(list(net.parameters())) == raw_bytes(list(twin.parameters()))


@pytest.mark.parametrize("enabled", [True, False])
def test_an_unused_scaler_is_a_scale_of_1(device: str, enabled: bool) -> None:
    net, twin = model(device), model(device)
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
    optimizer.attach(net, release=True, scaler=amp.GradScaler(device, enabled=enabled))
    train(net, optimizer, 2)
    plain = amp.optim.SGD(twin.parameters(), lr=0.1)
    train(twin, plain, 2)
    assert state_of(net, optimizer) == state_of(twin, plain)
    assert (optimizer.grad_norm is not None) == enabled


# Clipping.


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", ["parameter", "previous"])
def test_clipping_is_the_formula(device: str, clip: str, scaled: bool) -> None:
    """In float64: min(1, max_norm / (norm + 1e-6)), by the norm that the variant names."""
    net, limit, lr = model(device), 0.05, 0.5
    twin = copy.deepcopy(net).double()
    optimizer = amp.optim.SGD(net.parameters(), lr=lr, max_grad_norm=limit)
    scaler = amp.GradScaler(device, init_scale=SCALE, enabled=scaled)
    optimizer.attach(net, release=True, clip=clip, scaler=scaler)
    overflow_at(net.last.weight, [2])
    previous = None  # the norm of the last step without overflow
    for step in range(5):
        scaler.scale(loss_of(net, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_of(twin, step).backward()
        squares = 0.0
        coefficients = []
        for param in twin.parameters():
            norm = param.grad.norm().item()
            squares += norm**2
            by = norm if clip == "parameter" or previous is None else previous
            coefficients.append(min(1.0, limit / (by + 1e-6)))
            if step != 2 or param is not twin.last.weight:
                param.data -= lr * coefficients[-1] * param.grad
            param.grad = None
        assert min(coefficients) < 0.9  # there is something to see
        if step != 2:
            previous = math.sqrt(squares)
            assert optimizer.grad_norm == pytest.approx(previous, rel=1e-5)
        assert optimizer.step_was_skipped == (step == 2)
    # A gradient from float32 activations is off by some 2^-20 of its size, a weight by 2^-24 a
    # step; weights are below 2, steps below lr limit.
    for param, wanted in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.double(), wanted, rtol=0, atol=5 * 2.0**-22)


def test_after_loading_there_is_no_previous_norm(device: str) -> None:
    """So that a resumed run does not depend on what the process has done before."""
    found = []
    for warm in (True, False):
        net = model(device)
        optimizer = amp.optim.SGD(net.parameters(), lr=0.5, max_grad_norm=0.05)
        weights, state = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
        optimizer.attach(net, release=True, clip="previous")
        if warm:
            train(net, optimizer, 2)
            net.load_state_dict(weights)
            optimizer.load_state_dict(state)
        train(net, optimizer, 2)
        found.append(raw_bytes(list(net.parameters())))
    assert found[0] == found[1]


# Parameters without hook, state, life.


def test_parameters_of_no_hook_are_stepped_at_the_end(device: str) -> None:
    """Outside of the model, unfrozen later, added later."""
    found = []
    for release in (True, False):
        net = model(device)
        outside = nn.Parameter(torch.ones(8, device=device))
        late = nn.Parameter(torch.ones(8, device=device))
        net.norm.weight.requires_grad_(False)
        optimizer = amp.optim.AdamW([*net.parameters(), outside], lr=0.01, check_overflow=True)
        if release:
            optimizer.attach(net, release=True)
        for step in range(4):
            if step == 1:
                net.norm.weight.requires_grad_(True)
            if step == 2:
                optimizer.add_param_group({"params": [late], "lr": 0.1})
            (loss_of(net, step) + (outside * late).square().mean()).backward()
            optimizer.step()
            late.grad = late.grad if step >= 2 else None
            optimizer.zero_grad()
            found.append((optimizer.grad_norm, optimizer.step_was_skipped))
        found.append(state_of(net, optimizer) + raw_bytes([outside, late]))
    assert found[:5] == found[5:]


def test_a_parameter_taken_out_of_its_group_is_left_alone(device: str) -> None:
    """Numbers of the others change with it, and so their random bits: as without attach."""
    found = []
    for release in (True, False):
        net = model(device, LOW)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, memory="lean")
        if release:
            optimizer.attach(net, release=True)
        train(net, optimizer, 1)
        left = optimizer.param_groups[0]["params"].pop(0)
        optimizer.state.pop(left)
        train(net, optimizer, 2, first=1)
        assert left.grad is not None
        found.append(state_of(net, optimizer))
    assert found[0] == found[1]


def test_a_resumed_run_equals_an_unbroken_one(device: str) -> None:
    def start() -> tuple[nn.Module, amp.optim.AdamW]:
        net = model(device, LOW)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, memory="tiny")
        optimizer.attach(net, release=True)
        return net, optimizer

    net, optimizer = start()
    train(net, optimizer, 2)
    weights, state = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    train(net, optimizer, 2, first=2)
    again, resumed = start()
    train(again, resumed, 1)  # attached, with state: what hooks have prepared must not survive
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(again, resumed, 2, first=2)
    assert state_of(again, resumed) == state_of(net, optimizer)


def test_state_put_in_by_hand_is_used(device: str) -> None:
    found = []
    for release in (True, False):
        net = model(device, LOW)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01)
        if release:
            optimizer.attach(net, release=True)
        train(net, optimizer, 1)
        state = optimizer.state[net.last.weight]
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)
        train(net, optimizer, 1)
        found.append(state_of(net, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["release", "measure"])
def test_removed_it_is_the_ordinary_optimizer(device: str, mode: str) -> None:
    found = []
    for attached in (True, False):
        net = model(device)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01)
        if attached:
            with optimizer.attach(net, **{mode: True}):
                train(net, optimizer, 1)
            attachment = optimizer.attach(net, **{mode: True})
            attachment.remove()
            attachment.remove()
        else:
            train(net, optimizer, 1)
        loss_of(net, 1).backward()
        assert all(p.grad is not None for p in net.parameters())
        optimizer.step()
        found.append(state_of(net, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("mode", ["release", "measure"])
def test_copies_of_an_attached_optimizer_are_not_attached(device: str, mode: str, how: str) -> None:
    net = model(device)
    optimizer = amp.optim.AdamW(net.parameters(), lr=0.01)
    optimizer.attach(net, **{mode: True})
    train(net, optimizer, 1)
    if how == "deepcopy":
        twin, copied = copy.deepcopy((net, optimizer))
    else:
        file = io.BytesIO()
        torch.save((net, optimizer), file)
        file.seek(0)
        twin, copied = torch.load(file, weights_only=False)
    assert state_of(twin, copied) == state_of(net, optimizer)
    for param in twin.parameters():
        param.grad = None
    loss_of(twin, 1).backward()
    assert all(p.grad is not None for p in twin.parameters())
    copied.step()
    copied.attach(twin, **{mode: True})
    train(net, optimizer, 1, first=1)
    assert state_of(twin, copied) == state_of(net, optimizer)


def test_a_model_keeps_no_optimizer_alive(device: str) -> None:
    net = model(device)
    optimizer = amp.optim.AdamW(net.parameters())
    optimizer.attach(net, release=True)
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ref() is None
    loss_of(net, 0).backward()
    assert all(p.grad is not None for p in net.parameters())


# Errors.


def scaler_of_torch() -> Any:
    return torch.amp.GradScaler("cpu")


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "neither": (ValueError, "release and measure", {}),
    "both": (ValueError, "release and measure", {"release": True, "measure": True}),
    "clip": (ValueError, "clip must be one of parameter, previous", {"clip": "all"}),
    "torch's scaler": (TypeError, "amp_mp.GradScaler", {"scaler": scaler_of_torch}),
    "a number": (TypeError, "amp_mp.GradScaler", {"scaler": lambda: 1024.0}),
    "measured scaler": (
        ValueError,
        "scaler is for release=True",
        {"measure": True, "release": False, "scaler": lambda: amp.GradScaler("cpu")},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    kind, message, arguments = REFUSED[name]
    given = {k: v() if callable(v) else v for k, v in arguments.items()}
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    release = {} if name == "neither" else {"release": True}
    with pytest.raises(kind, match=message):
        optimizer.attach(net, **{**release, **given})
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    optimizer.attach(net, release=True)
    with pytest.raises(RuntimeError, match="attached already"):
        optimizer.attach(net, release=True)


def test_models_that_do_not_fit_are_refused() -> None:
    optimizer = amp.optim.AdamW(model("cpu").parameters())
    with pytest.raises(ValueError, match="model holds none"):
        optimizer.attach(model("cpu"), release=True)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        optimizer.attach([], release=True)
    whole = torch.zeros(10)
    net = nn.ParameterList([nn.Parameter(whole[:6]), nn.Parameter(whole[4:])])
    with pytest.raises(ValueError, match="parameter 1 of group 0"):
        amp.optim.AdamW(net.parameters()).attach(net, release=True)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters(), amp_scaling=False)
    with pytest.raises(ValueError, match="amp_scaling"):
        optimizer.attach(net, release=True, scaler=amp.GradScaler("cpu"))


@pytest.mark.parametrize("mode", ["release", "measure"])
@pytest.mark.parametrize("clipped", [False, True])
def test_a_sparse_gradient_is_refused_by_name(mode: str, clipped: bool) -> None:
    net = nn.Embedding(10, 4, sparse=True)
    before = raw_bytes(net.weight)
    optimizer = amp.optim.AdamW(net.named_parameters(), max_grad_norm=1.0 if clipped else None)
    optimizer.attach(net, **{mode: True})
    with pytest.raises((TypeError, ValueError), match=r"'weight'.*[Ss]parse"):  # noqa: PT012
        net(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert raw_bytes(net.weight) == before


def test_scalers_that_were_not_named_are_refused_not_ignored() -> None:
    for scaler in (amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        net = model("cpu")
        optimizer = amp.optim.AdamW(net.parameters())
        optimizer.attach(net, release=True)
        scaler.scale(loss_of(net, 0)).backward()
        with pytest.raises(RuntimeError, match="scaler="):
            scaler.step(optimizer)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    scaler = amp.GradScaler("cpu")
    optimizer.attach(net, release=True, scaler=scaler)
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)
    net = model("cpu")
    optimizer = amp.optim.AdamW(net.parameters())
    optimizer.attach(net, release=True)
    with pytest.raises(RuntimeError, match="nothing asked for measuring"):
        optimizer.measure_gradients()


# Measure.


class Reads:
    """Counts gradients that are read, in the hooks and by the step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        measure, slots_measure = _C.measure, _C.Slots.measure

        def counted(tensors: list[Tensor]) -> Tensor:
            self.count += len(tensors)
            return measure(tensors)

        def slots_counted(slots: _C.Slots) -> Tensor:
            self.count += len(slots)
            return slots_measure(slots)

        def stepping(operator: _C.Operator) -> _C.Operator:
            def step(slots: _C.Slots, *args: Any, **kwargs: Any) -> None:
                if kwargs.get("measure", args[4] if len(args) > 4 else False):
                    self.count += len(slots)
                operator(slots, *args, **kwargs)

            return step

        monkeypatch.setattr(_C, "measure", counted)
        monkeypatch.setattr(_C.Slots, "measure", slots_counted)
        for name, operator in _C.operators.items():
            monkeypatch.setitem(_C.operators, name, stepping(operator))

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.LAMB])
def test_measured_gradients_are_read_once_and_give_the_same_bits(
    device: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for measure in (True, False):
        net = model(device, LOW)
        optimizer = kind(net.parameters(), lr=0.01, memory="lean", max_grad_norm=0.05)
        reads = Reads(monkeypatch)
        if measure:
            optimizer.attach(net, measure=True)
        norms = []
        for step in range(3):
            if step == 1:  # a parameter that has state but no gradient
                net.norm.weight.requires_grad_(False)
            loss_of(net, step).backward()
            hooks = reads.take()
            optimizer.step()
            assert (hooks > 0, reads.take() > 0) == (measure, not measure)
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
            net.norm.weight.requires_grad_(True)
        found.append([state_of(net, optimizer), norms])
    assert found[0] == found[1]


@pytest.mark.parametrize("scaler_name", ["amp", "torch"])
def test_a_scaler_uses_what_was_measured(
    device: str, scaler_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalers = {"amp": amp.GradScaler, "torch": torch.amp.GradScaler}
    found = []
    for measure in (True, False):
        net = model(device)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, max_grad_norm=0.05)
        scaler = scalers[scaler_name](device, init_scale=SCALE)
        overflow_at(net.last.weight, [1])
        if measure:
            optimizer.attach(net, measure=True)
        for step in range(3):
            scaler.scale(loss_of(net, step)).backward()
            reads = Reads(monkeypatch)
            scaler.step(optimizer)
            scaler.update()
            if scaler_name == "amp":
                assert (reads.take() == 0) == measure
            found.append([optimizer.step_was_skipped, optimizer.grad_norm, scaler.get_scale()])
            optimizer.zero_grad()
        found.append(state_of(net, optimizer))
    assert found[:4] == found[4:]
    assert found[1] == [True, math.inf, SCALE / 2]


def new_object(param: Tensor) -> None:
    """The same values' place in memory, if the allocator will, and version: another tensor."""
    shape = param.grad.shape
    param.grad = None
    param.grad = torch.ones(shape, device=param.device)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda net: net.last.weight.grad.mul_(2),
    "through a view": lambda net: net.last.weight.grad.view(-1)[3:5].fill_(7),
    "torch's clipping": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.01),
    "another tensor": lambda net: setattr(net.last.weight, "grad", net.last.weight.grad * 2),
    "a new tensor": lambda net: new_object(net.last.weight),
    "other memory": lambda net: setattr(net.norm.bias.grad, "data", torch.ones(64)),
    "dropped": lambda net: setattr(net.last.weight, "grad", None),
    "accumulated": lambda net: loss_of(net, 5).backward(),
    "accumulated by hand": lambda net: net.last.weight.grad.add_(net.last.weight.grad),
    "all new": lambda net: [new_object(p) for p in net.parameters()],
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_changed_after_the_hook_are_measured_again(change: str) -> None:
    found = []
    for measure in (True, False):
        net = model("cpu")
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, max_grad_norm=0.05)
        if measure:
            optimizer.attach(net, measure=True)
        for step in range(2):
            loss_of(net, step).backward()
            CHANGES[change](net)
            optimizer.step()
            found.append(optimizer.grad_norm)
            optimizer.zero_grad()
        found.append(state_of(net, optimizer))
    assert found[:3] == found[3:]


# DistributedDataParallel.


class Conv(nn.Module):
    """Beside matrices a kernel in channels_last, whose bucket holds it in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1).to(memory_format=torch.channels_last)
        self.tail = Tied()
        self.tail.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
        return self.tail(self.conv(image).mean(1).flatten(1))


def ranks(rank: int, world: int, path: str) -> None:
    """Three steps each with plain DDP and released; saves parameters and states of both."""
    distributed.join(rank, world, path)
    saved = []
    for release, view in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        net = DistributedDataParallel(
            amp.prepare(Conv(), LOW), bucket_cap_mb=0.004, gradient_as_bucket_view=view
        )
        low = [p for p in net.parameters() if p.dtype == LOW]
        rest = [p for p in net.parameters() if p.dtype != LOW]
        scaler = amp.GradScaler("cpu", init_scale=SCALE)
        lean = amp.optim.AdamW(low, lr=0.01, memory="lean")
        plain = amp.optim.SGD(rest, lr=0.01, momentum=0.9)
        if release:
            for optimizer in (lean, plain):  # both on the one hook that there can be
                optimizer.attach(net, release=True, scaler=scaler)
        for step in range(3):
            if release and step == 2:  # removed, the hook is what DDP does without
                plain.attachment.remove()
                lean.attachment.remove()
                lean.attach(net, release=True, scaler=scaler)
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(9 * step + rank))
            if step == 1:  # gradients of two backwards, averaged with the second
                with net.no_sync():
                    scaler.scale(net(x.to(LOW)).float().square().mean()).backward()
            scaler.scale(net(x.to(LOW)).float().square().mean()).backward()
            saved.append(raw_bytes([p.grad for p in net.parameters()]))
            if not view:  # theirs still, not the bucket's
                assert all(p.grad.untyped_storage().nbytes() == p.nbytes for p in low)
            if step == 2:  # gradients by hand, which no hook has seen
                scaler.step(lean)
                scaler.update()
                for param in low:
                    param.grad.fill_(SCALE)
            for optimizer in (lean, plain):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            saved.append(lean.grad_norm)
        saved.append(raw_bytes([[p.detach() for p in net.parameters()],
                                lean.state_dict(), plain.state_dict()]))  # fmt: skip
    sparse = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    optimizer = amp.optim.SGD(sparse.named_parameters(), lr=0.1)
    optimizer.attach(sparse, release=True)
    with pytest.raises(RuntimeError, match=r"module\.weight.*Sparse"):
        sparse(torch.tensor([1])).sum().backward()
    unused = DistributedDataParallel(Tied(), static_graph=True)
    optimizer = amp.optim.SGD(unused.named_parameters(), lr=0.1)
    optimizer.attach(unused, release=True)
    with pytest.raises(RuntimeError, match=r"module\.last\.weight.*no part in this backward"):
        unused(torch.ones(4, 64), True).square().sum().backward()
    wrong = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    optimizer = amp.optim.SGD(wrong.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="find_unused_parameters"):
        optimizer.attach(wrong, release=True)
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, lambda state, bucket: None)
    optimizer = amp.optim.SGD(hooked.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="communication hook of its own"):
        optimizer.attach(hooked, release=True)
    with pytest.raises(ValueError, match="measure=True"):
        optimizer.attach(hooked, measure=True)
    with pytest.raises(ValueError, match="holds a DistributedDataParallel"):
        optimizer.attach(nn.Sequential(hooked), release=True)
    torch.save(saved, f"{path}.{rank}")
    distributed.leave()


@pytest.mark.slow
def test_replicas_that_step_in_the_hook_equal_plain_ones_bit_for_bit(tmp_path: Path) -> None:
    path = str(tmp_path / "rank")
    torch.multiprocessing.spawn(ranks, (2, path), nprocs=2)
    first, second = (torch.load(f"{path}.{rank}", weights_only=False) for rank in range(2))
    assert first == second
    count = len(first) // 3
    assert first[:count] == first[count : 2 * count] == first[2 * count :]


def test_scale_loss_refuses_an_optimizer_that_releases(device: str) -> None:
    """It would step with gradients that are still scaled."""
    net = nn.Linear(2, 2).to(device)
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
    optimizer.attach(net, release=True)
    handle = amp.init(device_type=device, dtype=torch.bfloat16, loss_scale=8.0)
    try:
        with (
            pytest.raises(ValueError, match="release=True steps during backward"),
            handle.scale_loss(net(torch.ones(1, 2, device=device)).sum(), optimizer),
        ):
            pass
    finally:
        handle._deactivate()
        amp.uninstall()
