"""FP16_Optimizer skips steps that overflow, with and without a closure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrapping import INNER, Mixed, everything, masters_of, train_step, wrap

from amp_mp.scaling import Backoff, ScalePolicy, Static


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("layer", ["low", "high"])
@pytest.mark.parametrize("name", INNER)
def test_overflow_changes_no_byte_says_so_and_training_goes_on(
    device: str, name: str, layer: str, bad: float, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Mixed(torch.float16).to(device)
    optimizer = wrap(
        INNER[name](model.parameters()),
        verbose=True,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 1024.0},
    )
    x = torch.randn(3, 4, device=device)
    for _ in range(2):
        train_step(model, optimizer, x)
    before = everything(model, optimizer)
    capsys.readouterr()

    optimizer.zero_grad()
    optimizer.backward(model(x).sum() + getattr(model, layer).weight[1, 2] * bad)
    assert optimizer.overflow
    assert optimizer.step() is None
    assert everything(model, optimizer) == before
    message = "OVERFLOW! Skipping step. Attempted loss scale: 1024.0, reducing to 512.0"
    assert message in capsys.readouterr().out
    assert optimizer.loss_scale == 512.0

    train_step(model, optimizer, x)
    assert not optimizer.overflow
    assert capsys.readouterr().out == ""
    after = everything(model, optimizer)
    assert all(after[0][key] != before[0][key] for key in before[0])  # every tensor of the model


@pytest.mark.parametrize("quiet", [{"verbose": False}, {"verbose": True, "enabled": False}])
def test_who_asks_for_silence_gets_it(
    device: str, quiet: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), dynamic_loss_scale=True, **quiet)
    optimizer.backward(weight.sum() * float("inf"))
    optimizer.step()
    assert capsys.readouterr().out == ""


def test_after_an_overflow_there_are_no_master_gradients_to_clip_or_inspect(device: str) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), dynamic_loss_scale=True)
    optimizer.backward(weight.sum() * float("inf"))
    assert optimizer.clip_master_grads(1.0) == -1.0
    with pytest.warns(UserWarning, match="overflow"):
        assert optimizer.inspect_master_grad_data() is None


def test_a_static_scale_checks_nothing(device: str) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), static_loss_scale=128.0)
    optimizer.backward(weight[0] * float("inf"))
    optimizer.step()
    assert not optimizer.overflow
    assert masters_of(optimizer)[0][0] == float("-inf")
    assert optimizer.loss_scale == 128.0


def test_the_scale_follows_its_policy(device: str) -> None:
    """Doubled after two clean steps, halved on overflow, at least 1, at most 16."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    policy = Backoff(scale_max=16.0, step_window=2, init_scale=4.0)
    optimizer = wrap(torch.optim.SGD([weight], lr=0.0), loss_scale=policy)
    found = []
    for overflow in "..!!..!!!.........":
        optimizer.zero_grad()
        optimizer.backward(weight.sum() * (float("inf") if overflow == "!" else 1.0))
        optimizer.step()
        found.append(optimizer.loss_scale)
    assert found == [4, 8, 4, 2, 2, 4, 2, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16]


def test_two_backwards_of_which_the_first_overflows_are_one_skipped_step(device: str) -> None:
    model = Mixed(torch.float16).to(device)
    policy = Backoff(init_scale=8.0)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0), loss_scale=policy)
    before = everything(model, optimizer)
    x = torch.randn(3, 4, device=device)
    for factor in (float("inf"), 1.0):
        optimizer.backward(model(x).sum() * factor)
    optimizer.step()
    assert everything(model, optimizer) == before
    assert optimizer.loss_scale == 4.0


def test_the_loss_scale_can_be_set(device: str) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), static_loss_scale=128.0)
    optimizer.loss_scale = 2
    optimizer.backward(weight.sum())
    assert weight.grad.tolist() == [2.0, 2.0]
    assert masters_of(optimizer)[0].grad.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="scale"):
        optimizer.loss_scale = 0
    assert optimizer.loss_scale == 2.0


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, Static(1.0)),
        ({"static_loss_scale": 128}, Static(128.0)),
        ({"loss_scale": 8.0}, Static(8.0)),
        ({"loss_scale": "Backoff"}, Backoff()),
        ({"loss_scale": Backoff(step_window=3)}, Backoff(step_window=3)),
        (
            {"dynamic_loss_scale": True, "static_loss_scale": 128.0},
            Backoff(1.0, 2.0**126, 2.0, 1000, init_scale=2.0**32),
        ),
        ({"loss_scale": "dynamic"}, Backoff(1.0, 2.0**126, 2.0, 1000, init_scale=2.0**32)),
        (
            {
                "dynamic_loss_scale": True,
                "dynamic_loss_args": {"init_scale": 8.0, "scale_factor": 4.0, "scale_window": 5},
            },
            Backoff(1.0, 2.0**126, 4.0, 5, init_scale=8.0),
        ),
    ],
)
def test_the_scale_arguments_mean(arguments: dict[str, Any], wanted: ScalePolicy) -> None:
    optimizer = wrap(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), **arguments)
    assert optimizer.loss_scaler.state_dict() == wanted.state_dict()
    assert optimizer.dynamic_loss_scale == isinstance(wanted, Backoff)


# Closures.


def bowl(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Least squares of 8 equations for 4 weights, in float16 and well conditioned."""
    x, y = torch.randn(8, 4).half(), torch.randn(8, 1)
    return nn.Linear(4, 1, bias=False).half().to(device), x.to(device), y.to(device)


def test_lbfgs_reaches_the_minimum_and_each_evaluation_sees_the_newest_masters(device: str) -> None:
    model, x, y = bowl(device)
    optimizer = wrap(torch.optim.LBFGS(model.parameters(), lr=0.5), static_loss_scale=128.0)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        assert torch.equal(model.weight, masters_of(optimizer)[0].half())
        seen.append(model.weight.detach().clone())
        loss = (model(x).float() - y).square().mean()
        optimizer.backward(loss)
        return loss

    first = optimizer.step(closure)
    for _ in range(4):
        optimizer.step(closure)
    assert len(seen) > 5  # several evaluations a step
    assert any(not torch.equal(weight, seen[0]) for weight in seen)
    solution = torch.linalg.lstsq(x.double().cpu(), y.double().cpu()).solution.flatten()
    # The gradient X'r is off by 2^-11 of its 8 terms, each below 2.6 (|x| < 2.2, |r| < 1.2), and
    # the inverse of X'X, of norm 0.53, takes that to the solution: 11 x 2^-11, and rounding a
    # weight adds 2^-12.
    assert (model.weight.detach().cpu().flatten() - solution).abs().max() < 16 * 2.0**-11
    assert isinstance(first, Tensor)


def test_an_overflow_in_a_closure_is_repeated_with_a_lower_scale(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x, y = bowl(device)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5)
    optimizer = wrap(lbfgs, verbose=True, dynamic_loss_scale=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x).float() - y).square().mean()
        optimizer.backward(loss)
        return loss

    before = closure().item()
    optimizer.overflow = False  # of that look at the loss
    optimizer.step(closure)
    assert closure().item() < before
    assert "OVERFLOW! Skipping step. Attempted loss scale: 4294967296.0" in capsys.readouterr().out
    assert 1.0 < optimizer.loss_scale < 2.0**32


def test_a_closure_that_no_scale_can_cure_raises_and_the_next_step_evaluates_again(
    device: str,
) -> None:
    model, x, y = bowl(device)
    optimizer = wrap(
        torch.optim.LBFGS(model.parameters()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 8.0},
    )
    factor = float("nan")
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (model(x).float() - y).square().mean() * factor
        optimizer.backward(loss)
        return loss

    before = model.weight.clone()
    with pytest.raises(RuntimeError, match=r"lowest loss scale, 1\.0"):
        optimizer.step(closure)
    assert calls == 4  # with scale 8, 4, 2, 1
    assert torch.equal(model.weight, before)
    factor = 1.0
    optimizer.step(closure)
    assert not torch.equal(model.weight, before)
