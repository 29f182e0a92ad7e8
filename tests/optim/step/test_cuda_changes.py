"""amp.Changes beside CUDA graphs and streams: replays note what they change.

Runs where there is a GPU, and in any case on the pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from cuda_training import DEVICE
from helpers import PRETEND_GPU
from torch import nn

import amp_mp as amp

pytestmark = pytest.mark.usefixtures("cuda")


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().view(torch.int16).flatten().clone() for param in model.parameters()]


def training(memory: str) -> tuple[nn.Module, amp.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 7)).to(DEVICE, torch.bfloat16)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer = amp.optim.AdamW(
        model.parameters(), lr=1e-3, memory=memory, max_grad_norm=1.0, check_overflow=True
    )
    return model, optimizer


def fill(model: nn.Module, step: int, overflow: bool = False) -> None:
    for param in model.parameters():
        source = torch.Generator().manual_seed(step)
        assert param.grad is not None
        param.grad.copy_(torch.randn(param.shape, generator=source))
        if overflow:
            param.grad.view(-1)[3] = torch.nan


@pytest.mark.parametrize("memory", ["exact", "lean", "tiny", "float32"])
def test_replays_note_what_they_change(memory: str) -> None:
    model, optimizer = training(memory)
    changes, receiver = amp.Changes(model), copy.deepcopy(model)
    for step in range(3):
        fill(model, step)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    amp.apply_changes(receiver, changes.take())
    wanted = [torch.zeros_like(each, dtype=torch.bool) for each in bits(model)]
    for step in range(3, 9):
        before = bits(model)
        fill(model, step, overflow=step == 5)
        graph.replay()
        for where, old, new in zip(wanted, before, bits(model), strict=True):
            where |= old != new
        if step % 3 == 2:
            taken = changes.take()
            for (name, _), where in zip(model.named_parameters(), wanted, strict=True):
                assert torch.equal(taken[name].positions.long(), where.nonzero().flatten()), name
                where.zero_()
            amp.apply_changes(receiver, taken)
            assert all(map(torch.equal, bits(receiver), bits(model)))


def test_a_graph_outlives_the_object() -> None:
    """Its replays write to memory that is kept for them."""
    model, optimizer = training("exact")
    changes = amp.Changes(model)
    fill(model, 0)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    del changes
    gc.collect()
    others = [
        torch.zeros(each.numel() // 64 + 1, dtype=torch.int64, device=DEVICE)
        for each in bits(model)
    ]
    for step in range(1, 4):
        fill(model, step)
        graph.replay()
    assert not any(other.any() for other in others)
    fresh, receiver = amp.Changes(model), copy.deepcopy(model)
    fill(model, 4)
    graph.replay()  # which does not know of it: all counts as written by others
    taken = fresh.take()
    assert all(len(taken[name].positions) == p.numel() for name, p in model.named_parameters())
    amp.apply_changes(receiver, taken)
    assert all(map(torch.equal, bits(receiver), bits(model)))


def test_it_takes_no_launch_and_no_wait_of_a_step() -> None:
    if not PRETEND_GPU:
        pytest.skip("launches are counted on the pretend GPU")
    from pretend_gpu.device import ledger

    counts = []
    for watched in (False, True):
        model, optimizer = training("lean")
        changes = amp.Changes(model) if watched else None
        for step in range(3):
            fill(model, step)
            with ledger() as found:
                optimizer.step()
        counts.append((found.launches, found.waits))
        assert watched == (changes is not None)
    assert counts[0] == counts[1] == (3, 0)


# Moves, as of a trainer that lends the GPU to a sampler.


def where_changed(before: list[torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    names = [name for name, _ in model.named_parameters()]
    return {
        name: (old != new.cpu()).nonzero().flatten()
        for name, old, new in zip(names, before, bits(model), strict=True)
    }


def places(taken: dict[str, amp.model.watched.ChangedWeights]) -> dict[str, torch.Tensor]:
    return {name: changed.positions.cpu().long() for name, changed in taken.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    wanted = {name: where for name, where in wanted.items() if len(where)}
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


@pytest.mark.parametrize("memory", ["exact", "lean", "float32"])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_move_keeps_the_notes(memory: str, non_blocking: bool) -> None:
    """There and back; taken there; and in the step after that."""
    model, optimizer = training(memory)
    changes = amp.Changes(model)
    taken_there = (False, True, False, True, True, False)
    before = [each.cpu() for each in bits(model)]
    for step, there in enumerate(taken_there):
        fill(model, step)
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        model.to("cpu", non_blocking=non_blocking)
        if there:
            taken = changes.take()
            assert all(changed.values.device.type == "cpu" for changed in taken.values())
            assert same(places(taken), where_changed(before, model))
            assert changes.count() == 0
            before = bits(model)
        model.to(DEVICE, non_blocking=non_blocking)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        if not there:
            taken = changes.take()
            assert all(changed.values.device.type == "cuda" for changed in taken.values())
            assert same(places(taken), where_changed(before, model))
            before = [each.cpu() for each in bits(model)]
    assert changes.take() == {}


def test_a_write_while_it_is_elsewhere_is_found() -> None:
    model, optimizer = training("lean")
    optimizer.param_groups[0]["lr"] = 1e-5
    changes, before = amp.Changes(model), [each.cpu() for each in bits(model)]
    fill(model, 0)
    optimizer.step()
    model.to("cpu")
    wanted = {**where_changed(before, model), "0.bias": torch.arange(300)}
    model[0].bias.data[5] += 1
    model.to(DEVICE)
    assert same(places(changes.take()), wanted)
    assert 0 < len(wanted["0.weight"]) < 300 * 64


def test_notes_made_on_a_cpu_follow_to_the_device() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 300).to(torch.bfloat16)
    changes = amp.Changes(model)
    model.to(DEVICE)
    assert changes.take() == {}
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3)
    before = [each.cpu() for each in bits(model)]
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(param)
    optimizer.step()
    assert same(places(changes.take()), where_changed(before, model))


class Many(nn.Module):
    """More tensors than one launch has room for."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(
            torch.randn(1 + number % 70, generator=source).to(DEVICE, torch.bfloat16)
            for number in range(900)
        )
        self.all.append(torch.randn(70_000, generator=source).to(DEVICE, torch.bfloat16))
        self.register_buffer("mean", torch.ones(5, device=DEVICE))


def halves(name: str, shape: torch.Size) -> list[amp.Piece]:
    half = shape[0] // 2
    return [amp.Piece(f"{name}.0", (half,)), amp.Piece(f"{name}.1", (shape[0] - half,), half)]


@pytest.mark.parametrize("named", [False, True])
def test_a_take_waits_once(named: bool) -> None:
    """And once more for pieces; applying waits once. Launches are those of the arguments' room."""
    if not PRETEND_GPU:
        pytest.skip("launches and waits are counted on the pretend GPU")
    from pretend_gpu.device import ledger

    model = Many()
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-3)
    changes = amp.Changes(model, torch.bfloat16, buffers=True, names=halves if named else None)
    receiver = copy.deepcopy(model)
    fill_all(model)
    optimizer.step()
    model.mean += 1
    changes.take(every=True)  # the first copies to the device where pieces begin
    for _ in range(2):
        optimizer.step()
        model.mean += 1
        with ledger() as found:
            taken = changes.take(every=True)
        assert found.waits == 1 + named
        assert found.launches <= 8
        assert sum(len(changed.positions) for changed in taken.values()) > 10_000
    if not named:
        with ledger() as found:
            amp.apply_changes(receiver, taken)
        assert found.waits == 1
        assert found.launches <= 6
    with ledger() as found:
        changes.begin()
    assert found.waits == 1


def fill_all(model: nn.Module) -> None:
    for number, param in enumerate(model.parameters()):
        source = torch.Generator().manual_seed(number)
        param.grad = torch.randn(param.shape, generator=source).to(param)
