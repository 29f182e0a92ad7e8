"""Calls of amp_C, the clipping and Muon's matrices with right arguments, for native_fuzz.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_mp import _C

ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": 1}
SGD = {"weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "lr": 0.1, "nesterov": False}
# Function, how many lists it takes, and the numbers behind them.
FUNCTIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("multi_tensor_scale", 2, {"scale": 2.0}),
    ("multi_tensor_axpby", 3, {"a": 1.0, "b": 2.0, "arg_to_check": -1}),
    ("multi_tensor_l2norm", 1, {"per_tensor": True}),
    ("multi_tensor_adam", 4, {**ADAM, "mode": 1, "bias_correction": True, "weight_decay": 0.1}),
    ("multi_tensor_adagrad", 3, {"lr": 0.1, "eps": 1e-8, "mode": 0, "weight_decay": 0.0}),
    (
        "multi_tensor_sgd",
        3,
        {**SGD, "first_run": True, "wd_after_momentum": False, "scale": 1.0},
    ),
]


def list_call(fuzz: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function and its arguments."""
    lists = [[fuzz.tensor((2, 32)), fuzz.tensor((5,))] for _ in range(4)]
    if fuzz.random.random() < 0.7:
        name, count, numbers = fuzz.random.choice(FUNCTIONS)
        flag = fuzz.tensor((1,), torch.int32)
        arguments = {"chunk_size": 65536, "noop_flag": flag, "tensor_lists": lists[:count]}
        return getattr(_C.amp_C, name), {**arguments, **numbers}
    stack = fuzz.tensor((2, 4, 8), torch.bfloat16)
    numbers = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}
    param = fuzz.tensor((4, 8))
    param.grad = fuzz.tensor((4, 8))

    _, rules, optimizer_groups, states = fuzz.optimizer()

    def edit(**given: Any) -> None:
        block = _C.EditBlock(**given)
        block.borrow()
        for master in block.masters if isinstance(block.masters, list) else [block.masters]:
            master.mul_(2.0)
        block.give_back()
        block.store()

    def lend(params: Any, what: Any) -> None:
        loan = _C.Loan(params)
        loan.borrow(what)
        _C.refuse_borrowed(params, what)

    def whole(directions: Any, **given: Any) -> Any:
        return _C.WholeMatrices(**given)(directions)

    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (
            _C.orthogonalise_,
            {"stack": stack, "group": numbers, "factor": 0.5},
        ),
        (
            whole,
            {
                "directions": fuzz.tensor((64,), torch.bfloat16),
                "locals": [param, fuzz.tensor((4, 8))],
                "groups": [numbers, numbers],
                "blocks": [[(1, 4, 8, 1.0)], [(1, 3, 8, 1.0), (1, 1, 8, 0.5)]],
            },
        ),
        (
            _C.clip_grad_norm_,
            {"parameters": [param], "max_norm": 1.0, "error_if_nonfinite": False},
        ),
        (
            edit,
            {
                "rules": rules,
                "groups": optimizer_groups,
                "states": states,
                "params": [("w", param) for param in list(states)[: fuzz.random.choice([0, 1, 9])]],
            },
        ),
        (lend, {"params": [param, *states], "what": "a call"}),
        (
            _C.qk_clip_factors,
            {
                "max_logits": fuzz.tensor((2,)),
                "threshold": 0.5,
                "alpha": 0.5,
                "queries": [fuzz.tensor((4, 8))],
                "keys": [fuzz.tensor((2, 8))],
            },
        ),
        (_C.have_params, {"groups": optimizer_groups, "params": list(states)}),
    ]
    return fuzz.random.choice(calls)
