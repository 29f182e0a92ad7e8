"""gpu_step.py: no failure stops the rest, what decides the most is first, what is known stays."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import gpu_report
import gpu_step
import pytest
import torch
from gpu_candidates import Candidate, Copy
from gpu_lists import ShapeList, shape_lists
from gpu_peers import KEY, candidates
from gpu_worker import DEVICE_LOST, Worker, limit

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


# ---- failures ------------------------------------------------------------------------------------


def made_up(name: str, run: Any, verify: str = "") -> Candidate:
    return Candidate(name, lambda *_: Copy(run, lambda: verify), lambda _: 1e6)


@pytest.mark.parametrize("large", [True, False])
def test_one_that_raises_is_reported_and_the_rest_goes_on(tmp_path: Path, large: bool) -> None:
    calls = {"late": 0}

    def late() -> None:  # three steps of warming up go well
        calls["late"] += 1
        if calls["late"] > 4:
            raise RuntimeError("not any more\nand more lines")

    def fails() -> None:
        raise ValueError("cannot do that")

    path = tmp_path / "worker.json"
    worker = Worker(ShapeList("x", "x", ((8,),), large), "cpu", True, path, 60.0)
    worker.run(
        [
            made_up("at once", fails),
            made_up("late", late),
            made_up("wrong", lambda: None, "weights did not change"),
            made_up("good", lambda: torch.ones(1000).sum()),
        ]
    )
    found = json.loads(path.read_text())
    assert found["running"] is None
    entries = found["candidates"]
    assert entries["at once"]["error"] == "ValueError: cannot do that"
    assert entries["late"]["error"] == "RuntimeError: not any more"
    assert entries["wrong"]["error"] == "RuntimeError: weights did not change"
    assert entries["good"]["ms"] > 0
    assert "error" not in entries["good"]


def test_what_takes_too_long_is_interrupted() -> None:
    with pytest.raises(TimeoutError, match="took longer than 0 s"), limit(0.1):
        time.sleep(10)


def test_without_time_nothing_is_run(tmp_path: Path) -> None:
    worker = Worker(ShapeList("x", "x", ((8,),), True), "cpu", True, tmp_path / "w.json", -1.0)
    worker.run([made_up("good", lambda: None)])
    assert worker.entries["good"] == {"error": "TimeoutError: not run: no time left"}


@pytest.mark.parametrize("status", [DEVICE_LOST, -11, None])
def test_a_worker_that_dies_is_replaced(
    monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    skipped = []

    def run_worker(
        _shapes: object,
        _device: str,
        _quick: bool,
        skip: list[str],
        _seconds: float,
        path: Path,
        _heard: object,
    ) -> tuple[int | None, str]:
        skipped.append(skip)
        first = {"fine": {"ms": 1.0}, "bad": {"error": "illegal"} if status == DEVICE_LOST else {}}
        entries = first if len(skipped) == 1 else {"later": {"ms": 2.0}}
        running = "bad" if len(skipped) == 1 else None
        content = {"running": running, "ceilings": {"copy": 1.0}, "candidates": entries}
        path.write_text(json.dumps(content))
        return (status, "Segmentation fault") if len(skipped) == 1 else (0, "")

    monkeypatch.setattr(gpu_step, "run_worker", run_worker)
    found = gpu_step.run_list(shape_lists(quick=True)[0], "cpu", True, 60.0)
    assert skipped == [[], ["bad", "fine"]]
    assert found["candidates"]["fine"] == {"ms": 1.0}
    assert found["candidates"]["later"] == {"ms": 2.0}
    wanted = "illegal" if status == DEVICE_LOST else "Segmentation fault"
    assert wanted in found["candidates"]["bad"]["error"]


def test_a_worker_that_cannot_begin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_step, "run_worker", lambda *_: (1, "ImportError: no amp_mp"))
    found = gpu_step.run_list(shape_lists(quick=True)[0], "cpu", True, 60.0)
    assert found["error"] == "the process ended with status 1: ImportError: no amp_mp"
    assert "ImportError" in gpu_report.list_table(found)


def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleeper = tmp_path / "gpu_worker.py"
    sleeper.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(gpu_step, "HERE", tmp_path)
    monkeypatch.setattr(gpu_step, "STALLED", 0.5)
    found = gpu_step.run_worker(shape_lists(True)[0], "cpu", True, [], 9.0, tmp_path / "x.json")
    assert found == (None, "nothing happened for 0.5 s")


# ---- verdicts ------------------------------------------------------------------------------------


def timed(ms: float, copy: float = 3000.0, **more: Any) -> dict[str, Any]:
    return {"ms": ms, "host_ms": ms, "bytes": 1e9, "copy_gb_s": copy, **more}


def test_targets_are_met_missed_or_not_measured() -> None:
    one = {
        "torch fused": timed(20.0),
        "amp_mp exact": timed(10.0, share=0.9, launches=3, waits=0, to_host=1),
        "amp_mp tiny": timed(6.0),
        "flashoptim 24-bit": timed(5.7),
        "flashoptim 32-bit, unquantised": {"error": "ModuleNotFoundError"},
        "amp_mp measure bfloat16": timed(0.8, gb_s=2800.0),
        "amp_mp measure float16": timed(0.8, gb_s=2600.0),
        "amp_mp measure float32": timed(0.8, gb_s=2800.0, error="found nan"),
        "amp_mp exact, overflow": timed(0.84),
    }
    lists = {"one": {"title": "one", "ceilings": {"read": 3000.0}, "candidates": one}}
    found = {t.what: t for t in gpu_report.targets(lists)}
    verdicts = {what: t.verdict for what, t in found.items() if what.startswith("one:")}
    assert verdicts == {
        "one: launches of a step, exact": "met",
        "one: waits of a step, exact": "MISSED",
        "one: exact, of copy bandwidth": "met",
        "one: exact against torch's pipeline": "met",
        "one: tiny against flashoptim 24-bit": "MISSED",
        "one: exact against flashoptim 32-bit": "not measured",
        "one: measure bfloat16, of reading": "met",
        "one: measure float16, of reading": "MISSED",
        "one: measure float32, of reading": "not measured",
        "one: overflow step, of measuring alone": "met",
    }
    assert found["one: exact against torch's pipeline"].found == "2.00x"
    assert found["one: tiny against flashoptim 24-bit"].found == "0.95x"
    assert found["one: overflow step, of measuring alone"].found == "1.05x"
    others = [t for what, t in found.items() if not what.startswith("one:")]
    assert len(others) == 10
    assert {t.verdict for t in others} == {"not measured"}


def test_speeds_are_in_copies_measured_beside_them() -> None:
    slow_memory = timed(11.0, copy=2000.0)
    assert gpu_report.speed(timed(10.0, copy=2200.0), slow_memory) == pytest.approx(1.0)
    assert gpu_report.speed(None, slow_memory) is None


def test_a_bound_is_met_at_the_bound_and_nan_is_not_measured() -> None:
    assert gpu_report.at_least("x", 0.9, 0.9, "%").met is True
    assert gpu_report.at_least("x", 0.8999, 0.9, "%").met is False
    assert gpu_report.at_least("x", math.nan, 0.9, "%").met is None


def test_a_trace_that_has_seen_nothing_has_measured_nothing() -> None:
    exact = timed(10.0, share=0.9, launches=0, waits=0, to_host=0)
    found = gpu_report.targets({"one": {"candidates": {"amp_mp exact": exact}}})
    assert [t.met for t in found[:2]] == [None, None]


def test_a_table_tells_times_and_errors() -> None:
    entries = {
        "torch fused": timed(20.0, gb_s=3000, share=1.0, launches=30, waits=0, to_host=2),
        "amp_mp exact": timed(10.0, gb_s=3000, share=1.0, ms_quartiles=[9.9, 10.0, 10.1])
        | {"kernel_us": {"amp_mp::cuda::apply": [900.0, 901.26, 903.0]}},
        "flashoptim 24-bit": {"error": "ModuleNotFoundError: No module named 'flashoptim'"},
    }
    content = {"title": "a list", "ceilings": {"copy": 3000.4}, "candidates": entries}
    lines = gpu_report.list_table(content).splitlines()
    assert lines[0] == "a list. GB/s: copy 3000"
    assert " ".join(lines[2].split()) == "torch fused 20.000 20.000 1000 3000 100% 1.00x 30 2"
    assert " ".join(lines[3].split()) == "amp_mp exact 10.000 1% 10.000 1000 3000 100% 2.00x"
    assert lines[4] == "    us: apply 901.3"
    assert lines[5].endswith("No module named 'flashoptim'")
