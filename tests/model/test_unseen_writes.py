"""Writes that advance no version counter, after a step: readers get what was written.

On a CPU, where a step leaves a sum of the weights that it stores. The oracle is the written weight.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from rules import RULES, is_allowed
from tiers import paired
from torch import Tensor, nn

import amp_mp as amp

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
STORAGES = ("float32", "exact", "lean", "micro", "nano")
SHAPE = (129, 258)  # a tile that is not full, and more elements than one thread takes


def trained(
    dtype: torch.dtype, memory: str, prepares: bool = True, kind: Any = amp.optim.AdamW, **own: Any
) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    model = amp.prepare(model, dtype) if prepares else model.to(dtype)
    optimizer = kind(model.parameters(), **{"lr": 1e-3, **own}, memory=memory)
    for _ in range(2):
        model.weight.grad = torch.randn_like(model.weight)
        optimizer.step()
    model.weight.grad = None
    return model, optimizer


def other(model: nn.Linear) -> Tensor:
    return (model.weight.detach() * 0.75).clone()


def through_numpy(model: nn.Linear) -> None:
    bits = model.weight.detach().view(torch.int16).numpy()
    numpy.copyto(bits, other(model).view(torch.int16).numpy())


def move_memory(model: nn.Linear) -> None:
    values = other(model)
    ctypes.memmove(model.weight.data_ptr(), values.data_ptr(), values.nbytes)


def last_element(model: nn.Linear) -> None:
    model.weight.data[-1, -1] = 0.375


WRITES: dict[str, Callable[[nn.Linear], Any]] = {
    "data.mul_": lambda m: m.weight.data.mul_(0.75),
    "data =": lambda m: setattr(m.weight, "data", other(m)),
    "one element of data": last_element,
    "rows of data change places": lambda m: m.weight.data.copy_(m.weight.data.flip(0).clone()),
    "numpy": through_numpy,
    "dlpack": lambda m: torch.from_dlpack(m.weight.detach()).mul_(0.75),
    "memmove": move_memory,
}


def through_a_checkpoint(model: nn.Linear, path: Path) -> Tensor:
    amp.checkpoint.save(path / "c", model)
    fresh = amp.prepare(nn.Linear(SHAPE[1], SHAPE[0], bias=False), model.weight.dtype)
    amp.checkpoint.load(path / "c", fresh)
    return amp.float32_of(fresh.weight)


def average(model: nn.Linear) -> Tensor:
    averaged = amp.AveragedModel(model, decay=0.5)
    averaged.update()
    return averaged.float32_state_dict()["weight"]


def begun_by_another(model: nn.Linear) -> Tensor:
    optimizer = amp.optim.SGD(model.parameters(), lr=0.0, memory="float32")
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return amp.float32_of(model.weight)


READERS: dict[str, Callable[[nn.Linear, Path], Tensor]] = {
    "float32_of": lambda m, _: amp.float32_of(m.weight),
    "float32_state_dict": lambda m, _: amp.float32_state_dict(m)["weight"],
    "average": lambda m, _: average(m),
    "checkpoint": through_a_checkpoint,
    "deepcopy": lambda m, _: amp.float32_of(copy.deepcopy(m).weight),
    "pickle": lambda m, _: amp.float32_of(pickle.loads(pickle.dumps(m)).weight),
    "new optimizer": lambda m, _: begun_by_another(m),
}
CASES = paired(READERS, STORAGES, LOW, allowed=is_allowed)


@pytest.mark.parametrize(("reader", "memory", "dtype"), CASES)
def test_readers_get_what_was_written_behind_the_counters(
    reader: str, memory: str, dtype: str, tmp_path: Path
) -> None:
    """Without a write they get the master, with its bits.

    A float32 master tells of each element whether it was written, and the others keep their bits.
    """
    model, optimizer = trained(LOW[dtype], memory)
    master = amp.float32_state_dict(model, optimizer)["weight"]
    (tmp_path / "unwritten").mkdir()
    found = READERS[reader](copy.deepcopy(model), tmp_path / "unwritten")
    # A new optimizer's master rounds to the weight where the other one's lay half way between two.
    torch.testing.assert_close(found, master, rtol=2.0**-23, atol=0)
    assert not torch.equal(found, model.weight.float())
    for name, write in WRITES.items():
        model, optimizer = trained(LOW[dtype], memory)
        before = model.weight.detach().clone()
        write(model)
        wanted = model.weight.detach().float()
        if memory == "float32":
            wanted = torch.where(model.weight == before, master, wanted)
        (tmp_path / name).mkdir()
        assert torch.equal(READERS[reader](model, tmp_path / name), wanted), name


@pytest.mark.parametrize("rule", RULES)
def test_the_sum_that_a_step_leaves_is_that_of_the_weights(rule: str) -> None:
    """After steps of any rule in any format readers find the master valid, and stale when not."""
    kind, numbers = RULES[rule]
    for memory in STORAGES[1:]:
        model, optimizer = trained(torch.bfloat16, memory, False, kind, **numbers)
        master = amp.float32_state_dict(model, optimizer)["weight"]
        assert torch.equal(amp.float32_of(model.weight), master), memory
        last_element(model)
        assert torch.equal(amp.float32_of(model.weight), model.weight.float()), memory


def test_a_skipped_step_leaves_the_sum() -> None:
    model, optimizer = trained(torch.bfloat16, "exact", check_overflow=True)
    before = amp.float32_of(model.weight)
    model.weight.grad = torch.full_like(model.weight, torch.inf)
    optimizer.step()
    assert torch.equal(amp.float32_of(model.weight), before)
    model.weight.data.mul_(0.5)
    optimizer.step()
    assert torch.equal(amp.float32_of(model.weight), model.weight.float())


def test_the_optimizer_goes_on_with_the_bits_of_what_was_not_written() -> None:
    """A step is as documented: an element that was written rounds to it, others keep their bits."""
    model, optimizer = trained(torch.bfloat16, "exact", weight_decay=0.0)
    master = amp.float32_of(model.weight)
    last_element(model)
    optimizer.param_groups[0]["lr"] = 0.0
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    found = amp.float32_of(model.weight)
    assert torch.equal(found[:-1], master[:-1])
    assert found[-1, -1].bfloat16() == 0.375


@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
def test_masters_of_a_second_wrapper_are_what_was_written(dtype: torch.dtype) -> None:
    """Also where the next write gives a weight the value that it had before the first one."""
    weight = nn.Parameter(torch.full((3,), 0.75, dtype=dtype))

    def wrapped() -> amp.FP16_Optimizer:
        inner = torch.optim.SGD([weight], lr=2.0**-12)
        return amp.FP16_Optimizer(inner, static_loss_scale=1.0, verbose=False)

    optimizer = wrapped()
    optimizer.backward(weight.float().sum())
    optimizer.step()  # a step below the weight's rounding
    for value in (0.5, 0.75):
        weight.data.fill_(value)
        optimizer = wrapped()
        assert optimizer.param_groups[0]["params"][0].tolist() == [value] * 3
