"""The examples run as they are, with small settings."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Script, run_each
from progress import Bar
from train_gpt import Settings, SettingsError, Trainer, plot, train

from amp_mp import _C

ROOT = Path(__file__).resolve().parents[2]
# Not an import statement: the linter would sort it differently once the demo has made demo/.
demo = importlib.import_module("demo")

SMALL: dict[str, Any] = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "batch": 4,
    "context": 16,
    "steps": 6,
    "eval_every": 3,
    "device": "cpu",
}


@pytest.mark.parametrize(
    ("precision", "optimizer", "memory"),
    [
        ("float32", "torch-adamw", "float32"),
        ("float32", "adam", "float32"),
        ("autocast", "torch-adamw", "float32"),
        ("bfloat16", "adamw", "float32"),
        ("bfloat16", "adamw", "micro"),
        ("bfloat16", "sgd", "exact"),
        ("float16", "adamw", "float32"),
    ],
)
def test_resuming_continues_exactly(
    precision: str, optimizer: str, memory: str, tmp_path: Path
) -> None:
    common = {**SMALL, "precision": precision, "optimizer": optimizer, "memory": memory}
    whole = train(Settings(**common))
    path = tmp_path / "run.pt"
    train(Settings(**common, checkpoint=path), until=4)
    resumed = train(Settings(**common, checkpoint=path, resume=True))
    assert resumed.train_loss == whole.train_loss
    assert resumed.validation == whole.validation
    assert resumed.steps_skipped == whole.steps_skipped
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"], "no temporary file is left"


def test_a_finished_run_goes_on_with_more_steps_and_says_so_without(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    short = train(Settings(**{**SMALL, "steps": 2}, checkpoint=path))
    with pytest.raises(SettingsError, match="has all its steps, 2: raise steps"):
        train(Settings(**{**SMALL, "steps": 2}, checkpoint=path, resume=True))
    longer = train(Settings(**{**SMALL, "steps": 4}, checkpoint=path, resume=True))
    assert len(longer.train_loss) == 4
    assert longer.train_loss[:2] == short.train_loss


def test_low_precision_keeps_masters_and_float32_keeps_none() -> None:
    for precision, optimizer in (("float32", "adamw"), ("bfloat16", "adamw")):
        trainer = Trainer(Settings(**SMALL, precision=precision, optimizer=optimizer))
        trainer.step()
        masters = sum("remainder16" in state for state in trainer.optimizer.state.values())
        low = sum(p.dtype == torch.bfloat16 for p in trainer.model.parameters())
        assert masters == low
        assert (low > 0) == (precision == "bfloat16")


def steps_take(patch: pytest.MonkeyPatch, seconds: dict[str, list[float]]) -> list[str]:
    """Steps of the demo's arms report these times, and from the last one on that one.

    The list that is returned gets the name of each step's arm.
    """
    names = {arm["precision"]: name for name, arm in demo.ARMS.items()}
    taken: list[str] = []

    def timed(trainer: Trainer) -> float:
        loss = step(trainer)
        taken.append(names[trainer.settings.precision])
        own, times = seconds[taken[-1]], trainer.run.step_seconds
        times[-1] = own[min(len(times), len(own)) - 1]
        return loss

    step = Trainer.step
    patch.setattr(Trainer, "step", timed)
    return taken


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        (
            ["amp_mp"],
            "stopped after 3 steps, 0.11 times the steps per second "
            "(0.11 times those of torch.autocast)",
        ),
        (
            ["torch.autocast"],
            "{:+.2f} % validation loss, 1.00 times the steps per second "
            "(9.00 times those of torch.autocast, stopped after 3 steps)",
        ),
        (
            ["torch.autocast", "amp_mp"],
            "stopped after 3 steps, 0.11 times the steps per second "
            "(1.00 times those of torch.autocast, stopped after 3 steps)",
        ),
    ],
    ids=["amp_mp", "torch.autocast", "both"],
)
def test_the_demo_stops_hopeless_arms_and_says_what_it_measured(
    slow: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    taken = steps_take(monkeypatch, {name: [9.0 if name in slow else 1.0] for name in demo.ARMS})
    small = {name: value for name, value in SMALL.items() if name not in ("steps", "device")}
    monkeypatch.setattr(demo, "Settings", partial(Settings, **small))
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    captions: list[str] = []
    draw = demo.draw
    monkeypatch.setattr(demo, "draw", lambda *given: captions.append(given[1]) or draw(*given))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--steps", "6"])
    monkeypatch.setenv("COLUMNS", "110")
    chosen = _C.products.choice(torch.bfloat16)
    demo.main()
    assert _C.products.choice(torch.bfloat16) == chosen

    results = json.loads((tmp_path / "result.json").read_text())
    for name, found in results.items():
        stopped = name in slow
        assert taken.count(name) == (3 if stopped else 6)
        assert found.get("stopped_after_steps") == (3 if stopped else None)
        assert ("validation_loss" in found) == ("difference_percent" in found) == (not stopped)
        assert found["step_milliseconds"] == found["from"] == found["to"]
        assert found["speed_up"] == (1 / 9 if stopped else 1)
    out, progress = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    by_title = {row[0]: row[1:] for row in rows if row}
    for title in ("validation loss, nats per byte", "difference to float32"):
        cells = zip(results, by_title[title], strict=True)
        assert [name for name, cell in cells if cell == "stopped"] == slow
    times = ["9000.0 ms" if name in slow else "1000.0 ms" for name in results]
    assert by_title["median time per step"] == times
    assert "stopped: after 3 steps, all slower than 5 times float32's fastest" in out
    difference = results["amp_mp"].get("difference_percent")
    sentence = "amp_mp against float32: " + said.format(difference)
    assert captions == [sentence]
    assert sentence in out.splitlines()
    assert "100%" in progress
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_stops_no_arm_for_slow_steps_among_fast_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"float32": [1.0], "torch.autocast": [20.0, 20.0, 1.5], "amp_mp": [20.0, 1.5, 20.0]}
    taken = steps_take(monkeypatch, times)
    trainers = demo.compare(**SMALL)
    assert [trainer.steps_done for trainer in trainers.values()] == [6, 6, 6]
    assert taken[:9] == [*demo.ARMS] * 3, "what slows the machine meets all arms"


def test_the_demo_compares_three_arms_on_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_take(monkeypatch, {name: [1.0] for name in demo.ARMS})
    trainers = demo.compare(**SMALL)
    assert list(trainers) == ["float32", "torch.autocast", "amp_mp"]
    results = {name: demo.measurements(t, trainers["float32"]) for name, t in trainers.items()}
    first = [trainer.run.train_loss[0] for trainer in trainers.values()]
    assert first == pytest.approx([first[0]] * 3, abs=2.0**-7), "the same weights and batches"
    assert len({trainer.run.train_loss[-1] for trainer in trainers.values()}) == 3
    # float32: weight, two moments, gradient, 4 bytes each; torch's steps are a number a tensor.
    tensors = len(list(trainers["float32"].model.parameters()))
    parameters = sum(p.numel() for p in trainers["float32"].model.parameters())
    for name in ("float32", "torch.autocast"):
        assert results[name]["bytes_per_parameter"] == 16 + 4 * tensors / parameters
        assert {p.dtype for p in trainers[name].model.parameters()} == {torch.float32}
    assert results["amp_mp"]["bytes_per_parameter"] < 16
    demo.draw({name: t.run for name, t in trainers.items()}, "caption", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_written(tmp_path: Path) -> None:
    plot(train(Settings(**SMALL)), tmp_path / "new" / "loss.png")
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "steps must be positive"),
        ({"heads": 3}, "width 32 is not divisible by heads 3"),
        ({"optimizer": "torch-adamw", "precision": "bfloat16"}, "torch-adamw keeps no masters"),
        ({"memory": "fast"}, "memory must be one of float32, exact, lean, tiny, micro, nano"),
        ({"resume": True}, "resume needs a checkpoint"),
        ({"device": "nonsense"}, "device nonsense cannot be used"),
    ],
    ids=["steps", "heads", "optimizer", "memory", "resume", "device"],
)
def test_bad_settings_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        train(Settings(**{**SMALL, **changed}))


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    train(Settings(**SMALL, checkpoint=path), until=1)
    with pytest.raises(SettingsError, match="width 32, this run 64"):
        train(Settings(**{**SMALL, "width": 64}, checkpoint=path, resume=True))


@pytest.mark.slow
def test_the_minimal_script_learns_and_is_what_the_readme_shows() -> None:
    script = ROOT / "examples/minimal.py"
    (done,) = run_each([Script([str(script)])])
    assert done.returncode == 0, done.stderr
    first, last = (float(x) for x in re.findall(r"loss ([\d.e+-]+)", done.stdout))
    assert last < first / 10
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown
    assert script.read_text().endswith(shown[1])


@pytest.mark.parametrize("watched", [True, False])
def test_a_log_gets_a_line_for_each_ten_per_cent(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: watched)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched)
    log = io.StringIO()
    with Bar(total=750, file=log, mininterval=0) as bar:
        for step in range(750):
            bar.set_description(f"loss {step}", refresh=step % 10 == 0)
            bar.update()
            bar.set_postfix_str("about 01:00 left")
    written = log.getvalue()
    if watched:
        assert written.count("\r") > 100
        return
    assert "\r" not in written
    shares = [line.split("%")[0].rpartition(" ")[2] for line in written.split("\n") if line]
    assert shares == [str(share) for share in range(0, 101, 10)]
