"""The examples run as they are, with small settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

from train_gpt import Settings, SettingsError, Trainer, plot, train  # noqa: E402

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
    ("precision", "optimizer"),
    [
        ("float32", "torch-adamw"),
        ("float32", "adam"),
        ("bfloat16", "adamw"),
        ("bfloat16", "sgd"),
        ("float16", "adamw"),
    ],
)
def test_resuming_continues_exactly(precision: str, optimizer: str, tmp_path: Path) -> None:
    common = {**SMALL, "precision": precision, "optimizer": optimizer}
    whole = train(Settings(**common))
    path = tmp_path / "run.pt"
    train(Settings(**common, checkpoint=path), until=4)
    resumed = train(Settings(**common, checkpoint=path, resume=True))
    assert resumed.train_loss == whole.train_loss
    assert resumed.validation == whole.validation
    assert resumed.steps_skipped == whole.steps_skipped
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"], "no temporary file is left"


def test_low_precision_keeps_masters_and_float32_keeps_none() -> None:
    for precision, optimizer in (("float32", "adamw"), ("bfloat16", "adamw")):
        trainer = Trainer(Settings(**SMALL, precision=precision, optimizer=optimizer))
        trainer.step()
        masters = sum("master" in state for state in trainer.optimizer.state.values())
        low = sum(p.dtype == torch.bfloat16 for p in trainer.model.parameters())
        assert masters == low
        assert (low > 0) == (precision == "bfloat16")


def test_the_picture_is_written(tmp_path: Path) -> None:
    plot(train(Settings(**SMALL)), tmp_path / "new" / "loss.png")
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "steps must be positive"),
        ({"heads": 3}, "width 32 is not divisible by heads 3"),
        ({"optimizer": "torch-adamw", "precision": "bfloat16"}, "torch-adamw keeps no masters"),
        ({"resume": True}, "resume needs a checkpoint"),
        ({"device": "nonsense"}, "device nonsense cannot be used"),
    ],
    ids=["steps", "heads", "optimizer", "resume", "device"],
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
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, last = (float(x) for x in re.findall(r"loss ([\d.e+-]+)", done.stdout))
    assert last < first / 10
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown
    assert script.read_text().endswith(shown[1])
