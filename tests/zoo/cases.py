"""The list of models that the zoo's test trains, and what its entries share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Case:
    """A model with random weights, a batch, and its loss in float32.

    The loss is computed from the model's outputs by this project, so that all precisions have the
    same; only detection has its own.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Loss


CASES: dict[str, Case] = {}


def case(
    name: str, batch: Callable[[], Batch], loss: Loss
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Adds a model to the list."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CASES[name] = Case(name, make, batch, loss)
        return make

    return add


def tokens(vocabulary: int, *shape: int) -> Tensor:
    """Random token ids, none of the first three, which are special."""
    return torch.randint(3, vocabulary, shape)


def logits_of(output: Any) -> Tensor:
    """The logits or the first tensor of what a model returned."""
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", None)
    return output[0] if found is None else found


ACTIVATIONS = ("images", "features", "nodes")


def to_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """A batch with what the model takes as activations in another dtype; coordinates stay."""
    cast = {name: batch[name] for name in ACTIVATIONS if name in batch}
    for name, value in cast.items():
        one = isinstance(value, Tensor)
        cast[name] = value.to(dtype) if one else [each.to(dtype) for each in value]
    return batch | cast
