"""checkpoint.save(wait=False): it writes what was there at the call, and loses no error."""

from __future__ import annotations

import gc
import os
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LOW, Gate, make, network, snapshot, train, under_way
from forked import Script, run_each
from random_tests import examples
from small_disk import small_disk
from tiers import paired
from torch import Tensor, nn

import amp_mp as amp


def written(path: Path) -> list[Any]:
    """What is in a checkpoint's files, but for its random number; with a GPU the order differs."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    data = {file.name: file.read_bytes() for file in path.glob("*.distcp")}
    entries = {
        index: data[at.relative_path][at.offset : at.offset + at.length]
        for index, at in metadata.storage_data.items()
    }
    assert sum(map(len, entries.values())) == sum(map(len, data.values()))
    return [entries, metadata.state_dict_metadata, metadata.planner_data]


class Training:
    """A model in training, and what may happen to it. kind: what is special about it."""

    def __init__(self, kind: str, preset: str, device: str) -> None:
        options = {"offload": "state"} if kind == "offloaded" else {}
        model: Any = network().to(device)
        if kind == "tied":
            model.append(nn.Linear(64, 32, device=device))
            model[3].weight = model[0].weight
        if preset != "torch":
            amp.prepare(model, LOW)
            optimizer: Any = amp.optim.AdamW(model.parameters(), lr=1e-2, memory=preset, **options)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer, self.device = model, optimizer, device
        self.average = amp.AveragedModel(model, decay=0.9)
        self.plan = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        self.history, self.seen = [0.5, {"a": [1]}], torch.arange(5.0, device=device)
        self.pair = (1, self.seen + 1)
        self.released = optimizer.attach(model) if kind == "released" else None
        for _ in range(2):
            self.step()

    def more(self) -> dict[str, Any]:
        named = {"average": self.average, "plan": self.plan}
        return named | {"history": self.history, "seen": self.seen, "pair": self.pair}

    def step(self) -> None:
        x = torch.randn(8, 64, device=self.device, dtype=self.model[0].weight.dtype)
        self.optimizer.zero_grad()
        self.model[:3](x).float().square().mean().backward()
        self.optimizer.step()
        self.average.update()
        self.plan.step()

    def write(self) -> None:
        with torch.no_grad():
            for each in (*self.model.parameters(), *self.model.buffers()):
                each.fill_(7)
            for each in self.model.parameters():
                each.data.zero_()

    def load(self) -> None:
        self.model.load_state_dict(
            {name: torch.ones_like(x) for name, x in self.model.state_dict().items()}
        )
        state = self.optimizer.state_dict()
        for own in state["state"].values():
            own.update({k: torch.zeros_like(x) for k, x in own.items() if isinstance(x, Tensor)})
        self.optimizer.load_state_dict(state)

    def swap(self) -> None:
        with self.average.swap():
            pass

    def record(self) -> None:
        self.history.append(3.0)
        self.history[1]["a"].append(2)  # type: ignore[index]
        self.seen.neg_()
        self.pair[1].neg_()

    def delete(self) -> None:
        del self.model, self.optimizer, self.average, self.plan, self.seen, self.released
        gc.collect()
        self.others = [torch.full((n,), -1.0, device=self.device) for n in range(1, 3000, 7)]


CASES = [
    *paired(
        ["plain", "released", "offloaded", "tied"], ["float32", "exact", "lean", "micro", "nano"]
    ),
    ("plain", "torch"),
]


@pytest.mark.parametrize(("kind", "preset"), CASES)
def test_it_writes_what_was_there_at_the_call(
    kind: str, preset: str, device: str, tmp_path: Path
) -> None:
    """The same bytes as a save that waits, whatever happens until they are written."""
    for seed in range(examples(1)):
        drawn = random.Random(f"{kind} {preset} {seed}")
        it = Training(kind, preset, device)
        parts = it.model, it.optimizer
        gate = Gate()
        gate.opened.set()
        amp.checkpoint.save(tmp_path / "waited", *parts, gate=gate, **it.more())
        with under_way(tmp_path / "beside", *parts, **it.more()):
            del parts
            actions = [it.step, it.write, it.load, it.swap, it.record]
            for action in drawn.sample([*actions, *actions], drawn.randrange(2, 10)):
                action()
            if drawn.random() < 0.5:
                it.delete()
        assert written(tmp_path / "beside") == written(tmp_path / "waited")


def storages() -> dict[int, int]:
    """The bytes of all memory of tensors in this process, by address."""
    found = [x.untyped_storage() for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    return {each.data_ptr(): each.nbytes() for each in found if each.nbytes()}


class Watching(nn.Module):
    """A model of views of one large array, as a flat buffer has them; some are tied."""

    def __init__(self, size: int = 4096, count: int = 3) -> None:
        super().__init__()
        flat = torch.randn(count * size)
        parts = [nn.Parameter(part) for part in flat.split(size)]
        self.params = nn.ParameterList([*parts, parts[0]])


@pytest.mark.parametrize("fails", [False, True])
def test_there_is_one_copy_and_it_is_freed(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Watching()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    model.zero_grad()
    whole = 2 * 3 * 4096 * 4  # weights and momentum, each once
    gc.collect()
    before, most = storages(), [0]

    def look() -> None:
        most[0] = max(most[0], sum(n for at, n in storages().items() if at not in before))

    left = 50_000 if fails else 10**9
    with small_disk(monkeypatch, left, watch=look):
        with under_way_at_end(tmp_path / "c", model, optimizer) as pending:
            look()
            assert most == [whole]
        if fails:
            while not pending.done():
                pass
        else:
            pending.wait()
    assert whole <= most[0] <= whole + 4 * 4096  # torch writes one tensor at a time
    assert not set(storages()) - set(before)
    if fails:
        with pytest.raises(RuntimeError, match="No space left"):
            pending.wait()


@contextmanager
def under_way_at_end(path: Path, *parts: Any) -> Iterator[Any]:
    """The same as under_way, for a save that may fail."""
    gate = Gate()
    pending = amp.checkpoint.save(path, *parts, wait=False, gate=gate)
    yield pending
    gate.opened.set()


def test_the_next_save_and_load_wait_for_it(tmp_path: Path) -> None:
    pair = make("exact")

    class Asks:
        def state_dict(self) -> dict[str, bool]:
            return {"earlier is done": pending.done()}

        def load_state_dict(self, state: Any) -> None:
            pass

    for wait in (False, True):
        gate = Gate()
        pending = amp.checkpoint.save(tmp_path / "c", *pair, wait=False, gate=gate, step=1)
        opens = threading.Timer(0.05, gate.opened.set)
        opens.start()
        amp.checkpoint.save(tmp_path / "d", *pair, wait=wait, asks=Asks()).wait()
        found = amp.checkpoint.load(tmp_path / "d", *make("exact"))
        assert found["asks"] == {"earlier is done": True}
        gate = Gate()
        pending = amp.checkpoint.save(tmp_path / "c", *pair, wait=False, gate=gate, step=2)
        opens = threading.Timer(0.05, gate.opened.set)
        opens.start()
        assert amp.checkpoint.load(tmp_path / "c", *make("exact"))["step"] == 2
        assert pending.done()


def test_the_earlier_checkpoint_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    old, new = make("exact"), make("exact")
    train(*new, 1)
    amp.checkpoint.save(tmp_path / "c", *old, step=1)
    copied = written(tmp_path / "c")
    with under_way(tmp_path / "c", *new, step=2):
        assert written(tmp_path / "c") == copied
    other = make("exact")
    assert amp.checkpoint.load(tmp_path / "c", *other)["step"] == 2
    assert snapshot(*other) == snapshot(*new)
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_save_that_waits_returns_one_that_is_complete(tmp_path: Path) -> None:
    pending = amp.checkpoint.save(tmp_path / "c", *make("exact"))
    assert pending.done()
    pending.wait()
    assert repr(pending) == f"<PendingSave of {tmp_path / 'c'}: complete>"


def failing(path: Path, monkeypatch: pytest.MonkeyPatch, left: int = 0) -> Any:
    """A save that has failed, and has told nobody."""
    gate = Gate()
    with small_disk(monkeypatch, left):
        pending = amp.checkpoint.save(path, *make("exact"), wait=False, gate=gate, step=2)
        gate.opened.set()
        while not pending.done():
            pass
    return pending


FULL = "was not written: rank 0 raised OSError: .*No space left"


@pytest.mark.parametrize("asked", ["wait", "save", "load", "wait False"])
def test_an_error_comes_from_whatever_is_called_next(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pair = tmp_path / "c", make("exact")
    amp.checkpoint.save(path, *pair, step=1)
    before = snapshot(*pair)
    pending = failing(path, monkeypatch)
    if asked == "wait":
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"^{path} {FULL}"):
                pending.wait()
    else:
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: amp.checkpoint.save(tmp_path / "d", *pair),
            "wait False": lambda: amp.checkpoint.save(tmp_path / "d", *pair, wait=False),
            "load": lambda: amp.checkpoint.load(path, *pair),
        }
        wanted = f"^the save before this call failed, and the call has done nothing: {path} {FULL}"
        with pytest.raises(RuntimeError, match=wanted):
            calls[asked]()
        assert not (tmp_path / "d").exists()
        assert snapshot(*pair) == before
    # It was told, so it is over.
    assert amp.checkpoint.load(path, *make("exact")) == {"step": 1}
    amp.checkpoint.save(path, *pair, wait=False, step=3).wait()
    assert amp.checkpoint.load(path, *make("exact")) == {"step": 3}
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_full_disk_leaves_the_earlier_checkpoint_wherever_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    amp.checkpoint.save(path, *make("exact"), step=1)
    needed = sum(file.stat().st_size for file in path.glob("*.distcp"))
    for left in range(0, needed, needed // 7):
        with pytest.raises(RuntimeError, match=FULL):
            failing(path, monkeypatch, left).wait()
        assert amp.checkpoint.load(path, *make("exact")) == {"step": 1}


def test_what_cannot_be_copied_is_an_error_of_the_call(tmp_path: Path) -> None:
    class Breaks:
        def __reduce__(self) -> Any:
            raise OSError(5, "broken")

    with pytest.raises(OSError, match="broken"):
        amp.checkpoint.save(tmp_path / "c", *make("exact"), wait=False, it=Breaks())
    for wrong in ("no", 0, None):
        with pytest.raises(TypeError, match="wait must be True or False, found"):
            amp.checkpoint.save(tmp_path / "c", *make("exact"), wait=wrong)  # type: ignore[arg-type]
    amp.checkpoint.save(tmp_path / "c", *make("exact"), wait=False).wait()
    amp.checkpoint.load(tmp_path / "c", *make("exact"))


def test_filters_of_warnings_stay_the_training_threads(tmp_path: Path) -> None:
    """Python keeps one list of them for all threads; torch warns where there is no group."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with under_way(tmp_path / "c", *make("exact")):
            before = list(warnings.filters)
    assert before[0][0] == "error"
    amp.checkpoint.load(tmp_path / "c", *make("exact"))


BEGIN = """
import os, signal, sys, threading, time
import torch
import amp_mp as amp

class Slow:
    def __deepcopy__(self, memo):
        return self
    def __reduce__(self):
        threading.main_thread().join()  # the main thread has ended before this is written
        {in_thread}
        return str, ("slow",)

def main():
    model = torch.nn.Linear(8, 8)
    amp.checkpoint.save({path!r}, model, step=5, slow=Slow(), wait=False)
    model.weight.data.zero_()

{ends}
"""
ENDS = {
    "returns": "main()",
    "exits": "main(); sys.exit(3)",
    "raises": "main(); raise KeyError('mine')",
    "is terminated": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); main(); "
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    ),
    "is a child": (
        "import multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=main)\n"
        "child.start(); child.join()"
    ),
    "saves in a thread": "it = threading.Thread(target=main); it.start(); it.join()",
}


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_the_process_waits(case: str, tmp_path: Path) -> None:
    ends, path = ENDS[case], f"{tmp_path}/c"
    good, bad = (
        BEGIN.format(path=path, ends=ends, in_thread=line)
        for line in ("", "raise OSError(28, 'No space left on device')")
    )
    (ended,) = run_each([Script(["-c", good])])
    assert "amp_mp" not in ended.stderr
    found = amp.checkpoint.load(path, nn.Linear(8, 8))
    assert found["step"] == 5
    (ended,) = run_each([Script(["-c", bad.replace("step=5", "step=6")])])
    wanted = f"amp_mp: RuntimeError: {path} was not written: rank 0 raised OSError"
    assert ended.stderr.count(wanted) == 1, ended.stderr
    assert amp.checkpoint.load(path, nn.Linear(8, 8))["step"] == 5


def test_a_forked_process_has_none_under_way(tmp_path: Path) -> None:
    with under_way(tmp_path / "c", *make("exact")):
        child = os.fork()
        if child == 0:
            try:
                amp.checkpoint.save(tmp_path / "d", *make("exact"), step=1)
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert amp.checkpoint.load(tmp_path / "d", *make("exact")) == {"step": 1}
