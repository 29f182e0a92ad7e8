"""State dicts of every optimizer and preset: what is in them, and who reads them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import raw_bytes, state_names, through_a_file
from rules import KINDS, cases, is_allowed
from torch import Tensor, nn

import amp_mp as amp

PRESETS = ("float32", "exact", "lean", "tiny", "micro", "nano", "masterless")
SHAPES = ((4, 32), (2, 3, 64), (3, 8, 8), (2, 3, 4, 8), (1, 64), (33,), (64,), (5, 31), (0, 32), ())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# How far a format's numbers may be from what was stored, relative to the number itself, or for m8
# to the largest of its group: one step, because rounding is stochastic. log8 has a floor besides.
STEP = {"float32": 0.0, "bfloat16": 2.0**-7, "ue8m8": 2.0**-8, "m8": 3 / 64, "log8": 1 / 8}
SUFFIXES = {"m8": "_m8", "log8": "_log8", "ue8m8": "_ue8m8"}
GROUPED = ("m8", "log8")


def optimizer_of(kind: str, params: list[nn.Parameter], memory: str) -> amp.optim.FusedOptimizer:
    return getattr(amp.optim, kind)(params, lr=0.01, **KINDS[kind], memory=memory, seed=5)


def stepped(
    kind: str, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], memory: str, device: str
) -> tuple[list[nn.Parameter], amp.optim.FusedOptimizer]:
    generator = torch.Generator().manual_seed(3)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    optimizer = optimizer_of(kind, params, memory)
    for _ in range(2):
        for param in params:
            grad = torch.randn(param.shape, generator=generator) * 0.1
            param.grad = grad.to(device, param.dtype)
        optimizer.step()
    return params, optimizer


def decoded(state: dict[str, Any], name: str) -> tuple[str, Tensor]:
    """The format by the entry's name, and the numbers."""
    for format, suffix in SUFFIXES.items():
        entries = [name + suffix, *([f"{name}{suffix}_scale"] if format in GROUPED else [])]
        if entries[0] in state:
            return format, amp.formats.decode([state[e] for e in entries], format)
    return str(state[name].dtype).removeprefix("torch."), state[name].float()


def bound(format: str, values: Tensor) -> Tensor:
    size = values.abs()
    if format not in GROUPED:
        return STEP[format] * size
    largest = size.reshape(-1, 32).amax(1, keepdim=True).expand(-1, 32).reshape(values.shape)
    if format == "m8":
        return STEP["m8"] * largest
    return STEP["log8"] * size + 2.0**-26 * (2 * 32 / 31) * largest


@pytest.mark.parametrize("round_", range(40))
def test_any_preset_reads_any_state_dict(device: str, round_: int) -> None:
    choose = np.random.default_rng(round_)
    kind = str(choose.choice([*KINDS]))
    source, target = (str(m) for m in choose.choice(PRESETS, 2))
    count = int(choose.integers(1, 5))
    shapes = [SHAPES[i] for i in choose.integers(0, len(SHAPES), count)]
    known = [d for d in DTYPES if is_allowed(source, d) and is_allowed(target, d)]
    dtypes = [known[i] for i in choose.integers(0, len(known), count)]
    params, optimizer = stepped(kind, shapes, dtypes, source, device)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        for entry, value in state.items():
            assert value.dtype not in (torch.int16, torch.uint16), entry
            if not value.dtype.is_floating_point:
                ends = ("_m8", "_log8", "_log8_scale", "_ue8m8")
                assert entry.startswith("remainder") or entry.endswith(ends), entry
    saved = through_a_file(saved, weights_only=True)

    for memory in (source, target):
        twins = [nn.Parameter(p.detach().clone()) for p in params]
        other = optimizer_of(kind, twins, memory)
        other.load_state_dict(saved)
        if memory == source:
            assert raw_bytes(other.state_dict()) == raw_bytes(saved)
        for param, twin in zip(params, twins, strict=True):
            old, new = optimizer.state[param], other.state[twin]
            assert new["step"] == old["step"]
            for name in state_names(optimizer):
                (before, wanted), (after, found) = decoded(old, name), decoded(new, name)
                if before == after:
                    assert torch.equal(found, wanted)
                assert bool(((found - wanted).abs() <= bound(after, wanted)).all()), (name, after)
                entries = [name, *(name + suffix for suffix in SUFFIXES.values())]
                held = [e for e in new if e in entries]
                assert len(held) == 1, held
            # The first step makes a master that the file lacks.
            has_master = param.dtype != torch.float32 and "masterless" not in (source, memory)
            assert len([e for e in new if e.startswith(("master", "remainder"))]) == has_master
        for twin in twins:
            twin.grad = torch.ones_like(twin)
        other.step()


LAYOUTS = {
    "row-major": torch.randn(2, 3, 4, 8),
    "channels_last": torch.randn(2, 3, 4, 8).to(memory_format=torch.channels_last),
    "transposed": torch.randn(6, 32).t(),
    "no dimension": torch.tensor(0.3),
    "one element": torch.randn(1, 1),
    "no element": torch.randn(0, 4),
}


@pytest.mark.parametrize(("memory", "dtype"), cases(PRESETS, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_healthy_state_dict_has_finite_numbers_and_reads_back(
    device: str, layout: str, memory: str, dtype: torch.dtype
) -> None:
    values = LAYOUTS[layout].to(device, dtype)
    param = nn.Parameter(values.detach())
    optimizer = optimizer_of("AdamW", [param], memory)
    for sign in (1, -1):
        param.grad = sign * torch.randn_like(param)
        optimizer.step()
    saved = optimizer.state_dict()
    (state,), (own,) = saved["state"].values(), optimizer.state.values()
    for entry, value in state.items():
        assert torch.equal(value, value.clone()), entry
        assert bool(value.isfinite().all()), entry
        held = own[entry]
        assert value.data_ptr() == held.data_ptr(), entry
        if held.dtype == torch.int16:
            assert (value.dtype, tuple(value.shape)) == (torch.uint8, (*param.shape, 2)), entry
            low_first = value.to(torch.int32)  # of a little-endian machine
            wanted = held.to(torch.int32) & 0xFFFF
            assert torch.equal(low_first[..., 0] | low_first[..., 1] << 8, wanted), entry
        else:
            assert raw_bytes(value) == raw_bytes(held), entry  # in the same memory: above
    twin = nn.Parameter(param.detach().clone())
    other = optimizer_of("AdamW", [twin], memory)
    other.load_state_dict(through_a_file(saved, weights_only=True))
    assert raw_bytes(other.state_dict()) == raw_bytes(saved)
    for entry, value in other.state[twin].items():
        assert value.dtype == own[entry].dtype, entry
        assert value.stride() == own[entry].stride(), entry
        assert value.numel() == 0 or value.data_ptr() != own[entry].data_ptr(), entry


def test_hooks_see_bytes_in_a_state_dict(device: str) -> None:
    _, optimizer = stepped("AdamW", [(2, 32)], [torch.float16], "exact", device)
    seen: list[Tensor] = []
    hook = lambda _, found: seen.append(found["state"][0]["remainder16_float16"])  # noqa: E731
    optimizer.register_state_dict_post_hook(hook)
    optimizer.state_dict()
    assert [(each.dtype, tuple(each.shape)) for each in seen] == [(torch.uint8, (2, 32, 2))]
    wanted = raw_bytes(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert raw_bytes(optimizer.state_dict()) == wanted


def test_scales_have_the_parameters_shape_where_they_can(device: str) -> None:
    wanted = {
        (4, 64): (4, 2),
        (2, 3, 32): (2, 3, 1),
        (2, 3, 4, 8): (2, 3),
        (1, 2, 4, 8): (1, 2),
        (2, 1, 1, 32): (2, 1, 1, 1),
    }
    params, optimizer = stepped("Lion", [*wanted], [torch.bfloat16] * 5, "tiny", device)
    found = [optimizer.state[p]["exp_avg_m8_scale"] for p in params]
    assert [tuple(s.shape) for s in found] == [*wanted.values()]
    turned = nn.Parameter(torch.ones(8, 32, 4, 4, device=device))
    turned.data = turned.data.to(memory_format=torch.channels_last)
    optimizer = amp.optim.Lion([turned], memory="tiny")
    turned.grad = torch.ones_like(turned)
    optimizer.step()
    assert tuple(optimizer.state[turned]["exp_avg_m8_scale"].shape) == (128,)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg_m8_scale"] = saved["state"][0]["exp_avg_m8_scale"].view(4, 2, 16)
    optimizer.load_state_dict(saved)
    assert tuple(optimizer.state[turned]["exp_avg_m8_scale"].shape) == (128,)


def test_a_state_held_twice_is_refused_by_name(device: str) -> None:
    (param,), optimizer = stepped("AdamW", [(4, 64)], [torch.bfloat16], "tiny", device)
    optimizer.state[param]["exp_avg"] = torch.zeros_like(param)
    amp.optim.forget(optimizer)
    message = "parameter 0 of group 0 holds 'exp_avg' twice, as 'exp_avg' and as 'exp_avg_m8'"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    del optimizer.state[param]["exp_avg"]
    optimizer.step()


@pytest.mark.parametrize("memory", PRESETS)
def test_init_state_makes_what_a_first_step_starts_from(device: str, memory: str) -> None:
    half = torch.float16 if is_allowed(memory, torch.float16) else torch.bfloat16
    shapes, dtypes = [(4, 32), (5,), (3,)], [torch.bfloat16, half, torch.float32]
    found = []
    for early in (True, False):
        generator = torch.Generator().manual_seed(0)
        params = [
            nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        frozen = nn.Parameter(torch.ones(2, 32, device=device), requires_grad=False)
        optimizer = optimizer_of("AdamW", [*params, frozen], memory)
        if early:
            before = raw_bytes(params)
            assert optimizer.init_state() is None
            assert raw_bytes(params) == before
            assert set(optimizer.state) == set(params)
            assert all(float(state["step"]) == 0 for state in optimizer.state.values())
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        state = raw_bytes(optimizer.state_dict())
        if early:
            optimizer.init_state()  # there is nothing to make
            assert raw_bytes(optimizer.state_dict()) == state
        found.append((raw_bytes(params), state))
    assert found[0] == found[1]


def test_init_state_raises_what_a_first_step_raises(device: str) -> None:
    param = nn.Parameter(torch.ones(4, 32, device=device))
    optimizer = optimizer_of("AdamW", [param], "tiny")
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside"):
        optimizer.init_state()
    assert not optimizer.state
    param.data = param.data.double()
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 has dtype torch\.float64"):
        optimizer.init_state()
    assert not optimizer.state
    param.data = param.data.float()
    optimizer.init_state()
    param.data = torch.ones(2, 32, device=device)
    with pytest.raises(ValueError, match="parameter 0 of group 0 has shape"):
        optimizer.init_state()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_masters_of_another_precision_are_read_as_numbers(device: str, dtype: torch.dtype) -> None:
    """As a script leaves them that converts all floats of a checkpoint."""
    param = nn.Parameter(torch.linspace(-1, 1, 64, device=device).bfloat16())
    param.grad = torch.ones_like(param)
    optimizer = amp.optim.AdamW([param], lr=0.01, memory="float32")
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    wanted = saved["state"][0]["master"] = saved["state"][0]["master"].to(dtype)
    optimizer.load_state_dict(saved)
    master = optimizer.state[param]["master"]
    assert master.dtype == torch.float32
    assert torch.equal(master, wanted.float())
