"""The examples run as they are, with small settings."""

from __future__ import annotations

import importlib
import io
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Script, run_each
from progress import Bar
from train_gpt import Settings, SettingsError, Trainer, plot, train

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


def test_the_demo_stops_arms_that_would_take_an_hour(tmp_path: Path) -> None:
    trainers = demo.compare(**SMALL, slowest=0.0)
    assert [trainer.steps_done for trainer in trainers.values()] == [2, 2, 2]
    results = {name: demo.measurements(t, trainers["float32"]) for name, t in trainers.items()}
    loss, _, median, half, speed_up, _ = zip(
        *(column.cells for column in demo.table(results).columns[1:]), strict=True
    )
    assert loss == ("stopped",) * 3
    assert all(cell.endswith("x") for cell in speed_up)
    for name, cell in zip(trainers, half, strict=True):
        lower, upper = map(float, cell.removesuffix(" ms").split(" to "))
        assert lower <= results[name]["step_milliseconds"] + 1
        assert results[name]["step_milliseconds"] <= upper + 1
    assert all(cell.endswith(" ms") for cell in median)
    demo.draw({name: t.run for name, t in trainers.items()}, "caption", tmp_path / "loss.png")


def test_the_demo_compares_three_arms_on_the_same_batches(tmp_path: Path) -> None:
    trainers = demo.compare(**SMALL, slowest=math.inf)
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
        ({"memory": "fast"}, "memory must be one of float32, exact, lean, tiny, micro"),
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
