"""The native slots of DTensors' shards: which gradients they take, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuts import HYPER, clock
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import amp_mp as amp
from amp_mp import _C

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed package")


@pytest.fixture
def mesh(device: str, tmp_path: Path) -> Iterator[DeviceMesh]:
    """One process, whose shard is the whole."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield DeviceMesh(device, [0])
    dist.destroy_process_group()


def shard(mesh: DeviceMesh, local: Tensor, *placements: Any) -> DTensor:
    return DTensor.from_local(local, mesh, placements or [Shard(0)], run_check=False)


def parameter(mesh: DeviceMesh, *shape: int, **of: Any) -> Any:
    local = torch.randn(*shape, device=mesh.device_type, **of)
    return nn.Parameter(shard(mesh, local))


def slots_of(params: list[Any], *, rule: str = "adamw") -> _C.Slots:
    """Slots of DTensors and plain tensors, float32 with float32 states."""
    locals_ = [getattr(p, "_local_tensor", p) for p in params]
    n, states = len(params), 2 if rule == "adamw" else 0
    return _C.Slots(
        params=locals_,
        masters=[None] * n,
        states=[[torch.zeros_like(p.detach()) for p in locals_] for _ in range(states)],
        scales=[[None] * n] * states,
        formats=[["float32"] * n] * states,
        stochastic=[False] * n,
        clocks=[clock(str(p.device)) for p in locals_],
        groups=[0] * n,
        tensor_indices=list(range(n)),
        firsts=[0] * n,
        names=[f"layer.{i}" for i in range(n)],
        dtensors=[p if isinstance(p, DTensor) else None for p in params],
    )


def step(slots: _C.Slots, device: str, rule: str = "adamw", found_inf: float = 0.0) -> None:
    verdict = torch.tensor([found_inf, 1, 0, 0, 1], dtype=torch.float64, device=device)
    _C.operators[f"{rule}_"](slots, [_C.Hyper(**HYPER)], verdict)


def test_dtensors_are_stepped_as_plain_tensors(device: str, mesh: DeviceMesh) -> None:
    sharded = [parameter(mesh, 5, 7), parameter(mesh, 3), nn.Parameter(torch.randn(4).to(device))]
    plain = [nn.Parameter(getattr(p, "_local_tensor", p).detach().clone()) for p in sharded]
    slots, wanted = slots_of(sharded), slots_of(plain)
    for n in range(3):
        for p, q in zip(sharded, plain, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = shard(mesh, q.grad) if isinstance(p, DTensor) else q.grad
        if n == 1:
            sharded[0].grad = plain[0].grad = None
        assert slots.fit()
        assert slots.find_gradients() == []
        measured = slots.measure().rows
        assert torch.equal(measured, wanted.measure().rows)
        assert torch.equal(slots.measure_weights().rows, wanted.measure_weights().rows)
        versions = [(p._version, getattr(p, "_local_tensor", p)._version) for p in sharded]
        step(slots, device)
        step(wanted, device)
        for i, (p, q) in enumerate(zip(sharded, plain, strict=True)):
            local = getattr(p, "_local_tensor", p)
            assert torch.equal(local, q.detach())
            moved = int(not (n == 1 and i == 0))
            assert (p._version, local._version) == (versions[i][0] + moved, versions[i][1] + moved)


def test_a_skipped_step_advances_no_version(device: str, mesh: DeviceMesh) -> None:
    p = parameter(mesh, 5, 7)
    p.grad = shard(mesh, torch.ones(5, 7, device=device))
    slots = slots_of([p])
    before, versions = p._local_tensor.clone(), (p._version, p._local_tensor._version)
    slots.find_gradients()
    step(slots, device, found_inf=1.0)
    assert torch.equal(p._local_tensor, before)
    if device == "cpu":  # a GPU does not tell the host
        assert (p._version, p._local_tensor._version) == versions


def test_gradients_are_looked_up_before_each_step(device: str, mesh: DeviceMesh) -> None:
    p = parameter(mesh, 5, 7)
    p.grad = shard(mesh, torch.ones(5, 7, device=device))
    slots = slots_of([p])
    for n in range(2):
        for use in (lambda: step(slots, device), slots.measure, slots.measure_weights):
            with pytest.raises(RuntimeError, match=r"call find_gradients\(\) before each step"):
                use()
        with pytest.raises(RuntimeError, match=r"call find_gradients\(\) before set_gradient"):
            slots.set_gradient(0, torch.zeros(5, 7, device=device))
        assert slots.find_gradients() == []
        assert slots.measure().rows[0, 0] == 35, n
        step(slots, device)


def test_a_failed_step_leaves_no_gradient_behind(device: str, mesh: DeviceMesh) -> None:
    p = parameter(mesh, 5, 7)
    p.grad = shard(mesh, torch.ones(5, 7, device=device))
    slots = slots_of([p])
    slots.find_gradients()
    with pytest.raises(ValueError, match="states"):
        step(slots, device, rule="sgd")
    p.grad = None
    assert slots.find_gradients() == []
    assert slots.measure().rows.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_other_placements_are_returned(device: str, mesh: DeviceMesh) -> None:
    first, second, third = (parameter(mesh, 4, 6) for _ in range(3))
    ones = torch.ones(4, 6, device=device)
    first.grad = DTensor.from_local(ones, mesh, [Shard(1)], run_check=False)
    second.grad = shard(mesh, ones)
    third.grad = DTensor.from_local(ones, mesh, [Replicate()], run_check=False)
    slots = slots_of([first, second, third])
    assert slots.find_gradients() == [0, 2]
    slots.set_gradient(0, 2 * ones)
    with pytest.raises(RuntimeError, match=r"gradient of layer\.2 is not placed as the parameter"):
        slots.measure()
    slots.set_gradient(2, 3 * ones)
    assert slots.measure().rows[:, 0].tolist() == [96, 24, 216, 336]
    slots.set_gradient(2, ones[:2])
    with pytest.raises(ValueError, match=r"gradient of layer\.2 has shape \[2, 6\]"):
        step(slots, device)
    assert slots.find_gradients() == [0, 2]
    for i in (0, 2):
        slots.set_gradient(i, ones)
    step(slots, device)


def test_a_gradient_that_is_being_filled_is_waited_for(device: str, mesh: DeviceMesh) -> None:
    """As autograd leaves it where a redistribution runs asynchronously."""
    p = parameter(mesh, 4, 6)
    p.grad = shard(mesh, torch.ones(4, 6, device=device))
    p.grad._local_tensor = AsyncCollectiveTensor(torch.ones(4, 6, device=device))
    slots = slots_of([p])
    assert slots.find_gradients() == []
    assert slots.measure().rows[0, 0] == 24


def test_a_captured_step_needs_the_gradient_of_each_dtensor(device: str, mesh: DeviceMesh) -> None:
    if device == "cpu":
        pytest.skip("only a GPU captures")
    p, frozen = parameter(mesh, 4, 6), parameter(mesh, 4).requires_grad_(False)
    slots, graph = slots_of([p, frozen]), torch.cuda.CUDAGraph()
    verdict = torch.tensor([0, 1, 0, 0, 1], dtype=torch.float64, device=device)
    slots.find_gradients()
    with (
        pytest.raises(ValueError, match=r"layer\.0 has no gradient, and a step captured now"),
        torch.cuda.graph(graph),
    ):
        _C.operators["adamw_"](slots, [_C.Hyper(**HYPER)], verdict)
    p.grad = shard(mesh, torch.ones(4, 6, device=device))
    slots.find_gradients()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        _C.operators["adamw_"](slots, [_C.Hyper(**HYPER)], verdict)


def test_equal_placements_of_another_spec_are_the_parameters(device: str, mesh: DeviceMesh) -> None:
    p = parameter(mesh, 4, 6)
    ones = torch.ones(4, 6, device=device)
    p.grad = DTensor.from_local(ones, DeviceMesh(device, [0]), [Shard(0)], run_check=False)
    assert slots_of([p]).find_gradients() == []


def test_a_plain_gradient_is_refused_by_name(device: str, mesh: DeviceMesh) -> None:
    params = [parameter(mesh, 3), parameter(mesh, 5, 7)]
    slots = slots_of(params)
    before = params[1]._local_tensor.clone()
    params[1].grad = torch.ones(5, 7, device=device)
    with pytest.raises(
        TypeError, match=r"gradient of layer\.1 is a plain tensor, the parameter is"
    ):
        slots.find_gradients()
    with pytest.raises(RuntimeError, match="find_gradients"):
        step(slots, device)
    assert torch.equal(params[1]._local_tensor, before)


def test_another_shard_does_not_fit(device: str, mesh: DeviceMesh) -> None:
    p = parameter(mesh, 5, 7)
    slots = slots_of([parameter(mesh, 2), p])
    assert slots.fit()
    local = p._local_tensor
    p._local_tensor = local.view_as(local)  # the same memory, another object
    assert not slots.fit()
    p._local_tensor = local
    assert slots.fit()
    with torch.no_grad():
        p._local_tensor = local.bfloat16()
    assert not slots.fit()


def test_what_belongs_to_no_dtensor_is_refused(device: str, mesh: DeviceMesh) -> None:
    p = parameter(mesh, 5, 7)
    plain = torch.randn(5, 7, device=device)
    arguments: dict[str, Any] = {
        "masters": [None],
        "states": [],
        "scales": [],
        "formats": [],
        "stochastic": [False],
        "clocks": [clock(device)],
        "groups": [0],
        "tensor_indices": [0],
        "firsts": [0],
        "names": ["layer.0"],
    }
    with pytest.raises(ValueError, match="params must hold the _local_tensor"):
        _C.Slots(params=[plain], dtensors=[p], **arguments)
    with pytest.raises(TypeError, match=r"dtensors holds a plain tensor for layer\.0"):
        _C.Slots(params=[plain], dtensors=[plain], **arguments)
    with pytest.raises(ValueError, match="dtensors has 0 elements, but there are 1 parameters"):
        _C.Slots(params=[plain], dtensors=[], **arguments)
    with pytest.raises(ValueError, match="row_lengths has 2 elements"):
        _C.Slots(params=[plain], row_lengths=[0, 0], **arguments)
    with pytest.raises(ValueError, match=r"the shard of layer\.0 cannot begin at element 0"):
        _C.Slots(params=[plain], row_lengths=[7], row_strides=[6], **arguments)
    slots = _C.Slots(params=[plain], **arguments)
    assert slots.find_gradients() == []
    for i in (0, 1, -1):
        with pytest.raises(IndexError, match=f"parameter {i} of these slots is not a DTensor"):
            slots.set_gradient(i, plain)


@pytest.mark.parametrize("operator", ["adamw_", "lamb_", "novograd_", "plain_sgd_"])
def test_empty_shards_go_through_every_pass(device: str, mesh: DeviceMesh, operator: str) -> None:
    """As on a process that has no row of a weight."""
    names = {"adamw_": ["m8", "ue8m8"], "lamb_": ["m8", "ue8m8"], "novograd_": ["float32"]}
    dtypes = {"m8": torch.int8, "ue8m8": torch.int16, "float32": torch.float32}
    local = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    assert local.data_ptr() == 0
    p: Any = nn.Parameter(shard(mesh, local))
    p.grad = shard(mesh, torch.empty_like(local))
    formats = names.get(operator, [])
    slots = _C.Slots(
        params=[p._local_tensor],
        masters=[torch.empty(0, 64, dtype=torch.int8, device=device)],
        states=[[torch.empty(0, 64, dtype=dtypes[f], device=device)] for f in formats],
        scales=[
            [torch.empty(0, 2, dtype=torch.bfloat16, device=device) if f == "m8" else None]
            for f in formats
        ],
        formats=[[f] for f in formats],
        stochastic=[False],
        clocks=[steps := clock(device)],
        groups=[0],
        tensor_indices=[0],
        firsts=[0],
        names=["layer.0"],
        dtensors=[p],
    )
    for n in range(2):
        assert slots.fit()
        assert slots.find_gradients() == []
        assert slots.measure().rows.tolist() == [[0.0] * 3] * 2
        verdict = torch.tensor([0, 1, 0, 0, 1], dtype=torch.float64, device=device)
        _C.operators[operator](
            slots, [_C.Hyper(**HYPER)], verdict, slots.measure(), weights=slots.measure_weights()
        )
        assert steps[0] == n + 1


def test_no_cast_of_a_shard_is_kept_or_written(device: str, mesh: DeviceMesh) -> None:
    """A kept copy of what a user casts by hand, as FSDP2 does with gathered parameters."""
    p = parameter(mesh, 64, 64)
    p.grad = shard(mesh, torch.ones(64, 64, device=device))
    local = p._local_tensor.requires_grad_()  # a leaf, or no cast of it would be cached
    slots = slots_of([p])
    x = torch.randn(64, 64, device=device)
    with amp.autocast(device, dtype=torch.bfloat16, keep_casts=True):
        nn.functional.linear(x, local)
        copies = {id(t): c.clone() for t, c in _C.casting.cached().items()}
        assert list(copies) == [id(local)]
        slots.find_gradients()
        step(slots, device)
        for tensor, copy in _C.casting.cached().items():
            assert torch.equal(copy, copies[id(tensor)])
        _C.casting.optimizer_stepped()
        assert not _C.casting.cached()
        found = nn.functional.linear(x, local)
    wanted = nn.functional.linear(x.bfloat16(), local.detach().bfloat16())
    assert torch.equal(found, wanted)
