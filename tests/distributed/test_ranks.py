"""Tests of the processes that the other tests in this folder run in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]


def gathered(values: Tensor) -> tuple[int, Tensor]:
    own = values[dist.get_rank()].clone()
    dist.all_reduce(own)
    return os.getpid(), own


def test_every_rank_returns_its_result_and_processes_stay() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    first, second = (on_ranks(4, gathered, values) for _ in range(2))
    assert [float(total) for _, total in first] == [15.0] * 4
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert [float(total) for _, total in on_ranks(2, gathered, values)] == [3.0] * 2


def fails(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the argument")
    dist.barrier()


def test_an_error_on_one_rank_is_raised_with_its_rank() -> None:
    with pytest.raises(KeyError, match="the argument") as caught:
        on_ranks(2, fails, 1)
    assert "rank 1" in caught.value.__notes__[0]
    assert "in fails" in caught.value.__notes__[0]
    assert len(on_ranks(2, gathered, torch.ones(2))) == 2  # by other processes


def dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match="the process of rank 1 ended with 3"):
        on_ranks(2, dies)


def waits_for_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), src=1)
    else:
        dist.send(torch.empty(1), dst=0)
        dist.barrier()


def test_a_rank_that_waits_for_ever_is_an_error_that_shows_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time is over when rank 0 has answered, however long that takes."""
    wait = ranks.wait
    monkeypatch.setattr(ranks, "wait", lambda pipes, _: wait(pipes) if len(pipes) == 2 else [])
    with pytest.raises(TimeoutError, match=r"the ranks \[1\] have not ended in 60.0 s") as caught:
        on_ranks(2, waits_for_rank_0, limit_s=60.0)
    monkeypatch.undo()
    assert "waits_for_rank_0" in str(caught.value).split("rank 1:")[1]
    assert len(on_ranks(2, gathered, torch.ones(2))) == 2


def leaves_all_behind(folder: Path) -> None:
    nn.modules.module.register_module_forward_hook(lambda *_: None)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    amp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale=1.0)
    os.environ["AMP_MP_LEFT"] = "1"
    os.chdir(folder)


def what_is_left() -> dict[str, Any]:
    return {
        "dtype of a product": (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
        "hooks": len(nn.modules.module._global_forward_hooks),
        "gradients": torch.is_grad_enabled(),
        "casts": torch.is_autocast_enabled("cpu"),
        "variable": "AMP_MP_LEFT" in os.environ,
        "folder": os.getcwd(),
    }


def test_a_call_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    before = on_ranks(4, what_is_left)
    on_ranks(4, leaves_all_behind, tmp_path)
    assert on_ranks(4, what_is_left) == before


def has_a_group_of_its_own(world: int) -> tuple[int, float]:
    group = dist.new_group(range(world))
    total = torch.ones(())
    dist.all_reduce(total, group=group)
    return dist.get_world_size(), float(total)


def test_calls_on_any_numbers_of_ranks_may_alternate() -> None:
    for world in (2, 4, 1, 2, 2, 4, 1, 4):
        assert on_ranks(world, has_a_group_of_its_own, world) == [(world, world)] * world
