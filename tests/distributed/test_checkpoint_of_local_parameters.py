"""Checkpoints of parameters that differ between processes: each gets its own back, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import raw_bytes
from layouts import made_once
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import amp_mp as amp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]
LOW = torch.bfloat16


def seeded(layer: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    for param in layer.parameters():
        nn.init.normal_(param)
    return layer


def held(model: nn.Module, optimizer: Any = None) -> dict[str, bytes]:
    """The bits of what this process has; of DTensors its own part."""

    def raw(value: Any) -> bytes:
        return raw_bytes(getattr(value, "_local_tensor", value).detach())

    found = {name: raw(value) for name, value in model.state_dict().items()}
    for number, state in ({} if optimizer is None else optimizer.state_dict()["state"]).items():
        for entry, value in state.items():
            found[f"{number} {entry}"] = raw(value)
    return found


def spoil(model: nn.Module, optimizer: Any = None) -> None:
    """Writes other numbers into everything, as a script that starts again has them."""
    with torch.no_grad():
        for value in model.state_dict().values():
            getattr(value, "_local_tensor", value).fill_(3)
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values():
            if isinstance(value, Tensor) and value.dtype.is_floating_point:
                getattr(value, "_local_tensor", value).fill_(2)


def saved_and_loaded(
    path: str, model: nn.Module, optimizer: Any, around: nn.Module | None = None
) -> tuple[Any, Any]:
    """What was there before a save, and what a load brings back after other numbers.

    around: the model in its wrapper, for these.
    """
    before, given = held(model, optimizer), model if around is None else around
    amp.checkpoint.save(path, given, optimizer)
    spoil(model, optimizer)
    amp.checkpoint.load(path, given, optimizer)
    return before, held(model, optimizer)


def step(optimizer: Any, seed: int) -> None:
    for group in optimizer.param_groups:
        torch.manual_seed(seed + (dist.get_rank() if group.get("process_groups") else 0))
        for param in group["params"]:
            param.grad = torch.randn_like(param)
    optimizer.step()


def experts(kind: str, groups: Any) -> tuple[nn.Module, Any]:
    """A dense layer that all processes have, an expert of each, and their optimizer."""
    seed = 1 if "before" in kind else 1 + dist.get_rank()
    own = seeded(nn.Linear(8, 8, bias=False), seed)
    model = nn.ModuleDict({"dense": seeded(nn.Linear(8, 8), 0), "expert": own})
    if "prepared" in kind:
        amp.prepare(model, LOW)
    named = {"process_groups": groups} if groups is not None else {}
    parts = [
        {"params": model["dense"].parameters()},
        {"params": model["expert"].parameters(), **named},
    ]
    options: dict[str, Any] = {"lr": 0.0} if "before" in kind else {"lr": 0.1}
    library = torch.optim if "torch" in kind else amp.optim
    if library is amp.optim:
        options["memory"] = "tiny" if "prepared" in kind else None
    return model, library.AdamW(parts, **options)


def round_trip(path: str, kind: str, named: bool) -> list[str]:
    """What is not, bit for bit, what this process has saved."""
    model, optimizer = experts(kind, dist.group.WORLD if named else None)
    # One batch for all, but for the experts.
    torch.manual_seed(0)
    for param in model["dense"].parameters():
        param.grad = torch.randn_like(param)
    for param in model["expert"].parameters():
        param.grad = torch.full_like(param, 2.0 + dist.get_rank())
    optimizer.step()
    given = None if "alone" in kind else optimizer
    before = held(model, optimizer)
    amp.checkpoint.save(path, model, given)
    if "alone" in kind:
        kept = amp.float32_state_dict(model)
        fresh = experts(kind, None)[0]
        amp.checkpoint.load(path, fresh)
        found = amp.float32_state_dict(fresh)
        return [name for name in kept if not torch.equal(kept[name], found[name])]
    spoil(model, optimizer)
    amp.checkpoint.load(path, model, optimizer)
    after = held(model, optimizer)
    wrong = [name for name in before if before[name] != after.get(name)]
    group = optimizer.param_groups[1].get("process_groups")
    return wrong if group is (dist.group.WORLD if named else None) else ["process_groups"]


KINDS = ["amp", "amp, prepared", "torch", "torch, before the weights change", "amp, alone"]


@pytest.mark.parametrize("named", [True, False], ids=["process_groups", "by their bytes"])
@pytest.mark.parametrize("kind", [*KINDS, "amp, prepared, alone"])
def test_each_process_gets_its_own_expert_back(kind: str, named: bool, tmp_path: Path) -> None:
    """Weights, masters and moments; with the param_group's process_groups, and without."""
    assert on_ranks(2, round_trip, f"{tmp_path}/c", kind, named) == [[], []]


def stage(rank: int) -> tuple[nn.Module, Any]:
    """A stage of a pipeline: the same names on each process, other shapes, and a norm."""
    layers = nn.Linear(4, 4 + rank), nn.BatchNorm1d(4 + rank)
    model = seeded(nn.Sequential(*layers), rank)
    return model, amp.optim.AdamW(model.parameters(), process_groups=dist.group.WORLD)


def stages(path: str) -> bool:
    model, optimizer = stage(dist.get_rank())
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    before, after = saved_and_loaded(path, model, optimizer)
    return before == after


def test_stages_of_equal_names_have_their_weights_moments_and_statistics(tmp_path: Path) -> None:
    assert on_ranks(2, stages, f"{tmp_path}/c") == [True, True]


def replicated_stages(path: str) -> Any:
    """Two stages, each in DistributedDataParallel on two of four processes."""
    mesh = made_once((2, 2), ("pp", "dp"))
    number = mesh.get_local_rank("pp")
    model = seeded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), number)
    group = mesh.get_group("dp")
    around = DistributedDataParallel(model, process_group=group, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    around(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    return saved_and_loaded(path, model, optimizer, around)


def test_stages_with_replicas(tmp_path: Path) -> None:
    """Of a stage's statistics those of one replica are kept."""
    found = on_ranks(4, replicated_stages, f"{tmp_path}/c")
    for rank, (before, after) in enumerate(found):
        buffers = {name for name in before if "running" in name}
        assert {k: v for k, v in after.items() if k not in buffers} == {
            k: v for k, v in before.items() if k not in buffers
        }
        of_stage = [found[other][0] for other in (rank // 2 * 2, rank // 2 * 2 + 1)]
        assert {k: after[k] for k in buffers} in [{k: r[k] for k in buffers} for r in of_stage]


def part_in_ddp(path: str) -> Any:
    """The names that amp.Changes gives, and whether this process has its own back."""
    model, _ = experts("amp", None)
    plain = [name for name, _ in model.named_parameters()]
    model["dense"] = DistributedDataParallel(model["dense"])
    groups = [
        {"params": model["dense"].parameters()},
        {"params": model["expert"].parameters(), "process_groups": dist.group.WORLD},
    ]
    optimizer = amp.optim.AdamW(groups, lr=0.1)
    changes = amp.Changes(model, LOW)
    step(optimizer, 3)
    names = list(changes.take())
    before, after = saved_and_loaded(path, model, optimizer)
    return names == plain, before == after


def test_experts_beside_a_part_in_ddp(tmp_path: Path) -> None:
    """The file has the plain model's names."""
    assert on_ranks(2, part_in_ddp, f"{tmp_path}/c") == [(True, True)] * 2
    keys = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    assert {key for key in keys if "dense.weight" in key and ".module." not in key} >= {
        "model.dense.weight",
        "optimizer.state.dense.weight.exp_avg",
    }
    assert not any(".module." in key for key in keys)


def meshes(across: bool, is_split: bool) -> tuple[nn.Module, Any]:
    """Two experts on four processes: each on two, as copies or in parts, beside FSDP2.

    across: whether an expert's processes are (0, 2) and (1, 3), not (0, 1) and (2, 3).
    """
    mesh = made_once((2, 2), ("ep", "shard"))
    ep, same = mesh["ep"], mesh["shard"]
    if across:
        ep, same = same, ep
    model = nn.ModuleDict({"dense": seeded(nn.Linear(4, 4, bias=False), 0)})
    model["expert"] = seeded(nn.Linear(4, 4, bias=False), 1 + ep.get_local_rank())
    fully_shard(model["dense"], mesh=made_once((4,), ("all",)))
    if is_split:
        fully_shard(model["expert"], mesh=same)
    groups = [
        {"params": model["dense"].parameters()},
        {"params": model["expert"].parameters(), "process_groups": ep},
    ]
    optimizer = amp.optim.AdamW(groups, lr=0.1, max_grad_norm=1.0)
    for number, param in enumerate(model.parameters()):
        param.grad = torch.ones_like(param) * (1 + number * ep.get_local_rank())
    optimizer.step()
    return model, optimizer


def on_meshes(path: str, saved: tuple[bool, bool], loaded: tuple[bool, bool] | None) -> Any:
    model, optimizer = meshes(*saved)
    before = held(model, optimizer)
    amp.checkpoint.save(path, model, optimizer)
    if loaded is not None:
        model, optimizer = meshes(*loaded)
    spoil(model, optimizer)
    spoilt = held(model, optimizer)
    return error(path, model, optimizer), held(model, optimizer) == (spoilt if loaded else before)


def error(path: str, *given: Any, **more: Any) -> str:
    try:
        amp.checkpoint.load(path, *given, **more)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


@pytest.mark.parametrize("is_split", [True, False], ids=["DTensors", "plain"])
def test_experts_that_two_processes_have_each(is_split: bool, tmp_path: Path) -> None:
    """Expert parallel times data parallel; each expert is once in the file."""
    found = on_ranks(4, on_meshes, f"{tmp_path}/c", (False, is_split), None)
    assert found == [("", True)] * 4
    keys = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    owners = {key.split(".")[2] for key in keys if key.startswith("amp_mp.local.")}
    assert owners == {"0", "2"}


@pytest.mark.parametrize("is_split", [True, False], ids=["DTensors", "plain"])
def test_other_processes_in_the_groups_are_an_error_on_all(is_split: bool, tmp_path: Path) -> None:
    at = (False, is_split), (True, is_split)
    for message, same in on_ranks(4, on_meshes, f"{tmp_path}/c", *at):
        assert message.startswith("ValueError: 'expert.weight' was another tensor on each process")
        assert "nothing was loaded" in message
        assert same


def saved(path: str, kind: str) -> None:
    model, optimizer = experts(kind, dist.group.WORLD)
    step(optimizer, 3)
    amp.checkpoint.save(path, model, None if "alone" in kind else optimizer)


def loaded(path: str, kind: str, strict: bool = True) -> tuple[str, bool]:
    model, optimizer = experts(kind, dist.group.WORLD)
    step(optimizer, 9)
    before = held(model, optimizer)
    given = (model,) if "alone" in kind else (model, optimizer)
    return error(path, *given, strict=strict), held(model, optimizer) == before


@pytest.mark.parametrize("kind", ["amp", "torch", "amp, alone"])
def test_another_number_of_processes_is_an_error_on_all(kind: str, tmp_path: Path) -> None:
    """Nothing says which expert the third process should have."""
    on_ranks(2, saved, f"{tmp_path}/c", kind)
    for world in (4, 1):
        for strict in (True, False):
            for message, same in on_ranks(world, loaded, f"{tmp_path}/c", kind, strict):
                assert message.startswith("ValueError: 'expert.weight' was another tensor on each")
                assert f"saved by 2 processes, and here are {world}" in message
                assert same


def named(kind: str, of: int) -> tuple[nn.Module, Any]:
    """Experts that have names of their own: `of` on all processes together."""
    rank, each = dist.get_rank(), of // dist.get_world_size()
    model = nn.ModuleDict({"dense": seeded(nn.Linear(8, 8, bias=False), 0)})
    for number in range(rank * each, (rank + 1) * each):
        model[f"expert{number}"] = seeded(nn.Linear(8, 8, bias=False), 1 + number)
    own = [p for name, p in model.named_parameters() if "expert" in name]
    groups: list[dict[str, Any]] = [{"params": model["dense"].parameters()}]
    if own:
        groups.append({"params": own, "process_groups": dist.group.WORLD, "lr": 0.5})
    library = torch.optim if "torch" in kind else amp.optim
    optimizer = library.AdamW(groups, lr=0.1)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    return model, optimizer


def save_named(path: str, kind: str) -> None:
    amp.checkpoint.save(path, *named(kind, 4))


def load_named(path: str, kind: str, strict: bool) -> tuple[str, bool]:
    """The error; whether this process has what the run had that saved its experts."""
    model, optimizer = named(kind, 4)
    before = held(model, optimizer)
    spoil(model, optimizer)
    optimizer.param_groups[1]["lr"] = 7.0
    message = error(path, model, optimizer, strict=strict)
    groups = optimizer.param_groups[1]
    same = groups["lr"] == 0.5 and groups["process_groups"] is dist.group.WORLD
    return message, same and held(model, optimizer) == before


@pytest.mark.parametrize("kind", ["amp", "torch"])
def test_experts_with_names_of_their_own_move_to_other_processes(kind: str, tmp_path: Path) -> None:
    """A name that one process has alone is found wherever it is loaded."""
    for before in (2, 4):
        path = f"{tmp_path}/{before}"
        on_ranks(before, save_named, path, kind)
        for world in (2, 4, 1):
            for strict in (True, False):
                assert on_ranks(world, load_named, path, kind, strict) == [("", True)] * world


def more_experts(path: str) -> str:
    return error(path, *named("amp", 8))


def test_a_name_that_no_process_saved_or_has_is_an_error_on_all(tmp_path: Path) -> None:
    on_ranks(2, save_named, f"{tmp_path}/c", "amp")
    for message in on_ranks(4, more_experts, f"{tmp_path}/c"):
        assert "'model.expert" in message
        assert "not in the checkpoint" in message
    model = nn.ModuleDict({"dense": nn.Linear(8, 8, bias=False)})
    with pytest.raises(ValueError, match=r"^'model.expert0.weight' and 3 others are not in the mo"):
        amp.checkpoint.load(tmp_path / "c", model)


def without_expert(path: str) -> bool:
    """Three experts on two processes: one has a group more."""
    model, optimizer = named("amp", 2)
    if dist.get_rank() == 1:
        del model["expert1"]
        optimizer = amp.optim.AdamW(model.parameters())
        optimizer.init_state()
    before, after = saved_and_loaded(path, model, optimizer)
    return before == after


def test_a_process_without_experts(tmp_path: Path) -> None:
    assert on_ranks(2, without_expert, f"{tmp_path}/c") == [True, True]


def averaged(path: str, kind: str) -> list[bool]:
    model, optimizer = experts(kind, dist.group.WORLD)
    average: Any = amp.AveragedModel(model, decay=0.5)
    for number in range(2):
        step(optimizer, number)
        average.update()
    kept = average.float32_state_dict()
    amp.checkpoint.save(path, model, optimizer, average=average)
    spoil(average)
    average.n_averaged.fill_(7)
    amp.checkpoint.load(path, model, optimizer, average=average)
    found = average.float32_state_dict()
    same = all(torch.equal(kept[name], found[name]) for name in kept)
    left = amp.checkpoint.load(path, model, optimizer)["average"]  # without the object
    return [same, int(average.n_averaged) == 2, torch.equal(left["n_averaged"], torch.tensor(2))]


@pytest.mark.parametrize("kind", ["amp", "amp, prepared"])
def test_averages_of_experts_beside_the_model(kind: str, tmp_path: Path) -> None:
    assert on_ranks(2, averaged, f"{tmp_path}/c", kind) == [[True] * 3] * 2


def second_optimizer(path: str, kind: str) -> str:
    model, optimizer = experts(kind, dist.group.WORLD if "named" in kind else None)
    step(optimizer, 0 if "amp" in kind else dist.get_rank())
    try:
        amp.checkpoint.save(path, model, second=optimizer)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


@pytest.mark.parametrize("kind", ["amp, named", "torch, named", "torch"])
def test_a_second_optimizer_of_experts_is_refused(kind: str, tmp_path: Path) -> None:
    """One process's state dict would be written of what has no names."""
    for message in on_ranks(2, second_optimizer, f"{tmp_path}/c", kind):
        assert "second is" in message
        assert "in a directory of its own" in message
    assert not (tmp_path / "c").exists()


def copies(path: str, way: str) -> tuple[dict[str, bytes], bool]:
    """Replicas, whose norms have seen other batches: what another optimizer loads, and this one."""
    model: Any = seeded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 0)
    around = DistributedDataParallel(model, broadcast_buffers=False) if way == "DDP" else model
    torch.manual_seed(dist.get_rank())
    around(torch.randn(8, 4)).square().mean().backward()
    for param in model.parameters():
        if way != "DDP":
            dist.all_reduce(param.grad)
    if way == "ZeRO":
        zero = ZeroRedundancyOptimizer(
            model.parameters(), amp.optim.AdamW, process_groups=dist.group.WORLD
        )
        zero.step()
        optimizer: Any = zero.optim
    else:
        optimizer = amp.optim.AdamW(model.parameters())
        optimizer.step()
    before, after = saved_and_loaded(path, model, optimizer, around)
    same = all(before[name] == after[name] for name in before if "running" not in name)
    fresh: Any = seeded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 5)
    again = amp.optim.AdamW(fresh.parameters())
    amp.checkpoint.load(path, fresh, again)
    return held(fresh, again), same


@pytest.mark.parametrize("way", ["DDP", "by hand", "ZeRO"])
def test_replicas_are_one_copy(way: str, tmp_path: Path) -> None:
    """In ZeroRedundancyOptimizer each process has the states of some of the parameters alone."""
    (first, one), (second, other) = on_ranks(2, copies, f"{tmp_path}/c", way)
    assert first == second
    assert one
    assert other
    keys = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    assert not any(key.startswith("amp_mp.local") and "param_groups" not in key for key in keys)
    assert way == "ZeRO" or "amp_mp.places" not in keys


def broken(path: str) -> tuple[str, bool]:
    """One process's scheduler cannot load what the file has."""

    class Scheduler:
        def load_state_dict(self, _: Any) -> None:
            if dist.get_rank() == 1:
                raise ValueError("not this")

    model, optimizer = experts("amp, prepared", dist.group.WORLD)
    step(optimizer, 3)
    amp.checkpoint.save(path, model, optimizer, scheduler={"a": 1})
    step(optimizer, 5)
    before = held(model, optimizer)
    message = error(path, model, optimizer, scheduler=Scheduler())
    return message, held(model, optimizer) == before


def test_what_one_process_cannot_load_none_has_loaded(tmp_path: Path) -> None:
    for message, same in on_ranks(2, broken, f"{tmp_path}/c"):
        assert message.startswith("ValueError: scheduler cannot load")
        assert same
