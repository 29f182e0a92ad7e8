"""Prints this process's instruction set, and digests of what the native passes compute in it.

Usage: digest.py THREADS. test_instruction_sets.py runs it with AMP_MP_CPU set, `make test-aarch64`
and `make test-processors` on other processors. Products and LARC's loop are not there, because they
use fused multiply-adds where a processor has some. Of Muon only the momentum is there: its matrix
products are torch's.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import cuts
import torch
from helpers import DTYPES, interesting_floats, on, random
from rules import OF_MATRICES, RULES
from torch import Tensor
from trainings import FORMATS, Training

import amp_mp as amp
from amp_mp import _C
from amp_mp.casting.products import choose_products
from amp_mp.dtypes import LOW_PRECISION


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def those_beside(formats: Sequence[str], dtype: torch.dtype) -> list[str]:
    """The formats whose weights may have the dtype."""
    return [name for name in formats if dtype == torch.bfloat16 or name != "split20"]


def conversions(digest: Any) -> None:
    """Every pattern of 16 bits to float32, and float32 with every exponent and every tie back."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    floats = torch.from_numpy(interesting_floats())
    for dtype in (torch.float16, torch.bfloat16):
        wide, low = torch.empty(patterns.numel()), torch.empty(floats.numel(), dtype=dtype)
        _C.copy_([wide], [patterns.view(dtype)])
        digest.update(raw(wide))
        for saturate in (False, True):
            _C.copy_([low], [floats], saturate=saturate)
            digest.update(raw(low))
        for format in those_beside(amp.formats.NAMES, dtype):
            parts = amp.formats.encode(floats, format, weight_dtype=dtype)
            for tensor in (*parts, amp.formats.decode(parts, format)):
                digest.update(raw(tensor))


def unaligned_steps_and_copies(digest: Any) -> None:
    for dtype in DTYPES.values():
        params = [
            torch.nn.Parameter(on("cpu", random(n, n), dtype, 1)) for n in (1, 65, 4097, 70001)
        ]
        for kind in (amp.optim.AdamW, amp.optim.Adam, amp.optim.SGD):
            optimizer = kind(params, lr=0.01, max_grad_norm=1.0)
            for step in range(3):
                for p in params:
                    p.grad = on("cpu", random(p.numel(), step, special=step == 1), dtype)
                digest.update(raw(_C.measure([p.grad for p in params])))
                optimizer.step()
                digest.update(repr(optimizer.grad_norm).encode())
        for p in params:
            digest.update(raw(p))
        x = random(200000, 3, 1e3)
        low = torch.empty(x.size, dtype=dtype)
        _C.copy_([low], [torch.from_numpy(x)])
        digest.update(raw(low))


def every_rule_in_every_format(digest: Any) -> None:
    for rule in RULES | OF_MATRICES:
        for format in FORMATS:
            training = Training(rule, format)
            training.step(1)
            training.step(2)
            for tensor in training.tensors().values():
                digest.update(raw(tensor))


def momentum_of_muon(digest: Any) -> None:
    for format in ("float32", "float16", "bfloat16", "m8", "i8"):
        for dtype in DTYPES.values():
            p = torch.nn.Parameter(on("cpu", random(64 * 64, 1), dtype).view(64, 64))
            optimizer = amp.optim.Muon([p], momentum_buffer=format)
            for step in range(3):
                p.grad = on("cpu", random(64 * 64, step), dtype).view(64, 64)
                optimizer.step()
            for name, state in optimizer.state[p].items():
                if name.startswith("momentum_buffer"):
                    digest.update(raw(state))


def averages(digest: Any) -> None:
    """Averages of 32 bits, of weights with and without a master of each kind."""
    x = torch.from_numpy(random(70002, 5))
    for dtype in DTYPES.values():
        low = dtype != torch.float32
        sources: list[tuple[Tensor, Tensor | None]] = [(on("cpu", x.numpy(), dtype), None)]
        if low:
            sources += [(x.to(dtype), x), (x, None)]
            for split in those_beside(amp.formats.SPLITS, dtype):
                weight, beside = amp.formats.encode(x, split, weight_dtype=dtype)
                sources.append((weight, beside))
        for source, beside in sources:
            average = on("cpu", random(70002, 4, 0.5), dtype, 1)
            remainder = torch.zeros_like(average, dtype=torch.int16) if low else None
            for decay in (0.999, 0.3):
                _C.average_([average], [remainder], [source], [beside], decay)
            digest.update(raw(average))
            if remainder is not None:
                digest.update(raw(remainder))


def norms(digest: Any) -> None:
    """Rows with and without an end inside a vector, and longer than what stays decoded."""
    for dtype in LOW_PRECISION:
        choose_products("float32", dtype)  # replaces torch's norms
    for dtype in DTYPES.values():
        for rows, width in ((37, 5), (20, 320), (3, 4500)):
            x, weight, bias, dy = (
                torch.from_numpy(random(n, seed)).to(dtype)
                for seed, n in enumerate((rows * width, width, width, rows * width))
            )
            given = [t.requires_grad_() for t in (x.view(rows, width), weight, bias)]
            kinds = [torch.ops.aten._fused_rms_norm(given[0], [width], given[1], 1e-6)[0]]
            if dtype != torch.float32:
                kinds.append(torch.nn.functional.layer_norm(given[0], [width], *given[1:]))
            for y in kinds:
                grads = torch.autograd.grad(y, given, dy.view(rows, width), allow_unused=True)
                for tensor in (y, *grads):
                    digest.update(b"" if tensor is None else raw(tensor))  # an RMS norm has no bias


def shards_of_rows(digest: Any) -> None:
    """Rows of every length against a draw of 16 and a tile of 256 elements."""
    drawn: dict[str, Any] = {"memory": "lean", "master": "none", "rounding": "stochastic"}

    def make(params: list[Any]) -> Any:
        return amp.optim.AdamW(params, lr=1e-2, seed=2**40 + 11, **drawn)

    for columns, pieces in ((2048, 1), (2048, 2), (2048, 7), (60, 3), (8, 8), (51, 3)):
        count = 60 * columns
        weight, *grads = (
            torch.from_numpy(random(count, seed, scale)).view(60, columns).half()
            for seed, scale in ((1, 1e-2), (2, 1.0), (3, 1.0))
        )
        for name, whole in cuts.stepped(make, weight, grads, (2, pieces)).items():
            digest.update(name.encode() + whole.tobytes())


PARTS = (
    conversions,
    unaligned_steps_and_copies,
    every_rule_in_every_format,
    momentum_of_muon,
    averages,
    norms,
    shards_of_rows,
)

if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(amp.build_info()["cpu"])
    for part in PARTS:
        found = hashlib.sha256()
        part(found)
        print(part.__name__, found.hexdigest(), flush=True)
