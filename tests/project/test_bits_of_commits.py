"""`make same-bits`: what differs between two versions of the package is found and named."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainings
import write_bits
from rules import KINDS, OF_MATRICES, PRESETS, RULES
from torch import Tensor

import amp_mp as amp

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(amp.__file__).parent
sys.path.append(str(ROOT))

from build_tools import same_bits  # noqa: E402


def result(row: str, column: str, **tensors: Tensor) -> Any:
    return row, column, {name: write_bits.bits(tensor) for name, tensor in tensors.items()}


def test_the_table_says_of_each_case_what_it_is() -> None:
    weight = torch.arange(6.0).view(2, 3)
    other = weight.clone()
    other[1, 0] = float(np.nextafter(np.float32(3), np.float32(4)))
    other[1, 2] = -5
    base = [
        result("adamw", "exact", weight=weight, m=weight),
        result("adamw", "lean", weight=weight, m=weight),
        result("sgd", "exact", weight=weight),
        ("sgd", "lean", "ValueError: no"),
        ("lion", "exact", "TypeError: none"),
        result("lion", "lean", weight=weight),
        result("old", "lean", weight=weight),
    ]
    here = [
        result("adamw", "exact", weight=weight, m=weight),
        result("adamw", "lean", weight=weight, m=other),
        result("muon", "lean", weight=weight),
        result("sgd", "exact", weight=weight, m=weight),
        ("sgd", "lean", "ValueError: never"),
        result("lion", "exact", weight=weight),
        ("lion", "lean", "RuntimeError: not now"),
    ]
    words, lines = same_bits.compare(base, here)
    assert same_bits.table(words) == [
        "       exact    lean",
        "adamw  same     DIFFERS",
        "sgd    DIFFERS  error",
        "muon            new",
        "lion   new      gone",
        "old             gone",
    ]
    assert lines == [
        "DIFFERS  adamw, lean: m[1, 0]: 3.0 (0x40400000) in BASE, 3.0000002 (0x40400001) here; "
        "2 of 6",
        "DIFFERS  sgd, exact: m: only in the working tree",
        "error  sgd, lean: ValueError: never",
        "new  lion, exact: BASE raises TypeError: none",
        "gone  lion, lean: the working tree raises RuntimeError: not now",
    ]


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0), "[]: 0.0 (0x00000000) in BASE, -0.0 (0x80000000)"),
        (
            torch.tensor([1.0, 1.0]).bfloat16(),
            torch.tensor([1.0, 1.0078125]).bfloat16(),
            "[1]: 1.0 (0x3f80) in BASE, 1.0078125 (0x3f81) here; 1 of 2",
        ),
        (torch.zeros(2), torch.zeros(2).half(), ": float32 (2,) in BASE, float16 (2,) here"),
        (torch.zeros(2), torch.zeros(2, 1), ": float32 (2,) in BASE, float32 (2, 1) here"),
    ],
    ids=["signs of zero", "bfloat16", "dtypes", "shapes"],
)
def test_the_first_difference_is_named(one: Tensor, other: Tensor, text: str) -> None:
    found = same_bits.first_difference({"w": write_bits.bits(one)}, {"w": write_bits.bits(other)})
    assert found.startswith(f"w{text}")


def test_equal_nans_are_the_same_and_others_are_not() -> None:
    nan, other = (torch.tensor([bits]).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert same_bits.judge({"w": write_bits.bits(nan)}, {"w": write_bits.bits(nan)})[0] == "same"
    assert same_bits.judge({"w": write_bits.bits(nan)}, {"w": write_bits.bits(other)})[0] == (
        "DIFFERS"
    )


def test_a_base_that_is_no_commit_is_one_sentence() -> None:
    with pytest.raises(SystemExit, match=r"^BASE=nowhere is no commit, branch or tag of this"):
        same_bits.commit_of("nowhere")


def test_every_optimizer_wrapper_and_rule_has_a_case_in_every_format() -> None:
    cases = [(row, column) for row, column, _ in trainings.cases()]
    rows = dict.fromkeys(row for row, _ in cases)
    assert {row for row in rows if row.endswith("()")} == {f"{kind}()" for kind in [*KINDS, "Muon"]}
    assert rows.keys() > RULES.keys() | OF_MATRICES.keys()
    around_torch = {row for row in rows if "torch's" in row}
    assert len(around_torch) == 6
    assert len(set(cases)) == len(cases) == 9 * len(rows) - 8 * len(around_torch)
    of_presets = {format for formats in PRESETS.values() for format in formats}
    assert of_presets | {"i8", "float16", "float16_root"} >= {*amp.formats.NAMES}


@pytest.mark.full
@pytest.mark.slow
def test_another_default_is_found_in_the_optimizers_that_have_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In copies of this package, the second of which has another eps of AdamW."""
    rows = ("adamw", "AdamW()", "SGD()", "FP16_Optimizer, AdamW")
    for name in ("base", "here"):
        shutil.copytree(PACKAGE, tmp_path / name / "python/amp_mp")
    trees = tmp_path / "base", tmp_path / "here"
    assert same_bits.compare_trees(*trees, rows=rows)
    assert capfd.readouterr().out.splitlines()[-1] == f"{8 * len(rows)} same"

    file = tmp_path / "here/python/amp_mp/optim/adam.py"
    text = file.read_text()
    at = text.index("eps: float", text.index("class AdamW("))
    file.write_text(text[:at] + text[at:].replace("1e-8", "1e-7", 1))
    assert not same_bits.compare_trees(*trees, rows=rows)
    lines = capfd.readouterr().out.splitlines()
    for row, word in zip(rows, ("same", "DIFFERS", "same", "DIFFERS"), strict=True):
        assert [line.split(row)[1].split() for line in lines if line.startswith(row)] == [
            8 * [word]
        ]
    wanted = "DIFFERS  AdamW(), exact: weight of float32 (1030, 32) after 2 steps["
    assert len([line for line in lines if line.startswith(wanted)]) == 1
    assert lines[-1] == "16 same, 16 DIFFERS"
