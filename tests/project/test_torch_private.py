"""torch's private names: those that the package uses are in torch_private.py, and in this torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from definitions import defined_in, tree_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from amp_mp import torch_private

PACKAGE = Path(torch_private.__file__).parent
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if "native" not in p.parts]
LISTED = {name for names in torch_private.ATTRIBUTES.values() for name in names}
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
PYTHONS = {"_asdict", "_make", "_replace", "_getframe", "_deepcopy_dispatch"}  # tuples, sys, copy
ASKING = {"attrgetter", "delattr", "getattr", "hasattr", "setattr"}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def objects() -> Iterator[tuple[str, Any]]:
    """One of each class in the table."""
    linear: Any = nn.Linear(8, 8)
    yield "Module", linear
    yield "RNNBase", nn.RNN(1, 1)
    yield "ConvNd", nn.Conv1d(1, 1, 1)
    yield "DistributedDataParallel", nn.parallel.DistributedDataParallel
    yield "Parameter", linear.weight
    yield "Function", type(Twice.apply(linear.weight).grad_fn)
    yield "Optimizer", torch.optim.SGD(linear.parameters())
    scaler: Any = torch.amp.GradScaler("cpu")
    yield "GradScaler", scaler
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sharded: Any = fully_shard(linear, mesh=init_device_mesh("cpu", (2,)))
        yield "DTensor", sharded.weight
        yield "DeviceMesh", sharded.weight.device_mesh
        yield "fully_shard", sharded
        yield "Module of fully_shard", sharded
        state = sharded._get_fsdp_state()
        yield "FSDPState", state
        (group,) = torch_private.fsdp_groups(state)
        yield "FSDPParamGroup", group
        yield "FSDPParam", group.fsdp_params[0]
    finally:
        dist.destroy_process_group()


def test_each_attribute_of_the_table_is_there() -> None:
    found = {}
    for kind, each in objects():
        found[kind] = {name for name in torch_private.ATTRIBUTES[kind] if hasattr(each, name)}
    assert found == {kind: set(names) for kind, names in torch_private.ATTRIBUTES.items()}


def test_the_functions_do_what_they_say() -> None:
    assert torch_private.current_backward() == -1
    assert not torch_private.functorch_is_active()
    assert not torch_private.has_forward_derivatives()
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.has_forward_derivatives()
    ended: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: torch_private.at_end_of_backward(lambda: ended.append(True)))
    x.sum().backward()
    assert ended == [True]
    assert torch_private.outside_graphs(lambda x: x + 1)(1) == 2

    nested = {"a": {"b": 1, "c": [torch.ones(1)]}}
    flat = torch_private.flatten_state_dict(nested)
    assert flat == {"a.b": 1, "a.c.0": nested["a"]["c"][0]}
    paths = {"a.b": ("a", "b"), "a.c.0": ("a", "c", 0)}
    assert torch_private.unflatten_state_dict(flat, paths) == nested


def test_the_base_classes_are_those_of_the_layers() -> None:
    own = torch_private
    layers = {
        own.BatchNorm: [nn.BatchNorm1d(1), nn.BatchNorm3d(1)],
        own.NormBase: [nn.BatchNorm2d(1), nn.InstanceNorm1d(1)],
        own.ConvNd: [nn.Conv1d(1, 1, 1), nn.ConvTranspose3d(1, 1, 1)],
        own.DropoutNd: [nn.Dropout(), nn.AlphaDropout()],
        own.Loss: [nn.L1Loss(), nn.CrossEntropyLoss()],
        own.PaddingNd: [nn.ZeroPad2d(1), nn.CircularPad1d(1)],
        own.MaxPoolNd: [nn.MaxPool1d(1), nn.AdaptiveMaxPool2d(1)],
    }
    for kind, each in layers.items():
        assert all(isinstance(layer, kind) for layer in each)
        assert not isinstance(nn.Linear(1, 1), kind)


class Counted(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


def test_names_in_state_dicts() -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
    from torch.distributed.fsdp import _common_utils

    assert list(Counted(1, 1, bias=False).state_dict()) == ["weight", torch_private.EXTRA_STATE]
    compiled: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    names = (
        next(iter(compiled.state_dict())).split(".")[0],
        *(
            checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE,
            _common_utils.FSDP_WRAPPED_MODULE,
        ),
    )
    assert names == torch_private.WRAPPED


def test_the_functions_of_dtensors_and_units() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert torch_private.default_store() is not None
        sharded: Any = fully_shard(nn.Linear(4, 6), mesh=init_device_mesh("cpu", (2,)))
        weight = sharded.weight
        assert torch_private.local_shape_and_offset(weight.shape, weight) == ((3, 4), (0, 0))
        made: Any = torch_private.dtensor_of(torch.zeros(3, 4), weight, (6, 4), (4, 1))
        assert made.placements == weight.placements
        assert not list(torch_private.gathered_parameters())
        sharded.unshard()
        gathered = list(torch_private.gathered_parameters())
        assert [id(p) for p in gathered] == [id(p) for p in sharded.parameters()]
    finally:
        dist.destroy_process_group()


def defined(tree: ast.AST) -> set[str]:
    """The private names that a file makes itself."""
    return {name for name in defined_in(tree) if PRIVATE.fullmatch(name)} - LISTED


def asked_for(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private names that a file reads from objects and from torch, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in LISTED:
            yield node.lineno, node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ASKING:
            for name in [a.value for a in node.args if isinstance(a, ast.Constant)]:
                if PRIVATE.fullmatch(str(name)):
                    yield node.lineno, name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in (*node.module.split("."), *(alias.name for alias in node.names)):
                if PRIVATE.fullmatch(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Import):
            for name in (part for alias in node.names for part in alias.name.split(".")):
                if PRIVATE.fullmatch(name):
                    yield node.lineno, name


def test_no_other_file_has_a_private_name_that_is_not_in_the_table() -> None:
    trees = {path.relative_to(PACKAGE).as_posix(): tree_of(path) for path in FILES}
    ours = set().union(*map(defined, trees.values())) | PYTHONS
    wrong, used = [], set()
    for file, tree in trees.items():
        if file == "torch_private.py":
            continue
        for line, name in asked_for(tree):
            used.add(name)
            if name not in ours | LISTED:
                wrong.append(f"{file}:{line}: {name}")
    assert wrong == []
    assert sorted(LISTED - used) == []
