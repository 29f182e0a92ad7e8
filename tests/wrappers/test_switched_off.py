"""enabled=False, and AMP_MP=0 in the environment: a script then trains as plain torch does."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from forked import Script, run_each
from handles import scaled_backward
from helpers import raw_bytes
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from wrapping import INNER

import amp_mp as amp
from amp_mp.apex.opt_levels import DTYPE
from amp_mp.casting.products import VARIABLE

OFF = {"enabled": False}


def network(device: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)


def batches(device: str) -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(2)
    for _ in range(5):
        yield (
            torch.randn(6, 8, generator=source).to(device),
            torch.randn(6, 4, generator=source).to(device),
        )


def plain(model: Any, optimizer: Any, device: str) -> None:
    for x, y in batches(device):
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_scaler(model: Any, optimizer: Any, device: str) -> None:
    scaler = amp.GradScaler(device, **OFF)
    for x, y in batches(device):
        scaler.scale(mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def with_fp16_optimizer(model: Any, optimizer: Any, device: str) -> None:
    optimizer = amp.FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False, **OFF)
    for x, y in batches(device):
        optimizer.zero_grad()
        optimizer.backward(mse_loss(model(x), y))
        optimizer.step()


def with_handle(model: Any, optimizer: Any, device: str) -> None:
    handle = amp.init(**OFF)
    for x, y in batches(device):
        scaled_backward(handle, mse_loss(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def with_wrapped_optimizer(model: Any, optimizer: Any, device: str) -> None:
    optimizer = amp.init(**OFF).wrap_optimizer(optimizer)
    for x, y in batches(device):
        scaled_backward(optimizer, mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def with_autocast(model: Any, optimizer: Any, device: str) -> None:
    for x, y in batches(device):
        with amp.autocast(device, **OFF):
            loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS = [with_scaler, with_fp16_optimizer, with_handle, with_wrapped_optimizer, with_autocast]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_is_off_gives_the_bits_of_plain_float32(
    device: str, loop: Callable[..., None], inner: str
) -> None:
    ours, theirs = network(device), network(device)
    assert amp.prepare(ours, torch.float16, **OFF) is ours
    loop(ours, INNER[inner](ours.parameters()), device)
    plain(theirs, INNER[inner](theirs.parameters()), device)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert raw_bytes([*ours.parameters()]) == raw_bytes([*theirs.parameters()])


def test_prepare_changes_nothing_and_refuses_what_it_always_refuses(device: str) -> None:
    model = network(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].weight.grad = grad = torch.ones_like(model[0].weight)
    assert amp.prepare(model, torch.bfloat16, keep_fp32="0", **OFF) is model
    assert model[0].weight.grad is grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    for arguments, match in (
        ({"dtype": torch.float32}, "dtype must be"),
        ({"keep_fp32": "no.such.layer"}, "no.such.layer"),
        ({"products": "fast"}, "products must be"),
    ):
        with pytest.raises(ValueError, match=match):
            amp.prepare(model, **{"dtype": torch.bfloat16, **arguments}, **OFF)
    with pytest.raises(TypeError, match="model must be"):
        amp.prepare([model], torch.bfloat16, **OFF)  # type: ignore[arg-type]


@pytest.mark.parametrize("inner", INNER)
def test_fp16_optimizer_clips_schedules_saves_and_loads_as_the_optimizer_in_it(
    device: str, inner: str
) -> None:
    ours, theirs = network(device), network(device)
    own, other = INNER[inner](ours.parameters()), INNER[inner](theirs.parameters())
    optimizer = amp.FP16_Optimizer(own, verbose=False, loss_scale=128.0, **OFF)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, other)]
    for x, y in batches(device):
        optimizer.zero_grad(set_to_none=True)
        optimizer.backward(mse_loss(ours(x), y))
        norm = optimizer.clip_master_grads(0.1)
        optimizer.step()
        other.zero_grad()
        mse_loss(theirs(x), y).backward()
        assert norm == float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.1))
        other.step()
        for schedule in schedules:
            schedule.step()
    assert optimizer.loss_scale == 1.0
    assert [group["lr"] for group in own.param_groups] == [
        group["lr"] for group in other.param_groups
    ]
    saved, others = copy.deepcopy((optimizer.state_dict(), other.state_dict()))
    other.load_state_dict(saved)  # the plain optimizer's own form
    optimizer.load_state_dict(others)
    plain(ours, optimizer, device)  # also with a plain backward
    plain(theirs, other, device)
    assert raw_bytes([*ours.parameters()]) == raw_bytes([*theirs.parameters()])


def test_fp16_optimizer_gives_no_masters_to_weights_that_were_cast_by_hand(device: str) -> None:
    model = network(device).bfloat16()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = amp.FP16_Optimizer(inner, verbose=False, **OFF)
    optimizer.backward(model(torch.ones(2, 8, device=device).bfloat16()).float().sum())
    optimizer.step()
    held = inner.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert optimizer.fp32_from_fp16_groups == [[]]


def test_fp16_optimizer_steps_where_it_would_have_skipped(device: str) -> None:
    """Plain training has no check for overflows."""
    weight = nn.Parameter(torch.ones(2, device=device))
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = amp.FP16_Optimizer(inner, check_overflow=True, verbose=False, **OFF)
    optimizer.backward((weight * float("inf")).sum())
    assert optimizer.clip_master_grads(float("inf")) == float("inf")
    optimizer.step()
    assert not optimizer.overflow
    assert not weight.isfinite().any()


def test_fp16_optimizer_hands_closures_on(device: str) -> None:
    ours, theirs = network(device), network(device)
    x, y = next(batches(device))
    optimizer = amp.FP16_Optimizer(torch.optim.LBFGS(ours.parameters()), verbose=False, **OFF)
    other = torch.optim.LBFGS(theirs.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(ours(x), y)
        optimizer.backward(loss)
        return loss

    def plain_closure() -> Tensor:
        other.zero_grad()
        loss = mse_loss(theirs(x), y)
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure), other.step(plain_closure))
    assert raw_bytes([*ours.parameters()]) == raw_bytes([*theirs.parameters()])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"static_loss_scale": 0.0}, ValueError),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"window": 3}}, ValueError),
        ({"loss_scale": "Forward"}, ValueError),
    ],
)
def test_fp16_optimizer_checks_its_arguments_all_the_same(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(error):
        amp.FP16_Optimizer(inner, verbose=False, **arguments, **OFF)


# The environment.

SCRIPT = """
import torch
from torch import nn
import amp_mp as amp
from amp_mp.compat import mixed_precision
from amp_mp.apex import amp as apex_amp

def data(model):
    torch.manual_seed(3)
    return torch.randn(6, 8).to(next(model.parameters()).dtype), torch.randn(6, 4)

def train(model, optimizer, backward, step):
    for _ in range(3):
        x, y = data(model)
        with amp.autocast("cpu"):
            out = model(x)
        backward(nn.functional.mse_loss(out.float(), y))
        step()
        optimizer.zero_grad()
    return [p.tolist() for p in model.parameters()]

def fresh():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

found = []
model, optimizer = fresh()
for _ in range(3):
    x, y = data(model)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
found.append([p.tolist() for p in model.parameters()])

model, optimizer = fresh()
amp.prepare(model, torch.bfloat16)
optimizer = amp.FP16_Optimizer(optimizer, dynamic_loss_scale=True)
found.append(train(model, optimizer, optimizer.backward, optimizer.step))

model, optimizer = fresh()
scaler = amp.GradScaler("cpu")
def step():
    scaler.step(optimizer)
    scaler.update()
found.append(train(model, optimizer, lambda loss: scaler.scale(loss).backward(), step))

model, optimizer = fresh()
handle = amp.init()
def backward(loss):
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
found.append(train(model, optimizer, backward, optimizer.step))
handle.deactivate()

model, optimizer = fresh()
config = {"dtype": "mixed", "loss_scaling": "Backoff"}
model, optimizer = mixed_precision(model, optimizer, config)
found.append(train(model, optimizer, optimizer.backward, optimizer.step))

for level in "O1", "O2":
    model, optimizer = fresh()
    model, optimizer = apex_amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    def backward(loss):
        with apex_amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    found.append(train(model, optimizer, backward, optimizer.step))
print(amp.build_info()["enabled"], [each == found[0] for each in found[1:]])
"""
EXPLICIT = """
import torch
import amp_mp as amp
from amp_mp.apex import amp as apex_amp
model = amp.prepare(torch.nn.Linear(4, 4), torch.bfloat16, enabled=True)
print(model.weight.dtype, amp.GradScaler("cpu", enabled=True).is_enabled(), amp.init().is_active())
for level in "O1", "O2":
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = apex_amp.initialize(model, optimizer, True, level, verbosity=0)
    model(torch.ones(2, 4))
    print(model.weight.dtype, torch.is_autocast_enabled("cpu"))
"""


def test_amp_mp_0_makes_every_script_plain_and_an_argument_counts_more() -> None:
    on, off, explicit, wrong = run_each(
        [
            Script(["-c", SCRIPT], {"AMP_MP": "1"}),
            Script(["-c", SCRIPT], {"AMP_MP": "0"}),
            Script(["-c", EXPLICIT], {"AMP_MP": "0"}),
            Script(["-c", "import amp_mp"], {"AMP_MP": "off"}),
        ]
    )
    assert not on.returncode, on.stderr
    # Under amp.init's table these products stay in float32, where that is faster.
    assert re.search(r"^True \[False, False, .*, False, .*, False\]$", on.stdout, re.MULTILINE)
    assert not off.returncode, off.stderr
    assert off.stdout.splitlines()[-1] == f"False {[True] * 6}"
    assert not explicit.returncode, explicit.stderr
    assert explicit.stdout.splitlines() == [
        "torch.bfloat16 True False",
        "torch.float32 True",
        "torch.float16 False",
    ]
    assert wrong.returncode == 1
    told = "ValueError: the environment variable AMP_MP must be one of 0, 1; found 'off'"
    assert wrong.stderr.splitlines()[-1] == told


EMPTY = """
import torch
import amp_mp as amp
from amp_mp.apex import amp as apex_amp
model = amp.prepare(torch.nn.Linear(4, 4), torch.bfloat16)
optimizer = torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=1.0)
apex_amp.initialize(torch.nn.Linear(4, 4), optimizer, opt_level="O3", verbosity=0)
info = amp.build_info()
print(info["enabled"], info["cpu"], model.weight.dtype)
"""


def test_an_empty_variable_counts_as_unset() -> None:
    """As CI systems and Dockerfiles set them."""
    names = "AMP_MP", "AMP_MP_CPU", VARIABLE, DTYPE
    empty, unset = run_each(
        [
            Script(["-c", EMPTY], dict.fromkeys(names, "")),
            Script(["-c", f"import os\nfor n in {names}: os.environ.pop(n, None)\n{EMPTY}"]),
        ]
    )
    assert not unset.returncode, unset.stderr
    assert (empty.stdout, empty.stderr) == (unset.stdout, unset.stderr)


def test_build_info_says_that_it_is_on() -> None:
    assert amp.build_info()["enabled"] is True
