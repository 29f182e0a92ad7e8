"""Steps of DTensors' shards: which gradients they take, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_training import graph_of, refused_capture
from cuts import as_rank
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


def local(param: Any) -> Tensor:
    found: Tensor = getattr(param, "_local_tensor", param).detach()
    return found


def adamw(params: list[Any], **options: Any) -> Any:
    names = [(f"layer.{i}", p) for i, p in enumerate(params)]
    return amp.optim.AdamW(names, lr=1e-2, **options)


def test_dtensors_are_stepped_as_plain_tensors(device: str, mesh: DeviceMesh) -> None:
    sharded = [parameter(mesh, 5, 7), parameter(mesh, 3), nn.Parameter(torch.randn(4).to(device))]
    plain = [nn.Parameter(local(p).clone()) for p in sharded]
    found, wanted = adamw(sharded, max_grad_norm=1.0), adamw(plain, max_grad_norm=1.0)
    for n in range(3):
        for p, q in zip(sharded, plain, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = shard(mesh, q.grad) if isinstance(p, DTensor) else q.grad
        if n == 1:
            sharded[0].grad = plain[0].grad = None
        versions = [(p._version, local(p)._version) for p in sharded]
        found.step()
        wanted.step()
        assert found.grad_norm == wanted.grad_norm
        for i, (p, q) in enumerate(zip(sharded, plain, strict=True)):
            assert torch.equal(local(p), q.detach())
            moved = int(not (n == 1 and i == 0))
            assert (p._version, local(p)._version) == tuple(v + moved for v in versions[i])


def test_a_skipped_step_advances_no_version(device: str, mesh: DeviceMesh) -> None:
    p = parameter(mesh, 5, 7)
    p.grad = shard(mesh, torch.full((5, 7), torch.inf, device=device))
    optimizer = adamw([p], check_overflow=True)
    before, versions = local(p).clone(), (p._version, local(p)._version)
    optimizer.step()
    assert torch.equal(local(p), before)
    if device == "cpu":  # a GPU does not tell the host
        assert (p._version, local(p)._version) == versions


def test_gradients_are_looked_up_before_each_step(device: str, mesh: DeviceMesh) -> None:
    """As the steps during backward do, parameter by parameter."""
    p = parameter(mesh, 5, 7)
    p.grad = shard(mesh, torch.ones(5, 7, device=device))
    optimizer = adamw([p])
    groups = optimizer.param_groups
    rules, info = optimizer._stepper.group_rules(), _C.GroupInfo(set(optimizer.defaults), {})
    bucket = _C.Bucket(rules, groups, optimizer.state, info, p, 0, 0, "layer.0")
    for n in range(2):
        for use in (bucket.measure, lambda: bucket.step(groups, None, None, None)):
            with pytest.raises(RuntimeError, match=r"call find_gradients\(\) before each step"):
                use()
        bucket.find_gradients()
        assert bucket.measure().rows[0, 0] == 35, n
        bucket.step(groups, None, None, None)


def test_a_failed_step_leaves_no_gradient_behind(device: str, mesh: DeviceMesh) -> None:
    p = parameter(mesh, 5, 7)
    p.grad = shard(mesh, torch.ones(5, 7, device=device))
    optimizer = adamw([p], max_grad_norm=1.0)
    optimizer.step()
    before, group = local(p).clone(), optimizer.param_groups[0]
    group["lr"] = "fast"
    with pytest.raises(ValueError, match="lr must be a number"):
        optimizer.step()
    group["lr"], p.grad = 1e-2, None
    optimizer.step()
    assert optimizer.grad_norm == 0
    assert torch.equal(local(p), before)


# A gradient of ones, however it lies.
PLACED: dict[str, Callable[[DeviceMesh, Tensor], DTensor]] = {
    "columns": lambda mesh, ones: shard(mesh, ones, Shard(1)),
    "replicated": lambda mesh, ones: shard(mesh, ones, Replicate()),
    "an equal mesh": lambda mesh, ones: shard(DeviceMesh(mesh.device_type, [0]), ones),
}


@pytest.mark.parametrize("placed", PLACED)
def test_a_gradient_of_other_placements_is_redistributed(
    device: str, mesh: DeviceMesh, placed: str
) -> None:
    p, ones = parameter(mesh, 4, 6), torch.ones(4, 6, device=device)
    q = nn.Parameter(local(p).clone())
    p.grad, q.grad = PLACED[placed](mesh, ones), ones
    found, wanted = adamw([p], max_grad_norm=1.0), adamw([q], max_grad_norm=1.0)
    found.step()
    wanted.step()
    assert torch.equal(local(p), q.detach())
    assert found.grad_norm == wanted.grad_norm


def test_a_gradient_that_is_being_filled_is_waited_for(device: str, mesh: DeviceMesh) -> None:
    """As autograd leaves it where a redistribution runs asynchronously."""
    p = parameter(mesh, 4, 6)
    p.grad = shard(mesh, torch.ones(4, 6, device=device))
    p.grad._local_tensor = AsyncCollectiveTensor(torch.ones(4, 6, device=device))
    optimizer = adamw([p], max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(24**0.5)


def test_a_captured_step_needs_the_gradient_of_each_dtensor(device: str, mesh: DeviceMesh) -> None:
    if device == "cpu":
        pytest.skip("only a GPU captures")
    p, frozen = parameter(mesh, 4, 6), parameter(mesh, 4)
    optimizer, grad = adamw([p, frozen]), shard(mesh, torch.ones(4, 6, device=device))
    p.grad, frozen.grad = grad, shard(mesh, torch.ones(4, device=device))
    optimizer.step()
    frozen.requires_grad_(False)
    p.grad = frozen.grad = None
    with refused_capture(ValueError, r"layer\.0'\) has no gradient, and a step captured now"):
        optimizer.step()
    p.grad = grad
    graph_of(optimizer)


def test_a_plain_gradient_is_refused_by_name(device: str, mesh: DeviceMesh) -> None:
    params = [parameter(mesh, 3), parameter(mesh, 5, 7)]
    optimizer = adamw(params)
    before = local(params[1]).clone()
    params[0].grad = shard(mesh, torch.ones(3, device=device))
    params[1].grad = torch.ones(5, 7, device=device)
    with pytest.raises(TypeError, match=r"layer\.1'\) is a plain tensor, the parameter is"):
        optimizer.step()
    assert torch.equal(local(params[1]), before)


def test_another_shard_is_stepped_from_then_on(device: str, mesh: DeviceMesh) -> None:
    p = parameter(mesh, 5, 7)
    optimizer = adamw([parameter(mesh, 2), p])
    p.grad = shard(mesh, torch.ones(5, 7, device=device))
    optimizer.step()
    old = p._local_tensor
    p._local_tensor = new = old.clone()
    optimizer.step()
    assert bool((new < old).all())
    p._local_tensor = new.view_as(new)  # the same memory, another object
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 3


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (amp.optim.AdamW, {"memory": "tiny"}),
    "lamb": (amp.optim.LAMB, {"memory": "tiny"}),
    "novograd": (amp.optim.NovoGrad, {"memory": "float32"}),
    "sgd": (amp.optim.SGD, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_empty_shards_go_through_every_pass(device: str, kind: str) -> None:
    """As on a process that has no row of a weight."""
    make, options = KINDS[kind]
    with as_rank(1, 2):
        mesh = init_device_mesh(device, (2,))
        empty = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
        assert empty.data_ptr() == 0
        one_row: dict[str, Any] = {"run_check": False, "shape": (1, 64), "stride": (64, 1)}
        p: Any = DTensor.from_local(empty, mesh, [Shard(0)], **one_row).requires_grad_()
        p.grad = DTensor.from_local(torch.empty_like(empty), mesh, [Shard(0)], **one_row)
        optimizer = make([p], lr=1e-2, max_grad_norm=1.0, **options)
        for n in range(2):
            optimizer.step()
            assert optimizer.grad_norm == 0
            assert float(optimizer.state[p]["step"]) == n + 1


def test_no_cast_of_a_shard_is_kept_or_written(device: str, mesh: DeviceMesh) -> None:
    """A kept copy of what a user casts by hand, as FSDP2 does with gathered parameters."""
    p = parameter(mesh, 64, 64)
    p.grad = shard(mesh, torch.ones(64, 64, device=device))
    own = p._local_tensor.requires_grad_()  # a leaf, or no cast of it would be cached
    optimizer, before = adamw([p]), own.detach().bfloat16()
    x = torch.randn(64, 64, device=device)
    with amp.autocast(device, dtype=torch.bfloat16, keep_casts=True):
        nn.functional.linear(x, own)
        copies = list(_C.casting.cached().items())
        assert [t is own for t, _ in copies] == [True]
        optimizer.step()
        assert torch.equal(copies[0][1], before)
        assert not _C.casting.cached()
        found = nn.functional.linear(x, own)
    wanted = nn.functional.linear(x.bfloat16(), own.detach().bfloat16())
    assert torch.equal(found, wanted)
