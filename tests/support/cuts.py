"""Whole tensors cut into the shards of several processes, stepped by the native operators alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers import random
from torch import Tensor, nn

from amp_mp import _C

FORMATS = {entry["name"]: entry for entry in _C.formats()}
HYPER = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "trust": 0.02,
    "seed": 2**40 + 11,
}
# The kinds of the states of each operator, in the order of csrc/core/rules.
STATES = {
    "adamw_": ("moment", "square"),
    "sgd_": ("moment",),
    "plain_sgd_": (),
    "lion_": ("moment",),
    "adadelta_": ("square", "square"),
    "nadam_": ("moment", "square"),
    "radam_": ("moment", "square"),
    "lars_": ("moment",),
    "lamb_": ("moment", "square"),
    "novograd_": ("moment",),
}


class Cut(NamedTuple):
    """A block of a matrix, or all of it."""

    rows: slice
    columns: slice

    def of(self, whole: Tensor, group: int = 1) -> Tensor:
        """The block; `group` neighbours of a row share an element of `whole`."""
        columns = slice(self.columns.start // group, self.columns.stop // group)
        return whole[self.rows, columns].contiguous()

    def origin(self, columns: int) -> tuple[int, int, int]:
        """first, row_length and row_stride, as a sharded parameter gives them."""
        width = self.columns.stop - self.columns.start
        first = self.rows.start * columns + self.columns.start
        return (first, 0, 0) if width == columns else (first, width, columns)


def cuts(shape: tuple[int, int], rows: Sequence[int], columns: Sequence[int]) -> list[Cut]:
    """The blocks between these places."""
    down, across = [0, *rows, shape[0]], [0, *columns, shape[1]]
    return [
        Cut(slice(a, b), slice(c, d))
        for a, b in itertools.pairwise(down)
        for c, d in itertools.pairwise(across)
    ]


def stored(x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """A matrix of float32 numbers in a format's one or two arrays."""
    entry = FORMATS[name]
    data = torch.empty_like(x, dtype=entry["dtype"])
    rest = None
    if entry["rest_dtype"] is not None:
        columns = x.shape[1] // max(1, entry["group"])
        rest = torch.empty((x.shape[0], columns), dtype=entry["rest_dtype"], device=x.device)
    _C.encode_(x, data, rest, name, seed=3)
    return data, rest


class Blocks:
    """Blocks of one parameter, with their states, as slots of one or of several processes."""

    def __init__(
        self,
        device: str,
        shape: tuple[int, int],
        blocks: Sequence[Cut],
        operator: str,
        weight: str = "bfloat16",
        formats: Sequence[str] = (),
        split: bool = False,
        values: Callable[[int], np.ndarray] | None = None,
        origins: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        """weight: its format; split: the weight has a one-byte remainder; formats: of the states.

        values: gives the numbers of the weight, 1, and of the states, 2 and 3. origins: where the
        operator believes the blocks to be.
        """
        count = shape[0] * shape[1]
        values = values or (lambda seed: random(count, seed, 1e-2))
        self.device, self.shape, self.blocks, self.operator = device, shape, blocks, operator
        self.hyper = _C.Hyper(**HYPER)

        def whole(seed: int) -> Tensor:
            return torch.from_numpy(values(seed)).to(device).view(shape)

        data = stored(whole(1), "bfloat16_split24" if split else weight)
        states = [
            stored(whole(2 + k).abs() if kind == "square" else whole(2 + k), name)
            for k, (kind, name) in enumerate(zip(STATES[operator], formats, strict=True))
        ]
        self.params = [nn.Parameter(b.of(data[0])) for b in blocks]
        self.masters = [b.of(data[1]) if split else None for b in blocks]  # type: ignore[arg-type]
        self.states = [[b.of(state) for b in blocks] for state, _ in states]
        self.scales = [
            [None if scales is None else b.of(scales, 32) for b in blocks] for _, scales in states
        ]
        self.clocks = [clock(device) for _ in blocks]
        origins = origins or [b.origin(shape[1]) for b in blocks]
        n = len(blocks)
        self.slots = _C.Slots(
            params=self.params,
            masters=self.masters,
            states=self.states,
            scales=self.scales,
            formats=[[name] * n for name in formats],
            stochastic=[weight.endswith("stochastic")] * n,
            clocks=self.clocks,
            groups=[0] * n,
            tensor_indices=[5] * n,
            firsts=[first for first, _, _ in origins],
            names=[f"block {i}" for i in range(n)],
            row_lengths=[length for _, length, _ in origins],
            row_strides=[stride for _, _, stride in origins],
        )

    def set_gradients(self, whole: Tensor) -> None:
        for param, block in zip(self.params, self.blocks, strict=True):
            param.grad = block.of(whole.to(self.device).view(self.shape)).to(param.dtype)

    def step(self, skip: bool = False, **arguments: Any) -> None:
        verdict = torch.tensor([float(skip), 1, 0, 0, 1], dtype=torch.float64, device=self.device)
        _C.operators[self.operator](self.slots, [self.hyper], verdict, **arguments)

    def tensors(self) -> list[Tensor]:
        """All that a step writes."""
        lists = [self.params, self.masters, *self.scales, self.clocks, *self.states]
        return [t for each in lists for t in each if t is not None]

    def raw(self) -> dict[str, np.ndarray]:
        """The bytes of the whole tensor's arrays, put together from the blocks."""
        arrays = {"weight": self.params, "master": self.masters}
        arrays |= {f"state {k}": column for k, column in enumerate(self.states)}
        arrays |= {f"scales {k}": column for k, column in enumerate(self.scales)}
        found = {}
        for name, pieces in arrays.items():
            if pieces[0] is None:
                continue
            group = 32 if name.startswith("scales") else 1
            width = pieces[0].element_size()
            whole = np.zeros((self.shape[0], self.shape[1] // group, width), np.uint8)
            for block, piece in zip(self.blocks, pieces, strict=True):
                columns = slice(block.columns.start // group, block.columns.stop // group)
                whole[block.rows, columns] = bytes_of(piece)
            found[name] = whole
        return found


def bytes_of(tensor: Tensor | None) -> np.ndarray:
    """A matrix's elements as bytes: one more dimension."""
    assert tensor is not None
    flat = tensor.detach().cpu().contiguous()
    array = flat.view(torch.uint8).numpy()
    return array.reshape(*flat.shape, flat.element_size()).copy()


def clock(device: str) -> Tensor:
    """The step count of a parameter that was never stepped."""
    return torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64, device=device)
