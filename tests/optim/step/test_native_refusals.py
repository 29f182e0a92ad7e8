"""What the native library refuses by name where it is called without the Python package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_mp as amp
from amp_mp import _C
from amp_mp.optim.base import rules_of


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        (torch.zeros(2), TypeError, "rows .* must be Double"),
        (torch.zeros(2, 3), TypeError, "rows .* must be Double"),
        (torch.zeros(3, dtype=torch.float64), ValueError, r"must have shape \[n \+ 1, 3\]"),
        (torch.zeros(4, 2, dtype=torch.float64), ValueError, r"must have shape \[n \+ 1, 3\]"),
        (torch.zeros(0, 3, dtype=torch.float64), ValueError, "rows must hold 3"),
        (torch.zeros((), dtype=torch.float64), ValueError, "rows must hold 3"),
        (torch.zeros(3, 3, dtype=torch.float64).t()[:2], ValueError, "rows"),
        (torch.zeros(3, 3, dtype=torch.int64), TypeError, "rows .* must be Double"),
        (torch.zeros(3, 3, dtype=torch.float64, device="meta"), TypeError, "neither on a CPU"),
    ],
)
def test_a_measurement_of_other_rows(rows: Tensor, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        _C.Measurement(rows)


NO_INFO = _C.GroupInfo(set(), {})


def adamw() -> tuple[Any, list[Any], list[dict[str, Any]], dict[Any, Any]]:
    param = torch.nn.Parameter(torch.zeros(64))
    param.grad = torch.ones(64)
    optimizer = amp.optim.AdamW([param])
    rules = [rules_of(amp.optim.AdamW)[0]]
    return param, rules, optimizer.param_groups, optimizer.state


def bucket(group: int) -> Callable[[], Any]:
    def call() -> Any:
        param, rules, groups, states = adamw()
        return _C.Bucket(rules, groups, states, NO_INFO, param, group, 0, "w")

    return call


def states_for(rules: int) -> Callable[[], Any]:
    def call() -> Any:
        _, own, groups, states = adamw()
        return _C.init_states(own * rules, groups, states)

    return call


def state_that_is(state: Any) -> Callable[[], Any]:
    def call() -> Any:
        param, rules, groups, _ = adamw()
        return _C.Bucket(rules, groups, {param: state}, NO_INFO, param, 0, 0, "w")

    return call


BF16, FLOAT32 = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)
CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a group that is not there": (bucket(1), IndexError, "there is no group 1"),
    "a group before the first": (bucket(-1), IndexError, "there is no group -1"),
    "fewer rules than groups": (states_for(0), ValueError, "0 rules, but 1 param_groups"),
    "more rules than groups": (states_for(2), ValueError, "2 rules, but 1 param_groups"),
    "a state that is not a dict": (state_that_is(7), TypeError, "the state of w must be a dict"),
    "a parameter that is not a tensor": (
        lambda: _C.float32_of(3),  # type: ignore[arg-type]
        TypeError,
        "a tensor is needed, found 3",
    ),
    "groups of what is not a tensor": (
        lambda: _C.has_groups("m8", "w"),  # type: ignore[arg-type]
        TypeError,
        "a tensor is needed",
    ),
    "a part of other dimensions": (
        lambda: _C.second_shape("m8", torch.zeros(2, 64), []),
        ValueError,
        "part .* 2 dimensions",
    ),
    "values of float32": (
        lambda: _C.weight_at(FLOAT32).store(FLOAT32, torch.zeros(4)),
        TypeError,
        "must be float16 or bfloat16",
    ),
    "values of another shape": (
        lambda: _C.weight_at(BF16).store(BF16, torch.zeros(1)),
        ValueError,
        r"values .*\[1\].* of the weight's shape",
    ),
    "values of float64": (
        lambda: _C.weight_at(BF16).store(BF16, torch.zeros(4, dtype=torch.float64)),
        TypeError,
        "values .* must be float32",
    ),
    "values of what is not a tensor": (
        lambda: _C.weight_at(3),  # type: ignore[arg-type]
        TypeError,
        "a tensor is needed, found 3",
    ),
    "a policy that is NaN": (
        lambda: _C.update_scale_(
            _C.ScaleUpdate(policy=torch.full((8,), torch.nan, dtype=torch.float64)),
            torch.zeros(1, dtype=torch.float64),
        ),
        ValueError,
        "policy nan",
    ),
    "parameters of what is not a group": (
        lambda: _C.have_params([3], []),  # type: ignore[list-item]
        TypeError,
        "a param_group must be a dict, found 3",
    ),
    "a ZeroTensor": (
        lambda: _C.decode(torch._efficientzerotensor(32), None, "float32"),
        ValueError,
        "data .* ZeroTensor",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_end_in_an_error_by_name(case: str) -> None:
    call, kind, message = CALLS[case]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("given", [torch.zeros(4).double(), torch.zeros(3)])
def test_a_master_that_does_not_go_with_its_weight_changes_nothing(given: torch.Tensor) -> None:
    param, state = torch.ones(4, dtype=torch.bfloat16), {"master": given}
    _C.weight_at(param).store(param, torch.full((4,), 1.001))
    with pytest.raises(ValueError, match="does not go with the weight"):
        _C.take_entries([param], [state])
    assert state["master"] is given
    assert torch.equal(_C.float32_of(param), torch.full((4,), 1.001))


@pytest.mark.slow
def test_the_library_without_the_package_says_that_its_python_functions_are_missing() -> None:
    code = f"""
import importlib.util, torch
spec = importlib.util.spec_from_file_location("_C", {_C.__file__!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
native.has_groups("m8", torch.zeros(2, 32).as_subclass(type("Other", (torch.Tensor,), {{}})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "RuntimeError: amp_mp: the native library needs a Python function" in done.stderr


def test_no_python_function_may_be_missing() -> None:
    with pytest.raises(KeyError, match="has_sharded_modules"):
        _C.bind_python(like=None)
