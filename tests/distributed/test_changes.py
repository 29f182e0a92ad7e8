"""Changed weights of sharded models: each process notes those of its shards, and sends nothing."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from around_sharding import error
from helpers import raw_bytes
from layouts import Bag, Net, local, mesh_of, placed_as, positions, set_grads, shard, whole
from ranks import LARGE, on_ranks
from tiers import tiered
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import amp_mp as amp
from amp_mp.sharding.shards import set_local

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")
# Uneven shards and empty ones; the last parameter stays plain under tensor parallelism.
SHAPES = [(96, 64), (33, 96), (1, 33), (33,), (3, 32), (64, 8, 2, 2), (5, 32, 32), (1,)]
MATRICES = [(96, 64), (33, 96), (1, 32), (3, 64), (5, 32, 32), (64, 8)]
STEPS, SKIPPED = 21, (0, 4, 5, 13)
KINDS: dict[str, tuple[type[amp.optim.FusedOptimizer], dict[str, Any]]] = {
    "adamw": (amp.optim.AdamW, {"lr": 1e-4}),
    "lamb": (amp.optim.LAMB, {"lr": 1e-3}),
    "muon": (amp.optim.Muon, {"lr": 1e-3}),
}
NO_MASTER = {"master": "none", "exp_avg": "bfloat16"}
STORAGES: dict[str, dict[str, Any]] = {
    **{name: {"memory": name} for name in ("float32", "exact", "lean", "tiny")},
    "none": NO_MASTER,
}


def model_of(layout: str, kind: str, dtype: torch.dtype) -> nn.Module:
    """The whole model, the same in every process."""
    if layout.split()[0] in ("tp", "sp"):
        return Net(dtype)
    if layout == "fsdp columns":
        return Bag([(96, 64), (8, 4), (64, 8, 2), (3, 32, 32)], dtype)
    return Bag(MATRICES if kind == "muon" else SHAPES, dtype)


def split(layout: str, kind: str, dtype: torch.dtype) -> Any:
    """The same model, sharded."""
    model = model_of(layout, kind, dtype)
    if layout == "fsdp columns":
        return shard(model, "fsdp", shard_placement_fn=lambda _: Shard(1))
    return shard(model, layout)


def optimizer_of(model: nn.Module, kind: str, storage: str) -> Any:
    make, numbers = KINDS[kind]
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": params}]
    if storage == "tiny":  # a group of 32 has to lie in one shard
        whole = [p for p in params if p.dim() == 2 and p.shape[1] == 64]
        rest = [p for p in params if all(p is not each for each in whole)]
        groups = [{"params": whole}, {"params": rest, "memory": "lean"}]
    if kind == "muon":
        groups = [{"params": [p for p in params if p.dim() > 1]}]
    return make(groups, check_overflow=True, **numbers, **STORAGES[storage])


def numbers_of(param: Tensor, dtype: torch.dtype) -> Tensor:
    """What is compared: the bits of this rank's weights, flat."""
    rounded = local(param).to(dtype).reshape(-1).clone()
    return rounded.view(torch.int16 if dtype in (BF16, FP16) else torch.int32)


Taken = list[dict[str, tuple[Tensor, Tensor]]]


def noted(
    layout: str, kind: str, storage: str, dtype: torch.dtype
) -> tuple[list[str], Taken, dict[str, Tensor], float]:
    """Steps, and takes after some of them, in turn with positions in shards and in whole tensors.

    Some steps are skipped, for one element of a gradient that is inf, where one rank holds it, or
    replicas of it. Returns what is wrong, in words;
    what was taken each time, of whole tensors; the whole weights at the end; and the mean share.
    """
    model = split(layout, kind, dtype)
    optimizer = optimizer_of(model, kind, storage)
    named = dict(model.named_parameters())
    first = optimizer.param_groups[0]["params"][0]
    index = next(i for i, param in enumerate(named.values()) if param is first)
    received = BF16 if dtype == FP32 else dtype
    changes = amp.Changes(model, received if dtype == FP32 else None)
    last = {name: numbers_of(p, received) for name, p in named.items()}
    differ = {name: torch.zeros_like(n, dtype=torch.bool) for name, n in last.items()}
    wrong, taken, shares = [], [], []
    if changes.take():
        wrong.append("something has changed before a step")
    for step in range(STEPS):
        wholes = set_grads(list(named.values()), 100 * step, 1e-2)
        if step in SKIPPED:
            wholes[index].view(-1)[-1] = INF
            first.grad = placed_as(first, wholes[index])
        optimizer.step()
        for name, param in named.items():
            now = numbers_of(param, received)
            changed = torch.ne(now, last[name])
            if step in SKIPPED and changed.any():
                wrong.append(f"{name} has moved in step {step}, which was to be skipped")
            differ[name] |= changed
            last[name] = now
        if step % 3 == 1:
            continue  # the next one finds what either has changed
        everywhere = step % 2 == 0
        expected = {n: d.nonzero().flatten() for n, d in differ.items() if d.any()}
        count, share = changes.count(), changes.share()
        if count != sum(e.numel() for e in expected.values()):
            wrong.append(f"step {step}: counts {count}")
        shares.append(share)
        found = changes.take(global_positions=everywhere)
        wrong += unlike(found, expected, named, last, everywhere, step)
        if changes.take() or changes.count():
            wrong.append(f"step {step}: something is left")
        if not everywhere:  # as the same rank would have them
            found = {
                n: (positions(named[n])[c.positions.long()], c.values) for n, c in found.items()
            }
        taken.append({name: tuple(each) for name, each in found.items()})
        differ = {name: torch.zeros_like(d) for name, d in differ.items()}
    if len(changes.take()) > 0:
        wrong.append("something is left at the end")
    weights = {name: whole(param).to(received) for name, param in named.items()}
    return wrong, taken, weights, sum(shares) / len(shares)


def unlike(
    found: dict[str, Any],
    expected: dict[str, Tensor],
    named: dict[str, Tensor],
    bits: dict[str, Tensor],
    everywhere: bool,
    step: int,
) -> list[str]:
    """Where what was taken is not what has changed, in words."""
    if list(found) != list(expected):
        return [f"step {step}: {list(found)} in place of {list(expected)}"]
    wrong = []
    for name, places in expected.items():
        at, values = found[name]
        wanted = positions(named[name])[places] if everywhere else places
        if at.dtype != torch.int32 or not torch.equal(at.long(), wanted):
            wrong.append(f"step {step}, {name}: {at} in place of {wanted}")
        elif not torch.equal(values.view(bits[name].dtype), bits[name][places]):
            wrong.append(f"step {step}, {name}: {values}")
    return wrong


SPLITS = [
    *[("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("rows", 2), ("columns", 2), ("fsdp columns", 2)],
    *[("columns fsdp", 4), ("rows fsdp", 4), ("tp", 2), ("tp fsdp", 4), ("sp", 2)],
    *[("fsdp", 1), ("rows", 4), ("columns", 4), ("sp fsdp", 4), ("fsdp columns", 4)],
]
STEPPED = [
    *[("adamw", "exact", BF16), ("adamw", "lean", FP16), ("lamb", "exact", BF16)],
    *[("adamw", "none", BF16), ("adamw", "float32", BF16), ("muon", "lean", BF16)],
    *[("adamw", "tiny", BF16), ("adamw", "float32", FP32), ("lamb", "none", FP16)],
]
CHOSEN = [
    *[(*SPLITS[0], *STEPPED[0]), (*SPLITS[1], *STEPPED[5]), (*SPLITS[3], *STEPPED[1])],
    *[(*SPLITS[5], *STEPPED[4]), (*SPLITS[7], *STEPPED[2]), (*SPLITS[8], *STEPPED[3])],
]
CASES = [(*s, *o) for s, o in itertools.product(SPLITS, STEPPED) if "columns" not in s or o[0]]
# Each layout with one way to step, and the other way round; the product in `make test-distributed`.
IN_TURN = [
    (*SPLITS[n % len(SPLITS)], *STEPPED[n % len(STEPPED)])
    for n in range(max(len(SPLITS), len(STEPPED)))
]
SOME = [case for case in CASES if case in CHOSEN or case in IN_TURN]


@pytest.mark.parametrize(
    ("layout", "world", "kind", "storage", "dtype"), CASES if LARGE else tiered(SOME, CHOSEN)
)
def test_a_receiver_of_changes_alone_has_every_bit(
    layout: str, world: int, kind: str, storage: str, dtype: torch.dtype
) -> None:
    ranks = on_ranks(world, noted, layout, kind, storage, dtype, limit_s=200)
    received = BF16 if dtype == FP32 else dtype
    receiver = model_of(layout, kind, dtype).to(received)
    untouched = raw_bytes(dict(receiver.named_parameters()))
    for wrong, _, _, share in ranks:
        assert wrong == []
        assert 0 < share < 0.9, "steps change none of the weights, or all"
    for each in zip(*(taken for _, taken, _, _ in ranks), strict=True):
        for taken in each:
            amp.apply_changes(receiver, taken)
    now = raw_bytes(dict(receiver.named_parameters()))
    assert now == raw_bytes(ranks[0][2])
    assert now != untouched


def mul(param: Any) -> None:
    param.mul_(1.5)


def through_data(param: Any) -> None:
    local(param.data)[0] += 1


def through_numpy(param: Any) -> None:
    local(param).view(torch.int16).numpy()[0] += 1


def copied(param: Any) -> None:
    local(param).copy_(local(param).flip(0))


WRITES = [mul, through_data, through_numpy, copied]
WRITTEN = 1  # the rank


def written(layout: str, name: str) -> tuple[list[str], Taken, dict[str, Tensor]]:
    """A write to one parameter on one rank, which alone takes at first; before it, a step or none.

    Returns what is wrong, what was taken, of whole tensors, and the whole weights at the end.
    """
    model = shard(Bag(SHAPES, BF16), layout)
    named = dict(model.named_parameters())
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-4)
    changes, taken, wrong = amp.Changes(model), [], []
    here = dist.get_rank() == WRITTEN
    for step in range(4):
        if step % 2:
            set_grads(list(named.values()), 100 * step, 1e-2)
            optimizer.step()
        if here:
            with torch.no_grad():
                globals()[name](named["p0"])
            found = changes.take(global_positions=True)
            if not torch.equal(found["p0"].positions, positions(named["p0"])):
                wrong.append(f"step {step}: {found['p0'].positions} of p0")
            taken.append({name: tuple(each) for name, each in found.items()})
            if step == 0 and list(found) != ["p0"]:
                wrong.append(f"step {step}: {list(found)}")
    found = changes.take(global_positions=True)
    if here and found:
        wrong.append(f"left at the end: {list(found)}")
    if not here and found["p0"].positions.numel() == local(named["p0"]).numel():
        wrong.append("all of p0 counts as changed on another rank")
    taken.append({name: tuple(each) for name, each in found.items()})
    return wrong, taken, {name: whole(param) for name, param in named.items()}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("layout", "world"), tiered([("fsdp", 2), ("fsdp", 4), ("rows", 2)], [("fsdp", 2)])
)
def test_a_write_on_one_rank_is_that_ranks_whole_shard(layout: str, world: int, write: Any) -> None:
    ranks = on_ranks(world, written, layout, write.__name__)
    receiver = Bag(SHAPES, BF16)
    for wrong, taken, _ in ranks:
        assert wrong == []
        for each in taken:
            amp.apply_changes(receiver, each)
    if layout == "fsdp":  # of what is replicated, p0 is written on one rank alone
        assert raw_bytes(dict(receiver.named_parameters())) == raw_bytes(ranks[0][2])


class Wrapped:
    """FP16_Optimizer around an optimizer of torch."""

    def __init__(self, model: nn.Module) -> None:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.optimizer = amp.FP16_Optimizer(inner, verbose=False)

    def step(self, loss: Tensor) -> None:
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Fused:
    """An optimizer of amp_mp."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = amp.optim.AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Attached(Fused):
    """One that steps during the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = amp.optim.AdamW(model.parameters(), lr=1e-4)
        self.optimizer.attach(model)


def prepared(name: str, layout: str) -> tuple[Taken, dict[str, Tensor]]:
    """A model whose norm stays float32, trained by its own gradients."""
    model, mesh = Net(), mesh_of(layout)
    if "tp" in layout:
        model.parallelize(mesh["tp"], "tp")
    if "fsdp" in layout:
        fully_shard(model.norm, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    amp.prepare(model, BF16)
    loop, changes, taken = globals()[name](model), amp.Changes(model), []
    for step in range(6):
        x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(step))
        loop.step(model(x.bfloat16()).float().square().mean())
        found = changes.take(global_positions=True)
        taken.append({name: tuple(each) for name, each in found.items()})
    return taken, {name: whole(param) for name, param in model.named_parameters()}


LOOPS = [Fused, Wrapped, Attached]


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize(
    ("layout", "world"), tiered([("fsdp", 2), ("tp fsdp", 4), ("tp", 2)], [("fsdp", 2)])
)
def test_a_prepared_model_hands_over_its_norms_whole(kind: Any, layout: str, world: int) -> None:
    ranks = on_ranks(world, prepared, kind.__name__, layout)
    receiver = amp.prepare(Net(), BF16)
    for taken, _ in ranks:
        assert [each["norm.weight"][1].dtype for each in taken] == [FP32] * 6
        for each in taken:
            assert each["up.weight"][1].dtype == BF16
            assert each["up.weight"][1].numel() < 64 * 32 // 2
            amp.apply_changes(receiver, each)
    assert raw_bytes(dict(receiver.named_parameters())) == raw_bytes(ranks[0][1])


def moments() -> dict[str, Any]:
    """What is said, and counted, around forward passes, `fully_shard` and another sharded model."""
    model: Any = Net(BF16)
    found: dict[str, Any] = {}
    changes = amp.Changes(model)
    shard(model, "fsdp")
    found["before"] = changes.share()
    changes.take()
    with torch.no_grad():
        model(torch.ones(1, 2, 32, dtype=BF16))
    found["gathered"] = error(changes.take)
    model.reshard()
    found["after reshard"] = changes.count()
    changes.mark_all()
    found["marked"] = changes.share()
    changes.take()
    other = shard(Net(BF16), "fsdp")
    set_grads(list(model.parameters()), 1, 1e-2)
    amp.optim.AdamW(model.parameters(), lr=1e-3).step()
    taken = changes.take()
    amp.apply_changes(other, taken)
    found["sharded receiver"] = raw_bytes([local(p) for p in model.parameters()]) == raw_bytes(
        [local(p) for p in other.parameters()]
    )
    everywhere = {
        n: (positions(model.get_parameter(n))[c[0].long()], c[1]) for n, c in taken.items()
    }
    found["whole positions"] = error(amp.apply_changes, other, everywhere)
    return found


def test_around_forward_passes_and_sharding() -> None:
    for rank, found in enumerate(on_ranks(2, moments)):
        assert found["before"] == 1.0  # sharded since, so all counts as changed
        assert "call model.reshard() first" in found["gathered"]
        assert found["after reshard"] == 0
        assert found["marked"] == 1.0
        assert found["sharded receiver"]
        assert ("belong to models that are not sharded" in found["whole positions"]) == (rank == 1)


# What receivers ask for.


def thirds(name: str, shape: torch.Size) -> list[amp.Piece]:
    """Pieces that no shard knows of, the last one first."""
    size = shape.numel()
    cuts = [0, size // 3, size - size // 5, size]
    pieces = [
        amp.Piece(f"{name}.{i}", (end - begin,), begin)
        for i, (begin, end) in enumerate(itertools.pairwise(cuts))
    ]
    return pieces[::-1]


def is_first_replica(param: Any) -> bool:
    """Whether this rank is the first of those that hold the same part."""
    if not isinstance(param, DTensor):
        return dist.get_rank() == 0
    if 0 not in param.device_mesh.mesh:  # other ranks hold the same on a mesh of theirs
        return False
    at = param.device_mesh.get_coordinate() or ()
    return not any(i for i, p in zip(at, param.placements, strict=True) if p.is_replicate())


def handed(layout: str) -> tuple[list[str], list[dict[str, Any]], dict[str, Any]]:
    """Takes under the receiver's names, of which some are lost and some are not confirmed.

    Returns what is wrong; what arrives; and this rank's parts of the checksums at the end.
    """
    model = split(layout, "adamw", BF16)
    optimizer = optimizer_of(model, "adamw", "lean")
    named = dict(model.named_parameters())
    changes, taken, wrong = amp.Changes(model, names=thirds), [], []
    for step in range(8):
        set_grads(list(named.values()), 100 * step, 1e-2)
        optimizer.step()
        if step == 3 and "a step has changed" not in error(changes.given):
            wrong.append("a step has come between")
        if step == 3:  # the shards move
            for param in named.values():
                set_local(param, local(param).clone())
        keeps = step in (1, 2, 5)
        found = changes.take(keep=keeps, every=step % 2 == 0)
        if step % 2 == 0 and len(found) != 3 * len(named):
            wrong.append(f"step {step}: {len(found)} names")
        if step != 1:  # which is lost
            taken.append({name: tuple(each) for name, each in found.items()})
        if step == 5:
            changes.given()
        if step == 6 and "belongs to take" not in error(changes.given):
            wrong.append("given() twice, or without keep")
    parts = changes.checksums()
    own = {
        piece.name: parts[piece.name]
        for name, param in named.items()
        for piece in thirds(name, param.shape)
        if is_first_replica(param) and piece.name in parts
    }
    return wrong, taken, {"sums": own, "weights": {n: whole(p) for n, p in named.items()}}


@pytest.mark.parametrize(
    ("layout", "world"),
    tiered(
        [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("rows", 2), ("columns", 2), ("columns fsdp", 4)],
        [("fsdp", 2), ("columns fsdp", 4)],
    ),
)
def test_pieces_and_checksums_of_shards_add_up(layout: str, world: int) -> None:
    ranks = on_ranks(world, handed, layout)
    receiver = {
        piece.name: param.detach().reshape(-1)[piece.first : piece.first + piece.numel].clone()
        for name, param in model_of(layout, "adamw", BF16).named_parameters()
        for piece in thirds(name, param.shape)
    }
    module = nn.Module()
    for name, value in receiver.items():
        module.register_parameter(name.replace(".", "_"), nn.Parameter(value))
    for wrong, _, _ in ranks:
        assert wrong == []
    for each in zip(*(taken for _, taken, _ in ranks), strict=True):
        for taken in each:
            amp.apply_changes(module, {n.replace(".", "_"): c for n, c in taken.items()})
    for name, param in ranks[0][2]["weights"].items():
        for piece in thirds(name, param.shape):
            wanted = param.reshape(-1)[piece.first : piece.first + piece.numel]
            found = getattr(module, piece.name.replace(".", "_")).detach()
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), piece.name
            if piece.numel:
                parts = [r[2]["sums"][piece.name] for r in ranks if piece.name in r[2]["sums"]]
                low, high = (sum(each) % 65521 for each in zip(*parts, strict=True))
                data = found.view(torch.uint8).numpy().tobytes()
                assert zlib.adler32(data) == high << 16 | low, piece.name
