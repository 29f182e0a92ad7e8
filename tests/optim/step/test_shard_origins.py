"""Stochastic rounding of a shard draws the bits of its place in the whole tensor, however cut."""

from __future__ import annotations

import cuts
import numpy as np
import pytest
import torch
from cuts import Blocks, Cut
from helpers import random

from amp_mp import _C

SHAPES = {"48 x 96": (48, 96), "33 x 40": (33, 40), "3 x 5000": (3, 5000)}
# Where columns and rows are cut: at whole groups of 32, at eights, anywhere, rows of one element.
PLACES: dict[str, dict[str, tuple[list[int], list[int]]]] = {
    "48 x 96": {
        "columns, groups": ([], [32, 64]),
        "columns, eights": ([], [8, 48]),
        "columns, anywhere": ([], [1, 2, 37, 70]),
        "rows": ([1, 17], []),
        "both": ([7, 20], [33, 57]),
    },
    "33 x 40": {
        "columns, eights": ([], [8, 24]),
        "columns, anywhere": ([], [13, 20]),
        "rows": ([5, 6, 32], []),
        "both": ([16], [39]),
    },
    "3 x 5000": {"columns, long": ([], [2500]), "columns, anywhere": ([1], [77, 999, 4321])},
}
CUTS = [(shape, how) for shape, ways in PLACES.items() for how in ways]
# Operator, format of the weight, formats of the states, and whether the weight has a remainder.
WAYS = {
    "adamw, lean": ("adamw_", "bfloat16", ("bfloat16_stochastic", "ue8m8"), True),
    "adamw, tiny": ("adamw_", "bfloat16", ("m8", "ue8m8"), True),
    "adamw, log8": ("adamw_", "bfloat16", ("bfloat16_stochastic", "log8"), True),
    "adamw, m8 and log8": ("adamw_", "bfloat16", ("m8", "log8"), True),
    "adamw, low": ("adamw_", "bfloat16_stochastic", ("bfloat16_stochastic",) * 2, False),
    "sgd": ("sgd_", "float16_stochastic", ("bfloat16_stochastic",), False),
    "sgd, m8": ("sgd_", "bfloat16_stochastic", ("m8",), False),
    "plain sgd": ("plain_sgd_", "bfloat16_stochastic", (), False),
    "lion": ("lion_", "bfloat16", ("bfloat16_stochastic",), True),
    "lion, m8": ("lion_", "float16_stochastic", ("m8",), False),
    "adadelta, codes": ("adadelta_", "bfloat16", ("log8", "ue8m8"), True),
    "nadam, m8": ("nadam_", "bfloat16", ("m8", "ue8m8"), True),
    "radam, low": ("radam_", "bfloat16_stochastic", ("bfloat16_stochastic",) * 2, False),
    "lamb": ("lamb_", "bfloat16_stochastic", ("bfloat16_stochastic", "ue8m8"), False),
    "lamb, m8": ("lamb_", "bfloat16", ("m8", "ue8m8"), True),
    "lamb, m8 and log8": ("lamb_", "bfloat16_stochastic", ("m8", "log8"), False),
}


def blocks_of(shape: str, how: str) -> list[Cut]:
    return cuts.cuts(SHAPES[shape], *PLACES[shape][how])


def fits(shape: str, how: str, formats: tuple[str, ...]) -> bool:
    """Whether each block has whole groups, if one of the formats needs them."""
    blocks = [Cut(slice(0, 0), slice(0, SHAPES[shape][1])), *blocks_of(shape, how)]
    return not {"m8", "log8"} & set(formats) or all(
        b.columns.start % 32 == 0 and b.columns.stop % 32 == 0 for b in blocks
    )


def stepped(
    device: str,
    shape: str,
    blocks: list[Cut],
    way: str,
    origins: list[tuple[int, int, int]] | None = None,
) -> dict[str, np.ndarray]:
    operator, weight, formats, split = WAYS[way]
    found = Blocks(device, SHAPES[shape], blocks, operator, weight, formats, split, origins=origins)
    # Without these two LAMB takes no norm, which would be that of a block.
    found.hyper = _C.Hyper(**{**cuts.HYPER, "weight_decay": 0.0})
    for step in range(3):
        found.set_gradients(torch.from_numpy(random(np.prod(SHAPES[shape]), 10 + step)))
        found.step(measure=operator == "lamb_")
    return found.raw()


@pytest.mark.parametrize(
    ("shape", "how", "way"), [(*c, w) for c in CUTS for w in WAYS if fits(*c, WAYS[w][2])]
)
def test_blocks_are_rounded_as_the_whole_is(device: str, shape: str, how: str, way: str) -> None:
    whole = stepped(device, shape, cuts.cuts(SHAPES[shape], [], []), way)
    found = stepped(device, shape, blocks_of(shape, how), way)
    assert found.keys() == whole.keys()
    for name, wanted in whole.items():
        assert np.array_equal(found[name], wanted), name


@pytest.mark.parametrize("wrong", [(70, 26, 97), (70, 25, 96), (71, 26, 96), (70, 0, 0)])
def test_another_place_draws_other_bits(device: str, wrong: tuple[int, int, int]) -> None:
    """What makes the tests above able to fail."""
    blocks = blocks_of("48 x 96", "columns, anywhere")
    origins = [b.origin(96) for b in blocks]
    assert origins[-1] == (70, 26, 96)
    right = stepped(device, "48 x 96", blocks, "adamw, lean")["state 0"]
    found = stepped(device, "48 x 96", blocks, "adamw, lean", [*origins[:-1], wrong])["state 0"]
    assert np.array_equal(found[:, :70], right[:, :70])
    assert not np.array_equal(found[:, 70:], right[:, 70:])


NATIVE = ("bfloat16_stochastic", "float16_stochastic", "ue8m8", "m8", "log8")


@pytest.mark.parametrize(
    ("shape", "how", "native"), [(*c, n) for c in CUTS for n in NATIVE if fits(*c, (n,))]
)
def test_conversion_does_not_depend_on_the_cut(
    device: str, shape: str, how: str, native: str
) -> None:
    blocks = blocks_of(shape, how)
    rows, columns = SHAPES[shape]
    x = torch.from_numpy(random(rows * columns, 4)).abs().to(device).view(rows, columns)
    wanted, wanted_scales = cuts.stored(x, native)
    for block in blocks:
        part = block.of(x)
        data, scales = torch.empty_like(part, dtype=wanted.dtype), None
        if wanted_scales is not None:
            scales = torch.empty_like(block.of(wanted_scales, 32))
        first, length, stride = block.origin(columns)
        place = {"first": first, "row_length": length, "row_stride": stride}
        _C.encode_(part, data, scales, native, seed=3, **place)
        assert torch.equal(data, block.of(wanted))
        if scales is not None and wanted_scales is not None:
            assert torch.equal(scales, block.of(wanted_scales, 32))


def test_an_impossible_place_is_refused() -> None:
    x, data = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    for place in ({"first": -1}, {"row_length": -1}, {"row_length": 4, "row_stride": 3}):
        with pytest.raises(ValueError, match="no row longer than the distance to the next"):
            _C.encode_(x, data, None, "bfloat16_stochastic", **place)
    assert not data.any()
