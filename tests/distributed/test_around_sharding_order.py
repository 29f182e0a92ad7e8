"""Calls in an order that leaves an optimizer with the wrong parameters, and in the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from around_sharding import (
    CLOSE,
    adamw,
    apart,
    error,
    even,
    fsdp,
    loss_of,
    net,
    steps_of,
    tensor_parallel,
    train,
    whole,
)
from ranks import on_ranks
from torch import nn

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]


def steps(model: nn.Module, optimizer: Any) -> str:
    return error(train, model, optimizer, 1)


def scales(model: nn.Module, optimizer: Any) -> str:
    scaler = amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model)).backward()
    return error(scaler.step, optimizer)


def makes_state(_: nn.Module, optimizer: Any) -> str:
    return error(optimizer.init_state)


def optimizer_first(shard: Any, model: Any, use: Callable[..., str]) -> tuple[str, float]:
    optimizer = adamw(model.parameters())
    shard(model)
    before = whole(model)
    return use(model, optimizer), apart(before, whole(model))


@pytest.mark.parametrize("use", [steps, scales, makes_state])
def test_an_optimizer_made_before_fully_shard_is_refused(use: Callable[..., str]) -> None:
    for raised, moved in on_ranks(2, optimizer_first, fsdp, net(), use):
        assert "parameter 0 of group 0 (and 7 more) is in no module any more" in raised
        assert "make the optimizer after that call" in raised
        assert moved == 0


def test_an_optimizer_made_before_parallelize_module_is_refused() -> None:
    for raised, moved in on_ranks(2, optimizer_first, tensor_parallel, even(), steps):
        assert "(8, 6)" in raised
        assert moved == 0


def sharded_after_a_step(attached: bool) -> str:
    model = net()
    optimizer = adamw(model.parameters())
    if attached:
        optimizer.attach(model, release=True)
    train(model, optimizer, 1)
    return steps(fsdp(model), optimizer)


@pytest.mark.parametrize("attached", [False, True])
def test_fully_shard_after_the_first_step_is_refused(attached: bool) -> None:
    assert "make the optimizer after" in on_ranks(2, sharded_after_a_step, attached)[0]


def fp16_optimizer_first(kind: Any) -> str:
    model = net(torch.bfloat16)
    optimizer = amp.FP16_Optimizer(kind(model.parameters(), lr=0.1), verbose=False)
    fsdp(model)

    def iteration() -> None:
        optimizer.backward(loss_of(model))
        optimizer.step()

    return error(iteration)


@pytest.mark.parametrize("kind", [amp.optim.SGD, torch.optim.SGD])
def test_an_fp16_optimizer_made_before_fully_shard_is_refused(kind: Any) -> None:
    assert "make the optimizer after" in on_ranks(2, fp16_optimizer_first, kind)[0]


def assigned() -> str:
    model = fsdp(net())
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return steps(model, optimizer)


def test_load_state_dict_with_assign_needs_a_new_optimizer() -> None:
    assert "load_state_dict(assign=True)" in on_ranks(2, assigned)[0]


def beside_a_module() -> list[float]:
    """A parameter in no module, of a bias's shape, whose gradient comes late."""
    model, prompt = fsdp(net()), nn.Parameter(torch.zeros(7))
    teacher = fsdp(net())
    optimizer = adamw([*model.parameters(), prompt], max_grad_norm=1e9)
    train(model, optimizer, 2)
    (loss_of(model) + prompt.sum() + 0 * loss_of(teacher)).backward()
    optimizer.step()
    return [*steps_of(optimizer), float(prompt.sum())]


def test_a_parameter_that_never_was_in_a_module_is_no_mistake() -> None:
    assert on_ranks(2, beside_a_module)[0] == [*[3.0] * 8, 1.0, pytest.approx(-0.7)]


class WithAdapter(nn.Module):
    """A frozen layer, an adapter beside it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.frozen(x) + self.up(self.down(x)))
        return out


def adapter_added(model: WithAdapter, make: Callable[..., Any]) -> list[torch.Tensor]:
    optimizer = make(list(model.head.parameters()))
    for step in range(4):
        if step == 2:
            adapter = [*model.down.parameters(), *model.up.parameters()]
            optimizer.add_param_group({"params": adapter, "lr": 0.05})
        loss_of(model).backward()
        optimizer.step()
        model.zero_grad()
    return whole(model)


def added_to_a_sharded_model() -> float:
    model: Any = WithAdapter()
    torch.distributed.fsdp.fully_shard(model)
    ours = adapter_added(model, lambda params: adamw(params, max_grad_norm=1e9))
    return apart(ours, adapter_added(WithAdapter(), lambda p: torch.optim.AdamW(p, lr=0.1)))


def test_an_adapter_added_later_trains_as_on_one_process() -> None:
    assert max(on_ranks(2, added_to_a_sharded_model)) < CLOSE


def two_optimizers(model: nn.Module, kinds: Any, **options: Any) -> list[torch.Tensor]:
    params = list(model.parameters())
    first = kinds.AdamW(params[:3], lr=0.1, **options)
    second = kinds.SGD(params[3:], lr=0.1, momentum=0.9)
    for _ in range(3):
        loss_of(model).backward()
        first.step()
        second.step()
        model.zero_grad()
    return whole(model)


def two_over_one_model() -> float:
    ours = two_optimizers(fsdp(net()), amp.optim, max_grad_norm=1e9)
    return apart(ours, two_optimizers(net(), torch.optim))


def test_two_optimizers_over_one_model() -> None:
    assert max(on_ranks(2, two_over_one_model)) < CLOSE


def state_taken_away(how: str) -> list[float]:
    model = fsdp(net())
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    if how == "clear":
        optimizer.state.clear()
    elif how == "delete":
        del optimizer.state[model[0].weight]
    else:
        optimizer.state[model[0].weight] = {}
    train(model, optimizer, 1)
    return steps_of(optimizer)


@pytest.mark.parametrize(
    ("how", "steps"),
    [("delete", [1.0, *[2.0] * 7]), ("empty", [1.0, *[2.0] * 7]), ("clear", [1.0] * 8)],
)
def test_state_that_was_taken_away_is_made_anew(how: str, steps: list[float]) -> None:
    assert on_ranks(2, state_taken_away, how) == [steps] * 2
