"""What the native functions of Apex's tree take: names, other objects, layouts, numbers."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PRETEND_GPU
from torch import nn

import amp_mp
from amp_mp.apex import amp_C
from amp_mp.apex.contrib.clip_grad import clip_grad_norm_

STUB = Path(amp_mp.__file__).parent / "apex/amp_C.pyi"
ARGUMENTS = {
    node.name: [argument.arg for argument in node.args.args]
    for node in ast.parse(STUB.read_text()).body
    if isinstance(node, ast.FunctionDef)
}


def flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


def test_the_stub_has_every_function() -> None:
    assert set(ARGUMENTS) == set(amp_C.__all__) == {n for n in dir(amp_C) if n[0] != "_"}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_the_stub_has_the_native_names_of_arguments(name: str) -> None:
    """And each function says more than its signature."""
    signature, _, text = inspect.getdoc(getattr(amp_C, name)).partition("\n")
    tree = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert [argument.arg for argument in tree.args.args] == ARGUMENTS[name]
    assert len(text.strip()) > 40


def test_other_objects_are_named() -> None:
    one = torch.ones(2)
    for lists, match in (
        ([[one], [None]], r"tensor_lists\[1\]\[0\] is None"),
        ([[one], [3.0]], "tensor_lists holds a <class 'float'>"),
        ([[one], 3], r"tensor_lists\[1\] must be a list of tensors, found 3"),
    ):
        with pytest.raises(TypeError, match=match):
            amp_C.multi_tensor_scale(0, flag(), lists, 2.0)  # type: ignore[arg-type]
    assert (one == 1).all()


def test_a_state_that_no_pass_stores_is_named() -> None:
    lists = [[torch.ones(2)], [torch.ones(2)], [torch.ones(2, dtype=torch.float64)]]
    with pytest.raises(TypeError, match=r"the state of tensor_lists\[1\]\[0\].*must be float32"):
        amp_C.multi_tensor_adagrad(0, flag(), lists, 0.1, 1e-8, 0, 0.0)


def test_numbers_may_be_tensors() -> None:
    """lr and the global norm; the caller's gradients and .grad stay as they are."""
    found: list[Any] = []
    for number in (float, lambda x: torch.tensor([x], dtype=torch.float64)):
        param, grad, *states = (torch.full((3,), x) for x in (1.0, 2.0, 0.0, 0.0))
        param.requires_grad_()
        rest = (0.9, 0.99, 1e-6, 1, True, 0.1, 1, 1, number(4.0), 1.0, False)
        lists = [[grad], [param], *([s] for s in states)]
        amp_C.multi_tensor_lamb(0, flag(), lists, number(0.25), *rest)
        assert param.grad is None
        assert (grad == 2).all()
        found.append(param.detach())
    assert torch.equal(*found)
    assert (found[0] < 1).all()


def test_clipping_reads_dense_layouts_itself() -> None:
    """float16 of other layouts has a finite norm as well; gaps and other dtypes are torch's."""
    large = torch.full((2, 3, 4, 5), 6e4, dtype=torch.float16)
    for grad in (large.to(memory_format=torch.channels_last), large.permute(3, 1, 0, 2)):
        param = nn.Parameter(torch.empty_like(grad))
        param.grad = grad.clone()
        norm = clip_grad_norm_([param], 1.0)
        assert norm.item() == pytest.approx(6e4 * 120**0.5, rel=1e-3)
        torch.testing.assert_close(param.grad, torch.full_like(grad, 120**-0.5), rtol=2e-3, atol=0)
    for dtype in (torch.float32, torch.float64):
        param = nn.Parameter(torch.zeros(4, 2, dtype=dtype))
        param.grad = torch.arange(16.0, dtype=dtype).view(4, 4)[:, ::2]
        before = param.grad.clone()
        norm = clip_grad_norm_(param, 1.0)
        assert norm.dtype == dtype
        torch.testing.assert_close(norm, before.norm())
        torch.testing.assert_close(param.grad, before / before.norm())


@pytest.mark.skipif(not PRETEND_GPU, reason="only the pretend GPU counts waits")
def test_the_host_waits_for_nothing() -> None:
    from pretend_gpu.device import ledger

    def lists(count: int) -> list[list[torch.Tensor]]:
        return [[torch.ones(s, device="cuda") for s in ((5,), (3, 2), (0,))] for _ in range(count)]

    noop, one = flag().cuda(), torch.ones(1, device="cuda")
    grad_norms, patience = torch.ones(3, device="cuda"), flag().cuda() + 2
    param = nn.Parameter(one.clone())
    param.grad = one.clone()
    betas = (0.1, 0.9, 0.99, 1e-8, 1)
    calls: dict[str, tuple[Any, ...]] = {
        "scale": (lists(2), 0.5),
        "axpby": (lists(3), 0.5, 2.0),
        "l2norm": (lists(1), True),
        "unscale_l2norm": (lists(1), one),
        "adam": (lists(4), *betas, 1, 1, 0.1),
        "adagrad": (lists(3), 0.1, 1e-8, 0, 0.1),
        "lamb": (lists(4), *betas, 1, 0.1, 1, 1, one, 1.0, False),
        "novograd": (lists(3), grad_norms, *betas, 0, 0.1, 1, 0, 2),
        "sgd": (lists(4), 0.1, 0.9, 0.0, 0.1, False, True, False, 0.5),
    }
    with ledger() as found:
        for name, given in calls.items():
            getattr(amp_C, f"multi_tensor_{name}")(0, noop, *given)
        amp_C.update_scale_hysteresis(one, noop, patience, 0 * one, 2.0, 0.5, 2000, 2)
        clip_grad_norm_([param], 1.0)
    assert (found.syncs, found.waits) == ([], 0)
    assert found.launches > 20
