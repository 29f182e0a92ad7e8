"""Calls in an order that leaves an optimizer with wrong parameters, and habits of scripts."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from around_sharding import (
    CLOSE,
    adamw,
    apart,
    error,
    even,
    file_of,
    fsdp,
    loss_of,
    net,
    poison,
    steps_of,
    tensor_parallel,
    train,
    whole,
)
from ranks import LARGE, on_ranks
from torch import Tensor, nn

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]


def warned(function: Callable[..., object], *args: Any) -> list[str]:
    """The warnings of amp_mp in a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function(*args)
    return [str(each.message) for each in found if str(each.message).startswith("amp_mp: ")]


def scaled(model: nn.Module, optimizer: Any, steps: int) -> None:
    scaler = amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(steps):
        scaler.scale(loss_of(model)).backward()
        assert "none of its parameters has a gradient" in error(scaler.step, optimizer)


def optimizer_first(shard: Any, model: Any, use: Callable[..., None]) -> tuple[list[str], float]:
    optimizer = adamw(model.parameters())
    shard(model)
    before = whole(model)
    return warned(use, model, optimizer, 2), apart(before, whole(model))


@pytest.mark.parametrize(
    ("shard", "model", "use"),
    [(fsdp, net(), train), (fsdp, net(), scaled), (tensor_parallel, even(), train)],
)
def test_an_optimizer_made_before_its_model_is_sharded_warns_once(
    shard: Any, model: Any, use: Any
) -> None:
    for (warning,), moved in on_ranks(2, optimizer_first, shard, model, use):
        assert "no parameter of this optimizer has a gradient, nor had one before" in warning
        assert f"parameter 0 of group 0, of shape {tuple(model[0].weight.shape)}. If" in warning
        assert "Make the optimizer after that call" in warning
        assert moved == 0


def fp16_optimizer_first(kind: Any) -> list[str]:
    model = net(torch.bfloat16)
    optimizer = amp.FP16_Optimizer(kind(model.parameters(), lr=0.1), verbose=False)
    fsdp(model)

    def iterations() -> None:
        for _ in range(2):
            optimizer.backward(loss_of(model))
            optimizer.step()

    return warned(iterations)


@pytest.mark.parametrize("kind", [amp.optim.SGD, torch.optim.SGD])
def test_an_fp16_optimizer_made_before_fully_shard_warns_once(kind: Any) -> None:
    (warning,) = on_ranks(2, fp16_optimizer_first, kind)[0]
    assert "Make the optimizer after that call" in warning


def assigned() -> list[str]:
    model = amp.prepare(fsdp(even()), torch.bfloat16)
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return warned(train, model, optimizer, 2)


def test_load_state_dict_with_assign_needs_a_new_optimizer() -> None:
    (warning,) = on_ranks(2, assigned)[0]
    assert "load_state_dict(assign=True)" in warning


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


BF16 = torch.bfloat16


def own_file(memory: Any) -> tuple[float, str, str]:
    """How far a run resumed from the own file is off; what loading the other rank's raises."""
    model = fsdp(even().to(BF16))
    optimizer = adamw(model.parameters(), memory=memory)
    train(model, optimizer, 2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    own, other = (file_of(state, r) for r in (dist.get_rank(), 1 - dist.get_rank()))
    train(model, optimizer, 2)
    again = fsdp(even().to(BF16))
    new = adamw(again.parameters(), memory=memory)
    refused = error(new.load_state_dict, other["optimizer"])
    weights = amp.float32_state_dict(again, new)
    theirs = file_of(weights, 1 - dist.get_rank())
    refused_weights = error(amp.load_float32_state_dict, again, new, theirs)
    again.load_state_dict(own["model"])
    new.load_state_dict(own["optimizer"])
    train(again, new, 2)
    return apart(whole(model), whole(again)), refused, refused_weights


@pytest.mark.parametrize("memory", ["exact", "nano"])
def test_each_rank_loads_its_own_file_and_no_others(memory: str) -> None:
    for rank, (difference, *refused) in enumerate(on_ranks(2, own_file, memory)):
        assert difference == 0
        for each in refused:
            assert f"the part of rank {1 - rank}" in each
            assert "amp_mp.checkpoint" in each


def clone_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad.clone()


def with_a_loop(loop: str, worlds: int) -> float:
    """How far three steps of a user's loop on shards are from torch on one process."""

    def run(model: Any, make: Callable[..., Any]) -> list[torch.Tensor]:
        norm = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # noqa: E731
        value = lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.001)  # noqa: E731
        before = {"norm": norm, "value": value, "clone": clone_gradients}.get(loop)
        if loop == "compile":
            model[0].compile(backend="aot_eager")
        if loop == "frozen":
            model[0].requires_grad_(False)
        if loop == "hooks" and make is adamw:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
        elif loop == "hooks":
            for param in model.parameters():
                param.register_hook(lambda grad: grad * 0.5)
        optimizer = make(list(model.parameters())[: 3 if loop == "part" else 8], lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        for _ in range(3):
            for micro in range(2 if loop in ("sync", "no-sync") else 1):
                if loop == "no-sync" and make is adamw:
                    model.set_requires_gradient_sync(micro == 1)
                loss_of(model).backward()
            if before is not None:
                before(model)
            optimizer.step()
            scheduler.step()
            model.zero_grad(set_to_none=loop != "zeros")
        return whole(model)

    return apart(run(fsdp(net()), adamw), run(net(), torch.optim.AdamW))


LOOPS = "norm value clone compile frozen hooks part sync no-sync zeros"


@pytest.mark.parametrize("loop", LOOPS.split())
@pytest.mark.parametrize("world", [2, 4] if LARGE else [2])
def test_a_loop_on_shards_is_that_of_one_process(loop: str, world: int) -> None:
    assert max(on_ranks(world, with_a_loop, loop, world)) < CLOSE


def reports() -> dict[str, Any]:
    model = fsdp(net(BF16))
    optimizer = adamw(model.parameters(), check_overflow=True)
    train(model, optimizer, 1)
    with amp.diagnose.Watch(model) as seen, amp.diagnose.UpdateRatios(optimizer) as ratios:
        loss_of(model).backward()
        optimizer.step()
        counted = sum(row.elements for row in ratios.report())
        poison(model, 1, float("nan"))
        ratios.reset()
        optimizer.step()  # nothing is updated, on the rank with finite gradients neither
    overflow = amp.diagnose.diagnose_overflow(model)
    own = sum(p.to_local().numel() for p in model.parameters())
    return {
        "counted": counted == own == seen.report().weights.elements,
        "says so": "only this process's shards" in str(seen.report()),
        "skipped": len(ratios.report()),
        "names": [row.name for row in overflow],
        "overflow": str(overflow),
    }


def test_diagnoses_count_the_shards_of_a_process_and_say_so() -> None:
    finite, poisoned = on_ranks(2, reports)
    for found in (finite, poisoned):
        assert found["counted"]
        assert found["says so"]
        assert found["skipped"] == 0
    assert finite["names"] == []
    assert "the shards of other processes were not read" in finite["overflow"]
    assert poisoned["names"] == ["0.weight"]
    assert "Only the shards of this process" in poisoned["overflow"]


def calls_on_rank_0() -> list[float]:
    model = fsdp(net(BF16))
    optimizer = adamw(model.parameters(), memory="tiny", max_grad_norm=1.0)
    train(model, optimizer, 2)
    if dist.get_rank() == 0:
        assert optimizer.last_report(wait=True) is not None
        assert optimizer.grad_norm is not None
        assert not optimizer.step_was_skipped
        assert optimizer.memory_report().parameters > 0
        assert len(optimizer.state_dict()["state"]) == 8
        amp.float32_state_dict(model, optimizer)
        copy.deepcopy(optimizer)
    train(model, optimizer, 1)
    return steps_of(optimizer)


def measured_step() -> list[str]:
    model = fsdp(net())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(model, adamw(model.parameters(), max_grad_norm=1.0), 1)
    return [str(each.message) for each in found if "all_gather" in str(each.message)]


def test_a_step_that_measures_uses_nothing_deprecated() -> None:
    assert on_ranks(2, measured_step) == [[], []]


def test_questions_to_one_rank_wait_for_no_other() -> None:
    assert on_ranks(2, calls_on_rank_0) == [[3.0] * 8] * 2


def freed_on_rank_1(limit: float | None) -> tuple[list[float], list[Tensor]]:
    """Python's garbage collector comes by at another time in each process."""
    old, model = fsdp(net()), fsdp(net())
    inner = amp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, skip_norm_above=limit)
    optimizer = amp.FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    norms = []
    for number in range(3):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        norms.append(optimizer.clip_master_grads(0.1))
        if number == 1 and dist.get_rank() == 1:
            del old
            gc.collect()
        optimizer.step()
    return norms, whole(model)


def kept_on_both() -> tuple[list[float], list[Tensor]]:
    """The same with torch's clipping and optimizer."""
    model = fsdp(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(float(norm.full_tensor()))
        optimizer.step()
    return norms, whole(model)


@pytest.mark.parametrize("limit", [None, 100.0])
def test_a_model_that_goes_on_one_rank_changes_no_step(limit: float | None) -> None:
    """Between clip_master_grads, which has measured the gradients, and the step that uses them."""
    expected_norms, expected = on_ranks(2, kept_on_both)[0]
    for norms, weights in on_ranks(2, freed_on_rank_1, limit):
        assert norms == pytest.approx(expected_norms, rel=CLOSE)
        torch.testing.assert_close(weights, expected, rtol=CLOSE, atol=CLOSE)
