"""State dicts written before codes had names of their own, and what followed from them.

m8's codes stood for cubes then. What else is in these files has kept its meaning.
"""

from __future__ import annotations

import copy
import hashlib
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_formats as formats
import torch
import torch.distributed.checkpoint as dcp
from helpers import array, assert_same, raw_bytes
from rules import found_state, raw
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

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


# The state that is in m8 in each of the "tiny" cases that have one, by the optimizer's name.
CUBES = dict.fromkeys(("Adam", "AdamW", "Adamax", "Lion", "LAMB", "NovoGrad"), "exp_avg")
CUBES |= dict.fromkeys(("SGD", "LARS", "RMSprop"), "momentum_buffer")


def cubes_of(case: str) -> str | None:
    """The state of a case's first parameter that was stored as cubes, or None."""
    return CUBES.get(CASES[case][0]) if case.endswith("tiny") else None


def cubes(codes: Tensor, scales: Tensor) -> np.ndarray:
    """What the codes meant: scale * (q / 127)^3, with 1 / 127^3 rounded down to a float."""
    third, q = np.float32(4.8818978e-07), codes.cpu().numpy().reshape(-1).astype(np.float32)
    return q * q * q * np.repeat(array(scales).reshape(-1) * third, 32)


def stored_anew(values: np.ndarray, number: int = 0) -> list[np.ndarray]:
    """m8 of today, with the bits of step 0."""
    return formats.encode(values, "m8", formats.stream(values.size, 7, 0, number))


def without(state_dict: dict[str, Any], name: str | None) -> dict[str, Any]:
    """A state dict without a state of the first parameter, whatever its entry is called."""
    ends = ("", "_scale", "_m8", "_m8_scale", "_m8v2", "_m8v2_scale")
    state = dict(state_dict["state"])
    left = state[0].items()
    state[0] = {k: v for k, v in left if name is None or k not in [name + end for end in ends]}
    return {"state": state}


def on(device: str, value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), value)


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    with lzma.open(FILE) as file:
        return torch.load(file, weights_only=True)


def loaded(
    device: str, case: str, low: str, saved: dict[str, Any]
) -> tuple[list[nn.Parameter], amp.optim.FusedOptimizer]:
    """The parameters and the optimizer that a case's files make."""
    params = parameters(LOW[low], device)
    with torch.no_grad():
        for param, weight in zip(params, saved["weights"], strict=True):
            param.copy_(weight)
    optimizer = optimizer_of(case, params)
    optimizer.load_state_dict(saved["state_dict"])
    return params, optimizer


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("case", CASES)
def test_a_file_with_the_old_names_continues_bit_for_bit(
    device: str, cases: dict[str, dict[str, Any]], case: str, low: str
) -> None:
    """But for a state in m8: it is what the cubes were, stored as m8 is today."""
    saved = on(device, cases[f"{case}, {low}"])
    assert FILE.stat().st_size < 100_000
    before = raw_bytes(saved)
    params, optimizer = loaded(device, case, low, saved)
    name = cubes_of(case)
    found, wanted = (without(d, name) for d in (optimizer.state_dict(), saved["state_dict"]))
    assert digest(found) == digest(wanted)
    if name is not None:
        old = saved["state_dict"]["state"][0]
        values = cubes(old[name], old[f"{name}_scale"])
        assert_same(values, array(cubes_by_the_library(old[name], old[f"{name}_scale"])), "cubes")
        codes, scales = stored_anew(values)
        state = optimizer.state[params[0]]
        assert np.array_equal(raw(state[f"{name}_m8v2"]), codes)
        assert np.array_equal(raw(state[f"{name}_m8v2_scale"]).view(np.uint16), scales)
        off = np.abs(found_state(state, name, "m8") - values)
        assert (off <= 3 / 64 * np.abs(values).reshape(-1, 32).max(axis=1).repeat(32)).all()
    step(params, optimizer, 3)
    if name is None:
        assert raw_bytes([*params]) == raw_bytes(saved["next_weights"])
        assert digest(optimizer.state_dict()) == saved["next_state"]
    assert raw_bytes([*params[1:]]) == raw_bytes(saved["next_weights"][1:])
    assert raw_bytes(saved) == before


def cubes_by_the_library(codes: Tensor, scales: Tensor) -> Tensor:
    return amp.formats.decode((codes, scales), "m8_cubed").reshape(-1)


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
    """The arithmetic has not changed since then, but for m8's."""
    for case, found in written().items():
        first = 0 if cubes_of(case.rpartition(",")[0]) is None else 1
        new, old = (d["next_weights"][first:] for d in (found, cases[case]))
        assert raw_bytes(new) == raw_bytes(old), case
        if first == 0:
            assert found["next_state"] == cases[case]["next_state"], case


def pickled(device: str, saved: dict[str, Any], case: str) -> amp.optim.FusedOptimizer:
    """What torch.load(..., weights_only=False) or copy.deepcopy make of an optimizer of before."""
    params = [nn.Parameter(weight) for weight in saved["weights"]]
    optimizer = optimizer_of(case, params)
    state = optimizer.__getstate__()
    states = copy.deepcopy(saved["state_dict"]["state"])
    state["state"].update(zip(params, states.values(), strict=True))
    again = type(optimizer).__new__(type(optimizer))
    again.__setstate__(state)
    return again


def test_an_optimizer_that_was_pickled_with_the_old_names_goes_on(
    device: str, cases: dict[str, dict[str, Any]]
) -> None:
    saved = on(device, cases["adamw lean, float16"])
    again = pickled(device, saved, "adamw lean")
    params = again.param_groups[0]["params"]
    step(params, again, 3)
    assert raw_bytes([*params]) == raw_bytes(saved["next_weights"])
    assert digest(again.state_dict()) == saved["next_state"]


@pytest.mark.parametrize("low", LOW)
def test_an_optimizer_that_was_pickled_with_cubes_goes_on(
    device: str, cases: dict[str, dict[str, Any]], low: str
) -> None:
    """As one that loads the file does; and what it saves before its next step is read as well."""
    saved = on(device, cases[f"adamw tiny, {low}"])
    again = pickled(device, saved, "adamw tiny")
    params = again.param_groups[0]["params"]
    old = saved["state_dict"]["state"][0]
    values = cubes(old["exp_avg"], old["exp_avg_scale"])
    shown = again.torch_state_dict()["state"][0]["exp_avg"]
    assert_same(array(shown).reshape(-1), values, "exp_avg")
    third_params, third = loaded(device, "adamw tiny", low, saved)
    third.load_state_dict(again.state_dict())
    other_params, other = loaded(device, "adamw tiny", low, saved)
    for optimizer, own in ((again, params), (other, other_params), (third, third_params)):
        step(own, optimizer, 3)
    assert raw_bytes([*params]) == raw_bytes([*other_params]) == raw_bytes([*third_params])
    assert raw_bytes(again.state_dict()["state"]) == raw_bytes(other.state_dict()["state"])
    assert set(again.state[params[0]]) == set(other.state[other_params[0]])


def with_entries_of_before(state: dict[str, Any], seed: int) -> np.ndarray:
    """Turns a parameter's m8 into `exp_avg_m8`, as versions before this one stored it: cubes."""
    generator = torch.Generator().manual_seed(seed)
    codes = state.pop("exp_avg_m8v2")
    scales = state.pop("exp_avg_m8v2_scale")
    drawn = torch.randint(-127, 128, codes.shape, generator=generator, dtype=torch.int8)
    sizes = torch.rand(scales.shape, generator=generator).exp().bfloat16()
    state["exp_avg_m8"], state["exp_avg_m8_scale"] = drawn.to(codes), sizes.to(scales)
    return cubes(state["exp_avg_m8"], state["exp_avg_m8_scale"])


def trained(device: str, memory: str = "tiny") -> tuple[nn.Linear, amp.optim.AdamW]:
    torch.manual_seed(0)
    model = amp.prepare(nn.Linear(64, 4, device=device), torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), memory=memory, seed=7)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("memory", ["float32", "exact", "lean", "tiny", "micro"])
def test_cubes_under_their_own_name_are_read_into_every_format(device: str, memory: str) -> None:
    model, optimizer = trained(device)
    saved = optimizer.state_dict()
    values = with_entries_of_before(saved["state"][0], 1)
    other_model, other = trained(device, memory)
    other_model.load_state_dict(model.state_dict())
    before = raw_bytes(saved)
    other.load_state_dict(saved)
    assert raw_bytes(saved) == before
    state = other.state[other_model.weight]
    if memory in ("tiny", "micro"):
        codes, scales = stored_anew(values)
        assert np.array_equal(raw(state["exp_avg_m8v2"]), codes)
        assert np.array_equal(raw(state["exp_avg_m8v2_scale"]).view(np.uint16), scales)
    elif memory == "lean":
        bits = formats.stream(values.size, 7, 0, 0)
        wanted = formats.decode(formats.encode(values, "bfloat16_stochastic", bits), "bfloat16")
        assert_same(array(state["exp_avg"]).reshape(-1), wanted, "exp_avg")
    else:
        assert_same(array(state["exp_avg"]).reshape(-1), values, "exp_avg")
    assert not [entry for entry in state if entry.startswith("exp_avg_m8_")]
    assert "exp_avg_m8" not in state


def test_cubes_that_a_user_puts_into_the_state_are_not_taken_for_todays_codes(device: str) -> None:
    (model, optimizer), (other_model, other) = trained(device), trained(device)
    saved = optimizer.state_dict()
    with_entries_of_before(saved["state"][0], 1)
    optimizer.load_state_dict(saved)
    with_entries_of_before(other.state[other_model.weight], 1)
    for each, own in ((model, optimizer), (other_model, other)):
        for param in each.parameters():
            param.grad = torch.ones_like(param)
        own.step()
    assert raw_bytes(model.state_dict()) == raw_bytes(other_model.state_dict())
    assert raw_bytes(optimizer.state_dict()) == raw_bytes(other.state_dict())


def test_cubes_beside_codes_of_today_are_refused(device: str) -> None:
    model, optimizer = trained(device)
    state = optimizer.state[model.weight]
    state["exp_avg_m8"] = state["exp_avg_m8v2"].clone()
    state["exp_avg_m8_scale"] = state["exp_avg_m8v2_scale"].clone()
    optimizer.forget()
    with pytest.raises(ValueError, match=r"holds 'exp_avg' twice, as 'exp_avg_m8.*' and as"):
        optimizer.step()


def test_a_directory_with_cubes_is_read_by_amp_checkpoint_and_by_nothing_else(
    tmp_path: Path,
) -> None:
    """torch's own load finds no entry of today's name, and says so."""
    model, optimizer = trained("cpu")
    values = with_entries_of_before(optimizer.state[model.weight], 1)
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    other_model, other = trained("cpu")
    amp.checkpoint.load(tmp_path / "c", other_model, other)
    codes, scales = stored_anew(values)
    state = other.state[other_model.weight]
    assert np.array_equal(raw(state["exp_avg_m8v2"]), codes)
    assert np.array_equal(raw(state["exp_avg_m8v2_scale"]).view(np.uint16), scales)
    state_of_optimizer = get_optimizer_state_dict(other_model, other)
    with pytest.raises(BaseException, match=r"Missing key in checkpoint.*exp_avg_m8v2"):
        dcp.load({"optimizer": state_of_optimizer}, checkpoint_id=tmp_path / "c")
