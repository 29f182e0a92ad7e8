"""verl's delta_sharded with the page's Engine: verl's sender, and its loader inside of SGLang.

What test_verl.py starts imports this. Only sockets and NCCL are replaced, which need GPUs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import verl
from helpers import raw_bytes
from verl_engine import batch, engine_of, loss_of, other_memory, train

from amp_mp.sharding.shards import is_dtensor

SYNCS = 60
BF16 = torch.bfloat16


def without_servers(package: str) -> None:
    """Has modules of a package of verl imported without its __init__, which wants servers."""
    empty = ModuleType(package)
    empty.__path__ = [str(Path(verl.__file__).parent.joinpath(*package.split(".")[1:]))]
    sys.modules[package] = empty


without_servers("verl.checkpoint_engine")
without_servers("verl.workers.rollout.sglang_rollout")
registry = SimpleNamespace(register=lambda name: lambda engine: engine)
nccl = SimpleNamespace(NCCLCheckpointEngine=object, MasterMetadata=None, WorkerMetadata=None)
STAND_INS: dict[str, Any] = {
    "cupy": ModuleType("cupy"),
    "zmq": ModuleType("zmq"),
    "verl.checkpoint_engine.base": SimpleNamespace(CheckpointEngineRegistry=registry),
    "verl.checkpoint_engine.nccl_checkpoint_engine": nccl,
}
with mock.patch.dict(sys.modules, STAND_INS):
    from verl.checkpoint_engine.delta_checkpoint_engine import DeltaShardedCheckpointEngine
from verl.checkpoint_engine.delta_sync.encode import checksum  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta  # noqa: E402


class Receiver:
    """A model as verl's loader sees it inside of SGLang."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


class Sender(DeltaShardedCheckpointEngine):
    """verl's, which gives process 0's flushes to a receiver in the same process."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0 if dist.get_rank() == 0 else -1
        self.is_master = self.rank == 0
        self.bucket_size, self.rollout_dtype = 20_000, BF16  # bytes: several flushes a sync
        self.receiver = Receiver()

    def _publish_flush(self, flush: Any, first: bool, is_last: bool) -> None:
        tensors = flush.values_gpu, flush.positions_cpu
        self.give(flush.encoding, flush.params, flush.checksum, *tensors)

    def _publish_values_flush(
        self, params: Any, values: torch.Tensor, is_last: bool, verify: bool = False
    ) -> None:
        self.give("dense", params, checksum(torch.empty(0), values), values)

    def give(self, encoding: str, params: Any, total: int, values: Any, *positions: Any) -> None:
        spec = {"encoding": encoding, "params": [vars(p) for p in params], "checksum": total}
        written = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
        named = [("__delta_spec__", written), ("__values__", values)]
        apply_delta(self.receiver, named + [("__positions__", each) for each in positions])

    def _publish_terminal(self, first: bool) -> None:
        """Nothing has changed."""

    def _release_staging_pool(self, phase: str) -> None:
        """cupy's."""

    def sync(self, engine: Any) -> None:
        asyncio.run(self.send_weights(engine))


def checked(entry: Any) -> Any:
    """An entry of verl's own export, if it has the form that the page's Engine makes."""
    form = (list, str, torch.Tensor, torch.Tensor, torch.Tensor, (dist.ProcessGroup, type(None)))
    assert type(entry) is tuple, f"verl's entries are others: {type(entry)}"
    assert len(entry) == len(form), f"verl's entries are others: {len(entry)} parts"
    for part, kind in zip(entry, form, strict=True):
        assert isinstance(part, kind), f"verl's entries are others: {part} in place of {kind}"
    slots, _, counts, positions, _, _ = entry
    assert all(type(slot) is tuple and list(map(type, slot)) == [str, tuple] for slot in slots)
    assert (counts.dtype, positions.dtype) == (torch.int64, torch.int32)
    return entry


def differences(ours: list[Any], verls: list[Any], superset: bool = False) -> list[str]:
    """What differs between two exports; with `superset` ours may have weights more."""
    if len(ours) != len(verls):
        return [f"{len(ours)} entries in place of {len(verls)}"]
    found = []
    for index, (our, their) in enumerate(zip(ours, verls, strict=True)):
        slots, dtype, counts, positions, values, group = checked(their)
        name = f"{index} {slots[0][0]}"
        if len(our) != len(their) or [*map(type, our)] != [*map(type, their)]:
            found.append(f"{name}: form")
            continue
        if our[0] != slots:
            found.append(f"{name}: slots")
        if our[1] != dtype or our[4].dtype != values.dtype:
            found.append(f"{name}: dtype")
        if our[5] is not group:
            found.append(f"{name}: group")
        ours_counts, ours_positions, ours_values = our[2:5]
        if superset:
            keep = torch.isin(ours_positions, positions)
            ours_counts = ours_counts - (~keep).sum()
            ours_positions, ours_values = ours_positions[keep], ours_values[keep]
        for what, one, other in (
            ("counts", ours_counts, counts),
            ("positions", ours_positions, positions),
            ("values", ours_values, values),
        ):
            if raw_bytes(one) != raw_bytes(other):
                found.append(f"{name}: {what}")
    return found


def changed(entries: list[Any]) -> int:
    return sum(int(entry[2].sum()) for entry in entries)


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """verl's export of everything, as its first sync sends it."""
    return {name: tensor.detach().to(BF16) for name, tensor in engine.get_per_tensor_param()[0]}


def mismatch(sender: Sender, engine: Any) -> bool:
    """Whether the receiver has other weights than verl's first sync would send now."""
    wanted = whole(engine)
    return sender.is_master and raw_bytes(sender.receiver.weights) != raw_bytes(wanted)


def exports(engine: Any) -> tuple[list[Any], list[Any]]:
    """The page's entries, and verl's own over its own snapshot."""
    ours, _ = engine.get_per_tensor_param_delta_shard()
    verls, _ = FSDPEngineWithLMHead.get_per_tensor_param_delta_shard(engine)
    return list(ours), list(verls)


def send(sender: Sender, entries: list[Any]) -> None:
    sender.sync(SimpleNamespace(get_per_tensor_param_delta_shard=lambda: (entries, None)))


def begun(engine: Any) -> Sender:
    """A sender that has sent everything, with verl's snapshot as of now."""
    sender = Sender()
    sender.sync(engine)
    FSDPEngineWithLMHead.prime_delta_snapshots(engine)
    return sender


def synced(
    dtype: str,
    overflows: Any = (),
    steps_a_sync: int = 1,
    buffer: bool = False,
    offload: bool = False,
    lost: Any = (),
    anew: Any = (),
    evaluates: bool = False,
    **of_engine: Any,
) -> dict[str, Any]:
    """What differs from verl's entries, after which syncs the receiver differs, how many changed.

    buffer: one element of it changes before each sync. offload: the weights are away meanwhile.
    lost: syncs of which the receiver gets nothing. anew: before these another sender begins.
    evaluates: before each sync; without reshard_after_forward the weights are whole then.
    """
    engine = engine_of(dtype, **of_engine)
    sender = begun(engine)
    found: dict[str, Any] = {"differ": [], "receiver": [], "ours": [], "verl's": []}
    for sync in range(SYNCS):
        first = sync * steps_a_sync
        train(engine, range(first, first + steps_a_sync), overflows)
        if buffer:
            engine.module.model.bias[sync % 40] += 1
        if offload:
            with other_memory():
                engine.to("cpu")
        if sync in anew:
            sender = begun(engine)
        if evaluates:
            with engine.eval_mode():
                engine.infer_batch(batch(sync), loss_of)
            assert not is_dtensor(engine.module.lm_head.weight)
        ours, verls = exports(engine)
        superset = steps_a_sync > 1 or sync - 1 in lost
        found["differ"] += [f"{sync}: {each}" for each in differences(ours, verls, superset)]
        found["ours"].append(changed(ours))
        found["verl's"].append(changed(verls))
        if sync in lost:
            engine.changes.mark_all()
        else:
            send(sender, ours)
            found["receiver"] += [sync] if mismatch(sender, engine) else []
        if offload:
            with other_memory():
                engine.to("cuda")
    weights = sum(tensor.numel() for tensor in whole(engine).values())
    found["differ"] = found["differ"][:20]  # a pipe keeps short lines whole
    return {**found, "weights": weights}


def mistakes() -> dict[str, Any]:
    """What the comparisons say of entries with one mistake, and of other entries of verl's."""
    engine = engine_of("bf16", memory="lean")
    sender = begun(engine)
    train(engine, range(2))
    ours, verls = exports(engine)
    slots, dtype, counts, positions, values, group = good = ours[1]
    ((name, shape),) = slots
    bit = torch.ones((), dtype=torch.int16)
    fewer = (slots, dtype, counts - 1, positions[1:], values[1:], group)
    bad: dict[str, Any] = {
        "fewer parts": good[:5],
        "name": ([(name + "s", shape)], *good[1:]),
        "shape": ([(name, shape[::-1])], *good[1:]),
        "dtype": (slots, "float16", *good[2:]),
        "counts": (slots, dtype, counts + 1, positions, values, group),
        "positions": (slots, dtype, counts, positions + 1, values, group),
        "int64": (slots, dtype, counts, positions.long(), values, group),
        "values": (*good[:4], (values.view(torch.int16) ^ bit).view(BF16), group),
        "float32": (*good[:4], values.float(), group),
        "group": (*good[:5], dist.new_group()),
    }
    found: dict[str, Any] = {"process": dist.get_rank(), "none": differences(ours, verls)}
    for what, entry in bad.items():
        found[what] = differences([ours[0], entry, *ours[2:]], verls)
    found["order"] = differences([ours[0], ours[2], ours[1], *ours[3:]], verls)[:1]
    found["one less"] = differences(ours[:-1], verls)
    found["superset"] = differences([ours[0], fewer, *ours[2:]], verls, superset=True)
    for what, theirs in (
        ("verl's of 7 parts", (*verls[0], None)),
        ("verl's as a list", list(verls[0])),
        ("verl's group by name", (*verls[0][:5], "default")),
        ("verl's int64", (*verls[0][:3], verls[0][3].long(), *verls[0][4:])),
    ):
        try:
            found[what] = differences(ours, [theirs, *verls[1:]])
        except AssertionError:
            found[what] = "raises"
    send(sender, [ours[0], fewer, *ours[2:]])
    found["receiver"] = mismatch(sender, engine)
    send(sender, ours)
    found["receiver now"] = mismatch(sender, engine)
    return found


def refuses_fsdp1() -> str:
    try:
        engine_of("bf16", strategy="fsdp").prime_delta_snapshots()
    except ValueError as error:
        return str(error)
    return ""
