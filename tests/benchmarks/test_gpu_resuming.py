"""gpu_step.py: what decides the most first, each figure at once, and what is known stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_step
import pytest
from gpu_candidates import Candidate, Copy
from gpu_lists import ShapeList, shape_lists
from gpu_peers import KEY, candidates
from gpu_worker import Worker

GOOD = {"ms": 1.0, "launches": 3}
KEYS = [s.key for s in shape_lists(quick=True)]


class Workers:
    """In place of gpu_step.run_list: notes what each would time, and finds it."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self.calls: list[tuple[str, list[str], float]] = []
        self.fails = fails

    def __call__(
        self,
        shapes: ShapeList,
        device: str,
        quick: bool,
        seconds: float,
        found: dict[str, Any] | None,
        skip: list[str],
        save: Any,
    ) -> None:
        wanted = [n for n in gpu_step.names(shapes, device, quick, False) if n not in skip]
        self.calls.append((shapes.key, wanted, seconds))
        known = found or {"title": "", "ceilings": {}, "candidates": {}}
        entries = {n: {"error": "no module"} if n in self.fails else dict(GOOD) for n in wanted}
        known["candidates"] |= entries
        save(known)


def go(
    monkeypatch: pytest.MonkeyPatch,
    lists: dict[str, Any],
    fails: tuple[str, ...] = (),
    key: bool = False,
) -> list[tuple[str, list[str], float]]:
    workers = Workers(fails)
    monkeypatch.setattr(gpu_step, "run_list", workers)
    gpu_step.benchmark(lists, "cpu", False, key, 400.0, lambda _: None)
    return workers.calls


def test_what_decides_the_most_is_first_on_every_list(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = go(monkeypatch, {})
    assert [key for key, _, _ in calls] == [*KEYS, *KEYS]
    assert [wanted for _, wanted, _ in calls[:4]] == [list(KEY)] * 4
    for _, wanted, _ in calls[4:]:
        assert wanted
        assert not set(wanted) & set(KEY)
    assert [round(seconds) for _, _, seconds in calls] == [50, 57, 67, 80, 100, 133, 200, 400]


def test_a_second_run_measures_what_is_missing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lists: dict[str, Any] = {}
    assert [wanted for _, wanted, _ in go(monkeypatch, lists, key=True)] == [list(KEY)] * 4
    rest = go(monkeypatch, lists)
    assert [key for key, _, _ in rest] == KEYS
    assert go(monkeypatch, lists) == []
    assert gpu_step.not_measured(lists, "cpu", False, False) == []


def test_what_failed_is_tried_again_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lists: dict[str, Any] = {}
    flash = "flashoptim 24-bit"
    first = go(monkeypatch, lists, fails=(flash,))
    assert sum(flash in wanted for _, wanted, _ in first) == 4  # once on each list
    assert gpu_step.not_measured(lists, "cpu", False, False) == [
        f"{key}: {flash}: no module" for key in KEYS
    ]
    assert [wanted for _, wanted, _ in go(monkeypatch, lists)] == [[flash]] * 4
    assert gpu_step.not_measured(lists, "cpu", False, False) == []


def test_what_there_was_no_time_for_is_named() -> None:
    no_time = {"error": "TimeoutError: not run: no time left"}
    missing = gpu_step.not_measured({"one": {"candidates": {KEY[0]: no_time}}}, "cpu", True, True)
    assert missing[0] == "one: amp_mp exact: not run: no time left"
    assert len(missing) == 3 * 4  # of each list: exact, tiny and torch
    assert not gpu_step.failed(no_time)


@pytest.mark.parametrize(
    ("entry", "done"),
    [
        (GOOD, True),
        ({"ms": 1.0}, False),
        ({"ms": 1.0, "not_counted": "TimeoutError: not run: no time left"}, False),
        ({"ms": 1.0, "not_counted": "RuntimeError: no tracing here"}, True),
        ({"ms": 1.0, "launches": 3, "error": "weights did not change"}, False),
        ({}, False),
    ],
)
def test_measured_is_what_was_timed_and_counted(entry: dict[str, Any], done: bool) -> None:
    assert gpu_step.done(entry) == done


def test_an_error_does_not_replace_figures() -> None:
    found = {"ceilings": {"copy": 3000.0}, "candidates": {"a": dict(GOOD), "b": {"error": "x"}}}
    part = {"copy": 2000.0, "read": 1.0}
    entries = {"a": {"error": "no time left"}, "b": {"error": "y"}, "c": {"ms": 2.0}}
    gpu_step.add(found, {"ceilings": part, "candidates": entries})
    assert found["candidates"] == {"a": GOOD, "b": {"error": "y"}, "c": {"ms": 2.0}}
    assert found["ceilings"] == {"copy": 3000.0, "read": 1.0}


def test_a_figure_is_heard_of_before_the_worker_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker writes one, and ends when the reader has seen it."""
    (tmp_path / "gpu_worker.py").write_text(
        "import pathlib, sys, time\n"
        "path = pathlib.Path(sys.argv[sys.argv.index('--json') + 1])\n"
        "time.sleep(0.1)\n"
        "fresh = path.with_suffix('.new')\n"
        'fresh.write_text(\'{"candidates": {"a": {"ms": 1.0}}}\')\n'
        "fresh.replace(path)\n"
        "while not path.with_suffix('.seen').exists():\n    time.sleep(0.05)\n"
    )
    monkeypatch.setattr(gpu_step, "HERE", tmp_path)
    path, heard = tmp_path / "x.json", []

    def hear(part: dict[str, Any]) -> None:
        heard.append(part)
        path.with_suffix(".seen").touch()

    status, _ = gpu_step.run_worker(shape_lists(True)[0], "cpu", True, [], 9.0, path, hear)
    assert status == 0
    assert heard == [{"candidates": {"a": {"ms": 1.0}}}]


@pytest.mark.parametrize("large", [True, False])
def test_a_candidate_is_built_once_and_its_time_written_before_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    built, written = [], []
    path = tmp_path / "worker.json"

    def build(*_: object) -> Copy:
        built.append(1)
        return Copy(lambda: None)

    def count(*_: object) -> Any:
        written.append(json.loads(path.read_text())["candidates"]["it"])
        raise RuntimeError("no tracing")

    monkeypatch.setattr("gpu_worker.count", count)
    monkeypatch.setattr("gpu_worker.copies_needed", lambda *_, **__: 1)
    worker = Worker(ShapeList("x", "x", ((8,),), large), "cpu", True, path, 60.0)
    worker.run([Candidate("it", build, lambda _: 1e6)])
    assert len(built) == 1
    assert written[0]["ms"] > 0
    assert worker.entries["it"]["not_counted"] == "RuntimeError: no tracing"
    assert "error" not in worker.entries["it"]


def test_the_deciding_ones_exist() -> None:
    names = [c.name for c in candidates(shape_lists()[0], "cuda", others=True)]
    assert names[: len(KEY)] == list(KEY)
    assert len(names) == len(set(names))
