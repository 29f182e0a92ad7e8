"""Benchmarks held to an instruction set, a stand-in for processors that have no other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator

import torch

# Best first: what of torch.cpu.get_capabilities() a processor has. These are of the processor
# itself: torch.backends.cpu.get_cpu_capability() gives what ATEN_CPU_CAPABILITY says, true or not.
NEEDS = {
    "native bfloat16": ("avx512_bf16",),
    "AVX512_CORE": ("avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"),
    "AVX2": ("avx2", "fma3"),
}
# What holds ATen, oneDNN, amp_mp's loops, and MKL on Intel's processors; on AMD's it takes AVX2.
HELD = {
    name: {
        "ATEN_CPU_CAPABILITY": loops,
        "ONEDNN_MAX_CPU_ISA": name,
        "AMP_MP_CPU": loops,
        "MKL_ENABLE_INSTRUCTIONS": loops.upper(),
    }
    for name, loops in {"AVX512_CORE": "avx512", "AVX2": "avx2"}.items()
}
ISAS = ("", *HELD)  # "": the processor as it is


def columns(isas: Iterable[str]) -> dict[str, dict[str, str]]:
    """By title: the variables that hold a process to each of these; prints what is left out.

    The processor as it is and the instruction set that it has are one column.
    """
    has = torch.cpu.get_capabilities()
    runs = [name for name, needs in NEEDS.items() if all(has.get(need) for need in needs)]
    best = runs[0] if runs else "baseline"
    found: dict[str, dict[str, str]] = {}
    for isa in isas:
        if isa in ("", best):
            found[f"{best} (this processor)"] = {}
        elif isa in runs:
            found[f"held to {isa}"] = HELD[isa]
        else:
            print(f"{isa} is left out: this processor does not have it.")
    return found


def outputs(isas: Iterable[str], *command: str) -> Iterator[tuple[str, str]]:
    """The title of each column and what a Python command prints there, in its own process."""
    # DNNL_MAX_CPU_ISA is what oneDNN called its variable before; it reads both.
    variables = {"DNNL_MAX_CPU_ISA", *HELD["AVX2"]}
    free = {name: value for name, value in os.environ.items() if name not in variables}
    for title, held in columns(isas).items():
        done = subprocess.run(
            [sys.executable, *command], env=free | held, stdout=subprocess.PIPE, text=True,
            check=True,
        )  # fmt: skip
        yield title, done.stdout
