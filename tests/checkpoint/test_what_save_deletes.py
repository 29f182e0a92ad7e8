"""checkpoint.save deletes what it made and nothing else, wherever it is interrupted."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make, network, snapshot, train
from everything import everything

import amp_mp as amp

# Makes something of a user's at the path, which is beside or in the folder's checkpoint "c".
Place = Callable[[Path, Path], object]


def contents(folder: Path) -> dict[str, Any]:
    """Every file, directory and link, with what is in it."""
    found: dict[str, Any] = {}
    for each in sorted(folder.rglob("*")):
        name = str(each.relative_to(folder))
        data = each.read_bytes() if each.is_file() else b""
        found[name] = os.readlink(each) if each.is_symlink() else (each.is_dir(), data)
    return found


def a_copy(folder: Path, path: Path) -> None:
    shutil.copytree(folder / "c", path)


def notes(folder: Path, path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def a_file(folder: Path, path: Path) -> None:
    path.write_text("mine")


PLACES: dict[str, tuple[str, Place]] = {
    "a copy named previous": ("c.previous", a_copy),
    "a copy named incomplete": ("c.incomplete", a_copy),
    "notes in previous": ("c.previous", notes),
    "notes in incomplete": ("c.incomplete", notes),
    "file previous": ("c.previous", a_file),
    "file incomplete": ("c.incomplete", a_file),
    "link previous": ("c.previous", lambda folder, path: path.symlink_to(folder / "c")),
    "link incomplete": ("c.incomplete", lambda folder, path: path.symlink_to(folder / "nowhere")),
    "folder in it": ("c/x.distcp", notes),
    "folder named as data": ("c/__7_0.distcp", notes),
    "file in it": ("c/mine.distcp", a_file),
    "metadata of mine": ("c/mine.metadata", a_file),
    "link in it": (
        "c/__5_0.distcp",
        lambda _, path: path.symlink_to(path.with_name("__0_0.distcp")),
    ),
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("kind", ["amp", "torch"])
def test_what_a_user_has_put_there_stays(case: str, kind: str, tmp_path: Path) -> None:
    model = network()
    pair = make("exact") if kind == "amp" else (model, torch.optim.AdamW(model.parameters()))
    train(*pair, 1)
    amp.checkpoint.save(tmp_path / "c", *pair, step=1)
    name, place = PLACES[case]
    placed = tmp_path / name
    place(tmp_path, placed)
    before = contents(tmp_path), everything(*pair)
    with pytest.raises(FileExistsError, match=placed.name if placed.parent != tmp_path else "c"):
        amp.checkpoint.save(tmp_path / "c", *pair, step=2)
    assert (contents(tmp_path), everything(*pair)) == before
    assert amp.checkpoint.load(tmp_path / "c", *pair) == {"step": 1}


def test_a_link_is_followed(tmp_path: Path) -> None:
    pair = make("exact")
    (tmp_path / "disk").mkdir()
    (tmp_path / "latest").symlink_to("disk/step_1")
    for step in range(3):  # the link dangles at first
        amp.checkpoint.save(tmp_path / "latest", *pair, step=step)
        assert amp.checkpoint.load(tmp_path / "latest", *pair) == {"step": step}
        assert amp.checkpoint.load(tmp_path / "disk" / "step_1", *pair) == {"step": step}
    assert os.readlink(tmp_path / "latest") == "disk/step_1"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk", "latest"]
    assert [each.name for each in (tmp_path / "disk").iterdir()] == ["step_1"]


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(FileExistsError, match="is a symbolic link"):
        amp.checkpoint.save(tmp_path / "a", *make("exact"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]


EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.utime")


def ended_at(number: int, folder: Path, save: Callable[[], None]) -> bool:
    """Runs `save` in a process of its own that ends at its nth operation on a file of the folder.

    Returns whether it ended there; False: it finished.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event not in EVENTS or not str(arguments[0]).startswith(str(folder)):
                return
            seen += 1
            if seen == number:
                os._exit(3)

        sys.addaudithook(watch)
        try:
            save()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 3)
    return code == 3


def readable(path: Path) -> Path:
    """Where the message of load says that the checkpoint is."""
    if path.exists():
        return path
    kept = path.with_name(f"{path.name}.previous")
    with pytest.raises(FileNotFoundError, match=f"The checkpoint of before is in {kept}"):
        amp.checkpoint.load(path, *make("exact"))
    return kept


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("before", ["nothing", "finished", "ended between the renames"])
def test_a_process_may_end_at_any_operation(before: str, wait: bool, tmp_path: Path) -> None:
    def save(path: Path) -> None:
        amp.checkpoint.save(path, *new, step=2, wait=wait).wait()

    old, new = make("exact"), make("exact")
    train(*old, 1)
    train(*new, 2)
    wanted = {1: snapshot(*old), 2: snapshot(*new)}
    number, ended = 0, True
    while ended:
        number += 1
        folder = tmp_path / str(number)
        path = folder / "c"
        amp.checkpoint.save(path, *old, step=1)
        if before == "ended between the renames":
            (path / ".amp_mp_saving").touch()
            path.rename(folder / "c.previous")
        elif before == "nothing":
            shutil.rmtree(path)
        ended = ended_at(number, folder, lambda path=path: save(path))
        if before != "nothing" or not ended:
            other = make("exact")
            step = amp.checkpoint.load(readable(path), *other)["step"]
            assert snapshot(*other) == wanted[step]
            assert ended or step == 2
        amp.checkpoint.save(path, *new, step=3)
        assert amp.checkpoint.load(path, *make("exact")) == {"step": 3}
        assert [each.name for each in folder.iterdir()] == ["c"]
        assert {f.name for f in path.iterdir()} == {".metadata", "__0_0.distcp"}
        shutil.rmtree(folder)
    assert number > 8


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda found: b"",
    "half": lambda found: found[: len(found) // 2],
    "text": lambda found: b"no pickle at all",
    "not UTF-8": lambda found: b"\x80\x04\x8c\x04\xff\xfe\xfd\xfc.",
    "huge": lambda found: b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b".",
    "another object": lambda found: b"\x80\x04]\x94.",
    "no module": lambda found: found.replace(b"torch.distributed", b"torsh.distributed"),
    "no class": lambda found: found.replace(b"TensorStorageMetadata", b"TensorStorageMetadatb"),
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("target", ["torch", "exact", "nano"])
def test_damaged_metadata_is_an_error_with_its_path(case: str, target: str, tmp_path: Path) -> None:
    model = network()
    pair = (model, torch.optim.AdamW(model.parameters())) if target == "torch" else make(target)
    train(*pair, 1)
    amp.checkpoint.save(tmp_path / "c", *pair)
    train(*pair, 1)
    file = tmp_path / "c" / ".metadata"
    file.write_bytes(DAMAGE[case](file.read_bytes()))
    before = everything(*pair)
    with pytest.raises(ValueError, match=rf"{tmp_path}/c/\.metadata is damaged .*nothing was load"):
        amp.checkpoint.load(tmp_path / "c", *pair)
    assert everything(*pair) == before
    train(*pair, 1)
