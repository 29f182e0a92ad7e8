"""What scripts do to a sharded model between steps: the next step finds the right memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from layouts import Bag, Net, differences, local, noise, placed_as, set_grads, shard
from ranks import LARGE, on_ranks
from rules import is_allowed
from tiers import full
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

import amp_mp as amp
from amp_mp.optim.base import stepper_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

SHAPES = [(96, 64), (33,), (1, 33), (3, 64), (1,)]
SPLITS = [("fsdp", 2), ("rows", 2), ("columns fsdp", 4)]
PRESETS = (
    ["float32", "exact", "lean", "tiny", "micro", "nano"] if LARGE else ["exact", "micro", "nano"]
)


def other_values(model: nn.Module) -> dict[str, Tensor]:
    """New weights for the model, whole."""
    named = enumerate(model.named_parameters())
    return {name: noise(tuple(p.shape), 900 + i).to(p.dtype) for i, (name, p) in named}


def like_the_model(model: nn.Module) -> dict[str, Tensor]:
    """New weights, each placed as the parameter is."""
    values = other_values(model)
    return {name: placed_as(p, values[name]) for name, p in model.named_parameters()}


def copy_memory(model: nn.Module) -> None:
    model._apply(torch.clone)


def load(model: nn.Module) -> None:
    model.load_state_dict(like_the_model(model))


def load_and_swap(model: nn.Module) -> None:
    """assign=True under torch's flag that keeps the Parameters: each gets the other's memory.

    torch refuses this for plain parameters, because an amp_mp optimizer refers to them.
    """
    if not all(isinstance(p, DTensor) for p in model.parameters()):
        load(model)
        return
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(like_the_model(model), assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def set_state_dict(model: nn.Module) -> None:
    set_model_state_dict(model, like_the_model(model))


def set_full_state_dict(model: nn.Module) -> None:
    set_model_state_dict(model, other_values(model), options=StateDictOptions(full_state_dict=True))


def unshard(model: nn.Module) -> None:
    if isinstance(model, FSDPModule):
        model.unshard()
        model.reshard()


def write(model: nn.Module) -> None:
    """In place, as weight decay or a projection written by hand."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def write_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.zero_()


def write_locally(model: nn.Module) -> None:
    for param in model.parameters():
        local(param).mul_(0.5)


def write_to_local(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            (param.to_local() if isinstance(param, DTensor) else param).zero_()


WRITES = [write, write_data, write_locally, write_to_local]
BETWEEN = [copy_memory, load, load_and_swap, set_state_dict, unshard, *WRITES]


def moved(layout: str, dtype: torch.dtype, names: list[str]) -> list[str]:
    """Where a rank parts from one process if something happens between the third and fourth step.

    names: what happens.
    """
    found = []
    for name in names:
        for preset in PRESETS:
            if not is_allowed(preset, dtype, name):
                continue
            runs: list[Any] = []
            for model in (shard(Bag(SHAPES, dtype), layout), Bag(SHAPES, dtype)):
                kept = list(model.parameters())
                optimizer = amp.optim.AdamW(kept, lr=0.01, memory=preset)
                for step in range(6):
                    if step == 3:
                        happens(name, model)
                        assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))
                    set_grads(kept, 100 * step)
                    optimizer.step()
                runs += [kept, optimizer]
            found += [f"{name}, {preset}: {text}" for text in differences(*runs)]
    return found


def happens(name: str, model: nn.Module) -> None:
    if name in ("float32", "bfloat16", "float16"):
        model.zero_grad()
        model.to(getattr(torch, name))
    else:
        globals()[name](model)


@pytest.mark.parametrize(("layout", "world"), SPLITS)
@pytest.mark.parametrize("dtype", [full(torch.float32), torch.bfloat16], ids=str)
def test_the_next_step_updates_the_memory_there_is(
    layout: str, world: int, dtype: torch.dtype
) -> None:
    names = [between.__name__ for between in BETWEEN]
    if layout != "columns fsdp":  # torch 2.13 cannot there, where rows are split unevenly
        names.append("set_full_state_dict")
    for rank in on_ranks(world, moved, layout, dtype, names):
        assert rank == []


@pytest.mark.parametrize(("layout", "world"), SPLITS)
@pytest.mark.parametrize(
    ("before", "after"), [(torch.float32, "bfloat16"), (torch.bfloat16, "float32")], ids=str
)
def test_a_model_may_change_its_dtype(
    layout: str, world: int, before: torch.dtype, after: str
) -> None:
    for rank in on_ranks(world, moved, layout, before, [after]):
        assert rank == []


def made_from_gathered_parameters() -> list[str]:
    """Errors for parameters of a model that is not split at the moment: new optimizer, new group.

    After unshard(), and after a root's forward, parameters() gives the gathered ones.
    """
    net = shard(Net(), "fsdp")
    optimizer = amp.optim.SGD(net.norm.parameters(), lr=0.1)
    messages = []
    for gather in (net.unshard, lambda: net(torch.ones(2, 4, 32))):
        gather()
        for make in (
            lambda: amp.optim.AdamW(net.parameters(), lr=0.1),
            lambda: optimizer.add_param_group({"params": list(net.up.parameters())}),
        ):
            with pytest.raises((TypeError, ValueError)) as caught:
                make()
            messages.append(str(caught.value))
        net.reshard()
    assert len(optimizer.param_groups) == 1
    amp.optim.AdamW(net.parameters(), lr=0.1)
    return messages


def test_parameters_of_a_gathered_model_are_refused_by_name() -> None:
    for messages in on_ranks(2, made_from_gathered_parameters):
        for message, label in zip(messages, ["0 of group 0", "0 of group 1"] * 2, strict=True):
            assert f"parameter {label}" in message
            assert "reshard" in message


def empty_rank(preset: str) -> tuple[int, list[str]]:
    """How many elements a rank holds of a model with fewer rows than ranks, and where it parts."""
    shapes: list[tuple[int, ...]] = [(1, 64), (2, 32), (1,)]
    runs: list[Any] = []
    for model in (shard(Bag(shapes, torch.bfloat16), "fsdp"), Bag(shapes, torch.bfloat16)):
        params = list(model.parameters())
        optimizer = amp.optim.AdamW(params, lr=0.01, memory=preset, check_overflow=True)
        for step in range(4):
            set_grads(params, 100 * step)
            if step == 2:
                local(params[0].grad).fill_(float("nan"))
            optimizer.step()
            assert optimizer.step_was_skipped == (step == 2)
        runs += [params, optimizer]
    return sum(local(p).numel() for p in runs[0]), differences(*runs)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_that_holds_nothing_takes_part(preset: str) -> None:
    ranks = on_ranks(4, empty_rank, preset)
    assert [held for held, _ in ranks] == [97, 32, 0, 0]
    assert [parts for _, parts in ranks] == [[]] * 4


def offloaded(preset: str) -> list[float]:
    """Losses of a net whose shards FSDP keeps on the host, and of one where it does not."""
    found = []
    for options in ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}):
        net = shard(Net(torch.bfloat16), "fsdp", **options)
        optimizer = amp.optim.AdamW(net.parameters(), lr=0.01, memory=preset, max_grad_norm=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss = net(noise((4, 8, 32), step).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("preset", ["exact", "nano"])
def test_shards_that_are_kept_on_the_host(preset: str) -> None:
    for losses in on_ranks(2, offloaded, preset):
        assert losses[:4] == losses[4:]
        assert len(set(losses)) == 4


def gradients_left(layout: str) -> list[bool]:
    """Whether a gradient's shard is still alive after measuring and zero_grad, without a step."""
    model = shard(Bag(SHAPES[:3], torch.bfloat16), layout)
    params = list(model.parameters())
    optimizer = amp.optim.AdamW(params, lr=0.01, max_grad_norm=1.0)
    set_grads(params, 0)
    optimizer.step()
    set_grads(params, 1)
    alive = [weakref.ref(param.grad._local_tensor) for param in params[:2]]
    stepper_of(optimizer).totals()
    optimizer.zero_grad()
    return [ref() is not None for ref in alive]


@pytest.mark.parametrize("layout", ["fsdp", "rows"])
def test_zero_grad_frees_gradients_that_were_only_measured(layout: str) -> None:
    assert on_ranks(2, gradients_left, layout) == [[False] * 2] * 2
