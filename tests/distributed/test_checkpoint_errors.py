"""Errors of amp.checkpoint on several processes: all of them raise, and nothing is changed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import caught
from layouts import Bag, Net, digests, set_grads, shard
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]
SHAPES = [(96, 64), (33, 96), (33,)]


def made(layout: str | None = "fsdp", shapes: Any = SHAPES) -> Any:
    model: Any = Bag(shapes, torch.bfloat16)
    model = model if layout is None else shard(model, layout)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, memory="tiny")
    set_grads(list(model.parameters()), 0)
    optimizer.step()
    return model, optimizer


def held(model: Any, optimizer: Any) -> Any:
    return digests(list(model.parameters()), optimizer), repr(optimizer.param_groups[0]["lr"])


def load_wrong(path: str, case: str) -> tuple[str, bool]:
    """The error, and whether every bit is as before."""
    model, optimizer = made()
    more: dict[str, Any] = {}
    place, given, stepper = Path(path), model, optimizer
    if case == "nowhere on rank 1":
        place = place if dist.get_rank() == 0 else place / "nowhere"
    elif case == "nowhere":
        place = place / "nowhere"
    elif case == "shapes":
        given, stepper = made(shapes=[(96, 64), (33, 96), (34,)])
    elif case == "scheduler":
        more["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    elif case == "object on rank 1":
        more["step"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        more["step"] = more["step"] if dist.get_rank() == 0 else 7
    elif case == "groups on rank 1" and dist.get_rank() == 1:
        stepper = amp.optim.AdamW([nn.Parameter(torch.ones(2))])
    elif case == "another optimizer":
        stepper = amp.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        stepper.init_state()
    elif case == "second optimizer":
        more["step"] = optimizer
    before = held(given, optimizer if stepper is optimizer else stepper)
    message = caught(amp.checkpoint.load, place, given, stepper, **more)
    return message, held(given, stepper) == before


CASES = {
    "nowhere": ("FileNotFoundError", ""),
    "nowhere on rank 1": ("FileNotFoundError", "Raised on rank 1"),
    "shapes": ("ValueError 'model.p2' has shape (33,) in the checkpoint, (34,) in the model", ""),
    "scheduler": ("ValueError the checkpoint has no part named 'scheduler'", ""),
    "object on rank 1": ("TypeError step has no load_state_dict", "Raised on rank 1"),
    "groups on rank 1": ("ValueError parameter 0 of group 0", "Raised on rank 1"),
    "another optimizer": ("ValueError the checkpoint: 'exp_avg", ""),
    "second optimizer": ("TypeError step is an optimizer of sharded parameters", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_all_processes_raise_and_nothing_is_changed(case: str, tmp_path: Path) -> None:
    amp.checkpoint.save(tmp_path / "c", *made(None), step={"last_epoch": 3})
    words, note = CASES[case]
    for rank, (message, same) in enumerate(on_ranks(2, load_wrong, f"{tmp_path}/c", case)):
        assert message.startswith(words), rank
        assert note in message or rank == 1
        assert same


def load_broken(path: str) -> tuple[str, bool]:
    model, optimizer = made()
    before = held(model, optimizer)
    return caught(amp.checkpoint.load, path, model, optimizer), held(model, optimizer) == before


def save_good(path: str) -> None:
    amp.checkpoint.save(path, *made(), step=1)


def test_data_that_one_process_cannot_read_is_an_error_on_all(tmp_path: Path) -> None:
    on_ranks(2, save_good, f"{tmp_path}/c")
    (tmp_path / "c" / "__1_0.distcp").unlink()
    for message, same in on_ranks(2, load_broken, f"{tmp_path}/c"):
        assert message.startswith("RuntimeError")
        assert "could not be read; nothing was loaded: rank" in message
        assert "FileNotFoundError" in message
        assert same


def between_forwards(path: str) -> list[bool]:
    """Whether weights and state are loaded where FSDP2 has gathered the weights."""
    model = shard(Net(torch.bfloat16), "fsdp", reshard_after_forward=False)
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.ones(2, 3, 32, dtype=torch.bfloat16)
    model(x).float().mean().backward()
    optimizer.step()
    before = held(model, optimizer)
    model(x)
    gathered = not isinstance(model.up.weight, DTensor)
    amp.checkpoint.save(path, model, optimizer)
    set_grads(list(model.parameters()), 5)
    optimizer.step()
    model(x)
    gathered = gathered and not isinstance(model.up.weight, DTensor)
    amp.checkpoint.load(path, model, optimizer)
    return [gathered, held(model, optimizer) == before]


def test_gathered_weights_are_put_back_before_saving_and_loading(tmp_path: Path) -> None:
    assert on_ranks(2, between_forwards, f"{tmp_path}/c") == [[True, True]] * 2


class Breaks:
    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


def save_wrong(path: str, case: str) -> str:
    model, optimizer = made()
    more: dict[str, Any] = {"step": 2}
    if case == "disk":
        more["broken"] = Breaks()
    elif case == "optimizer on rank 1" and dist.get_rank() == 1:
        optimizer = amp.optim.AdamW([nn.Parameter(torch.ones(2))])
    elif case == "other files":
        path = str(Path(path).parent)
    message = caught(amp.checkpoint.save, path, model, optimizer, **more)
    other = made()
    assert amp.checkpoint.load(f"{path}/c" if case == "other files" else path, *other) == {
        "step": 1
    }
    return message


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("disk", "OSError"),
        ("optimizer on rank 1", "ValueError parameter 0 of group 0"),
        ("other files", "FileExistsError"),
    ],
)
def test_a_save_that_fails_leaves_the_earlier_checkpoint_and_fails_on_all(
    case: str, words: str, tmp_path: Path
) -> None:
    on_ranks(2, save_good, f"{tmp_path}/c")
    for message in on_ranks(2, save_wrong, f"{tmp_path}/c", case):
        assert words in message


def save_alone(path: str) -> None:
    model, optimizer = made(None)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    if dist.get_rank() == 0:
        amp.checkpoint.save(path, model, optimizer)


def test_saving_on_one_process_alone_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    """After the process group's timeout, which is half an hour unless it is set."""
    with pytest.raises(RuntimeError) as caught:
        on_ranks(2, save_alone, f"{tmp_path}/c")
    assert "every process has to call amp_mp.checkpoint.save" in "\n".join(caught.value.__notes__)
    assert not (tmp_path / "c").exists()
