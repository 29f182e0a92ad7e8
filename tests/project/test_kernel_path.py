"""What one iteration of the apply kernels costs, by their machine code: it must not get worse.

benchmarks/kernels/kernel_path.py follows a warp through it; nothing here needs a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_path import PACK, PRESETS, RULES, Measured, code_of, follow
from kernel_report import Report
from recorded_step import record

from amp_mp.optim.state import formats

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.xdist_group("kernel_report")]

# Instructions for eight elements a thread, and dependent waits for the memory. With more of them
# the kernels need longer than an H100's memory does.
# "exact" has six too many since cautious weight decay, which takes 24.
MOST_INSTRUCTIONS = {"exact": 416, "lean": 615, "tiny": 875}
MOST_ROUNDS = {0: 1, 1: 3}  # by skew: of aligned arrays, and of others


def told(measured: Sequence[Measured]) -> str:
    return "\n".join(f"{m.rule} {m.preset}, skew {m.skew}: {m.path}" for m in measured)


def test_machine_code_stores_the_bytes_of_the_emulator(followed: list[Measured]) -> None:
    assert len(followed) == 2 * len(RULES) * len(PRESETS)
    assert not (wrong := [m for m in followed if m.path.wrong]), told(wrong)


@pytest.mark.parametrize("rule", RULES)
def test_it_does_for_zeros_and_for_subnormal_and_large_numbers(
    recorder: Path, compiled: Report, rule: str
) -> None:
    # Here the quick square root and quotient are wrong, and lanes of a warp go different ways.
    _, code = code_of(compiled.kernels, rule)
    for preset, stored in PRESETS.items():
        path = follow(code, record(recorder, rule, stored, 0, "rare"))
        assert path.wrong == 0, (preset, path)
        assert all("a subroutine is called" in guess for guess in path.guesses), (preset, path)


def test_it_does_for_any_formats(recorder: Path, compiled: Report, any_rule: str) -> None:
    _, code = code_of(compiled.kernels, any_rule)
    choose = random.Random(any_rule)

    def one_of(kind: str) -> str:
        return choose.choice([n for n, f in formats.NATIVE_FORMATS.items() if kind in f["kinds"]])

    for _ in range(6):
        master, skew = one_of("master"), choose.choice([0, 0, 1])
        copy = choose.choice(["-", "bfloat16", "float16"]) if master == "float32" else "-"
        stored = (one_of("grad"), master, copy, one_of("moment"), one_of("square"))
        numbers = choose.choice(["usual", "rare"])
        path = follow(code, record(recorder, any_rule, stored, skew, numbers))
        assert path.wrong == 0, (stored, skew, numbers, path)
        assert all("a subroutine is called" in guess for guess in path.guesses), (stored, path)


def test_a_wrong_byte_is_noticed(recorder: Path, compiled: Report) -> None:
    step = record(recorder, "SGD", PRESETS["float32"], 0)
    wrong = follow(code_of(compiled.kernels, "SGD")[1], replace(step, after=step.before)).wrong
    stored = 2 * 4 * 32 * PACK * 4  # two arrays of 4 bytes, four iterations of a warp
    assert stored / 2 < wrong <= stored  # not all bytes of a number change


def test_no_branch_of_the_main_path_is_guessed(followed: list[Measured]) -> None:
    assert not (unsure := [m for m in followed if m.path.guesses]), told(unsure)


def test_each_byte_is_read_and_written_once(followed: list[Measured]) -> None:
    # Gradient; master and its rest twice, read and written; states twice, of which m8 has two bytes
    # for 32 elements besides and log8 one; a copy is only written.
    expected = {
        "float32": 4 + 2 * (4 + 4 + 4),
        "float32, copy": 2 + 2 * (4 + 4 + 4) + 2,
        "exact": 2 + 2 * (4 + 4 + 4),
        "lean": 2 + 2 * (3 + 2 + 2),
        "tiny": 2 + 2 * (3 + 1 + 2 / 32 + 2),
        "micro": 2 + 2 * (3 + 1 + 2 / 32 + 1 + 1 / 32),
    }
    for m in followed:
        if m.rule == "AdamW":
            assert m.path.bytes == expected[m.preset], told([m])


def test_a_warp_waits_for_the_memory_once(followed: list[Measured]) -> None:
    late = [m for m in followed if m.path.rounds > MOST_ROUNDS[m.skew]]
    assert not late, told(late)


@pytest.mark.parametrize("preset", MOST_INSTRUCTIONS)
def test_adamw_issues_few_instructions(followed: list[Measured], preset: str) -> None:
    (own,) = [m for m in followed if (m.rule, m.preset, m.skew) == ("AdamW", preset, 0)]
    assert own.path.instructions <= MOST_INSTRUCTIONS[preset], told([own])


def test_presets_are_those_of_the_library() -> None:
    names = {"float32": "float32", "bfloat16": "bfloat16_stochastic"}
    for preset, chosen in formats.PRESETS.items():
        gradient, master, copy, moment, square = PRESETS[preset]
        split = chosen["master"] != "float32"
        assert master == (f"bfloat16_{chosen['master']}" if split else "float32")
        assert gradient == ("bfloat16" if split else "float32")
        assert copy == "-"
        assert moment == names.get(chosen["moment"], chosen["moment"])
        assert square == names.get(chosen["square"], chosen["square"])
    assert set(PRESETS) == set(formats.PRESETS) | {"float32, copy"}
