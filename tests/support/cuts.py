"""One parameter cut over several ranks, each of which this process plays in turn.

torch's fake process group: a collective copies what a rank sends, one copy for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from layouts import REPLICATED
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

Pieces = tuple[int, ...]  # into how many pieces each dimension is cut


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def block(shape: Sequence[int], pieces: Pieces, rank: int) -> tuple[slice, ...]:
    """The part of a tensor that the rank has, as torch.chunk cuts."""
    found = []
    for count, parts, at in zip(shape, pieces, np.unravel_index(rank, pieces), strict=True):
        size = -(-count // parts)
        found.append(slice(min(int(at) * size, count), min((int(at) + 1) * size, count)))
    return tuple(found)


def shard(whole: Tensor, mesh: DeviceMesh, part: tuple[slice, ...]) -> DTensor:
    """The DTensor of which this rank has a part, along the mesh's dimensions."""
    return DTensor.from_local(
        whole[part].clone(memory_format=torch.contiguous_format),
        mesh,
        [Shard(dim) for dim in range(mesh.ndim)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def stepped(
    make: Callable[[list[Any]], Any], weight: Tensor, grads: Sequence[Tensor], pieces: Pieces
) -> dict[str, np.ndarray]:
    """The bytes of weight and states after a step for each gradient, put together of the ranks'.

    make: the optimizer of these parameters. Where nothing is cut the parameter is a plain one.
    """
    found: dict[str, np.ndarray] = {}
    for rank in range(prod(pieces)):
        with as_rank(rank, prod(pieces)):
            part, is_cut = block(weight.shape, pieces, rank), prod(pieces) > 1
            mesh = init_device_mesh(weight.device.type, pieces)
            placed = (lambda t: shard(t, mesh, part)) if is_cut else torch.clone  # noqa: B023
            # Not nn.Parameter, whose detach() finds the spec of an equal mesh, of another rank.
            param: Any = placed(weight).requires_grad_()
            optimizer = make([param])
            for grad in grads:
                param.grad = placed(grad)
                optimizer.step()
            for name, value in {"weight": param, **optimizer.state[param]}.items():
                put_in(found, name, value, part)
    return found


def put_in(found: dict[str, np.ndarray], name: str, value: Tensor, part: tuple[slice, ...]) -> None:
    """A rank's part among those of the others; what every rank has must be the same."""
    own = bytes_of(value)
    if name in REPLICATED:
        assert np.array_equal(found.setdefault(name, own), own), name
        return
    group = 32 if name.endswith("_scale") else 2 if name == "remainder4" else 1
    last = slice(part[-1].start // group, part[-1].stop // group)
    whole = found.setdefault(name, np.zeros((*value.shape, own.shape[-1]), np.uint8))
    whole[(*part[:-1], last)] = own


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The elements that this process has, as bytes: one more dimension."""
    flat = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous()
    array = flat.reshape(-1).view(torch.uint8).numpy()
    return array.reshape(*flat.shape, flat.element_size()).copy()
