"""Every instruction set, and any number of threads, computes the same bits."""

from __future__ import annotations

import os
import subprocess
import sys

import digest
import pytest

import amp_mp as amp


@pytest.mark.slow
def test_instruction_sets_and_threads_give_the_same_bits() -> None:
    """Which are left out because the processor has none of them is printed with -rP."""
    digests: dict[str, str] = {}
    for isa, threads in (("baseline", "1"), ("avx2", "2"), ("avx512", "1")):
        done = subprocess.run(
            [sys.executable, digest.__file__, threads],
            env={**os.environ, "AMP_MP_CPU": isa},
            capture_output=True,
            text=True,
        )
        if "AMP_MP_CPU must be" in done.stderr:
            print(f"{isa}: not supported by this processor")
            continue
        assert done.returncode == 0, done.stderr
        name, digests[isa] = done.stdout.split()
        assert name == isa
    assert "baseline" in digests
    assert len(set(digests.values())) == 1, digests


def test_an_unknown_instruction_set_is_refused() -> None:
    code = [sys.executable, "-c", "import amp_mp"]
    env = {**os.environ, "AMP_MP_CPU": "sse9"}
    done = subprocess.run(code, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "AMP_MP_CPU must be baseline, avx2 or avx512" in done.stderr
    assert amp.build_info()["cpu"] in ("baseline", "avx2", "avx512")
