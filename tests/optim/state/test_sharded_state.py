"""State beside DTensors, in two processes that compare what they hold with one process's state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from layouts import REPLICATED, made_once, whole
from ranks import LARGE, on_ranks
from rules import is_allowed
from tiers import tiered
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import amp_mp as amp
from amp_mp.sharding.shards import local_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

PRESETS = ("float32", "exact", "lean", "tiny", "micro", "nano", "masterless")
IN_GROUPS = ("tiny", "micro", "nano", "masterless")
MATRICES = (
    (96, 64),
    (3, 64),
    (33, 96),
    (4, 2, 8, 8),
    (6, 2, 32),
    (1, 64),
    (1, 32),
    (4, 6),
    (1, 4, 6),
)
SHAPES = (*MATRICES, (33,), (64,), (1,))
# The shapes whose states "tiny" and "micro" store in groups, where parameters are split by rows, as
# by fully_shard, and by columns; in one process as by rows.
BY_ROWS = {(96, 64), (3, 64), (33, 96), (4, 2, 8, 8), (6, 2, 32)}
BY_COLUMNS = {(96, 64), (3, 64)}


class Bag(nn.Module):
    """Parameters of all the shapes, bfloat16 and every third one float16 if the presets take it."""

    def __init__(self, seed: int, *presets: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for i, shape in enumerate(SHAPES):
            takes = is_allowed(*presets, torch.float16)
            dtype = torch.float16 if i % 3 == 2 and takes else torch.bfloat16
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(value))


def trained(preset: str, *others: str) -> tuple[Bag, amp.optim.AdamW]:
    """A model of one process after three steps, and its optimizer; new ones at every call.

    others: presets that its weights go to.
    """
    return copy.deepcopy(trained_once(preset, *others))


@cache
def trained_once(preset: str, *others: str) -> tuple[Bag, amp.optim.AdamW]:
    model = Bag(0, preset, *others)
    optimizer = amp.optim.AdamW(model.parameters(), lr=0.01, memory=preset, seed=3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    for param in model.parameters():
        param.grad = None
    return model, optimizer


def mesh() -> DeviceMesh:
    return made_once((2,), ("ranks",))


def split(model: nn.Module, layout: str) -> nn.Module:
    """A copy of a model, split by rows with fully_shard, by columns, or replicated."""
    made = copy.deepcopy(model)
    if layout == "rows":
        return fully_shard(made, mesh=mesh())  # type: ignore[return-value]
    for name, param in [*made.named_parameters()]:
        size, last = param.shape[-1], max(param.dim() - 1, 0)
        place = Shard(last) if layout == "columns" and size % 2 == 0 else Replicate()
        placed = distribute_tensor(param.detach(), mesh(), [place])
        made.register_parameter(name, nn.Parameter(placed))
    return made


def adamw(model: nn.Module, preset: str) -> amp.optim.AdamW:
    return amp.optim.AdamW(model.parameters(), lr=0.01, memory=preset)


def gathered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with whole tensors."""
    return {
        number: {name: whole(value) for name, value in state.items()}
        for number, state in state_dict["state"].items()
    }


def check_placing(optimizer: torch.optim.Optimizer) -> None:
    """Everything but the clock is a DTensor that is split as its parameter is."""
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if name in REPLICATED:
                assert type(value) is Tensor, name
                continue
            assert isinstance(value, DTensor), name
            assert value.placements == param.placements, name
            if name.endswith("_scale"):
                counts = [local_of(value).numel(), local_of(param).numel() // 32]
                assert counts[0] == counts[1], name
            elif name == "remainder4":
                assert 2 * local_of(value).numel() == local_of(param).numel()
            else:
                assert value.shape == param.shape, name
                assert local_of(value).shape == local_of(param).shape, name
                assert value.stride() == param.stride(), name


def has_groups(layout: str, shape: tuple[int, ...]) -> bool:
    return shape in (BY_COLUMNS if layout == "columns" else BY_ROWS)


def check_same(found: dict[str, Any], wanted: dict[str, Any], skipped: set[int]) -> None:
    """Bit for bit, but for parameters whose states fell back to formats without groups."""
    for number, state in wanted.items():
        codes = [n for n in state if number in skipped and f"{n}_scale" in state]
        if "remainder8" in found[number]:  # in columns of an odd length
            codes += [n for n in state if n == "remainder4"]
        names = {n for n in state if n.removesuffix("_scale") not in codes}
        extra = {n.removesuffix("_m8").replace("_log8", "_ue8m8") for n in codes}
        extra = {n.replace("remainder4", "remainder8") for n in extra}
        assert set(found[number]) == names | extra, number
        for name in names:
            assert raw_bytes(found[number][name]) == raw_bytes(state[name]), (number, name)


def fell_back(layout: str, preset: str) -> set[int]:
    if preset not in IN_GROUPS:
        return set()
    here = BY_ROWS - (BY_COLUMNS if layout == "columns" else BY_ROWS)
    return {i for i, shape in enumerate(SHAPES) if shape in here}


def whole_tensors(layout: str, preset: str) -> None:
    """A file of one process is read by two, and their state dict by one."""
    model, optimizer = trained(preset)
    saved = copy.deepcopy(optimizer.state_dict())
    sharded = split(model, layout)
    other = adamw(sharded, preset)
    other.load_state_dict(saved)
    check_placing(other)
    for param in sharded.parameters():
        if preset in IN_GROUPS:
            assert ("exp_avg_m8" in other.state[param]) == has_groups(layout, tuple(param.shape))
    skipped = fell_back(layout, preset)
    check_same(gathered(other.state_dict()), saved["state"], skipped)
    for number in skipped:
        moments = gathered(other.state_dict())[number]["exp_avg"].float()
        codes = [saved["state"][number][n] for n in ("exp_avg_m8", "exp_avg_m8_scale")]
        wanted = amp.formats.decode(codes, "m8")
        assert bool(((moments - wanted).abs() <= 2.0**-7 * wanted.abs()).all())
        if preset in ("micro", "masterless"):  # ue8m8 has all levels of log8
            codes = [saved["state"][number][f"exp_avg_sq_log8{end}"] for end in ("", "_scale")]
            squares = whole(other.torch_state_dict()["state"][number]["exp_avg_sq"])
            assert torch.equal(squares, amp.formats.decode(codes, "log8"))

    shown = other.state_dict()
    for state in shown["state"].values():
        for name, value in state.items():
            assert local_of(value).dtype != torch.int16, name
            assert bool(local_of(value).isfinite().all()), name
            assert torch.equal(value, value.clone()), name
    alone = adamw(copy.deepcopy(model), preset)
    alone.load_state_dict(shown)
    read = alone.state_dict()["state"]
    if not skipped:
        check_same(read, saved["state"], skipped)
    for number in skipped:  # bfloat16 there, m8 here
        parts = [read[number][n] for n in ("exp_avg_m8", "exp_avg_m8_scale")]
        moments = gathered(shown)[number]["exp_avg"].float().reshape(-1, 32)
        off = (amp.formats.decode(parts, "m8").reshape(-1, 32) - moments).abs()
        assert bool((off <= 3 / 64 * moments.abs().amax(1, keepdim=True)).all())
    again = adamw(split(model, "rows" if layout == "columns" else "columns"), preset)
    again.load_state_dict(shown)
    check_placing(again)
    third = adamw(split(model, layout), preset)
    third.load_state_dict(shown)
    assert raw_bytes(gathered(third.state_dict())) == raw_bytes(gathered(shown))


def conversion(layout: str, source: str, target: str) -> None:
    """Two processes draw the bits that one process draws."""
    model, optimizer = trained(source, target)
    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    amp.drop_masters(twin)  # a copy's weights keep their bits, which shards lack; the file has them
    alone = adamw(twin, target)
    alone.load_state_dict(saved)
    sharded = split(model, layout)
    other = adamw(sharded, target)
    other.load_state_dict(saved)
    check_placing(other)
    check_same(gathered(other.state_dict()), alone.state_dict()["state"], fell_back(layout, target))
    weights = [whole(p) for p in sharded.parameters()]
    assert raw_bytes(weights) == raw_bytes([p.detach() for p in twin.parameters()])
    mine = adamw(split(model, layout), source)
    mine.load_state_dict(saved)
    from_shards = adamw(split(model, layout), target)
    from_shards.load_state_dict(mine.state_dict())
    check_placing(from_shards)
    if not fell_back(layout, source):
        found, wanted = gathered(from_shards.state_dict()), gathered(other.state_dict())
        assert raw_bytes(found) == raw_bytes(wanted)


def first_state(layout: str, preset: str) -> None:
    """init_state makes what the state of one process is before its first step."""
    model = Bag(0, preset)
    sharded = split(model, layout)
    found = []
    for each in (model, sharded):
        optimizer = amp.optim.Adagrad(
            each.parameters(), memory=preset, initial_accumulator_value=0.1
        )
        assert optimizer.init_state() is None
        found.append(optimizer)
    check_placing(found[1])
    assert float(found[1].state[sharded.p0]["step"]) == 0
    wanted = found[0].state_dict()["state"]
    check_same(gathered(found[1].state_dict()), wanted, fell_back(layout, preset))
    held = sum(
        local_of(t).untyped_storage().nbytes()
        for p, state in found[1].state.items()
        for n, t in state.items()
        if n not in REPLICATED
    )
    report = found[1].memory_report()
    assert sum(n for k, n in report.bytes.items() if k not in ("weight", "step")) == held
    assert report.parameters == sum(local_of(p).numel() for p in sharded.parameters())


def masters(layout: str, preset: str) -> None:
    model, optimizer = trained(preset)
    sharded = split(model, layout)
    other = adamw(sharded, preset)
    other.load_state_dict(optimizer.state_dict())
    for a, b in zip(model.parameters(), sharded.parameters(), strict=True):
        wanted, before = amp.float32_of(a), b._version
        found = amp.float32_of(b)
        assert isinstance(found, DTensor)
        assert raw_bytes(found.full_tensor()) == raw_bytes(wanted)
        with other.masters(b) as master:
            master.mul_(2)
        assert b._version > before or local_of(b).numel() == 0
        assert raw_bytes(amp.float32_of(b).full_tensor()) == raw_bytes(wanted * 2)
        assert raw_bytes(b.full_tensor()) == raw_bytes((wanted * 2).to(b.dtype)) or (
            preset != "float32"
        )


def parts_are_refused(layout: str, preset: str) -> None:
    model, optimizer = trained(preset)
    sharded = split(model, layout)
    other = adamw(sharded, preset)
    other.load_state_dict(optimizer.state_dict())
    shown = other.state_dict()
    for state in shown["state"].values():
        state.update({n: local_of(v) for n, v in state.items()})
    before = raw_bytes([local_of(v) for s in other.state.values() for v in s.values()])
    with pytest.raises(ValueError, match=r"parameter 0 has shape .*one process's part"):
        other.load_state_dict(shown)
    assert raw_bytes([local_of(v) for s in other.state.values() for v in s.values()]) == before


CASES: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    **{
        f"{case.__name__}, {layout}, {preset}": (case, (layout, preset))
        for case in (whole_tensors, first_state, masters)
        for layout in ("rows", "columns", "replicated")
        for preset in PRESETS
    },
    **{
        f"conversion, {layout}, {a} to {b}": (conversion, (layout, a, b))
        for layout in ("rows", "columns")
        for a, b in [
            ("exact", "micro"),
            ("exact", "lean"),
            ("exact", "tiny"),
            ("micro", "exact"),
            ("exact", "masterless"),
            ("masterless", "exact"),
            ("micro", "tiny"),
            ("lean", "micro"),
            ("exact", "nano"),
            ("nano", "exact"),
            ("nano", "micro"),
            ("micro", "nano"),
        ]
    },
    **{f"parts, {preset}": (parts_are_refused, ("rows", preset)) for preset in ("exact", "micro")},
}
SOME = [name for name in CASES if not name.endswith(("float32", "lean", "tiny"))]
FEW = [f"{case.__name__}, columns, micro" for case in (whole_tensors, first_state, masters)]
FEW += [f"{case.__name__}, columns, nano" for case in (whole_tensors, masters)]
FEW += [
    "whole_tensors, rows, micro",
    "conversion, columns, nano to exact",
    "conversion, rows, exact to micro",
    "parts, micro",
]


def run(case: str) -> None:
    """What each of two processes does."""
    function, arguments = CASES[case]
    function(*arguments)


@pytest.mark.parametrize("case", CASES if LARGE else tiered(SOME, FEW))
def test_two_processes_hold_what_one_holds(case: str) -> None:
    on_ranks(2, run, case)
