"""Every instruction set, and any number of threads, computes the same bits."""

from __future__ import annotations

import digest
import pytest
from forked import Script, run_each

import amp_mp as amp

THREADS = {"baseline": "1", "avx2": "2", "avx512": "1"}


@pytest.mark.slow
def test_instruction_sets_and_threads_give_the_same_bits() -> None:
    """Which are left out because the processor has none of them is printed with -rP."""
    digests: dict[str, list[str]] = {}
    runs = [Script([digest.__file__, n], {"AMP_MP_CPU": isa}) for isa, n in THREADS.items()]
    unknown = Script(["-c", "import amp_mp"], {"AMP_MP_CPU": "sse9"})
    *ran, refused = run_each([*runs, unknown])
    for isa, done in zip(THREADS, ran, strict=True):
        if "AMP_MP_CPU must be" in done.stderr:
            print(f"{isa}: not supported by this processor")
            continue
        assert done.returncode == 0, done.stderr
        name, *digests[isa] = done.stdout.splitlines()
        assert name == isa
    assert "baseline" in digests
    assert all(found == digests["baseline"] for found in digests.values()), digests
    assert len(digests["baseline"]) == len(digest.PARTS)
    assert refused.returncode != 0
    assert "AMP_MP_CPU must be baseline, avx2 or avx512" in refused.stderr
    assert amp.build_info()["cpu"] in ("baseline", "avx2", "avx512")
