"""Norms of whole tensors, gathered from the processes that hold the parts: LARS, LAMB, NovoGrad.

The numbers are small integers, of which float32 and double add squares exactly. So the norm of the
whole is the same number however it was added, and the steps must be equal bit for bit. Both halves
are equal: torch's fake process group gives back what a rank sends, once for each rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cuts import as_rank, bytes_of, shard, stepped
from helpers import NO_GRADIENT, warns
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import amp_mp as amp

HALF = (20, 96)
DRAWN = {"master": "none", "rounding": "stochastic"}
# Class, dtype of the weight, and options. With LAMB's m is g, v is g^2 and its update the sign of g
# plus w / 2. eps keeps LARS' ratio of two norms from being that of halves.
WAYS: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "lars": (amp.optim.LARS, torch.bfloat16, {**DRAWN, "weight_decay": 0.01, "eps": 50.0}),
    "novograd": (amp.optim.NovoGrad, torch.bfloat16, {**DRAWN, "weight_decay": 0.01}),
    "lamb": (amp.optim.LAMB, torch.float32, {"betas": (0, 0), "weight_decay": 0.5, "eps": 0.0}),
}


def integers(shape: tuple[int, ...], seed: int) -> Tensor:
    numbers = np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)
    return torch.from_numpy(numbers)


def halves(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight and its gradient, which has no zeros, each one half and the same again."""
    weight, grad = (torch.cat([t, t]) for t in (integers(HALF, 1), integers(HALF, 9) + 0.5))
    return weight.to(device, dtype), grad.to(device, dtype)


def made(way: str) -> Any:
    kind, _, options = WAYS[way]
    return lambda params: kind(params, lr=1e-2, seed=2**40 + 11, max_grad_norm=None, **options)


@pytest.mark.parametrize("way", WAYS)
def test_halves_step_as_the_whole_does(device: str, way: str) -> None:
    weight, grad = halves(device, WAYS[way][1])
    whole = stepped(made(way), weight, [grad], (1, 1))
    found = stepped(made(way), weight, [grad], (2, 1))
    assert not np.array_equal(whole["weight"], bytes_of(weight))
    assert found.keys() == whole.keys()
    for name, wanted in whole.items():
        assert np.array_equal(found[name], wanted), name


def both(device: str, absent: list[int]) -> tuple[list[Any], list[Any], Any, Any]:
    """Six parameters as DTensors and as plain ones, some without a gradient, and their LAMBs.

    Call it as a rank of two.
    """
    mesh = init_device_mesh(device, (2,))
    split, plain = [], []
    for i in range(6):
        whole, grad = (
            torch.cat([t, t]).to(device) for t in (integers((i + 1, 32), s) for s in (i, 10 + i))
        )
        part = (slice(0, i + 1), slice(0, 32))
        split.append(shard(whole, mesh, part).requires_grad_())
        plain.append(nn.Parameter(whole.clone()))
        if i not in absent:
            split[-1].grad, plain[-1].grad = shard(grad + 0.5, mesh, part), grad + 0.5
    return split, plain, made("lamb")(split), made("lamb")(plain)


@pytest.mark.parametrize("absent", [[0], [1, 2], [5], [0, 3, 5], [0, 1, 2, 3, 4, 5]])
def test_parameters_without_gradients_have_their_places(device: str, absent: list[int]) -> None:
    """Other processes may have gradients where this one has none."""
    with as_rank(0, 2):
        split, plain, sharded, whole = both(device, absent)
        before = [p.detach().clone() for p in plain]
        for step in range(2):
            for i in absent * step:  # state, but no gradient
                split[i].grad = plain[i].grad = None
            if step == 0 and absent != [0, 1, 2, 3, 4, 5]:
                continue
            for optimizer in (sharded, whole):
                with warns(NO_GRADIENT, step == 0):
                    optimizer.step()
        for i, (p, q) in enumerate(zip(split, plain, strict=True)):
            assert torch.equal(p._local_tensor, q.detach()[: i + 1]), i
            assert torch.equal(q.detach(), before[i]) == (i in absent)


def test_a_skipped_step_changes_nothing(device: str) -> None:
    with as_rank(0, 2):
        split, _, optimizer, _ = both(device, [])
        optimizer.step()
        split[3].grad._local_tensor[0, 0] = torch.inf
        tensors = [t for p in split for t in (p, *optimizer.state[p].values())]
        before, versions = [bytes_of(t) for t in tensors], [p._version for p in split]
        optimizer.step()
        assert optimizer.step_was_skipped
        assert all(map(np.array_equal, before, [bytes_of(t) for t in tensors]))
        if device == "cpu":  # a GPU does not tell the host
            assert [p._version for p in split] == versions
