"""The comparison of storage formats: "exact" gives a float32 reference's bits in both its jobs."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import finetune_task
import formats
import numpy as np
import pytest
import torch
from finetune_task import FineTune, telephone, weights_path
from formats import JOBS, Job, Run, begin, gpt, summary, table, train
from gpt_trainer import MAX_GRAD_NORM
from progress import Bar
from reference_adamw import ReferenceAdamW, away_from_zero
from torch import Tensor, nn

SMALL: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "batch": 4, "context": 16}
STEPS = 12
# What a bfloat16 cannot decide by distance; prepare rounds them to even, the optimizer away from 0.
TIES = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, -1 - 3 * 2.0**-8])


def gpt_with_ties(seed: int, steps: int) -> Any:
    task = gpt(seed, steps, **SMALL)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.view(-1)[:4] = TIES
    return task


def small_gpt() -> Job:
    return replace(JOBS["gpt"], begin=gpt_with_ties)


def small_finetune() -> Job:
    try:
        weights_path()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return replace(JOBS["finetune"], begin=functools.partial(FineTune, batch=8, held_out=32))


@pytest.mark.parametrize("job", [small_gpt, small_finetune], ids=["gpt", "finetune"])
def test_exact_is_the_reference_bit_for_bit(job: Any) -> None:
    chosen = job()
    with Bar(disable=True) as bar:
        runs = {arm: train(chosen, arm, 3, STEPS, bar) for arm in ("reference", "exact")}
    wanted, found = runs["reference"], runs["exact"]
    assert found.train_loss == wanted.train_loss
    assert found.validation_loss == wanted.validation_loss
    assert found.accuracy == wanted.accuracy
    assert summary({arm: [run] for arm, run in runs.items()})["exact"]["passed"]
    assert found.train_loss[-1] != found.train_loss[0]
    assert found.start == wanted.start > found.validation_loss
    assert found.size < wanted.size


@pytest.mark.parametrize("arm", ["lean", "tiny", "micro", "nano", "masterless", "nearest"])
def test_low_bit_arms_train_and_are_smaller(arm: str) -> None:
    with Bar(disable=True) as bar:
        wanted, found, again = (
            train(small_gpt(), each, 3, STEPS, bar) for each in ("exact", arm, arm)
        )
    assert found.train_loss[-1] < found.train_loss[0]
    assert found.size < wanted.size
    assert found.train_loss == again.train_loss, "the seed decides the rounding"


def test_muons_arms_differ_in_how_matrices_store_momentum() -> None:
    """Embeddings, the head and vectors take AdamW, with the job's betas."""
    job = replace(JOBS["muon_64"], begin=functools.partial(gpt, **SMALL))
    stored, losses = {}, {}
    for arm in job.arms:
        task = begin(job, arm, 3, STEPS)
        losses[arm] = [task.step() for _ in range(STEPS)]
        block, head = task.model.blocks[0].qkv.weight, task.model.head.weight
        stored[arm] = sorted(name for name in task.optimizer.state[block] if "momentum" in name)
        assert "exp_avg_sq" in " ".join(task.optimizer.state[head])
        for group in task.optimizer.param_groups:
            assert group["use_muon"] or group["betas"] == job.betas
        assert losses[arm][-1] < losses[arm][0]
    assert stored["exact"] == stored["lean"] == ["momentum_buffer"]
    assert stored["micro, m8"] == ["momentum_buffer_m8", "momentum_buffer_m8_scale"]
    for arm in ("micro", "nano"):
        assert stored[arm] == ["momentum_buffer_i8", "momentum_buffer_i8_scale"]
    assert len(set(map(tuple, losses.values()))) == len(job.arms)


def test_a_model_trained_further_starts_where_the_training_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "TRAINED_STEPS", 5)
    formats.trained.cache_clear()
    try:
        rates = {}
        for name in ("further", "further_1e-6", "further_1e-5"):
            task = JOBS[name].begin(0, STEPS)
            rates[name] = task.settings.lr
            for key, weight in task.model.state_dict().items():
                assert torch.equal(weight, formats.trained()[key])
    finally:
        formats.trained.cache_clear()
    assert rates == {"further": 6e-7, "further_1e-6": 1e-6, "further_1e-5": 1e-5}


def test_masters_alone_follow_worse_with_fewer_bits_and_at_smaller_rates() -> None:
    moved = formats.masters_alone(50)
    for each in moved.values():
        errors = [error for error, _ in each.values()]  # from the largest rate to the smallest
        assert errors == sorted(errors)
        assert each["0.0001"][1] == pytest.approx(1, abs=0.01)
    for rate in moved["split24"]:
        assert 4 < moved["split20"][rate][0] / moved["split24"][rate][0] < 64


def test_the_reference_is_torchs_adamw() -> None:
    """In float32 the formulas differ in where they round: some 2^-24 of a weight in each step."""
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(40, 3)), nn.Parameter(torch.randn(7))]
    second = [nn.Parameter(p.detach().clone()) for p in first]

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        decays = (0.01, 0.0)
        return [
            {"params": [p], "weight_decay": d, "lr": 1e-2}
            for p, d in zip(parameters, decays, strict=True)
        ]

    reference, twin = ReferenceAdamW(groups(first), {}), torch.optim.AdamW(groups(second))
    for step in range(30):
        for mine, theirs in zip(first, second, strict=True):
            mine.grad = torch.randn_like(mine) * (0.01 if step % 3 else 1.0)
            theirs.grad = mine.grad.clone()
        nn.utils.clip_grad_norm_(second, MAX_GRAD_NORM)
        reference.step()
        twin.step()
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_weights_are_rounded_to_nearest_and_ties_away_from_zero() -> None:
    up = torch.tensor([1 + 2.0**-7, 1 + 2.0**-6])
    assert torch.equal(away_from_zero(TIES).float(), torch.cat([up, -up]))
    others = torch.randn(1000) * 10.0 ** torch.randint(-30, 30, (1000,))
    others = others[(others.view(torch.int32) & 0xFFFF) != 0x8000]
    assert torch.equal(away_from_zero(others), others.bfloat16())


def test_the_verdict_counts_bytes_and_measures_in_spreads() -> None:
    def runs(losses: list[float], weight: float) -> list[Run]:
        weights: list[Tensor] = [torch.tensor([weight]).bfloat16()]
        return [Run([1.0], loss, 2.0, [], 1.0, weights) for loss in losses]

    reference = runs([1.0, 1.5, 1.25], 1.0)
    good = {"reference": reference, "exact": runs([1.0, 1.5, 1.25], 1.0)}
    good |= {"lean": runs([1.5, 1.0, 1.25], 1.0), "tiny": runs([0.0, 1.5, 1.25], 1.0)}
    good |= {"micro": good["tiny"], "nano": good["lean"]}
    rows = summary(good)
    assert all(row["passed"] for row in rows.values())
    assert rows["reference"]["spread"] == 0.5
    assert rows["reference"]["deviation"] == 0.25
    assert rows["tiny"]["to_reference"] == rows["micro"]["to_reference"] == 1.0
    assert rows["tiny"]["differences"] == [-1.0, 0.0, 0.0]
    assert rows["tiny"]["mean_difference"] == -1 / 3
    assert rows["lean"]["differences"] == [0.5, -0.5, 0.0]
    assert rows["lean"]["start"] == [2.0, 2.0, 2.0]
    columns = {column.header: list(column.cells) for column in table(JOBS["long"], rows).columns}
    assert columns["of each seed"][2:4] == [
        "+0.50000 -0.50000 +0.00000",
        "-1.00000 +0.00000 +0.00000",
    ]
    assert columns["difference"][:4] == ["", "+0.00000", "+0.00000", "-0.33333"]
    assert columns["gained"][0] == "0.75000"
    bad = {"reference": reference, "exact": runs([1.0, 1.5, 1.25], 1 + 2.0**-7)}
    bad |= {"lean": runs([1.625, 1.5, 1.25], 1.0), "tiny": runs([1.0, 2.625, 1.25], 1.0)}
    bad |= {"micro": bad["tiny"], "nano": bad["lean"]}
    rows = summary(bad)
    assert not any(rows[arm]["passed"] for arm in ("exact", "lean", "tiny", "micro", "nano"))
    assert rows["exact"]["differing_bytes"] == [1, 1, 1]


def test_frames_have_the_pitch_they_say_and_no_sound_outside_the_band() -> None:
    """A quiet voice's spectrum has its peaks at multiples of the pitch, from 300 to 3400 Hz."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune_task, "LOUDEST_NOISE", 60.0)
        patch.setattr(finetune_task, "FAINTEST_NOISE", 60.0)
        sound, cents = telephone(50, np.random.default_rng(0))
    assert sound.shape == (50, finetune_task.FRAME)
    torch.testing.assert_close(sound.mean(1), torch.zeros(50), rtol=0, atol=1e-5)
    torch.testing.assert_close(sound.std(1), torch.ones(50), rtol=0, atol=1e-5)
    power = torch.fft.rfft(sound * torch.hann_window(finetune_task.FRAME)).abs() ** 2
    hertz = torch.fft.rfftfreq(finetune_task.FRAME, 1 / finetune_task.RATE)
    outside = (hertz < 150) | (hertz > 4200)
    assert (power[:, outside].sum(1) / power.sum(1)).max() < 0.02
    pitch = 10 * 2 ** (cents / 1200)
    harmonic = hertz[power.argmax(1)] / pitch
    # A bin is 16 Hz wide, and the vibrato's 50 cents are 3 % of the harmonic's frequency.
    assert ((harmonic - harmonic.round()).abs() < 10 / pitch + 0.03 * harmonic).all()


def test_fine_tuning_finds_more_pitches() -> None:
    small_finetune()
    job = replace(JOBS["finetune"], begin=functools.partial(FineTune, batch=32, held_out=256))
    with Bar(disable=True) as bar:
        before, after = train(job, "reference", 0, 20, bar).accuracy
    assert 0.7 < before < 0.9
    assert after > before + 0.03


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune_task, "PACKAGE", "no-such-package-anywhere")
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps no-such-package-anywhere"):
        weights_path()


@pytest.mark.usefixtures("_threads_are_left_as_they_were")
def test_it_prints_a_table_and_saves_a_picture_and_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(formats.JOBS, "gpt", small_gpt())
    folder = tmp_path / "new"
    formats.main(["--job=gpt", "--seeds=2", "--steps=2", "--threads=1", f"--out={folder}"])
    assert (folder / "formats_gpt.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((folder / "formats_gpt.json").read_text())
    assert list(rows) == list(formats.JOBS["gpt"].arms)
    assert rows["exact"]["differing_bytes"] == [0, 0]
    assert all(math.isfinite(loss) for row in rows.values() for loss in row["validation_loss"])
    printed = capsys.readouterr().out
    assert all(arm in printed for arm in rows)
    formats.main(["--job=masters", "--steps=2", "--threads=1", f"--out={folder}"])
    numbers = json.loads((folder / "formats_masters.json").read_text())
    printed = capsys.readouterr().out
    assert all(f"{rate:g}" in printed and len(numbers) == 2 for rate in formats.RATES)
    assert all(form in printed for form in numbers)
