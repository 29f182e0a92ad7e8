"""Muon with normalize="rows": NorMuon."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import array, random, raw_bytes
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import _C

SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any], tuple[int, int]]] = {
    "tall": ((48, 32), {}, (48, 32)),
    "wide": ((8, 96), {}, (8, 96)),
    "two blocks of the cache": ((300, 150), {}, (300, 150)),
    "blocks": ((96, 32), {"split": 3}, (32, 32)),
    "stack": ((4, 16, 24), {}, (16, 24)),
    "convolution": ((12, 4, 3, 3), {"flatten": True}, (12, 36)),
}


def orthogonal(grad: Tensor, matrix: tuple[int, int]) -> Tensor:
    """The orthogonal updates of a gradient without momentum, bfloat16 [n, rows, columns]."""
    stack = grad.to(torch.bfloat16).reshape(-1, *matrix).clone()
    _C.orthogonalise_(stack, {})
    return stack


def normuon(o: np.ndarray, v: np.ndarray, beta2: float, real: type) -> tuple[np.ndarray, Any]:
    """Li et al. 2025: normalised updates and v. Squares are summed in float64."""
    square = np.square(o.astype(np.float64)).mean(-1)
    v = v * real(beta2) + square.astype(real) * real(1 - beta2)
    scale = real(1) / (np.sqrt(v) + real(1e-10))
    after = (square * np.square(scale.astype(np.float64))).sum(-1, keepdims=True)
    ratio = np.sqrt(square.sum(-1, keepdims=True) / after).astype(real)
    return o.astype(real) * (scale * ratio)[..., None], v


def rounded(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().float().numpy()


@pytest.mark.parametrize("case", SHAPES)
def test_steps_are_the_reference_bit_for_bit_and_the_paper(device: str, case: str) -> None:
    shape, options, matrix = SHAPES[case]
    start = random(int(np.prod(shape)), 1).reshape(shape)
    param = nn.Parameter(torch.from_numpy(start.copy()).to(device))
    group = {"params": [param], **options}
    own: dict[str, Any] = {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "normalize": "rows"}
    optimizer = amp.optim.Muon([group], adjust_lr_fn="match_rms_adamw", **own)
    rate = np.float32(0.5 * 0.2 * np.sqrt(max(matrix)))
    w, v = start.copy(), np.zeros((start.size // np.prod(matrix), matrix[0]), np.float32)
    v64 = v.astype(np.float64)
    for step in range(4):
        grad = torch.from_numpy(random(start.size, 5 + step).reshape(shape)).to(device)
        grad[0] *= 100  # rows of very different size
        o = orthogonal(grad, matrix)
        o32 = o.float().cpu().numpy()
        u, v = normuon(o32, v, 0.95, np.float32)
        paper, v64 = normuon(o32.astype(np.float64), v64, 0.95, np.float64)
        before = w
        w = w - rate * rounded(u).reshape(shape)
        param.grad = grad
        optimizer.step()
        assert np.array_equal(array(param), w)
        found = optimizer.state[param]["second_momentum_buffer"]
        assert np.array_equal(array(found).reshape(v.shape), v)
        assert np.abs(u - paper).max() <= 4e-6 * np.abs(paper).max()
        assert np.linalg.norm(paper, axis=(1, 2)) == pytest.approx(
            np.linalg.norm(o32, axis=(1, 2)), rel=1e-6
        )
        moved = (before - w) / rate
        # what bfloat16 keeps of an update
        assert np.abs(moved - paper.reshape(shape)).max() <= 2**-8 * np.abs(paper).max()
    assert found.dtype == torch.float32
    sizes = [*shape[: -1 if len(shape) < 4 else 1], *[1] * (1 if len(shape) < 4 else 3)]
    assert list(found.shape) == sizes


def test_unequal_blocks_are_normalised_as_matrices_of_their_own(device: str) -> None:
    """Rows of 64, 16 and 16 of a fused weight."""
    options: Any = {"lr": 0.5, "normalize": "rows", "adjust_lr_fn": "match_rms_adamw"}
    start = torch.from_numpy(random(96 * 32, 1).reshape(96, 32)).to(device)
    fused = nn.Parameter(start.clone())
    parts = [nn.Parameter(part.clone()) for part in start.split((64, 16, 16))]
    first = amp.optim.Muon([{"params": [fused], "split": (64, 16, 16)}], **options)
    second = amp.optim.Muon(parts, **options)
    for step in range(3):
        fused.grad = torch.from_numpy(random(96 * 32, 5 + step).reshape(96, 32)).to(device)
        for param, part in zip(parts, fused.grad.split((64, 16, 16)), strict=True):
            param.grad = part.clone()
        first.step()
        second.step()
    rows = [second.state[param]["second_momentum_buffer"] for param in parts]
    found = first.state[fused]["second_momentum_buffer"]
    assert torch.equal(found[:64], rows[0])
    # The smaller blocks have 1 / sqrt(2) of the first's factor in their updates.
    torch.testing.assert_close(found[64:], torch.cat(rows[1:]) / 2, rtol=2**-6, atol=0)
    torch.testing.assert_close(fused, torch.cat(parts), rtol=0, atol=6 * 0.5 * 2**-8)


def test_rows_move_alike(device: str) -> None:
    """What NorMuon is for: updates of Muon differ from row to row, these do not."""
    spread = []
    for normalize in (None, "rows"):
        param = nn.Parameter(torch.zeros(64, 16, device=device))
        optimizer = amp.optim.Muon([param], lr=1.0, weight_decay=0.0, normalize=normalize)
        for step in range(30):
            param.grad = torch.from_numpy(random(1024, step).reshape(64, 16)).to(device)
            param.grad[:8] *= 20
            before = param.detach().clone()
            optimizer.step()
        sizes = (param.detach() - before).norm(dim=1)
        spread.append(float(sizes.max() / sizes.min()))
    assert spread[1] < spread[0] / 1.5


def model_with(device: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
    amp.prepare(model, torch.bfloat16)
    options: Any = {"lr": 0.02, "normalize": "rows", "max_grad_norm": 1.0, "memory": "lean"}
    return model, amp.optim.Muon(model, matrices=["*.weight"], **options)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        for number, param in enumerate(model.parameters()):
            values = torch.from_numpy(random(param.numel(), 10 * step + number))
            param.grad = values.to(param.device, param.dtype).view(param.shape)
        optimizer.step()


def bytes_of(model: nn.Module, optimizer: Any) -> Any:
    return raw_bytes([[p.detach() for p in model.parameters()], optimizer.state_dict()["state"]])


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_resumed_run_has_the_same_bits(device: str, way: str) -> None:
    model, optimizer = model_with(device)
    train(model, optimizer, range(3))
    if way == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    else:
        twin, other = model_with(device)
        twin.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), (twin, other)):
        train(*each, range(3, 6))
    assert bytes_of(model, optimizer) == bytes_of(twin, other)


def test_a_skipped_step_and_a_missing_gradient_leave_the_rows(device: str) -> None:
    model, optimizer = model_with(device)
    train(model, optimizer, range(2))
    before = bytes_of(model, optimizer)
    first = next(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    first.grad[0, 0] = float("inf")
    optimizer.step()
    assert optimizer.step_was_skipped
    assert bytes_of(model, optimizer) == before
    kept = optimizer.state[first]["second_momentum_buffer"].clone()
    others = optimizer.state[model[2].weight]["second_momentum_buffer"].clone()
    train(model, optimizer, range(5, 6))
    assert not torch.equal(optimizer.state[first]["second_momentum_buffer"], kept)
    kept = optimizer.state[first]["second_momentum_buffer"].clone()
    first.grad = None
    optimizer.step()
    assert torch.equal(optimizer.state[first]["second_momentum_buffer"], kept)
    assert not torch.equal(optimizer.state[model[2].weight]["second_momentum_buffer"], others)


def test_a_run_of_muon_may_go_on_with_rows(device: str) -> None:
    param = nn.Parameter(torch.ones(8, 16, device=device))
    plain = amp.optim.Muon([param])
    param.grad = torch.ones_like(param)
    plain.step()
    assert "second_momentum_buffer" not in plain.state[param]
    rows = amp.optim.Muon([param], normalize="rows")
    state = plain.state_dict()
    state["param_groups"][0]["normalize"] = "rows"
    rows.load_state_dict(state)
    rows.step()
    held = rows.state[param]["second_momentum_buffer"]
    assert held.shape == (8, 1)
    assert (held > 0).all()
    state = rows.state_dict()
    state["state"][0]["second_momentum_buffer"] = torch.ones(16, 1)
    with pytest.raises(ValueError, match=r"second_momentum_buffer.*has shape \(16, 1\)"):
        rows.load_state_dict(state)
    rows.state[param]["second_momentum_buffer"] = torch.ones(4, 1, device=device)
    with pytest.raises(ValueError, match="second_momentum_buffer has shape"):
        rows.step()


def test_a_transposed_weight_has_the_same_rows(device: str) -> None:
    values, grad = random(512, 1).reshape(16, 32), random(512, 2).reshape(16, 32)
    found = []
    for transposed in (False, True):
        made = torch.from_numpy(values.copy()).to(device)
        param = nn.Parameter(made.t().contiguous().t() if transposed else made)
        param.grad = torch.from_numpy(grad.copy()).to(device).as_strided((16, 32), (32, 1))
        optimizer = amp.optim.Muon([param], normalize="rows")
        optimizer.step()
        found.append((array(param), array(optimizer.state[param]["second_momentum_buffer"])))
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("hyperball", [False, True], ids=["Muon", "MuonH"])
def test_a_matrix_without_elements_is_left_alone(
    device: str, shape: tuple[int, ...], hyperball: bool
) -> None:
    """Beside another one, which moves as it does alone."""
    moved = []
    for shapes in (((4, 6), shape), ((4, 6),)):
        params = [nn.Parameter(torch.ones(*each, device=device)) for each in shapes]
        optimizer = amp.optim.Muon(params, lr=0.1, normalize="rows", hyperball=hyperball)
        for step in range(2):
            for param in params:
                grad = torch.from_numpy(random(param.numel(), step)).view_as(param)
                param.grad = grad.to(device)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        held = [x for state in optimizer.state.values() for x in state.values()]
        assert all(x.isfinite().all() for x in held if isinstance(x, Tensor))
        moved.append(params[0].detach())
    assert torch.equal(*moved)
    assert not torch.equal(moved[0], torch.ones_like(moved[0]))
