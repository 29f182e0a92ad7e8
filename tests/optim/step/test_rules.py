"""The update rules: bit for bit the NumPy reference, over sizes, dtypes, storage and groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import reference
import torch
from helpers import DTYPES, RAGGED, array, assert_same, on, random, raw_bytes, state_names
from rules import OF_MATRICES, RULES, STORAGES, Expected, found_master, found_state, is_allowed
from tiers import in_turn, paired, tiered

import amp_mp as amp

STEPS = 3
TO_RECTIFY = 7  # RAdam's first five steps are without its second moment
LAYERWISE = [r for r in RULES if r.startswith(("lar", "lamb", "novograd"))]
ELEMENTWISE = [r for r in RULES if r not in LAYERWISE]
PLACES = {"aligned": 0, "unaligned": 3}  # elements from an aligned address
HALVES = ["float16", "bfloat16"]
COMPACT = ["exact", "lean", "tiny", "micro", "nano"]
KINDS = list(itertools.product(DTYPES, PLACES))
MILLIONS = [(rule, *kind) for rule in ELEMENTWISE for kind in KINDS]
SOME_MILLIONS = [(rule, *KINDS[n % len(KINDS)]) for n, rule in enumerate(ELEMENTWISE)]
SHAPES = [*((n,) for n in RAGGED[:-1]), (5, 64), (33, 31), (3, 32), (3, 1026), (64, 1), (1, 64)]


def check(
    device: str,
    rule: str,
    weight_dtype: str,
    grad_dtype: str,
    shapes: Sequence[tuple[int, ...]],
    *,
    shift: int = 0,
    special: bool = False,
    spread: tuple[float, float] = (1.0, 1e-2),  # of weights, of gradients
    **storage: Any,
) -> None:
    weights = [
        on(device, random(n, n + 1, spread[0]), DTYPES[weight_dtype], shift).view(shape)
        for shape in shapes
        for n in (math.prod(shape),)
    ]
    params = [torch.nn.Parameter(w) for w in weights]
    kind, numbers = (RULES | OF_MATRICES)[rule]
    optimizer = kind(params, **numbers, check_overflow=not special, **storage)
    states = state_names(optimizer)
    expected = [Expected(rule, p, n, states, **storage) for n, p in enumerate(params)]
    steps = TO_RECTIFY if kind is amp.optim.RAdam else STEPS
    for step in range(steps):
        for number, (param, want) in enumerate(zip(params, expected, strict=True)):
            values = random(param.numel(), 100 * step + number, spread[1], special)
            grad = on(device, values, DTYPES[grad_dtype], shift and 5 - shift).view(param.shape)
            param.grad_dtype = grad.dtype
            param.grad = grad
            want.step(array(grad), np.float32(1))
        optimizer.step()
    for param, want in zip(params, expected, strict=True):
        what = f"{rule}, {weight_dtype} weight, {grad_dtype} gradient, {tuple(param.shape)}"
        state = optimizer.state[param]
        assert_same(array(param).reshape(-1), want.visible, f"{what}: weight")
        master = found_master(state, param, want.formats["master"])
        assert_same(master, want.master, f"{what}: master")
        for name, values in want.states.items():
            found = found_state(state, name, want.formats[name])
            assert_same(found, values, f"{what}: {name}")
        assert state["step"].item() == steps
        if kind is amp.optim.NAdam:
            assert state["mu_product"].item() == pytest.approx(want.clock.mu_product, rel=1e-14)
        if rule in OF_MATRICES:
            assert state["radius"].item() == pytest.approx(want.clock.radius, rel=1e-14)


@pytest.mark.parametrize(("rule", "weight", "grad", "place"), paired(RULES, DTYPES, DTYPES, PLACES))
def test_rule_equals_the_reference_bit_for_bit(
    device: str, rule: str, weight: str, grad: str, place: str
) -> None:
    check(device, rule, weight, grad, SHAPES, shift=PLACES[place], master="float32")


@pytest.mark.parametrize(
    ("rule", "memory", "weight"), paired(RULES, COMPACT, HALVES, allowed=is_allowed)
)
def test_every_preset_equals_the_reference_bit_for_bit(
    device: str, rule: str, memory: str, weight: str
) -> None:
    check(device, rule, weight, weight, SHAPES, memory=memory, seed=2**40 + 3)


@pytest.mark.parametrize(("rule", "memory"), in_turn(RULES, ["lean", "tiny", "micro", "nano"]))
def test_float32_weights_may_have_compact_states(device: str, rule: str, memory: str) -> None:
    check(device, rule, "float32", "bfloat16", SHAPES, memory=memory, master="float32")


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "memory"), in_turn(LAYERWISE, STORAGES))
def test_norms_are_of_whole_tensors(device: str, rule: str, memory: str) -> None:
    """Several spans of 65,536 elements, gradients of a loss scale of 1,024."""
    storage = STORAGES[memory]
    param = torch.nn.Parameter(on(device, random(2500 * 64, 1), torch.bfloat16).view(2500, 64))
    kind, numbers = RULES[rule]
    optimizer = kind([param], **numbers, **storage)
    want = Expected(rule, param, states=state_names(optimizer), **storage)
    for step in range(STEPS):
        param.grad = on(device, random(param.numel(), step, 10.0), param.dtype).view(param.shape)
        want.step(array(param.grad), np.float32(1 / 1024))
        optimizer.grad_scale = torch.tensor(1024.0, device=device)
        optimizer.found_inf = torch.tensor(0.0, device=device)
        optimizer.step()
    state = optimizer.state[param]
    assert_same(found_master(state, param, want.formats["master"]), want.master, "master")
    if kind is amp.optim.NovoGrad:
        assert state["layer"].item() == pytest.approx(want.clock.layer, rel=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "weight", "place"), tiered(MILLIONS, SOME_MILLIONS[::2]))
def test_a_million_elements_equal_the_reference(
    device: str, rule: str, weight: str, place: str
) -> None:
    for grad in ("float32", "bfloat16") if weight != "float16" else ("float16",):
        check(device, rule, weight, grad, [RAGGED[-1:]], shift=PLACES[place], master="float32")


@pytest.mark.parametrize(("rule", "storage"), in_turn(RULES, ["float32", "exact", "lean", "nano"]))
def test_maximize_negates_the_gradient(device: str, rule: str, storage: str) -> None:
    shapes = [(1,), (65,), (4097,), (64, 6)]
    check(device, rule, "bfloat16", "bfloat16", shapes, maximize=True, **STORAGES[storage])


@pytest.mark.parametrize("rule", ELEMENTWISE)
@pytest.mark.parametrize("weight", DTYPES)
def test_unchecked_infinities_and_nans_go_where_arithmetic_sends_them(
    device: str, rule: str, weight: str
) -> None:
    check(device, rule, weight, "float32", [(65,), (4097,)], special=True, master="float32")


@pytest.mark.parametrize(
    ("rule", "memory", "weight"), paired(ELEMENTWISE, COMPACT, HALVES, allowed=is_allowed)
)
def test_compact_formats_keep_infinities_and_nans(
    device: str, rule: str, memory: str, weight: str
) -> None:
    shapes = [(65,), (4097,), (64, 96)]
    check(device, rule, weight, "float32", shapes, special=True, memory=memory)


@pytest.mark.parametrize("rule", LAYERWISE)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_rules_that_measure_skip_what_is_not_finite(device: str, rule: str, bad: float) -> None:
    kind, numbers = RULES[rule]
    param = torch.nn.Parameter(on(device, random(64, 1), torch.bfloat16).view(2, 32))
    optimizer = kind([param], **numbers, memory="tiny")
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = raw_bytes([param, optimizer.state_dict()])
    param.grad[1, 7] = bad
    optimizer.step()
    assert optimizer.step_was_skipped
    assert raw_bytes([param, optimizer.state_dict()]) == before


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9], ids=["unclipped", "clipped", "below"])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 1000.0])
def test_unscaling_and_clipping_are_one_multiplication(
    device: str, max_norm: float | None, scale: float
) -> None:
    param = torch.nn.Parameter(on(device, random(5000, 1), torch.bfloat16))
    optimizer = amp.optim.SGD([param], lr=0.1, max_grad_norm=max_norm, master="float32")
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


# Other storage: decoded, updated in float32, rounded once; float16 saturates.

WHOLE = {"master": "float32"}
FLOAT16 = {"momentum_buffer": "float16"}
STOCHASTIC = {"master": "none", "rounding": "stochastic", "seed": 5}
LEAN = {"exp_avg": "bfloat16", "exp_avg_sq": "ue8m8"}
STORAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "no master": ("sgd", {"master": "none"}),
    "no master, half buffer": ("sgd", {"master": "none", **FLOAT16}),
    "no master, half buffer, scaled": ("scaled nesterov", {"master": "none", **FLOAT16}),
    "half buffer": ("nesterov", {**WHOLE, **FLOAT16}),
    "half moments": ("adamw", {**WHOLE, "exp_avg": "float16", "exp_avg_sq": "float16"}),
    "half root of a sum": ("adagrad", {**WHOLE, "sum": "float16_root"}),
    "half root, momentum": (
        "rmsprop momentum",
        {**WHOLE, "square_avg": "float16_root", "momentum_buffer": "float16"},
    ),
    "half squares of steps": (
        "adadelta",
        {**WHOLE, "square_avg": "float16", "acc_delta": "float16"},
    ),
    "half roots of two squares": (
        "adadelta",
        {"master": "none", "square_avg": "float16_root", "acc_delta": "float16_root"},
    ),
    "one square of two": ("adadelta", {**WHOLE, "acc_delta": "ue8m8"}),
    "two kinds of codes": (
        "adadelta",
        {**STOCHASTIC, "square_avg": "log8", "acc_delta": "bfloat16"},
    ),
    "half nesterov": ("nadam", {**WHOLE, "exp_avg": "float16", "exp_avg_sq": "float16_root"}),
    "rectified half": ("radam", {"exp_avg": "float16", "exp_avg_sq": "bfloat16"}),
    "half average": ("lion", {**WHOLE, "exp_avg": "float16"}),
    "half root": ("adam", {"exp_avg": "float16", "exp_avg_sq": "float16_root"}),
    "everything": ("adamw", {"master": "none", "exp_avg": "float16", "exp_avg_sq": "float16_root"}),
    "half norms": ("lamb", {"master": "none", "exp_avg": "float16", "exp_avg_sq": "float16_root"}),
    "stochastic weights": ("plain sgd", STOCHASTIC),
    "stochastic weights, buffer": ("sgd", {**STOCHASTIC, "momentum_buffer": "bfloat16"}),
    "stochastic weights, layers": ("lars", {**STOCHASTIC, "momentum_buffer": "m8"}),
    "all that is stochastic": ("adamw", {**STOCHASTIC, "exp_avg": "m8", "exp_avg_sq": "ue8m8"}),
    "float32 master, lean": ("adamw", {**WHOLE, **LEAN}),
    "float32 master, codes": ("adam", {**WHOLE, "exp_avg": "m8"}),
    "float32 master, lean squares": ("lamb", {**WHOLE, "exp_avg_sq": "ue8m8"}),
    "bfloat16 squares": ("adamw", {**WHOLE, "exp_avg_sq": "bfloat16"}),
    "split32, lean": ("adamw", {"master": "split32", **LEAN}),
    "split32, codes": ("lion", {"master": "split32", "exp_avg": "m8"}),
    "split24 alone": ("adamw", {"master": "split24"}),
    "i8, float32 master": ("sgd", {**WHOLE, "momentum_buffer": "i8"}),
    "i8, split24": ("adamw", {"memory": "micro", "exp_avg": "i8"}),
    "i8, split32": ("lion", {"master": "split32", "exp_avg": "i8"}),
    "split24, half": ("rmsprop momentum", {"master": "split24", "momentum_buffer": "float16"}),
    "exact, lean squares": ("amsgrad adam", {"memory": "exact", "exp_avg_sq": "ue8m8"}),
    "tiny, float32 moments": ("adamw", {"memory": "tiny", "exp_avg": "float32"}),
}


OF_BFLOAT16 = {
    "split20 alone": ("adamw", {"master": "split20"}),
    "split20, half": ("rmsprop momentum", {"master": "split20", "momentum_buffer": "float16"}),
    "split20, i8": ("nesterov", {"master": "split20", "momentum_buffer": "i8", "seed": 2**33}),
    "split20, lean": ("lamb", {"master": "split20", **LEAN}),
    "split20, ue8m8": ("rmsprop", {"memory": "nano", "square_avg": "ue8m8"}),
}


@pytest.mark.parametrize("name", OF_BFLOAT16)
def test_every_storage_beside_half_a_byte_rounds_once(device: str, name: str) -> None:
    rule, storage = OF_BFLOAT16[name]
    check(device, rule, "bfloat16", "bfloat16", SHAPES, spread=(1e3, 10.0), **storage)


@pytest.mark.parametrize("weight", HALVES)
@pytest.mark.parametrize("name", STORAGE)
def test_every_storage_rounds_once_and_saturates(device: str, name: str, weight: str) -> None:
    rule, storage = STORAGE[name]
    check(device, rule, weight, weight, SHAPES, spread=(1e3, 10.0), **storage)


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
