"""The update rules: bit for bit the NumPy reference, over sizes, dtypes, alignments and groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
import torch
from helpers import DTYPES, RAGGED, array, assert_same, on, random

import amp_mp as amp

STEPS = 3
ADAM = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "nesterov": False}
RMSPROP = {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.01, "momentum": 0.9}
RULES: dict[str, tuple[type[amp.optim.FusedOptimizer], dict[str, Any]]] = {
    "adamw": (amp.optim.AdamW, ADAM),
    "adam": (amp.optim.Adam, ADAM),
    "sgd": (amp.optim.SGD, SGD),
    "nesterov": (amp.optim.SGD, {**SGD, "dampening": 0.0, "nesterov": True}),
    "plain_sgd": (amp.optim.SGD, {**SGD, "momentum": 0.0, "dampening": 0.0}),
    "adagrad": (
        amp.optim.Adagrad,
        {"lr": 0.02, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.01},
    ),
    "rmsprop": (amp.optim.RMSprop, {**RMSPROP, "momentum": 0.0}),
    "rmsprop momentum": (amp.optim.RMSprop, RMSPROP),
    "lion": (amp.optim.Lion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "scaled": (amp.optim.SGD, {**SGD, "dampening": 0.0, "momentum_form": "scaled"}),
    "scaled nesterov": (
        amp.optim.SGD,
        {**SGD, "dampening": 0.0, "nesterov": True, "momentum_form": "scaled"},
    ),
}


class Expected:
    """One parameter, stepped by the reference."""

    def __init__(self, rule: str, weight: np.ndarray, maximize: bool = False) -> None:
        self.rule, self.weight, self.maximize = rule, weight, maximize
        self.states = [np.zeros_like(weight), np.zeros_like(weight)]
        self.clock = reference.Clock()

    def step(self, grad: np.ndarray, multiplier: np.float32) -> None:
        _, numbers = RULES[self.rule]
        with np.errstate(all="ignore"):
            g = grad * (-multiplier if self.maximize else multiplier)
            if self.rule.startswith("adam"):
                self.clock.tick(*numbers["betas"])
                self.weight, *self.states = reference.adam(
                    g,
                    self.weight,
                    *self.states,
                    self.clock,
                    decoupled=self.rule == "adamw",
                    **numbers,
                )
            elif self.rule == "adagrad":
                self.clock.tick(0, 0)
                self.weight, self.states[0] = reference.adagrad(
                    g, self.weight, self.states[0], self.clock, **numbers
                )
            elif self.rule.startswith("rmsprop"):
                self.weight, *self.states = reference.rmsprop(
                    g, self.weight, *self.states, **numbers
                )
            elif self.rule == "lion":
                self.weight, self.states[0] = reference.lion(
                    g, self.weight, self.states[0], **numbers
                )
            elif self.rule.startswith("scaled"):
                names = ("lr", "momentum", "weight_decay", "nesterov")
                self.weight, self.states[0] = reference.scaled_sgd(
                    g, self.weight, self.states[0], **{name: numbers[name] for name in names}
                )
            else:
                self.clock.tick(0, 0)
                self.weight, self.states[0] = reference.sgd(
                    g, self.weight, self.states[0], self.clock, **numbers
                )


def check(
    device: str,
    rule: str,
    weight_dtype: str,
    grad_dtype: str,
    sizes: tuple[int, ...],
    *,
    shift: int = 0,
    maximize: bool = False,
    special: bool = False,
) -> None:
    weights = [on(device, random(n, n + 1), DTYPES[weight_dtype], shift) for n in sizes]
    params = [torch.nn.Parameter(w) for w in weights]
    expected = [Expected(rule, array(p), maximize) for p in params]
    kind, numbers = RULES[rule]
    optimizer = kind(params, maximize=maximize, **numbers)
    for step in range(STEPS):
        for number, (param, want) in enumerate(zip(params, expected, strict=True)):
            values = random(param.numel(), 100 * step + number, 1e-2, special)
            grad = on(device, values, DTYPES[grad_dtype], shift and 5 - shift)
            param.grad_dtype = grad.dtype
            param.grad = grad
            want.step(array(grad), np.float32(1))
        optimizer.step()
    for param, want in zip(params, expected, strict=True):
        what = f"{rule}, {weight_dtype} weight, {grad_dtype} gradient, {param.numel()} elements"
        state = optimizer.state[param]
        master = array(state["master"]) if weight_dtype != "float32" else array(param)
        assert_same(master, want.weight, f"{what}: master")
        stored = reference.store(want.weight, weight_dtype, saturating=True)
        assert_same(array(param), stored, f"{what}: weight")
        for name, value in zip(optimizer._states(), want.states, strict=False):
            assert_same(array(state[name]), value, f"{what}: {name}")
        assert state["step"].item() == STEPS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "unaligned"])
def test_rule_equals_the_reference_bit_for_bit(
    device: str, rule: str, weight: str, grad: str, shift: int
) -> None:
    check(device, rule, weight, grad, RAGGED[:-1], shift=shift)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "unaligned"])
def test_a_million_elements_equal_the_reference(
    device: str, rule: str, weight: str, shift: int
) -> None:
    for grad in ("float32", "bfloat16") if weight != "float16" else ("float16",):
        check(device, rule, weight, grad, RAGGED[-1:], shift=shift)


@pytest.mark.parametrize("rule", RULES)
def test_maximize_negates_the_gradient(device: str, rule: str) -> None:
    check(device, rule, "bfloat16", "bfloat16", (1, 65, 4097), maximize=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weight", DTYPES)
def test_unchecked_infinities_and_nans_go_where_arithmetic_sends_them(
    device: str, rule: str, weight: str
) -> None:
    check(device, rule, weight, "float32", (65, 4097), special=True)


def test_groups_have_their_own_numbers_and_late_parameters_their_own_steps(device: str) -> None:
    first, late = (torch.nn.Parameter(on(device, random(300, s), torch.bfloat16)) for s in (1, 2))
    optimizer = amp.optim.AdamW([{"params": [first]}, {"params": [late], "lr": 1e-2}], lr=1e-3)
    grads = [random(300, s, 1e-2) for s in (3, 4, 5)]
    want = {id(first): Expected("adamw", array(first)), id(late): Expected("adamw", array(late))}
    numbers = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "decoupled": True}
    for step, values in enumerate(grads):
        for param, lr in ((first, 1e-3), (late, 1e-2)):
            if param is late and step == 0:
                continue
            param.grad = on(device, values, torch.bfloat16)
            e = want[id(param)]
            e.clock.tick(0.9, 0.999)
            e.weight, *e.states = reference.adam(
                array(param.grad), e.weight, *e.states, e.clock, lr=lr, **numbers
            )
        optimizer.step()
    for param, steps in ((first, 3), (late, 2)):
        assert_same(array(optimizer.state[param]["master"]), want[id(param)].weight, "master")
        assert optimizer.state[param]["step"].item() == steps


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9], ids=["unclipped", "clipped", "below"])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 1000.0])
def test_unscaling_and_clipping_are_one_multiplication(
    device: str, max_norm: float | None, scale: float
) -> None:
    param = torch.nn.Parameter(on(device, random(5000, 1), torch.bfloat16))
    optimizer = amp.optim.SGD([param], lr=0.1, max_grad_norm=max_norm)
    want = array(param)
    param.grad = on(device, random(5000, 2, scale), torch.bfloat16)
    grad = array(param.grad)
    squares, _, _ = reference.measure(grad)
    norm = np.sqrt(squares) / scale
    optimizer.grad_scale = torch.tensor(scale, device=device)
    optimizer.found_inf = torch.tensor(0.0, device=device)
    optimizer.step()
    g = grad * reference.multiplier(norm, scale, max_norm)
    assert_same(array(optimizer.state[param]["master"]), want - np.float32(0.1) * g, "master")
    if max_norm is not None:
        # sqrt and one product in double, in either order: within an ulp or two
        assert optimizer.grad_norm == pytest.approx(norm, rel=4e-16)


# Other storage: decoded, updated in float32, rounded once, saturating.

FLOAT16 = {"momentum_buffer": "float16"}
STORAGE: dict[str, tuple[str, dict[str, str]]] = {
    "no master": ("sgd", {"master": "none"}),
    "no master, half buffer": ("sgd", {"master": "none", **FLOAT16}),
    "no master, half buffer, scaled": ("scaled nesterov", {"master": "none", **FLOAT16}),
    "half buffer": ("nesterov", FLOAT16),
    "half moments": ("adamw", {"exp_avg": "float16", "exp_avg_sq": "float16"}),
    "half root of a sum": ("adagrad", {"sum": "float16_root"}),
    "half root, momentum": (
        "rmsprop momentum",
        {"square_avg": "float16_root", "momentum_buffer": "float16"},
    ),
    "half average": ("lion", {"exp_avg": "float16"}),
    "half root": ("adam", {"exp_avg": "float16", "exp_avg_sq": "float16_root"}),
    "everything": ("adamw", {"master": "none", "exp_avg": "float16", "exp_avg_sq": "float16_root"}),
}


def stored(values: np.ndarray, how: str) -> np.ndarray:
    if how == "float16_root":
        return reference.store_root(values)
    return reference.store(values, how, saturating=True)


@pytest.mark.parametrize("weight_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", STORAGE)
def test_every_storage_rounds_once_and_saturates(device: str, name: str, weight_dtype: str) -> None:
    rule, storage = STORAGE[name]
    for size in RAGGED[:-1]:
        values = random(size, size + 1, 1e3)  # some beyond float16
        param = torch.nn.Parameter(on(device, values, DTYPES[weight_dtype]))
        want = Expected(rule, array(param))
        kind, numbers = RULES[rule]
        optimizer = kind([param], **numbers, **storage)
        for step in range(STEPS):
            param.grad = on(device, random(size, step, 10.0), DTYPES[weight_dtype])
            want.step(array(param.grad), np.float32(1))
            if "master" in storage:
                want.weight = stored(want.weight, weight_dtype)
            names = optimizer._states()
            for i, state in enumerate(names):
                want.states[i] = stored(want.states[i], storage.get(state, "float32"))
            optimizer.step()
        if size == 0:
            continue
        state = optimizer.state[param]
        assert ("master" in state) == ("master" not in storage)
        assert_same(array(param), stored(want.weight, weight_dtype), f"{name}: weight")
        for i, key in enumerate(optimizer._states()):
            how = storage.get(key, "float32")
            found = array(state[key])
            assert state[key].dtype == DTYPES[how.removesuffix("_root")]
            assert_same(found * found if "root" in how else found, want.states[i], f"{name}: {key}")


def test_a_root_keeps_what_a_square_would_lose(device: str) -> None:
    """g = 1e-4: (1 - beta2) g^2 = 1e-11 is 0 in float16; Adam then steps 100 times too far."""
    steps = {}
    for how in ("float32", "float16", "float16_root"):
        param = torch.nn.Parameter(torch.zeros(1, device=device))
        optimizer = amp.optim.Adam([param], lr=1e-3, exp_avg_sq=how)
        for _ in range(2):  # the first step's v is read back by the second
            param.grad = torch.full_like(param, 1e-4)
            optimizer.step()
        steps[how] = param.item()
    assert steps["float16_root"] == pytest.approx(steps["float32"], rel=2e-3)
    assert abs(steps["float16"]) > 1.2 * abs(steps["float32"])


def test_states_of_another_width_are_converted_when_loaded(device: str) -> None:
    def trained(**storage: str) -> amp.optim.AdamW:
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(100, device=device))
        optimizer = amp.optim.AdamW([param], lr=1e-2, **storage)
        for _ in range(3):
            param.grad = torch.randn_like(param)
            optimizer.step()
        return optimizer

    source = trained()
    target = trained(exp_avg="float16", exp_avg_sq="float16_root")
    target.load_state_dict(source.state_dict())
    (wide,), (narrow,) = source.state.values(), target.state.values()
    assert torch.equal(narrow["exp_avg"], wide["exp_avg"].half())
    assert torch.equal(narrow["exp_avg_sq"], wide["exp_avg_sq"].sqrt().half())
    again = trained(exp_avg="float16", exp_avg_sq="float16_root")
    again.load_state_dict(target.state_dict())
    (same,) = again.state.values()
    assert torch.equal(same["exp_avg_sq"], narrow["exp_avg_sq"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: amp.optim.SGD(p, master="half"), 'master must be "float32" or "none"'),
        (lambda p: amp.optim.AdamW(p, exp_avg="float16_root"), "exp_avg must be one of float32"),
        (lambda p: amp.optim.AdamW(p, exp_avg_sq="int8"), "exp_avg_sq must be one of float32"),
        (lambda p: amp.optim.SGD(p, momentum_form="new"), 'momentum_form must be "unscaled"'),
        (
            lambda p: amp.optim.SGD(p, momentum=0.9, dampening=0.1, momentum_form="scaled"),
            'momentum_form="scaled" has no dampening',
        ),
    ],
)
def test_storage_that_is_none_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([torch.nn.Parameter(torch.zeros(1))])
