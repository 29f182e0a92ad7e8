"""State dicts written before codes had names of their own, and what followed from them."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp

# Each case: the weights and the state dict after three steps, the weights after the fourth, and a
# digest of the state after it. All of it was written by the code of that time.
FILE = Path(__file__).parent / "files" / "state_dicts_with_old_names.pt.xz"

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "amsgrad": ("AdamW", {"amsgrad": True}),
    "sgd": ("SGD", {"momentum": 0.9}),
    "lars": ("LARS", {}),
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.1}),
    "rmsprop": ("RMSprop", {"momentum": 0.9}),
    "centered": ("RMSprop", {"centered": True}),
    "adamax": ("Adamax", {}),
    "lion": ("Lion", {}),
    "lamb": ("LAMB", {}),
    "novograd": ("NovoGrad", {}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name} {memory}": (kind, {**arguments, "memory": memory})
    for name, (kind, arguments) in OPTIMIZERS.items()
    for memory in ("float32", "exact", "lean", "tiny")
}
CASES["adamw half"] = ("AdamW", {"exp_avg": "float16", "exp_avg_sq": "float16_root"})
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Some numbers from -1 to 1, the same on every machine."""
    count = torch.arange(torch.Size(shape).numel())
    return (((count * 37 + seed * 101) % 127 - 63) / 64).reshape(shape)


def parameters(low: torch.dtype, device: str) -> list[nn.Parameter]:
    """A weight with groups of 32, a bias without, and a float32 parameter."""
    kinds = (((2, 32), low), ((5,), low), ((3,), torch.float32))
    values = [numbers(shape, i).to(device, dtype) for i, (shape, dtype) in enumerate(kinds)]
    return [nn.Parameter(v) for v in values]


def optimizer_of(case: str, params: list[nn.Parameter]) -> amp.optim.FusedOptimizer:
    kind, arguments = CASES[case]
    return getattr(amp.optim, kind)(params, lr=0.01, weight_decay=0.01, seed=7, **arguments)


def step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    for i, param in enumerate(params):
        grad = numbers(tuple(param.shape), 10 * number + i)
        param.grad = grad.to(param.device, param.dtype)
    optimizer.step()


def digest(state_dict: dict[str, Any]) -> str:
    """Of the bytes of all tensors of a state, whatever their names and the shapes of scales."""
    found = []
    for _, state in sorted(state_dict["state"].items()):
        found.append(sorted(raw_bytes(v)[2] for v in state.values() if v is not None))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def written() -> dict[str, dict[str, Any]]:
    """The cases that the file has, as this code writes them."""
    cases = {}
    for case in CASES:
        for name, low in LOW.items():
            params = parameters(low, "cpu")
            optimizer = optimizer_of(case, params)
            for number in range(3):
                step(params, optimizer, number)
            saved = torch.utils._pytree.tree_map_only(
                Tensor, lambda t: t.detach().clone(), optimizer.state_dict()
            )
            weights = [p.detach().clone() for p in params]
            step(params, optimizer, 3)
            cases[f"{case}, {name}"] = {
                "weights": weights,
                "state_dict": saved,
                "next_weights": [p.detach().clone() for p in params],
                "next_state": digest(optimizer.state_dict()),
            }
    return cases


def on(device: str, value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), value)


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    with lzma.open(FILE) as file:
        return torch.load(file, weights_only=True)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("case", CASES)
def test_a_file_with_the_old_names_continues_bit_for_bit(
    device: str, cases: dict[str, dict[str, Any]], case: str, low: str
) -> None:
    saved = on(device, cases[f"{case}, {low}"])
    assert FILE.stat().st_size < 100_000
    params = parameters(LOW[low], device)
    with torch.no_grad():
        for param, weight in zip(params, saved["weights"], strict=True):
            param.copy_(weight)
    optimizer = optimizer_of(case, params)
    before = raw_bytes(saved)
    optimizer.load_state_dict(saved["state_dict"])
    assert digest(optimizer.state_dict()) == digest(saved["state_dict"])
    step(params, optimizer, 3)
    assert raw_bytes([*params]) == raw_bytes(saved["next_weights"])
    assert digest(optimizer.state_dict()) == saved["next_state"]
    assert raw_bytes(saved) == before


@pytest.mark.parametrize("case", ["adamw tiny", "adamw half", "lion tiny", "rmsprop lean"])
def test_the_states_of_an_old_file_have_todays_names(
    device: str, cases: dict[str, dict[str, Any]], case: str
) -> None:
    for low, dtype in LOW.items():
        params = parameters(dtype, device)
        loaded, fresh = optimizer_of(case, params), optimizer_of(case, params)
        loaded.load_state_dict(on(device, cases[f"{case}, {low}"]["state_dict"]))
        step(params, fresh, 0)
        for param in params:
            kinds = [
                {name: (t.dtype, t.shape) for name, t in optimizer.state[param].items()}
                for optimizer in (loaded, fresh)
            ]
            assert kinds[0] == kinds[1]


def test_the_old_file_has_what_this_code_gives(cases: dict[str, dict[str, Any]]) -> None:
    """The arithmetic has not changed since then."""
    for case, found in written().items():
        assert raw_bytes(found["next_weights"]) == raw_bytes(cases[case]["next_weights"]), case
        assert found["next_state"] == cases[case]["next_state"], case


def test_an_optimizer_that_was_pickled_with_the_old_names_goes_on(
    device: str, cases: dict[str, dict[str, Any]]
) -> None:
    """What torch.load(..., weights_only=False) or copy.deepcopy pass to the new object."""
    saved = on(device, cases["adamw tiny, float16"])
    params = [nn.Parameter(weight) for weight in saved["weights"]]
    optimizer = optimizer_of("adamw tiny", params)
    state = optimizer.__getstate__()
    state["state"].update(zip(params, saved["state_dict"]["state"].values(), strict=True))
    again = amp.optim.AdamW.__new__(amp.optim.AdamW)
    again.__setstate__(state)
    step(params, again, 3)
    assert raw_bytes([*params]) == raw_bytes(saved["next_weights"])
    assert digest(again.state_dict()) == saved["next_state"]
