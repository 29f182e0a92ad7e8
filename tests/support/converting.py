"""A model of every kind of tensor that a conversion meets, and what of a model is float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.model.convert import convert_network

CONVERTERS = {"prepare": amp.prepare, "convert_network": convert_network}
converters = pytest.mark.parametrize("convert", CONVERTERS.values(), ids=CONVERTERS)


class Model(nn.Module):
    """Norms with statistics, a tied weight, and buffers of several dtypes, two of them one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.full((3,), 1 / 3))
        self.register_buffer("same", self.table)
        self.register_buffer("wide", torch.full((3,), 1 / 3, dtype=torch.float64))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(tokens))))


INTEGERS = {"steps", "body.1.num_batches_tracked"}
FLOAT32 = set(Model().state_dict()) - INTEGERS - {"wide"}


def starting(*prefixes: str) -> set[str]:
    """The names of float32 tensors that begin so."""
    return {name for name in FLOAT32 if name.startswith(prefixes)}


LAYER_NORM, BATCH_NORM = starting("norm."), starting("body.1.")
NORMS = LAYER_NORM | BATCH_NORM
TIED = {"embed.weight", "head.weight"}


def float32_in(model: nn.Module) -> set[str]:
    return {name for name, t in model.state_dict().items() if t.dtype == torch.float32}
