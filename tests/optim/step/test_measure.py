"""The one read of the gradients: sums in the fixed order, maxima, counts."""

from __future__ import annotations

import os
import subprocess
import sys

import helpers
import numpy as np
import pytest
import reference
import torch
from helpers import DTYPES, RAGGED, array, on, random

import amp_mp as amp
from amp_mp import _C

CASES = {
    "ordinary": 1.0,
    "squares overflow float": 1e25,
    "squares underflow float": 1e-30,
    "all zero": 0.0,
}


def rows(tensors: list[torch.Tensor]) -> list[tuple[float, ...]]:
    return [tuple(row) for row in _C.measure(tensors).cpu().tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_measuring_equals_the_reference(device: str, dtype: str, spread: float, shift: int) -> None:
    if dtype == "float16" and spread > 1:
        spread = 100.0  # 1e25 is no float16
    sizes = [*RAGGED[:-1], 65536, 65537, 200_001]
    tensors = [on(device, random(n, n, spread), DTYPES[dtype], shift) for n in sizes]
    wanted = [reference.measure(array(t)) for t in tensors]
    total = (
        reference.combine([w[0] for w in wanted]),
        max(w[1] for w in wanted),
        sum(w[2] for w in wanted),
    )
    assert rows(tensors) == [*wanted, total]


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_elements_are_counted_and_left_out(device: str, dtype: str) -> None:
    sizes = (1, 64, 4097, 70_000)
    tensors = [on(device, random(n, n, 1.0, special=True), DTYPES[dtype]) for n in sizes]
    found = rows(tensors)
    for row, tensor in zip(found, tensors, strict=False):
        assert row == reference.measure(array(tensor))
    assert found[-1][2] == sum(int((~torch.isfinite(t)).sum()) for t in tensors) > 0


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=["inf", "-inf", "nan"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_anywhere_is_found(device: str, dtype: str, value: float) -> None:
    for size, positions in ((1, [0]), (65, [0, 63, 64]), (8200, [0, 4095, 4096, 8199])):
        for position in positions:
            x = random(size, 1)
            x[position] = value
            assert rows([on(device, x, DTYPES[dtype])])[-1][2] == 1


def test_no_finite_gradient_has_an_infinite_norm(device: str) -> None:
    x = torch.full((100_000,), 3e38, device=device)
    squares, largest, bad = rows([x])[-1]
    assert squares == pytest.approx(1e5 * float(np.float32(3e38)) ** 2, rel=1e-12)
    assert (largest, bad) == (float(np.float32(3e38)), 0)


def test_an_empty_list_and_empty_tensors_measure_zero(device: str) -> None:
    assert rows([torch.empty(0, device=device)] * 3) == [(0.0, 0.0, 0.0)] * 4
    assert rows([]) == [(0.0, 0.0, 0.0)]
    assert rows([None, torch.ones(2, device=device)]) == [(0, 0, 0), (2, 1, 0), (2, 1, 0)]


def test_layout_does_not_matter_to_what_is_measured(device: str) -> None:
    x = torch.randn(4, 6, 5, 3, device=device)
    for view in (
        x.to(memory_format=torch.channels_last),
        x[:, ::2],
        x[0, 0, 0].expand(7, 3),
        x.permute(3, 2, 1, 0),
    ):
        squares, largest, bad = rows([view])[0]
        assert squares == pytest.approx(float((view.double() ** 2).sum()), rel=1e-6)
        assert (largest, bad) == (float(view.abs().max()), 0)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    tensors = [on("cpu", random(n, n), torch.bfloat16) for n in (500_000, 3, 70_000, 0, 1_000_003)]
    before = torch.get_num_threads()
    expected = rows(tensors)
    try:
        torch.set_num_threads(threads)
        assert rows(tensors) == expected
    finally:
        torch.set_num_threads(before)


DIGEST = """
import hashlib, sys, numpy, torch
sys.path.insert(0, sys.argv[1])
import amp_mp as amp
from amp_mp import _C
from helpers import DTYPES, on, random
digest = hashlib.sha256()
for dtype in DTYPES.values():
    params = [torch.nn.Parameter(on("cpu", random(n, n), dtype, 1)) for n in (1, 65, 4097, 70001)]
    for kind in (amp.optim.AdamW, amp.optim.Adam, amp.optim.SGD):
        optimizer = kind(params, lr=0.01, max_grad_norm=1.0)
        for step in range(3):
            for p in params:
                p.grad = on("cpu", random(p.numel(), step, special=step == 1), dtype)
            optimizer.step()
            digest.update(repr(optimizer.grad_norm).encode())
    for p in params:
        digest.update(p.detach().view(torch.uint8).numpy().tobytes())
    x = random(200000, 3, 1e3)
    low = torch.empty(x.size, dtype=dtype)
    _C.copy_([low], [torch.from_numpy(x)])
    digest.update(low.view(torch.uint8).numpy().tobytes())
print(amp.build_info()["cpu"], digest.hexdigest())
"""


def digest(isa: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", DIGEST, os.path.dirname(helpers.__file__)],
        env={**os.environ, "AMP_MP_CPU": isa},
        capture_output=True,
        text=True,
    )
    if "AMP_MP_CPU must be" in done.stderr:
        return [isa, "not supported by this processor"]
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_every_instruction_set_gives_the_same_bits() -> None:
    results = dict(digest(isa) for isa in ("baseline", "avx2", "avx512"))
    supported = {r for r in results.values() if not r.startswith("not")}
    assert "baseline" in results
    assert len(supported) == 1, results


def test_an_unknown_instruction_set_is_refused() -> None:
    code = [sys.executable, "-c", "import amp_mp"]
    env = {**os.environ, "AMP_MP_CPU": "sse9"}
    done = subprocess.run(code, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "AMP_MP_CPU must be baseline, avx2 or avx512" in done.stderr
    assert amp.build_info()["cpu"] in ("baseline", "avx2", "avx512")
