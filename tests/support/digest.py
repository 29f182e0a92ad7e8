"""Prints this process's instruction set, and digests of what the native passes compute in it.

Usage: digest.py THREADS. test_instruction_sets.py runs it with AMP_MP_CPU set, `make test-aarch64`
on another processor. Muon is left out: its matrix products are torch's.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import cuts
import torch
from helpers import DTYPES, interesting_floats, on, random, state_names
from rules import FLOAT32_ONLY, RULES, SQUARES, STORAGES
from torch import Tensor

import amp_mp as amp
from amp_mp import _C


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


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
        for format in amp.formats.NAMES:
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
                optimizer.step()
                digest.update(repr(optimizer.grad_norm).encode())
        for p in params:
            digest.update(raw(p))
        x = random(200000, 3, 1e3)
        low = torch.empty(x.size, dtype=dtype)
        _C.copy_([low], [torch.from_numpy(x)])
        digest.update(raw(low))


def every_rule_in_every_format(digest: Any) -> None:
    def tensors(seed: int) -> list[Tensor]:
        return [
            torch.from_numpy(random(rows * columns, seed)).view(rows, columns).squeeze(1).to(dtype)
            for dtype in DTYPES.values()
            for rows, columns in ((1030, 32), (37, 1), (33, 31))
        ]

    weights, *grads = tensors(0), tensors(1), tensors(2)
    for rule, (kind, numbers) in RULES.items():
        names = state_names(kind([torch.nn.Parameter(weights[0])], **numbers))
        free = [n for n in names if n not in FLOAT32_ONLY and not rule.startswith("centered")]
        halves = {name: "float16_root" if name in SQUARES else "float16" for name in free}
        drawn = {"master": "none", "rounding": "stochastic"}
        for storage in [*STORAGES.values(), drawn, halves]:
            params = [torch.nn.Parameter(w.clone()) for w in weights]
            optimizer = kind(params, **numbers, **storage, max_grad_norm=1.0)
            for step in grads:
                for p, g in zip(params, step, strict=True):
                    p.grad = g
                optimizer.step()
            for p in params:
                for tensor in (p, *optimizer.state[p].values()):
                    digest.update(raw(tensor))


def averages(digest: Any) -> None:
    for dtype in DTYPES.values():
        average, x = on("cpu", random(70001, 4, 0.5), dtype, 1), on("cpu", random(70001, 5), dtype)
        low = dtype != torch.float32
        remainder = torch.zeros_like(average, dtype=torch.int16) if low else None
        for decay in (0.999, 0.3):
            _C.average_([average], [remainder], [x], [None], decay)
        digest.update(raw(average))


def shards_of_rows(digest: Any) -> None:
    """Rows of every length against a draw of 16 and a tile of 256 elements."""
    shape = (60, 2048)
    states = ("bfloat16_stochastic", "ue8m8")
    for places in ([], [1, 8, 24, 61], [100, 356, 613], [1024]):
        blocks = cuts.cuts(shape, [7], places)
        found = cuts.Blocks("cpu", shape, blocks, "adamw_", "float16_stochastic", states)
        for step in range(2):
            found.set_gradients(torch.from_numpy(random(60 * 2048, step)))
            found.step()
        for name, whole in found.raw().items():
            digest.update(name.encode() + whole.tobytes())


PARTS = (
    conversions,
    unaligned_steps_and_copies,
    every_rule_in_every_format,
    averages,
    shards_of_rows,
)

if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(amp.build_info()["cpu"])
    for part in PARTS:
        found = hashlib.sha256()
        part(found)
        print(part.__name__, found.hexdigest(), flush=True)
