"""Errors of amp.checkpoint: they say what is wrong, and nothing is changed."""

from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import LOW, make, network, snapshot, train
from everything import everything
from small_disk import small_disk
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import amp_mp as amp
from amp_mp.checkpoint.optimizer_part import named_state

Pair = tuple[nn.Module, Any]


def saved(path: Path, **more: Any) -> Path:
    pair = make("exact")
    train(*pair, 1)
    amp.checkpoint.save(path / "c", *pair, **more)
    return path / "c"


def stepped(preset: str = "exact") -> Pair:
    pair = make(preset)
    train(*pair, 2, seed=20)
    return pair


def grouped(model: nn.Module) -> Any:
    groups = [{"params": [*model[0].parameters()]}]
    groups.append({"params": [*model[1].parameters(), *model[2].parameters()], "lr": 0.1})
    return amp.optim.AdamW(groups)


def no_optimizer(path: Path) -> Path:
    amp.checkpoint.save(path / "c", network())
    return path / "c"


def by_number(path: Path) -> Path:
    model, optimizer = make("exact")
    train(model, optimizer, 1)
    state = {"model": get_model_state_dict(model), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path / "c")
    return path / "c"


def two_groups(path: Path) -> Path:
    model = network()
    amp.checkpoint.save(path / "c", model, grouped(model))
    return path / "c"


def other_optimizer(path: Path) -> Path:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    train(model, optimizer, 1)
    amp.checkpoint.save(path / "c", model, optimizer)
    return path / "c"


def wider(path: Path) -> Path:
    model = nn.Sequential(nn.Linear(64, 33), nn.LayerNorm(33), nn.Linear(33, 3))
    amp.checkpoint.save(path / "c", model, amp.optim.AdamW(model.parameters()))
    return path / "c"


def layers(count: int) -> Any:
    def write(path: Path) -> Path:
        model = nn.Sequential(*[*network(), nn.Linear(3, 3)][:count])
        amp.checkpoint.save(path / "c", model, amp.optim.AdamW(model.parameters()))
        return path / "c"

    return write


def bare(path: Path) -> Path:
    path.joinpath("c").write_text("no directory")
    return path / "c"


def half_written(path: Path) -> Path:
    (saved(path) / ".metadata").unlink()
    return path / "c"


def without_data(path: Path) -> Path:
    for file in saved(path).glob("*.distcp"):
        file.unlink()
    return path / "c"


def truncated(path: Path) -> Path:
    for file in saved(path).glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    return path / "c"


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (lambda path: path / "c", FileNotFoundError, "has no file .metadata"),
    "file": (bare, FileNotFoundError, "is not a directory"),
    "half written": (half_written, FileNotFoundError, "saving it was interrupted"),
    "no data": (without_data, RuntimeError, "could not be read; nothing was loaded: rank 0"),
    "truncated": (truncated, RuntimeError, "could not be read; nothing was loaded: rank 0"),
    "no optimizer": (no_optimizer, ValueError, "no optimizer's state"),
    "by number": (by_number, ValueError, r"not in optimizer\.state_dict"),
    "groups": (two_groups, ValueError, "'0.weight' are in 2 param_groups"),
    "optimizer": (other_optimizer, ValueError, "'momentum_buffer' of '0.weight'.* another opti"),
    "shape": (wider, ValueError, r"'model.0.weight' has shape \(33, 64\) in .*, \(32, 64\) in"),
    "extra": (layers(4), ValueError, "'model.3.bias' and 1 others are not in the model"),
    "missing": (layers(2), ValueError, "'model.2.bias' and 1 others are not in the checkpoint"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_does_not_fit_changes_nothing(case: str, tmp_path: Path) -> None:
    write, kind, words = WRONG[case]
    path = write(tmp_path)
    model, optimizer = stepped()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = snapshot(model, optimizer)
    with pytest.raises(kind, match=words):
        amp.checkpoint.load(path, model, optimizer)
    assert snapshot(model, optimizer) == before
    assert scheduler.last_epoch == 0
    train(model, optimizer, 1)


def test_a_file_of_amp_is_refused_by_an_optimizer_that_cannot_decode_it(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = network().to(LOW)
    theirs = torch.optim.AdamW(model.parameters())
    before = snapshot(model, theirs)
    with pytest.raises(ValueError, match="'remainder16', which AdamW does not know"):
        amp.checkpoint.load(path, model, theirs)
    assert snapshot(model, theirs) == before


def test_an_entry_that_is_gone_or_another_is_named(tmp_path: Path) -> None:
    def begin() -> tuple[nn.Module, Any, dict[str, Any]]:
        model, optimizer = stepped()
        first = torch.optim.lr_scheduler.ConstantLR(optimizer)
        then = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        plan = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], [3])
        return model, optimizer, {"plan": plan, "scaler": amp.GradScaler("cpu")}

    model, optimizer, more = begin()
    amp.checkpoint.save(tmp_path / "c", model, optimizer, step=3, **more)
    file = tmp_path / "c/.metadata"
    whole = file.read_bytes()

    def refused(change: Callable[[Any], Any], words: str) -> None:
        metadata = pickle.loads(whole)
        change(metadata)
        file.write_bytes(pickle.dumps(metadata))
        parts = begin()
        before = everything(*parts[:2], *parts[2].values())
        with pytest.raises(ValueError, match=words) as error:
            amp.checkpoint.load(tmp_path / "c", *parts[:2], **parts[2])
        assert "nothing was loaded" in str(error.value)
        assert everything(*parts[:2], *parts[2].values()) == before

    for key in ("step", "plan.last_epoch", "plan._schedulers.0.factor", "scaler.scale"):
        refused(lambda m, key=key: m.state_dict_metadata.pop(key), f"'{key}'")
        for nested in (3, ()):
            wrong = re.escape(f"{file} is damaged (TypeError: it nests {key!r} as {nested!r})")
            refused(lambda m, key=key, to=nested: m.planner_data.update({key: to}), wrong)


@pytest.mark.parametrize("value", [None, "text", [], (1, 2), 7])
def test_another_object_under_a_name_is_named(value: Any, tmp_path: Path) -> None:
    model, optimizer = make("exact")
    train(model, optimizer, 1)
    state = {"model": get_model_state_dict(model), "optimizer": named_state(model, optimizer)}
    changed = copy.deepcopy(state["optimizer"])
    changed["param_groups"][0]["params"] = value
    for name, more, words in (
        ("plan", {"plan": value}, "plan cannot load what the checkpoint has"),
        (
            "structure",
            {"plan": {"last_epoch": 1}, "amp_mp.structure": value},
            "'amp_mp.structure' does not fit",
        ),
        (
            "params",
            {"plan": {"last_epoch": 1}, "optimizer": changed},
            "param_groups?.0.params|no param_group",
        ),
    ):
        if name == "plan" and value == []:
            continue  # as of a scheduler without state
        dcp.save({**state, **more}, checkpoint_id=tmp_path / name)
        parts = stepped()
        plan = torch.optim.lr_scheduler.StepLR(parts[1], 1)
        before = everything(*parts, plan)
        with pytest.raises(ValueError, match=words) as error:
            amp.checkpoint.load(tmp_path / name, *parts, plan=plan)
        assert "nothing was loaded" in str(error.value)
        assert everything(*parts, plan) == before


def test_objects_that_cannot_be_loaded_change_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path, step=3)
    model, optimizer = stepped()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = snapshot(model, optimizer)
    for more, kind, words in (
        ({"step": 5}, TypeError, "step has no load_state_dict"),
        ({"scheduler": scheduler}, ValueError, "no part named 'scheduler'; it has model, optimi"),
    ):
        with pytest.raises(kind, match=words):
            amp.checkpoint.load(path, model, optimizer, **more)
    wrapped = amp.FP16_Optimizer(optimizer, verbose=False)
    for call in (amp.checkpoint.load, amp.checkpoint.save):
        with pytest.raises(TypeError, match=r"pass optimizer\.optimizer and scaler=optimizer\."):
            call(path, model, wrapped)
        with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, found StepLR"):
            call(path, model, scheduler)
        stranger = amp.optim.SGD([nn.Parameter(torch.ones(3))], lr=1)
        with pytest.raises(ValueError, match="is none of the model's parameters"):
            call(path, model, stranger)
    assert snapshot(model, optimizer) == before
    assert amp.checkpoint.load(path, *make("exact")) == {"step": 3}


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    pair = make("exact")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file; a checkpoint is a directory"):
        amp.checkpoint.save(tmp_path / "file", *pair)
    path = saved(tmp_path)
    (path / "notes.txt").write_text("mine")
    for place, name in ((path, "notes.txt"), (tmp_path, "c")):
        with pytest.raises(FileExistsError, match=f"holds '{name}', which is not of a checkpoint"):
            amp.checkpoint.save(place, *pair)
    assert (path / "notes.txt").read_text() == "mine"
    (path / "notes.txt").unlink()
    amp.checkpoint.save(path, *pair, step=2)
    assert amp.checkpoint.load(path, *pair) == {"step": 2}
    amp.checkpoint.save(tmp_path / "new" / "folder", *pair)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "file", "new"]


def test_a_full_disk_is_named_wherever_it_is_met_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While torch writes a tensor it raises an "enforce fail" of its own."""
    path, pair = saved(tmp_path, step=1), make("exact")
    needed = sum(file.stat().st_size for file in path.glob("*.distcp"))
    for left in range(0, needed, needed // 7):
        with small_disk(monkeypatch, left):
            wanted = f"^{path} was not written: rank 0 raised OSError: .*No space left"
            with pytest.raises(RuntimeError, match=wanted):
                amp.checkpoint.save(path, *pair, step=2)
        assert amp.checkpoint.load(path, *make("exact")) == {"step": 1}
    amp.checkpoint.save(path, *pair, step=3)
    assert amp.checkpoint.load(path, *make("exact")) == {"step": 3}
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_an_error_between_the_two_renames_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, step=1)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".incomplete"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with pytest.raises(OSError, match="Input/output error"):
            amp.checkpoint.save(path, *make("exact"), step=2)
    with pytest.raises(FileNotFoundError, match=r"The checkpoint of before is in .*c\.previous"):
        amp.checkpoint.load(path, *make("exact"))
    assert amp.checkpoint.load(f"{path}.previous", *make("exact")) == {"step": 1}
    shutil.copytree(f"{path}.incomplete", tmp_path / "d")
    assert amp.checkpoint.load(tmp_path / "d", *make("exact")) == {"step": 2}
    amp.checkpoint.save(path, *make("exact"), step=3)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "d"]
