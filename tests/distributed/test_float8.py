"""Float8 of sharded models: bit for bit the whole model's, in one all-reduce for all cut blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from float8_reference import FORMS, float8, numpy_of
from helpers import raw_bytes
from layouts import LAYOUTS, Bag, Net, local, mesh_of, positions, shard
from ranks import LARGE, on_ranks
from tiers import tiered
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Blocks that are cut once or more, uneven shards and empty ones, experts, whole blocks; the last
# stays plain under tensor parallelism.
SHAPES = [(300, 256), (130, 64), (1, 160), (3, 140, 128), (256, 128), (64,), (5, 32, 128), (96, 64)]
DTYPES = {"bfloat16": BF16, "float16": FP16, "float32": FP32}


def weights_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Bag:
    """Of many sizes, with a block of zeros, NaN and inf, and the largest in any place."""
    model = Bag(shapes, FP32)
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0 ** -torch.randint(0, 9, param.shape, generator=source))
            param.view(-1)[torch.randint(param.numel(), (1,), generator=source)] *= 64
        model.p0[:128, :128] = -0.0
        model.p0[140, 130], model.p1[129, 3], model.p1[0, 5] = float("nan"), float("-inf"), 1e4
    return model.to(dtype)


def whole_of(model: nn.Module, form: str, dtype: torch.dtype) -> dict[str, Any]:
    """Codes and scales of the plain model by the reference, and what is left."""
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        value = param.detach()
        value = value.to(dtype) if value.dtype == FP32 else value
        if value.dim() > 1:
            codes, scales = float8(value.float().numpy(), form)
            found[name] = torch.from_numpy(codes), torch.from_numpy(scales)
        else:
            found[name] = value
    return found


def split(layout: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Any:
    model = weights_of(shapes, dtype)
    if layout == "fsdp columns":
        return shard(model, "fsdp", shard_placement_fn=lambda _: Shard(1))
    return shard(model, layout)


def differing(layout: str, shapes: list[tuple[int, ...]], form: str, name: str) -> list[str]:
    """Where a rank has anything else than its part of the whole model's float8, in words."""
    dtype = DTYPES[name]
    model = split(layout, shapes, dtype)
    wanted = whole_of(weights_of(shapes, dtype), form, FP16)
    with CommDebugMode() as calling:
        weights = amp.float8_weights(model, form, dtype=FP16)
    with CommDebugMode() as iterating:
        found = dict(weights)
    wrong = [] if list(found) == list(wanted) else [f"names {list(found)}"]
    dimensions = {
        dim
        for param in model.parameters()
        if isinstance(param, DTensor) and param.dim() > 1
        for dim, placement in enumerate(param.placements)
        if not placement.is_replicate() and param.device_mesh.size(dim) > 1
    }
    reductions = 0 if form == "mxfp8" else len(dimensions)
    counts = {str(op): count for op, count in calling.get_comm_counts().items()}
    if sum(counts.values()) != reductions or any("allreduce" not in op for op in counts):
        wrong.append(f"{counts} in place of {reductions} all-reduces")
    if iterating.get_total_counts():
        wrong.append(f"while iterating: {iterating.get_comm_counts()}")
    for key, param in model.named_parameters():
        own, places = found[key], positions(param)
        if param.dim() < 2:
            if raw_bytes(own) != raw_bytes(wanted[key].reshape(-1)[places]):
                wrong.append(f"{key} is another")
            continue
        codes, scales = wanted[key]
        if form == "mxfp8":
            shape = (*local(param).shape[:-1], local(param).shape[-1] // 32)
            scales = scales.reshape(-1)[places[::32] // 32].reshape(shape)
        codes = codes.reshape(-1)[places].reshape(local(param).shape)
        for what, mine, theirs in (("codes", own.codes, codes), ("scales", own.scales, scales)):
            if raw_bytes(torch.from_numpy(numpy_of(mine))) != raw_bytes(theirs):
                wrong.append(f"{key} has other {what}")
    return wrong


ROWS = [(300, 256), (130, 384), (3, 140, 128), (64,), (5, 32, 128), (96, 64)]
COLUMNS = [(300, 256), (130, 512), (8, 64), (3, 140, 128)]  # even shards, as fully_shard wants
RANKS = {**LAYOUTS, "fsdp columns": (2, 4)}
CASES = [
    (layout, world, form, dtype)
    for layout, worlds in RANKS.items()
    if layout.split()[0] not in ("tp", "sp")  # of Net, whose weights are small: below
    for world, form, dtype in itertools.product(worlds, FORMS, DTYPES)
]
QUICK = [
    ("fsdp", 2, "float8_128x128", "bfloat16"),
    ("fsdp", 4, "float8_128x128_power", "float32"),
    ("fsdp", 4, "mxfp8", "float16"),
    ("hsdp", 4, "float8_128x128", "float16"),
    ("rows", 2, "float8_128x128", "float32"),
    ("columns fsdp", 4, "float8_128x128", "bfloat16"),
    ("rows fsdp", 4, "float8_128x128_power", "bfloat16"),
    ("fsdp columns", 4, "float8_128x128", "bfloat16"),
]


@pytest.mark.parametrize(
    ("layout", "world", "form", "dtype"), CASES if LARGE else tiered(CASES, QUICK)
)
def test_each_process_has_its_part_of_the_whole_models_float8(
    layout: str, world: int, form: str, dtype: str
) -> None:
    shapes = COLUMNS if layout == "fsdp columns" else SHAPES
    if layout.startswith("rows"):
        shapes = ROWS
    if layout == "fsdp columns" and form == "mxfp8":
        shapes = [(300, 256), (130, 512), (3, 64, 128)]
    found = on_ranks(world, differing, layout, shapes, form, dtype)
    assert found == [[]] * world


def several_ways() -> list[str]:
    """Tensor parallel and FSDP2 by torch's own plans, after a forward that leaves weights whole."""
    wrong = []
    for layout in ("tp fsdp", "sp fsdp", "fsdp"):
        model: Any = shard(Net(BF16), layout)
        with torch.no_grad():
            model(torch.randn(2, 8, 32, dtype=BF16))
        wanted = whole_of(Net(BF16), "float8_128x128", BF16)
        found = dict(amp.float8_weights(model, "float8_128x128"))
        for name, param in model.named_parameters():
            if param.dim() > 1:
                codes, scales = wanted[name]
                mine = numpy_of(found[name].codes).reshape(-1)
                if mine.tobytes() != codes.reshape(-1)[positions(param)].numpy().tobytes():
                    wrong.append(f"{layout}: {name} has other codes")
                if not torch.equal(found[name].scales, scales):
                    wrong.append(f"{layout}: {name} has other scales")
    return wrong


def test_layouts_that_torch_makes_and_weights_that_were_gathered() -> None:
    assert on_ranks(4, several_ways) == [[]] * 4


def one_weight(value: Tensor, placements: list[Any]) -> nn.Module:
    mesh = mesh_of("fsdp")
    placed = DTensor.from_local(value, mesh, placements, run_check=False)
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(placed))
    return model


def refusals() -> list[str]:
    """What each refused model's error says; nothing is sent."""
    said = []
    with CommDebugMode() as counted:
        for model, form in [
            (one_weight(torch.ones(64, 64), [Partial()]), "float8_128x128"),
            (one_weight(torch.ones(64, 64), [_StridedShard(0, split_factor=2)]), "mxfp8"),
            (one_weight(torch.ones(64, 48), [Shard(1)]), "mxfp8"),
        ]:
            try:
                amp.float8_weights(model, form)
            except ValueError as error:
                said.append(str(error))
        try:
            amp.float8_of(one_weight(torch.ones(64, 64), [Shard(0)]).weight, "mxfp8")
        except TypeError as error:
            said.append(str(error))
    return [*said, str(counted.get_total_counts())]


def test_placements_that_cannot_be_served_are_refused_by_name() -> None:
    for partial, strided, columns, dtensor, sent in on_ranks(2, refusals):
        assert partial.startswith("weight has the placement P(sum)") or "Partial" in partial
        assert "weight has the placement _S(" in strided or "_StridedShard" in strided
        assert "weight is cut along its rows, and this process's part has rows of 48" in columns
        assert "weight is a DTensor, whose blocks" in dtensor
        assert "float8_weights" in dtensor
        assert sent == "0"


def sent(form: str) -> bool:
    """Whether a gathered weight is the whole one, as docs/rl.md gathers it."""
    plain = weights_of(SHAPES, BF16)
    model = shard(weights_of(SHAPES, BF16), "fsdp")
    params = dict(model.named_parameters())
    for name, value in amp.float8_weights(model, form):
        if not isinstance(value, amp.Float8):
            continue
        param, whole = params[name], []
        for part in (value.codes.view(torch.uint8), value.scales):
            is_cut = part is not value.scales or form == "mxfp8"
            shape = (*param.shape[:-1], part.shape[-1])
            strides = torch.empty(shape, device="meta").stride()
            whole.append(
                DTensor.from_local(
                    part, param.device_mesh, param.placements, shape=shape, stride=strides
                ).full_tensor()
                if is_cut
                else part
            )
        codes, scales = float8(plain.get_parameter(name).detach().float().numpy(), form)
        if raw_bytes(whole[0]) != raw_bytes(torch.from_numpy(codes)):
            return False
        if raw_bytes(whole[1]) != raw_bytes(torch.from_numpy(scales)):
            return False
    return True


@pytest.mark.parametrize("form", FORMS)
def test_gathered_parts_are_the_whole_weight(form: str) -> None:
    assert on_ranks(2, sent, form) == [True, True]
