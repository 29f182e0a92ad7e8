"""Optimizers with compact formats: long runs, shards, memory, groups and arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import random
from rules import (
    MEMORIES,
    PRESETS,
    found_master,
    found_state,
)
from tiers import tiered
from torch import nn

import amp_mp as amp

# What the presets store moments and squares as.
MOMENTS = sorted({PRESETS[m][1] for m in MEMORIES})
SQUARES = sorted({PRESETS[m][2] for m in MEMORIES})


# Optimizers.


@pytest.mark.parametrize("format", tiered(SQUARES, ["ue8m8", "log8"]))
def test_the_second_moment_follows_a_gradient_that_drops(device: str, format: str) -> None:
    """Nearest rounding would stay at the old value: .999 of a number is the same number.

    The mean is right. Single elements scatter, by what docs/formats.md says and a tenth.
    """
    count, beta2 = (128, 32), 0.999
    param = nn.Parameter(torch.zeros(count, device=device))
    optimizer = amp.optim.AdamW([param], lr=0.0, betas=(0.9, beta2), exp_avg_sq=format)
    generator = torch.Generator().manual_seed(1)
    pool = [torch.randn(count, generator=generator).to(device) for _ in range(500)]
    wanted = torch.zeros(count, dtype=torch.float64, device=device)
    for step in range(3000 + 2800):
        param.grad = pool[step % 500] * (1.0 if step < 3000 else 0.1)
        wanted.mul_(beta2).add_(param.grad.double().square(), alpha=1 - beta2)
        optimizer.step()
    found = found_state(optimizer.state[param], "exp_avg_sq", format).astype(np.float64)
    ratio = found / wanted.cpu().numpy().reshape(-1)
    assert ratio.mean() == pytest.approx(1, abs=0.02)
    spread = {"float32": 1e-3, "ue8m8": 0.07, "log8": 0.37}[format]
    assert spread / 2 <= ratio.std() <= spread or format == "float32"


@pytest.mark.parametrize("format", MOMENTS)
def test_the_first_moment_of_a_constant_gradient_is_right(device: str, format: str) -> None:
    """Averaged over steps and elements, for elements of a group that are 1, 1/8, 1/1000 of it.

    A step's bias, ten times over with beta1 = .9: bfloat16's probabilities are 256ths of an ulp of
    2^-7. m8's numbers from code 2^k on are 3/2^k apart at most, and the mean is too large between
    two of them with a power of two between, by .375 / 2^k at most and by 2/3 of that on average. A
    moment that scatters by a step and more is there a third of the time. A step's deviation is an
    ulp / 2 or 3/2 / 2^k, 1 / sqrt(1 - .81) of it stationary; five of these, ten steps counting as
    one.
    """
    steps, sizes = 200, np.float32([1, 1 / 8, 1 / 1000])
    columns = np.repeat(sizes, [11, 11, 10])
    grad = torch.from_numpy(np.tile(columns, (512, 1))).to(device)
    param = nn.Parameter(torch.zeros_like(grad))
    optimizer = amp.optim.AdamW([param], lr=0.0, betas=(0.9, 0.999), exp_avg=format)
    total = np.zeros((512, 32))
    for step in range(steps):
        param.grad = grad
        optimizer.step()
        state = optimizer.state[param]
        if step >= steps // 2:
            values = found_state(state, "exp_avg", format).reshape(512, 32)
            total += values / (1 - 0.9 ** (step + 1))
    ratio = total / (steps // 2) / columns
    for size in sizes:
        chosen = ratio[:, columns == size]
        octave = 2.0 ** -np.floor(np.log2(126 * np.cbrt(size)))
        bias, deviation = {
            "float32": (2.0**-23, 2.0**-23),
            "bfloat16": (2.0**-7 / 512, 2.0**-8),
            "m8": (0.375 * octave * 2 / 3 / 3, 1.5 * octave),
        }[format]
        tolerance = 10 * bias + 5 * deviation / np.sqrt(0.19 * chosen.size * steps / 20)
        assert chosen.mean() == pytest.approx(1, abs=tolerance), size


@pytest.mark.full
@pytest.mark.parametrize("memory", MEMORIES)
def test_an_element_without_gradient_comes_to_rest(device: str, memory: str) -> None:
    """Half of the elements of two rows stop, and two whole rows."""
    param = nn.Parameter(torch.from_numpy(random(128, 1)).bfloat16().to(device).view(4, 32))
    optimizer = amp.optim.AdamW([param], lr=1e-3, weight_decay=0.0, memory=memory)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(4, 32, generator=generator).bfloat16().to(device) for _ in range(50)]
    stops = torch.ones(4, 32, dtype=torch.bool, device=device)
    stops[:2, ::2] = False
    for step in range(500):
        param.grad = grads[step % 50]
        optimizer.step()
    rest = [grad.masked_fill(stops, 0.0) for grad in grads]
    seen = []
    for step in range(20_000):
        param.grad = rest[step % 50]
        optimizer.step()
        if step >= 20_000 - 100:
            master = found_master(optimizer.state[param], param, PRESETS[memory][0])
            seen.append(master.reshape(4, 32))
    still, moving = stops.cpu().numpy(), ~stops.cpu().numpy()
    assert all(np.array_equal(master[still], seen[0][still]) for master in seen)
    moved = seen[0][moving] != seen[-1][moving]
    # Without masters an update moves a weight by a whole place or by nothing.
    assert moved.any() if memory == "masterless" else moved.all()


@pytest.mark.parametrize(
    ("memory", "wanted"),
    [
        (None, 12),
        ("float32", 14),
        ("exact", 12),
        ("lean", 7),
        ("tiny", 6.0625),
        ("micro", 5.09375),
        ("nano", 4.59375),
        ("masterless", 4.09375),
    ],
)
def test_memory_is_what_the_storages_take(device: str, memory: str | None, wanted: float) -> None:
    param = nn.Parameter(torch.ones(1024, 1024, dtype=torch.bfloat16, device=device))
    optimizer = amp.optim.AdamW([param], memory=memory)
    assert optimizer.memory_report().bytes_per_parameter == 2
    param.grad = torch.ones_like(param)
    optimizer.step()
    report = optimizer.memory_report()
    assert report.bytes_per_parameter == pytest.approx(wanted, abs=0.01)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (param, param.grad, *optimizer.state[param].values())
    }
    assert report.total == sum(storages.values())
    assert report.parameters == param.numel()
    lines = [line.split() for line in str(report).splitlines()]
    assert ["weight", "2.00", "MiB", "0", "B", "2.000"] in lines
    assert lines[-1][-1] == f"{report.bytes_per_parameter:.3f}"
    assert {len(line) for line in str(report).splitlines()[1:]} == {
        len(str(report).splitlines()[0])
    }


# Arguments.


def test_groups_have_their_own_formats(device: str) -> None:
    params = [nn.Parameter(torch.ones(4, 32, dtype=torch.bfloat16, device=device)) for _ in "abcd"]
    optimizer = amp.optim.AdamW(
        [
            {"params": params[0]},
            {"params": params[1], "master": "float32", "exp_avg": "float32"},
        ],
        memory="tiny",
    )
    optimizer.add_param_group({"params": params[2], "memory": "lean"})
    optimizer.add_param_group({"params": params[3], "exp_avg_sq": "float16_root"})
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    found = [
        {
            name: str(tensor.dtype).removeprefix("torch.")
            for name, tensor in optimizer.state[p].items()
            if tensor.shape == p.shape
        }
        for p in params
    ]
    assert found == [
        {"remainder8": "int8", "exp_avg_m8": "int8", "exp_avg_sq_ue8m8": "int16"},
        {"master": "float32", "exp_avg": "float32", "exp_avg_sq_ue8m8": "int16"},
        {"remainder8": "int8", "exp_avg": "bfloat16", "exp_avg_sq_ue8m8": "int16"},
        {"remainder8": "int8", "exp_avg_m8": "int8", "exp_avg_sq_root": "float16"},
    ]
    assert "memory" not in optimizer.param_groups[2]
