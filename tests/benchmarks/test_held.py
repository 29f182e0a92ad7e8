"""Benchmarks are held to the instruction sets that their columns name."""

from __future__ import annotations

import platform
from typing import Any

import held
import pytest
import torch
from forked import Script, run_each

AVX2 = {"avx2": True, "fma3": True}
AVX512 = {**AVX2, **dict.fromkeys(("avx512_f", "avx512_bw", "avx512_cd", "avx512_dq"), True)}
BFLOAT16 = {**AVX512, "avx512_vl": True, "avx512_bf16": True}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (BFLOAT16, ["native bfloat16 (this processor)", "held to AVX512_CORE", "held to AVX2"], []),
    ({**BFLOAT16, "avx512_bf16": False}, ["AVX512_CORE (this processor)", "held to AVX2"], []),
    (AVX512, ["AVX2 (this processor)"], ["AVX512_CORE"]),  # without avx512_vl
    (AVX2, ["AVX2 (this processor)"], ["AVX512_CORE"]),
    ({"neon": True}, ["baseline (this processor)"], ["AVX512_CORE", "AVX2"]),
]
# What runs says of itself; oneDNN when its first primitive begins.
SAYS = """
import torch, amp_mp
print("ATen", torch.backends.cpu.get_cpu_capability())
print("amp_mp", amp_mp.build_info()["cpu"])
torch.nn.functional.conv2d(torch.ones(4, 64, 32, 32), torch.ones(64, 64, 3, 3))
"""


@pytest.mark.parametrize(("has", "titles", "left_out"), CASES)
def test_a_column_is_what_the_processor_is_or_is_held_to(
    has: dict[str, Any],
    titles: list[str],
    left_out: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    found = held.columns(held.ISAS)
    assert list(found) == titles
    for title, variables in found.items():
        assert variables == held.HELD.get(title.removeprefix("held to "), {})
    lines = [f"{isa} is left out: this processor does not have it." for isa in left_out]
    assert capsys.readouterr().out.splitlines() == lines
    assert list(held.columns(["AVX2"])) == titles[-1:] * ("AVX2" not in left_out)


def test_a_column_drops_variables_that_hold_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [*held.HELD["AVX2"], "DNNL_MAX_CPU_ISA"]
    for name in names:
        monkeypatch.setenv(name, "another")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: BFLOAT16)
    show = f"import os; print([os.environ.get(name) for name in {names}])"
    assert dict(held.outputs(held.ISAS, "-c", show)) == {
        "native bfloat16 (this processor)": "[None, None, None, None, None]\n",
        "held to AVX512_CORE": "['avx512', 'AVX512_CORE', 'avx512', 'AVX512', None]\n",
        "held to AVX2": "['avx2', 'AVX2', 'avx2', 'AVX2', None]\n",
    }


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets are x86-64's")
def test_the_variables_hold_what_they_name() -> None:
    # To less than any column, so that every processor shows it. MKL does not tell what it takes.
    least = dict(zip(held.HELD["AVX2"], ("default", "SSE41", "baseline", "SSE4_2"), strict=True))
    (done,) = run_each([Script(["-c", SAYS], {**least, "ONEDNN_VERBOSE": "1"})])
    assert done.returncode == 0, done.stderr
    assert "ATen DEFAULT" in done.stdout
    assert "amp_mp baseline" in done.stdout
    assert "isa:Intel SSE4.1" in done.stdout
