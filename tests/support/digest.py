"""Prints this process's instruction set and a digest of what steps, copies and norms compute in it.

Usage: digest.py THREADS. test_instruction_sets.py runs it with AMP_MP_CPU set.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import cuts
import torch
from helpers import DTYPES, on, random
from rules import RULES, STORAGES
from torch import Tensor

import amp_mp as amp
from amp_mp import _C


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


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
            for dtype in (torch.bfloat16, torch.float16)
            for rows, columns in ((1030, 32), (37, 1), (33, 31))
        ]

    weights, *grads = tensors(0), tensors(1), tensors(2)
    for kind, numbers in RULES.values():
        for storage in [*STORAGES.values(), {"master": "none", "rounding": "stochastic"}]:
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


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    found = hashlib.sha256()
    unaligned_steps_and_copies(found)
    every_rule_in_every_format(found)
    averages(found)
    shards_of_rows(found)
    print(amp.build_info()["cpu"], found.hexdigest())
