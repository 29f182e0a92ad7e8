"""offload="state": an optimizer's arrays in memory of the host, in which the kernels step.

The oracle is the same training without it, and what the emulated CUDA runtime has pinned. Runs
where there is a GPU, and in any case on the pretend one (test_pretend_gpu.py).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_training import graph_of, refused_capture
from everything import everything
from helpers import PRETEND_GPU, raw_bytes
from offloading import (
    DEVICE,
    LEAST,
    LOW,
    adamw,
    arrays,
    backward,
    both,
    fill,
    held,
    misplaced,
    models,
    params_in,
    params_of,
    pinned,
    saved,
    train,
    without_memory,
)
from rules import RULES, STORAGES, is_allowed
from streams import late
from tiers import full, in_turn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from watching import watching

import amp_mp as amp
from amp_mp import _C
from amp_mp.sharding.shards import local_of

if PRETEND_GPU:
    import amp_mp_pretend_gpu as native

pytestmark = pytest.mark.usefixtures("cuda")
emulated = pytest.mark.skipif(not PRETEND_GPU, reason="asks the emulated CUDA runtime")


def check_bits(rule: str, preset: str, dtype: torch.dtype = LOW) -> None:
    kind, numbers = RULES[rule]
    ours, plain = both(kind, dtype=dtype, **numbers, **STORAGES[preset])
    for optimizer in (ours, plain):
        train(optimizer)
    assert held(ours) == held(plain)
    assert not misplaced(ours)
    assert not misplaced(plain, offload=False)


@pytest.mark.parametrize(("rule", "preset"), in_turn(RULES, STORAGES))
def test_bits_are_those_without_offload(rule: str, preset: str) -> None:
    check_bits(rule, preset)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bits_of_other_dtypes(dtype: torch.dtype) -> None:
    for preset in STORAGES:
        if is_allowed(preset, dtype):
            check_bits("adamw", preset, dtype)


@pytest.mark.parametrize("normalize", [None, "rows"])
def test_muon_offloads_momentum_and_rows(normalize: Any) -> None:
    ours, plain = both(amp.optim.Muon, [(LEAST, 4), (16, 32)], lr=0.01, normalize=normalize)
    for optimizer in (ours, plain):
        train(optimizer, range(3))
    assert held(ours) == held(plain)
    assert not misplaced(ours)


@pytest.mark.parametrize("seed", [1, *map(full, range(2, 21))])
def test_delayed_streams_change_no_bit(seed: int) -> None:
    """Arrays are made, moved there and back, and dropped on two streams, all of which are late."""
    with late(seed):
        ours, plain = adamw(memory="lean"), adamw(offload=None, memory="lean")
        stream = torch.cuda.Stream()
        for optimizer in (ours, plain):
            train(optimizer, range(2))
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                if optimizer is ours:
                    optimizer.param_groups[0]["offload"] = None
                train(optimizer, range(2, 4))
            torch.cuda.current_stream().wait_stream(stream)
            if optimizer is ours:
                optimizer.param_groups[0]["offload"] = "state"
            train(optimizer, range(4, 6))
        assert held(ours) == held(plain)
        del ours
        if PRETEND_GPU:
            assert native.host_memory()[1] == 0


def test_ledger_of_a_step_is_that_without() -> None:
    for memory in STORAGES:
        seen = []
        for offload in ("state", None):
            optimizer = adamw(offload=offload, memory=memory)
            train(optimizer, range(2))
            fill(params_in(optimizer), 2)
            with watching() as found:
                optimizer.step()
            seen.append((found.kernels, found.others, found.waits))
        assert seen[0] == seen[1]
        assert seen[0][2] == 0


def after_load(optimizer: Any) -> Any:
    optimizer.load_state_dict(saved(optimizer))
    return optimizer


def after_another_file(optimizer: Any) -> Any:
    other = adamw(offload=None, memory="micro")
    train(other, range(2))
    optimizer.load_state_dict(other.state_dict())
    return optimizer


def after_a_file_of_torchs(optimizer: Any) -> Any:
    plain = torch.optim.AdamW(params_of(dtype=torch.float32))
    fill(params_in(plain), 0)
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    return optimizer


def after_init_state(_: Any) -> Any:
    optimizer = adamw(memory="tiny")
    optimizer.init_state()
    return optimizer


def after_masters(_: Any) -> Any:
    optimizer = adamw(memory="lean")
    with optimizer.masters() as masters:
        for master in masters:
            master.add_(1e-4)
    return optimizer


def after_a_changed_format(optimizer: Any) -> Any:
    optimizer.param_groups[0].update(exp_avg="m8", exp_avg_sq="bfloat16", master="float32")
    train(optimizer, range(3, 4))
    return optimizer


def after_another_layout(optimizer: Any) -> Any:
    for param in params_in(optimizer):
        param.grad = None
    weight = params_in(optimizer)[0]
    weight.data = weight.data.t().contiguous().t()
    train(optimizer, range(3, 4))
    return optimizer


def after_unpickling(optimizer: Any) -> Any:
    found = pickle.loads(pickle.dumps(optimizer))
    train(found, range(3, 4))
    return found


def after_a_copy(optimizer: Any) -> Any:
    found = copy.deepcopy(optimizer)
    train(found, range(3, 4))
    return found


ACTIONS: list[Callable[[Any], Any]] = [
    *(after_load, after_another_file, after_a_file_of_torchs, after_init_state, after_masters),
    *(after_a_changed_format, after_another_layout, after_unpickling, after_a_copy),
]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("preset", ["exact", full("tiny")])
def test_device_bytes_are_those_of_small_arrays(action: Any, preset: str) -> None:
    optimizer = adamw(memory=preset)
    train(optimizer, range(2))
    optimizer = action(optimizer)
    assert not misplaced(optimizer)
    report = optimizer.memory_report()
    large = [(n, t) for n, t in arrays(optimizer) if t.numel() >= LEAST]
    assert sum(report.host.values()) == sum(t.nbytes for _, t in large) > 0
    assert set(report.host) == {name for name, _ in large}


@emulated
@pytest.mark.parametrize("loads", [False, True])
def test_device_bytes_are_pinned_in_one_piece_of_the_exact_size(loads: bool) -> None:
    """Scales of groups are arrays, too; of a file's states the room is for this one's formats."""
    shapes, before = [(1024, 128), (64, 96)], pinned()
    optimizer = adamw(params_of(shapes), memory="micro")
    fill(params_in(optimizer), 0)
    if loads:
        other = adamw(params_of(shapes), offload=None, memory="exact")
        fill(params_in(other), 0)
        other.step()
        optimizer.load_state_dict(other.state_dict())
    else:
        optimizer.step()
    large = [t.nbytes for _, t in arrays(optimizer) if t.numel() >= LEAST]  # multiples of 256
    assert len(large) == 3 + 3 + 2
    assert sorted(pinned()) == sorted([*before, sum(large)])
    del optimizer
    assert pinned() == before


@emulated
def test_device_bytes_follow_parameters_to_other_devices() -> None:
    """In one piece for each device, which goes when they leave it."""
    before = pinned()
    ours, plain = both(amp.optim.AdamW, lr=0.01, memory="tiny")
    for device, pieces in (("cpu", 0), ("cuda:1", 1), ("cuda:0", 1)):
        for optimizer in (ours, plain):
            for param in params_in(optimizer):
                param.grad, param.data = None, param.data.to(device)
            train(optimizer, range(3))
        assert held(ours) == held(plain)
        assert all(str(t.device) == device for n, t in arrays(ours) if t.numel() >= LEAST)
        assert len(pinned()) - len(before) == pieces


@pytest.mark.parametrize(("first", "second"), [("state", None), (None, "state"), ("state",) * 2])
@pytest.mark.parametrize("preset", STORAGES)
def test_switch_by_a_file_goes_on_bit_for_bit(first: Any, second: Any, preset: str) -> None:
    optimizer = adamw(offload=first, memory=preset)
    train(optimizer, range(3))
    params = [nn.Parameter(p.detach().clone()) for p in params_in(optimizer)]
    other = adamw(params, offload=second, memory=preset)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["offload"] == second
    for each in (optimizer, other):
        train(each, range(3, 5))
    assert held(optimizer) == held(other)
    assert not misplaced(other, offload=second is not None)


def test_switch_by_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """amp_mp.checkpoint, which reads into the host what will lie there."""
    model, optimizer = models()[0]
    for step in range(3):
        fill(model.parameters(), step)
        optimizer.step()
    amp.checkpoint.save(tmp_path / "step", model, optimizer)
    for other, resumed in models():
        amp.checkpoint.load(tmp_path / "step", other, resumed)
        assert not misplaced(resumed, offload=resumed.param_groups[0]["offload"] == "state")
        assert held(resumed) == held(optimizer)


def test_graph_replays_are_eager_steps() -> None:
    ours, plain = adamw(memory="lean"), adamw(offload=None, memory="lean")
    params, others = map(params_in, (ours, plain))
    for optimizer in (ours, plain):
        train(optimizer, range(2))
    grads = [p.grad for p in params]
    graph = graph_of(ours)
    for step in range(2, 5):
        fill(others, step)
        for kept, own, param in zip(grads, others, params, strict=True):
            kept.copy_(own.grad)
            param.grad = kept
        graph.replay()
        plain.step()
        assert held(ours) == held(plain)


def test_graph_errors_leave_everything() -> None:
    optimizer = adamw()
    group = optimizer.param_groups[0]
    train(optimizer, range(2))
    before = held(optimizer)
    group["offload"] = None
    with refused_capture(RuntimeError, "offload cannot change while a CUDA graph is captured"):
        optimizer.step()
    group["offload"] = "state"
    assert held(optimizer) == before
    graph = graph_of(optimizer)
    group["offload"] = None
    with pytest.raises(RuntimeError, match="a captured graph holds these arrays"):
        optimizer.step()
    assert held(optimizer) == before
    assert not misplaced(optimizer)
    group["offload"] = "state"
    graph.replay()
    assert held(optimizer) != before


@emulated
def test_graph_keeps_its_memory_when_others_drop_it() -> None:
    """Replays would write where nothing is any more."""
    before, optimizer = pinned(), adamw()
    train(optimizer, range(2))
    graph = graph_of(optimizer)
    with pytest.warns(UserWarning, match="replays go on with the old ones"):
        optimizer.load_state_dict(saved(optimizer))
    del optimizer
    assert len(pinned()) == len(before) + 1
    graph.replay()


def test_groups_differ_and_change() -> None:
    params, others = params_of(), params_of()
    ours = adamw([{"params": params[::2]}, {"params": params[1::2], "offload": None}])
    plain = adamw([{"params": others[::2]}, {"params": others[1::2]}], offload=None)
    changes: list[tuple[Any, Any]] = [("state", None), ("state", "state"), (None, "state")]
    for number, change in enumerate(changes):
        for group, offload in zip(ours.param_groups, change, strict=True):
            group["offload"] = offload
        steps = range(2 * number, 2 * number + 2)
        for optimizer in (ours, plain):
            train(optimizer, steps)
        for group, offload in zip(ours.param_groups, change, strict=True):
            for param in group["params"]:
                large = [t for t in ours.state[param].values() if t.numel() >= LEAST]
                assert all(_C.is_on_host(t) == (offload is not None) for t in large)
        assert held(ours) == held(plain)
    ours.add_param_group({"params": params_of([(64, 64)]), "offload": "state"})
    fill(params_in(ours), 6)
    ours.step()
    assert len(misplaced(ours)) == 3  # of the first group


@emulated
@pytest.mark.parametrize("way", ["first step", "init_state", "changed", "load", "two rules"])
def test_errors_of_a_host_without_memory_leave_everything(way: str) -> None:
    optimizer: Any = adamw(offload=None if way == "changed" else "state", memory="lean")
    if way == "two rules":
        first, second = params_of([(64, 96), (LEAST,)])
        groups = [{"params": [first]}, {"params": [second], "use_muon": False}]
        optimizer = amp.optim.Muon(groups, lr=0.1, offload="state")
    if way in ("changed", "load"):
        train(optimizer, range(2))
    fill(params_in(optimizer), 7)
    given = saved(optimizer)
    if way == "changed":
        optimizer.param_groups[0]["offload"] = "state"
    before = everything(optimizer, *params_in(optimizer))
    call = {"load": lambda: optimizer.load_state_dict(given), "init_state": optimizer.init_state}
    text = r"gave no pinned memory for states \(0 GiB asked, 0 GiB held\): out of memory\. It"
    with without_memory(is_there=False), pytest.raises(RuntimeError, match=text):
        call.get(way, optimizer.step)()
    after = everything(optimizer, *params_in(optimizer))
    assert after == before
    optimizer.step()
    assert not misplaced(optimizer)


@emulated
def test_errors_of_a_device_that_cannot_address_the_host() -> None:
    optimizer = adamw()
    fill(params_in(optimizer), 0)
    before = held(optimizer)
    text = r'cuda:0 cannot address host memory; leave out offload="state"'
    with without_memory(is_mapped=False), pytest.raises(RuntimeError, match=text):
        optimizer.step()
    assert held(optimizer) == before


def test_errors_of_another_value() -> None:
    text = "offload must be None or \"state\", found 'cpu'"
    optimizer: Any = adamw()
    train(optimizer, range(1))
    before = held(optimizer)
    with pytest.raises(ValueError, match=text):
        adamw(offload="cpu")
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": params_of([(2, 2)]), "offload": "cpu"})
    optimizer.param_groups[0]["offload"] = "cpu"
    fill(params_in(optimizer), 1)
    with pytest.raises(ValueError, match=f"param_group 0: {text}"):
        optimizer.step()
    assert held(optimizer) == before


@emulated
@pytest.mark.parametrize("seed", [1, *map(full, range(2, 21))])
def test_leak_of_no_memory_and_none_freed_too_early(seed: int) -> None:
    before = pinned()
    with late(seed):
        for number in range(100):
            optimizer = adamw(params_of([(64, 64)]), memory=list(STORAGES)[number % 5])
            fill(params_in(optimizer), number)
            optimizer.step()
            if number % 3 == 0:
                with torch.cuda.stream(torch.cuda.Stream()):
                    optimizer = None
    del optimizer
    assert pinned() == before
    assert native.host_memory()[1] == 0


@emulated
def test_leak_of_memory_that_is_dropped_in_a_capture_alone() -> None:
    """There the device cannot be waited for, and who waited would end the capture."""
    before, optimizer, weight = pinned(), adamw(), torch.zeros(3, device=DEVICE)
    train(optimizer, range(1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.add_(1)
        del optimizer
    graph.replay()
    assert weight.tolist() == [1.0] * 3
    assert len(pinned()) == len(before) + 1


def test_release_makes_states_when_it_is_attached() -> None:
    (ours, optimizer), (plain, other) = models()
    optimizer.attach(ours)
    assert not misplaced(optimizer)
    assert len(optimizer.state) == 4
    other.attach(plain)
    for step in range(3):
        if step == 2:
            optimizer.param_groups[0]["offload"] = None
        for model, each in ((ours, optimizer), (plain, other)):
            backward(model, step)
            each.step()
        assert held(optimizer) == held(other)
        assert not misplaced(optimizer, offload=step < 2)


def test_loss_scaling_and_averages_are_those_without() -> None:
    found = []
    for model, optimizer in models(dtype=torch.float16):
        scaler = amp.GradScaler(DEVICE, init_scale=2.0**20, growth_interval=2)
        averaged = amp.AveragedModel(model, optimizer, decay=0.5)
        for step in range(5):
            backward(model, step, scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            averaged.update()
        found.append((held(optimizer), scaler.get_scale(), raw_bytes(averaged.state_dict())))
    assert found[0] == found[1]


@pytest.mark.parametrize("places", [[Shard(0)], [Shard(1)], [Replicate()]])
def test_shards_are_offloaded_as_they_are(places: list[Any]) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, optimizers = init_device_mesh(DEVICE, (2,)), []
        for offload in ("state", None):
            params = [
                nn.Parameter(DTensor.from_local(p.detach(), mesh, places, run_check=False))
                for p in params_of([(64, 96), (128, 64)])
            ]
            optimizers.append(adamw(params, offload=offload, memory="tiny"))
            for step in range(2):
                fill(params, step)
                optimizers[-1].step()
            optimizers[-1].load_state_dict(saved(optimizers[-1]))
        ours, plain = ([local_of(t) for _, t in arrays(each)] for each in optimizers)
        assert raw_bytes(ours) == raw_bytes(plain)
        assert not misplaced(optimizers[0])
        assert all(isinstance(t, DTensor) for n, t in arrays(optimizers[0]) if t.dim() > 1)
    finally:
        dist.destroy_process_group()


def test_memory_report_shows_the_host() -> None:
    optimizer, plain = adamw(memory="lean"), adamw(offload=None, memory="lean")
    for each in (optimizer, plain):
        train(each, range(1))
    report = optimizer.memory_report()
    assert report.bytes == plain.memory_report().bytes
    large = 64 * 96 + LEAST
    assert report.host == {"remainder8": large, "exp_avg": 2 * large, "exp_avg_sq_ue8m8": 2 * large}
    lines = [line.split() for line in str(report).splitlines()]
    assert lines[0][:2] == ["memory", "host"]
    assert ["remainder8", "14.04", "KiB", "10.00", "KiB", "1.000"] in lines
    assert plain.memory_report().host == {}
