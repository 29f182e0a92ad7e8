"""train_gpt.py --parallel under torchrun: the losses of one process, and checkpoints of any."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt import GPT
from gpt_settings import Settings, SettingsError
from gpt_trainer import Trainer
from parallel import Processes
from ranks import LARGE, on_ranks
from tiers import tiered
from train_gpt import train

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {
    "layers": 2,
    "width": 32,
    "batch": 4,
    "context": 16,
    "steps": 6,
    "eval_every": 3,
    "device": "cpu",
}

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]


def run(**settings: Any) -> list[tuple[int, float]]:
    """The validation losses of a run in this process, which may be one of several."""
    return train(Settings(**{**SMALL, **settings})).validation


def losses(processes: int, **settings: Any) -> list[float]:
    """The validation losses, which all processes agree about."""
    found = on_ranks(processes, run, **settings) if processes > 1 else [run(**settings)]
    assert all(each == found[0] for each in found)
    assert [step for step, _ in found[0]] == [3, 6]
    return [loss for _, loss in found[0]]


TORCHS = {"precision": "autocast", "optimizer": "torch-adamw"}
RECIPES = {
    "torch": TORCHS,
    "float32 shards": {"precision": "autocast", "memory": "lean"},
    "exact": {"precision": "bfloat16", "memory": "exact"},
    "tiny": {"precision": "bfloat16", "memory": "tiny"},
}
KINDS = ("ddp", "fsdp", "hsdp", "tp")
CASES = [(k, r) for k in KINDS for r in RECIPES if (k, r) != ("tp", "torch")]
SOME = [("fsdp", "tiny"), ("tp", "tiny"), ("ddp", "exact"), ("fsdp", "float32 shards")]
SOME += [("hsdp", "torch")]
RESUMED = [(1, "none"), (2, "hsdp"), (2, "tp"), (2, "ddp"), (4, "fsdp")]


@pytest.mark.parametrize(("kind", "recipe"), CASES if LARGE else tiered(SOME, []))
def test_two_processes_train_as_one(kind: str, recipe: str) -> None:
    alone = losses(1, **RECIPES[recipe])
    # Two halves of a batch add up in another order, and blocks of float32 shards compute in
    # bfloat16 where torch.autocast keeps the residual stream in float32.
    assert losses(2, **RECIPES[recipe], parallel=kind) == pytest.approx(alone, abs=0.002)


def test_a_checkpoint_is_resumed_by_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    whole = losses(2, parallel="fsdp")
    on_ranks(2, interrupted, path)
    for processes, kind in RESUMED if LARGE else RESUMED[1:2]:
        copy = shutil.copytree(path, tmp_path / f"{processes} {kind}")
        resumed = losses(processes, parallel=kind, checkpoint=copy, resume=True)
        assert resumed[0] == whole[0], "from the file"
        assert resumed[1] == pytest.approx(whole[1], abs=0.002), kind


def interrupted(path: Path) -> None:
    """A run that stops after four of its six steps."""
    train(Settings(**SMALL, parallel="fsdp", checkpoint=path), until=4)


def test_a_process_holds_its_part() -> None:
    wanted = held()
    for found in on_ranks(2, held, parallel="fsdp"):
        assert found == pytest.approx(wanted / 2, rel=0.02)


def held(**settings: Any) -> int:
    """Bytes of weights, gradients and state after a step."""
    trainer = Trainer(Settings(**{**SMALL, **settings}))
    trainer.step()
    return trainer.training_bytes()


@pytest.mark.full
def test_torchrun_starts_it_and_one_process_prints() -> None:
    """Two processes of a command line, with a process group of their own."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = [str(ROOT / "examples/train_gpt.py"), "--parallel=ddp", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *command, *script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"validation loss [\d.]+ after 6 steps", done.stdout)) == 1
    assert done.stderr.count("0/6") == 1, "one progress bar"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parallel": "fsdp"}, "parallel fsdp needs torchrun: torchrun --nproc_per_node 2"),
        ({"parallel": "zero"}, "parallel must be one of none, ddp, fsdp, hsdp, tp"),
        ({"replicas": 0}, "replicas must be positive"),
        (
            {"parallel": "tp", "optimizer": "torch-adamw", "precision": "float32"},
            "torch-adamw cannot mix",
        ),
    ],
    ids=["alone", "kind", "replicas", "torch with tp"],
)
def test_bad_settings_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Trainer(Settings(**{**SMALL, **changed}))


def test_parts_of_a_batch_are_the_batch() -> None:
    batch = torch.arange(12).view(6, 2)
    parts = [Processes("fsdp", rank, 3, rank).own(batch) for rank in range(3)]
    assert torch.equal(torch.cat(parts), batch)
    assert torch.equal(Processes("tp", 1).own(batch), batch)
    model = GPT(1, 8, 2, 4)
    assert Processes().wrap(model) is model
