"""Seeded damage to state dicts and to checkpoint directories, as a disk or a script may do it.

Not drawn by Hypothesis, which prefers what it has drawn before: 600 state dicts damaged by its
choices raise 51 different errors, by these seeds 92.
"""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ODD_VALUES: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: "text",
    lambda: [],
    lambda: {},
    lambda: (1, 2),
    lambda: True,
    lambda: 10**30,
    lambda: -1,
    lambda: -0.5,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 1j,
    lambda: b"bytes",
    lambda: object(),
    lambda: torch.ones(3),
    lambda: torch.ones(0),
    lambda: torch.ones(()),
    lambda: torch.ones((), dtype=torch.complex64),
    lambda: torch.ones((), device="meta"),
    lambda: torch.ones(4, 32, device="meta"),
    lambda: torch.ones(4, 32).to_sparse(),
    lambda: torch._efficientzerotensor(4, 32),
    lambda: torch.full((4, 32), float("nan")),
    lambda: torch.ones(4, 32, dtype=torch.int64),
    lambda: torch.ones(4, 32, dtype=torch.uint8),
)
KEYS = ("step", "exp_avg", "exp_avg_scale", "exp_avg_m8", "master", "remainder16", "remainder4")
KEYS += ("momentum_buffer", "lr", "betas", "params", "amsgrad", "state", "mine", "param_names")


def changed_tensor(choose: random.Random, value: Tensor) -> Any:
    """A tensor with something of it changed."""
    if value.is_meta or value.layout is not torch.strided or value._is_zerotensor():
        return None
    ways: list[Callable[[], Any]] = [
        lambda: value.to("meta"),
        lambda: value.to(choose.choice((torch.float16, torch.int32, torch.float64, torch.bool))),
        lambda: value.to(torch.complex64) if value.is_floating_point() else value.bool(),
        lambda: value.flatten(),
        lambda: value.unsqueeze(0),
        lambda: value.flatten()[: value.numel() // 2],
        lambda: value.t() if value.dim() == 2 else value.reshape(-1, 1),
        lambda: value.float().to_sparse(),
        lambda: value.tolist(),
        lambda: -value if value.is_floating_point() else value,
        lambda: value.float() * float("nan"),
        lambda: value.clone().requires_grad_() if value.is_floating_point() else value,
        lambda: torch.ones(()).expand(value.shape),
        lambda: torch._neg_view(value.float()),
        lambda: value.new_empty((0,)),
    ]
    return choose.choice(ways)()


def mutated(choose: random.Random, saved: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state dict with one to three changes anywhere in it."""
    found = copy.deepcopy(saved)
    for _ in range(choose.randint(1, 3)):
        place: Any = found
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            inner = [k for k in keys if isinstance(place[k], dict | list) and place[k]]
            if not inner or choose.random() < 0.25:
                break
            place = place[choose.choice(inner)]
        _change(choose, place, keys)
    return found


def _change(choose: random.Random, place: Any, keys: list[Any]) -> None:
    key = choose.choice(keys) if keys else None
    way = choose.randrange(6)
    odd = choose.choice(ODD_VALUES)()
    if key is None or (way == 0 and isinstance(place, dict)):
        place[choose.choice(KEYS)] = odd if isinstance(place, dict) else None
    elif way == 1:
        place.pop(key)
    elif way == 2:
        other = choose.choice(keys)
        place[key], place[other] = place[other], place[key]
    elif way == 3 and isinstance(place, dict):
        place[choose.choice(KEYS)] = place.pop(key)
    elif isinstance(place[key], Tensor) and way != 5:
        place[key] = changed_tensor(choose, place[key])
    else:
        place[key] = odd


def mutated_directory(choose: random.Random, source: Path, to: Path) -> Path:
    """A copy of a checkpoint directory whose files are damaged."""
    shutil.copytree(source, to)
    for _ in range(choose.randint(1, 2)):
        files = sorted(f for f in to.iterdir() if f.is_file())
        if files:
            _damage(choose, choose.choice(files), to)
    return to


def _damage(choose: random.Random, file: Path, folder: Path) -> None:
    data = bytearray(file.read_bytes())
    way, at = choose.randrange(8), choose.randrange(max(1, len(data)))
    if way == 0:
        file.unlink()
        return
    if way == 1:
        file.unlink()
        file.mkdir()
        return
    if way == 2:
        file.rename(folder / f"{file.name}x")
        return
    if way == 3:
        del data[at:]
    elif way == 4:
        del data[at : at + choose.randint(1, 64)]
    elif way == 5:
        data[at:at] = choose.randbytes(choose.randint(1, 64))
    else:
        for _ in range(choose.choice((1, 8, 64))):
            if data:
                data[choose.randrange(len(data))] = choose.randrange(256)
    file.write_bytes(bytes(data))
