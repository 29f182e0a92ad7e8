"""Stochastic rounding of a shard draws the bits of its place in the whole tensor, however cut."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from cuts import Pieces, as_rank, block, bytes_of, shard, stepped
from helpers import random
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import amp_mp as amp
from amp_mp import _C

# Where columns and rows are cut: at whole groups of 32, at eights, anywhere, rows of one element.
CUTS: dict[str, tuple[tuple[int, ...], Pieces]] = {
    "columns, groups": ((48, 96), (1, 3)),
    "columns, eights": ((48, 96), (1, 4)),
    "columns, anywhere": ((48, 96), (1, 7)),
    "rows": ((48, 96), (5, 1)),
    "rows and columns": ((48, 96), (3, 7)),
    "columns of 33 rows, eights": ((33, 40), (1, 5)),
    "columns of 33 rows, anywhere": ((33, 40), (1, 3)),
    "rows of 33": ((33, 40), (4, 1)),
    "rows of 33 and columns": ((33, 40), (2, 6)),
    "columns of one element": ((20, 3), (1, 3)),
    "long columns": ((3, 5000), (1, 2)),
    "long columns, anywhere": ((3, 5000), (2, 7)),
    "one dimension": ((1000,), (7,)),
}
KEPT = {"master": "none", "rounding": "stochastic"}  # the weight itself is rounded
LOW = {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}
SHORT = {"betas": (0.9, 0.99)}  # log8 follows longer averages badly, and warns
OPTIM = amp.optim
LAMB = {"weight_decay": 0.0, "always_adapt": False}  # no norms: of other ranks there are none
# Class, dtype of the weight, and options; of some states codes share scales.
WAYS: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "adamw, lean": (OPTIM.AdamW, torch.bfloat16, {"memory": "lean"}),
    "adamw, tiny": (OPTIM.AdamW, torch.bfloat16, {"memory": "tiny"}),
    "adamw, log8": (OPTIM.AdamW, torch.bfloat16, {"memory": "lean", "exp_avg_sq": "log8", **SHORT}),
    "adamw, m8 and log8": (OPTIM.AdamW, torch.bfloat16, {"memory": "micro", **SHORT}),
    "adamw, nano": (OPTIM.AdamW, torch.bfloat16, {"memory": "nano", **SHORT}),
    "adamw, split20": (OPTIM.AdamW, torch.bfloat16, {"memory": "lean", "master": "split20"}),
    "adamw, masterless": (OPTIM.AdamW, torch.bfloat16, {"memory": "masterless", **SHORT}),
    "adamw, low": (OPTIM.AdamW, torch.bfloat16, {**KEPT, **LOW}),
    "sgd": (OPTIM.SGD, torch.float16, {"momentum": 0.9, **KEPT, "momentum_buffer": "bfloat16"}),
    "sgd, m8": (OPTIM.SGD, torch.bfloat16, {"momentum": 0.9, **KEPT, "momentum_buffer": "m8"}),
    "sgd, i8": (OPTIM.SGD, torch.bfloat16, {"momentum": 0.9, **KEPT, "momentum_buffer": "i8"}),
    "plain sgd": (OPTIM.SGD, torch.bfloat16, KEPT),
    "lion": (OPTIM.Lion, torch.bfloat16, {"memory": "lean"}),
    "lion, split20": (OPTIM.Lion, torch.bfloat16, {"master": "split20", "exp_avg": "i8"}),
    "lion, m8": (OPTIM.Lion, torch.float16, {**KEPT, "exp_avg": "m8"}),
    "adadelta, codes": (OPTIM.Adadelta, torch.bfloat16, {"memory": "lean", "square_avg": "log8"}),
    "nadam, m8": (OPTIM.NAdam, torch.bfloat16, {"memory": "tiny"}),
    "radam, low": (OPTIM.RAdam, torch.bfloat16, {**KEPT, **LOW}),
    "lamb": (OPTIM.LAMB, torch.bfloat16, {**KEPT, **LOW, "exp_avg_sq": "ue8m8", **LAMB}),
    "lamb, m8": (OPTIM.LAMB, torch.bfloat16, {"memory": "tiny", **LAMB}),
    "lamb, m8 and log8": (OPTIM.LAMB, torch.bfloat16, {**KEPT, "memory": "micro", **LAMB, **SHORT}),
}
IN_GROUPS = ("log8", "m8", "i8", "tiny", "micro", "nano", "masterless")


def fits(cut: str, options: dict[str, Any]) -> bool:
    """Whether each block has whole groups, or columns in pairs, if a format needs them."""
    shape, pieces = CUTS[cut]
    parts = [block(shape, pieces, rank)[-1] for rank in range(prod(pieces))]
    named = set(map(str, options.values()))
    if not named & set(IN_GROUPS):
        return "split20" not in named or (len(shape) > 1 and shape[-1] % (2 * pieces[-1]) == 0)
    return len(shape) > 1 and all(p.start % 32 == p.stop % 32 == 0 for p in parts)


def steps(device: str, shape: tuple[int, ...], pieces: Pieces, way: str) -> dict[str, np.ndarray]:
    kind, dtype, options = WAYS[way]

    def make(params: list[Any]) -> Any:
        return kind(params, lr=1e-2, seed=2**40 + 11, max_grad_norm=None, **options)

    def values(seed: int, scale: float = 1.0) -> Tensor:
        return torch.from_numpy(random(prod(shape), seed, scale)).view(shape).to(device, dtype)

    return stepped(make, values(1, 1e-2), [values(10 + step) for step in range(3)], pieces)


@pytest.mark.parametrize(
    ("cut", "way"), [(c, w) for c in CUTS for w in WAYS if fits(c, WAYS[w][2])]
)
def test_blocks_are_rounded_as_the_whole_is(device: str, cut: str, way: str) -> None:
    shape, pieces = CUTS[cut]
    whole = steps(device, shape, (1,) * len(shape), way)
    found = steps(device, shape, pieces, way)
    assert found.keys() == whole.keys()
    for name, wanted in whole.items():
        assert np.array_equal(found[name], wanted), name


NATIVE = ("bfloat16_stochastic", "float16_stochastic", "ue8m8", "m8", "i8", "log8")


@pytest.mark.parametrize(
    ("cut", "native"), [(c, n) for c in CUTS for n in NATIVE if fits(c, {"format": n})]
)
def test_conversion_does_not_depend_on_the_cut(device: str, cut: str, native: str) -> None:
    shape, pieces = CUTS[cut]
    x = torch.from_numpy(random(prod(shape), 4)).abs().to(device).view(shape)
    wanted = _C.encode(x, native, seed=3)
    for rank in range(prod(pieces)):
        with as_rank(rank, prod(pieces)):
            part = block(shape, pieces, rank)
            own = shard(x, init_device_mesh(device, pieces), part)
            data, scales = _C.encode(own, native, seed=3)
            assert np.array_equal(bytes_of(data), bytes_of(wanted[0][part]))
            if scales is not None and wanted[1] is not None:
                of_groups = (*part[:-1], slice(part[-1].start // 32, part[-1].stop // 32))
                assert np.array_equal(bytes_of(scales), bytes_of(wanted[1][of_groups]))
