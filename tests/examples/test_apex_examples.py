"""Apex's examples: with and without FP16_Optimizer they train the same in float32."""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LOSES_UPDATES, warns
from torch import Tensor, nn

import amp_mp as amp

APEX = Path(__file__).resolve().parents[2] / "examples" / "apex"
SCRIPTS = ["minimal", "closure", "save_load", "distributed", "imagenet", "word_language_model"]
LOW = ["bfloat16", "float16"]

Runner = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs a script with its options; returns its global names, losses and model among them."""

    def script(name: str, *options: str) -> dict[str, Any]:
        path = str(APEX / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *options])
        monkeypatch.setattr(sys, "path", list(sys.path))  # what it adds is not for other tests
        return runpy.run_path(path, run_name="__main__")

    return script


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_lines_make_a_plain_script_a_mixed_precision_one(name: str) -> None:
    text = re.sub(r"^ *#.*\n", "", (APEX / f"{name}.py").read_text(), flags=re.MULTILINE)
    assert text.count("args.plain") == 2
    assert re.search(
        r" = torch\.optim(?s:.)*if not args.plain:\n +optimizer = amp.FP16_Opt.*\n", text
    )
    two = r"if args.plain:\n +loss.backward\(\)\n +else:\n +optimizer.backward\(loss\)\n"
    assert re.search(two, text)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("minimal", []),
        ("closure", []),
        ("save_load", ["--steps=20"]),
        ("imagenet", ["--epochs=1", "--images=1024"]),
    ],
)
def test_fp16_optimizer_leaves_a_float32_model_bit_for_bit_what_it_was(
    run: Runner, name: str, options: list[str]
) -> None:
    """A scale that is a power of two comes and goes without rounding anything."""
    plain, mixed = run(name, "--plain", *options), run(name, *options)
    assert isinstance(mixed["optimizer"], amp.FP16_Optimizer)
    assert not isinstance(plain["optimizer"], amp.FP16_Optimizer)
    assert mixed["losses"] == plain["losses"]
    for (key, found), (_, wanted) in zip(
        mixed["model"].state_dict().items(), plain["model"].state_dict().items(), strict=True
    ):
        assert torch.equal(found, wanted), key


# A linear layer.


def follows(found: list[float], wanted: list[float], dtype: str) -> bool:
    """Whether losses of the linear layer are float32's but for its dtype's rounding.

    With u = eps / 2, the largest relative error of a rounding: rounded inputs change the rates at
    which residuals decay by about u, and so a loss that has decayed by e^-k by k u; rounded weights
    change it by u. Twice that, as several things are rounded. What rounding a prediction of about
    1 adds to a loss is at most u^2, and as much again where weights are rounded.
    """
    u = torch.finfo(getattr(torch, dtype)).eps / 2
    return all(
        abs(a - b) <= 2 * u * b * (1 + math.log(max(1.0, wanted[0] / b))) + 2 * u**2
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("dtype", LOW)
def test_minimal_follows_float32_and_plain_it_does_not(run: Runner, dtype: str) -> None:
    wanted = run("minimal", "--plain")["losses"]
    mixed = run("minimal", "--dtype", dtype)
    assert wanted[-1] < wanted[0] / 1000
    assert follows(mixed["losses"], wanted, dtype)
    with warns(LOSES_UPDATES):
        plain = run("minimal", "--plain", "--dtype", dtype)
    assert not follows(plain["losses"], wanted, dtype)

    assert mixed["x"].shape == (64, 1024)
    assert mixed["y"].shape == (64, 16)
    assert len(mixed["losses"]) == 200
    optimizer = mixed["optimizer"]
    assert isinstance(optimizer, amp.FP16_Optimizer)
    assert isinstance(optimizer.optimizer, torch.optim.SGD)
    assert optimizer.loss_scale == 128
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (1e-3, 0.9)


@pytest.mark.parametrize("dtype", LOW)
def test_closure_goes_as_far_down_as_its_dtype_can_tell_apart(run: Runner, dtype: str) -> None:
    """In float32 the loss goes to 0; else what is left is the rounding of weights and outputs.

    Either is uniform, of variance u^2 / 3 or less, relative to what is rounded, and sums up to that
    of the targets, 1.
    """
    wanted = run("closure", "--plain")["losses"]
    mixed = run("closure", "--dtype", dtype)
    u = torch.finfo(getattr(torch, dtype)).eps / 2
    assert len(mixed["losses"]) == 5
    assert isinstance(mixed["optimizer"].optimizer, torch.optim.LBFGS)
    assert mixed["optimizer"].loss_scale == 128
    assert wanted[-1] < 1e-8
    assert mixed["losses"][-1] < 2 / 3 * u**2


@pytest.mark.parametrize("dtype", ["float32", *LOW])
@pytest.mark.parametrize("plain", [(), ("--plain",)])
def test_a_loaded_run_goes_on_bit_for_bit(run: Runner, plain: tuple[str, ...], dtype: str) -> None:
    with warns(LOSES_UPDATES, bool(plain) and dtype != "float32"):
        end = run("save_load", *plain, "--dtype", dtype)
    assert end["losses"] == end["unbroken"]
    assert len(end["losses"]) == 200
    if not plain:
        assert follows(end["losses"], run("minimal", "--plain")["losses"], dtype)


# Two processes.

DISTRIBUTED_STEPS = 60


def ranks(dtype: str, folder: Path, *plain: str) -> list[dict[str, Any]]:
    """What each of the two processes saved."""
    folder.mkdir(exist_ok=True)
    options = [*plain, f"--dtype={dtype}", f"--steps={DISTRIBUTED_STEPS}", f"--save={folder}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(APEX / "distributed.py"), *options]
    subprocess.run(command, env=environment, check=True, timeout=300)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def plain_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Without FP16_Optimizer, in float32."""
    return ranks("float32", tmp_path_factory.mktemp("plain"), "--plain")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("apex_ranks")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_two_processes_agree_bit_for_bit_and_follow_float32(
    plain_ranks: list[dict[str, Any]], dtype: str, tmp_path: Path
) -> None:
    first, second = ranks(dtype, tmp_path / "ranks")
    assert first["losses"] != second["losses"], "each has numbers of its own"
    for name, weight in first["model"].items():
        assert weight.dtype == getattr(torch, dtype)
        assert torch.equal(weight, second["model"][name]), name
    for found, wanted in zip((first, second), plain_ranks, strict=True):
        assert wanted["losses"][-1] < wanted["losses"][0] / 2
        assert follows(found["losses"], wanted["losses"], dtype)
        if dtype == "float32":
            assert found["losses"] == wanted["losses"]


# Larger networks.


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW)
def test_imagenet_reaches_the_accuracy_of_float32(run: Runner, dtype: str) -> None:
    """Of 2,048 digits about 96 % are found, to which chance adds +-0.4 points; twice, hence 2."""
    options = ["--epochs=3", f"--images={2048 if dtype == 'float16' else 4096}"]
    wanted = run("imagenet", "--plain", *options)
    mixed = run("imagenet", *options, "--dtype", dtype)
    assert wanted["top1"] > 92
    assert abs(mixed["top1"] - wanted["top1"]) < 2
    group = mixed["optimizer"].param_groups[0]
    assert group["lr"] == pytest.approx(0.1 * wanted["args"].lr), "the schedule reaches the masters"
    assert all(p.dtype == torch.float32 for p in group["params"])
    for module in mixed["model"].modules():
        wanted_dtype = (
            torch.float32 if isinstance(module, nn.BatchNorm2d) else getattr(torch, dtype)
        )
        assert all(p.dtype == wanted_dtype for p in module.parameters(recurse=False))


LANGUAGE_MODEL = ["--steps=120", "--width=32", "--batch=8"]


def norm_of_gradients(optimizer: amp.FP16_Optimizer) -> Tensor:
    grads = [p.grad for p in optimizer.param_groups[0]["params"]]
    assert all(g.dtype == torch.float32 for g in grads)
    return torch.cat([g.flatten() for g in grads]).norm()


def test_the_language_model_follows_float32(run: Runner) -> None:
    """A relative error of 2^-11 in logits up to 8 is 2^-8 in a loss; so differ the first losses.

    From then on the large steps of this example part any two runs, by how much depends on the
    initial weights, and so on torch's build. It is the mean of the last losses that says whether
    one run is worse: ten times as much is allowed.
    """
    wanted = run("word_language_model", "--plain", *LANGUAGE_MODEL)["losses"]
    mixed = run("word_language_model", "--fp16", *LANGUAGE_MODEL)
    losses = mixed["losses"]
    assert sum(wanted[-20:]) / 20 < wanted[0] - 2
    assert {p.dtype for p in mixed["model"].parameters()} == {torch.float16}
    assert losses[:3] == pytest.approx(wanted[:3], abs=2.0**-8)
    assert sum(losses[-20:]) / 20 == pytest.approx(sum(wanted[-20:]) / 20, abs=10 * 2.0**-8)
    assert norm_of_gradients(mixed["optimizer"]) <= 0.25 * (1 + 1e-6)


def test_the_language_model_with_a_dynamic_scale_finds_one_and_learns(
    run: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = run("word_language_model", "--plain", *LANGUAGE_MODEL)["losses"]
    mixed = run("word_language_model", "--fp16", "--dynamic-loss-scale", *LANGUAGE_MODEL)
    skipped = capsys.readouterr().out.count("[OVERFLOW! Skipping step. Attempted loss scale: ")
    assert skipped > 0
    assert mixed["optimizer"].loss_scale == 2.0 ** (32 - skipped)
    # It is behind by the steps it skipped, so it is where float32 was before as many.
    behind = wanted[-20 - skipped : -skipped]
    assert sum(mixed["losses"][-20:]) / 20 == pytest.approx(sum(behind) / 20, abs=0.1)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_the_steps_and_options_of_its_model(name: str) -> None:
    text = (APEX / f"{name}.py").read_text()
    wanted = {
        "minimal": ["default=200"],
        "closure": ["LBFGS", "default=5,"],
        "save_load": ["default=100", "weights_only=True"],
        "distributed": ["default=500", '"gloo"', "DistributedDataParallel"],
        "imagenet": ['"--epochs"', "lr_scheduler", "top1"],
        "word_language_model": ['"--fp16"', "nn.LSTM", "default=0.25"],
    }
    assert all(each in text for each in wanted[name])
