"""benchmarks/moments/moment_formats.py: its simulations, and what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import moment_formats
import numpy as np
import pytest
import torch
from moment_codes import random_bytes
from moment_simulations import Adam, Setting, constant, drop, stopped, stored_error, unequal
from simulated_formats import FORMATS

SMALL = Setting(rows=64, steps=150, seed=0)


def nothing(ticks: int = 1) -> None:
    pass


# ---- simulations ---------------------------------------------------------------------------------


def test_adam_is_torchs() -> None:
    source = np.random.default_rng(0)
    weight = torch.zeros(256, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1, betas=(0.9, 0.95))
    exact = Adam(None, None, 256, 0.95)
    for _ in range(20):
        gradient = source.standard_normal(256).astype(np.float32)
        before = weight.detach().clone()
        weight.grad = torch.from_numpy(gradient.astype(np.float64))
        optimizer.step()
        moved = (before - weight.detach()).numpy()
        np.testing.assert_allclose(
            exact.step(gradient, random_bytes(source, 256)), moved, atol=1e-14
        )


def test_with_unequal_elements_micro_stays_near_exact_adam_and_linear_roots_do_not() -> None:
    formats = [FORMATS[name] for name in ("exact", "lean", "tiny", "micro", "FlashOptim")]
    found = unequal(formats, SMALL, 0.999, 2.0, nothing)
    assert found["exact"]["largest"] == pytest.approx(1, abs=1e-5)
    assert found["exact"]["nmse"] < 1e-10
    assert found["lean"]["largest"] < 1.05
    assert found["micro"]["largest"] < 2
    assert found["micro"]["nmse"] < 0.1
    assert found["FlashOptim"]["largest"] > 100
    equal = unequal(formats, SMALL, 0.999, 0.0, nothing)
    assert max(result["largest"] for result in equal.values()) < 1.5


def test_a_formats_results_do_not_depend_on_which_others_run() -> None:
    alone = unequal([FORMATS["micro"]], SMALL, 0.95, 1.0, nothing)
    together = unequal([FORMATS["tiny"], FORMATS["micro"]], SMALL, 0.95, 1.0, nothing)
    assert alone["micro"] == together["micro"]


@pytest.mark.full
def test_second_moments_follow_a_tenfold_drop_also_with_8_bits_and_beta2_of_999() -> None:
    """A store that leans by 2e-4 to one side would make them a fifth too small or too large."""
    formats = [FORMATS[name] for name in ("lean", "micro")]
    found = drop(formats, SMALL, 0.999, (2800, 6000), nothing)
    for result in found.values():
        assert result["mean"] == pytest.approx(1, abs=0.02)
        assert result["settled_mean"] == pytest.approx(1, abs=0.02)
        assert result["settled_sd"] < result["sd"]
    assert found["lean"]["sd"] == pytest.approx(0.064, rel=0.1)
    assert found["micro"]["sd"] == pytest.approx(0.31, rel=0.1)


def test_updates_stay_small_where_gradients_stop_unless_v_becomes_zero() -> None:
    formats = [FORMATS[name] for name in ("exact", "micro", "FlashOptim")]
    found = stopped(formats, SMALL, 0.95, nothing)
    assert found["exact"]["largest"] == pytest.approx(found["exact"]["exact"], rel=1e-3)
    assert found["exact"]["exact"] < 0.3  # with gradients it would be above 2
    assert found["micro"]["largest"] < 3 * found["micro"]["exact"]
    assert found["FlashOptim"]["largest"] > 100


def test_a_constant_gradient_leaves_moments_where_they_belong() -> None:
    formats = [FORMATS[name] for name in ("exact", "lean", "tiny", "micro")]
    for result in constant(formats, SMALL, 0.95, 300, nothing).values():
        assert result["first"] == pytest.approx(1, abs=2e-3)
        assert result["square"] == pytest.approx(1, abs=2e-3)


def test_errors_of_first_moments_are_those_of_one_store() -> None:
    formats = [FORMATS[name] for name in ("exact", "lean", "tiny", "FlashOptim")]
    found = stored_error(formats, SMALL, 0.0, 5, nothing)
    assert found["exact"]["nmse"] == 0
    # Stochastic rounding of a number f of the way between two neighbours has a variance of
    # f (1 - f), 1/6 on average, of their distance; bfloat16's are 2^-7 to 2^-8 of a number apart.
    assert 2.0**-16 / 6 < found["lean"]["nmse"] < 2.0**-14 / 6
    assert found["lean"]["nmse"] < found["FlashOptim"]["nmse"] < found["tiny"]["nmse"] < 1e-3


# ---- the program ---------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.slow
def test_a_quick_run_prints_every_format_and_writes_figures_and_picture(tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    command = [sys.executable, moment_formats.__file__, "--quick", "--beta2", "0.95"]
    done = subprocess.run(
        [*command, "--json", str(figures), "--picture", str(picture)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(figures.read_text())
    assert list(content["formats"]) == list(FORMATS)
    assert content["settings"]["rows"] == moment_formats.QUICK["rows"]
    kinds = ("unequal", "drop", "stopped", "constant", "stored_error")
    for kind in kinds:
        records = [each for each in content["records"] if each["simulation"] == kind]
        per_format = len(moment_formats.LOG_SDS) if kind in ("unequal", "stored_error") else 1
        assert len(records) == per_format * len(FORMATS), kind
    summary = done.stdout[done.stdout.index("Summary, beta2 = 0.95") :]
    for name in FORMATS:
        assert summary.count(f"│ {name} ") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "12"], "--rows must be a multiple of 8, found 12"),
        (["--steps", "3"], "--steps must be at least 50, found 3"),
        (["--seeds", "0"], "--seeds must be at least 1, found 0"),
        (["--beta2", "1.5"], "--beta2 must be between 0 and 1, found 1.5"),
        (["--only", "nano"], "invalid choice: 'nano'"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        moment_formats.parsed(arguments)
    assert message in capsys.readouterr().err
