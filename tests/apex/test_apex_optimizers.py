"""apex.optimizers against the formulas, in float64 NumPy."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch
from apex_reference import (
    Arrays,
    adagrad,
    adam,
    gradients,
    lamb,
    novograd,
    parameters,
    sgd,
    start,
)
from helpers import (
    DTYPES,
    PRETEND_GPU,
    array,
    assert_same,
    random,
    skip_unless_torch_unscales,
    through_a_file,
)
from tiers import paired, pairs, tiered
from torch import nn

import amp_mp as amp
from amp_mp.apex import optimizers
from amp_mp.apex.parallel import LARC

KINDS: dict[str, dict[str, Any]] = {
    "FusedAdam": {},
    "FusedAdagrad": {},
    "FusedSGD": {"lr": 0.1, "momentum": 0.9},
    "FusedLAMB": {},
    "FusedMixedPrecisionLamb": {},
    "FusedNovoGrad": {},
}


def train(optimizer: Any, params: list[nn.Parameter], steps: int = 4, size: float = 1.0) -> Arrays:
    for step in range(steps):
        for param, grad in zip(params, gradients(step, size), strict=True):
            param.grad = torch.from_numpy(np.array(grad)).to(param.device, param.dtype)
        optimizer.step()
    return [p.detach().double().cpu().numpy() for p in params]


def compare(found: Arrays, wanted: Arrays) -> None:
    for each, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, other, rtol=2e-6, atol=2e-6)


def all_of(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    shown = inspect.signature(getattr(optimizers, kind)).parameters.values()
    return {p.name: p.default for p in shown} | given


EITHER = (True, False)
LAMB = dict.fromkeys(("use_nvlamb", "bias_correction", "adam_w_mode", "grad_averaging"), EITHER)
LAMB |= {"weight_decay": (0.0, 0.01), "max_grad_norm": (1.0, 100.0, None)}
# Each class's formula, its arguments with their values, and the gradients' size.
FORMULAS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "FusedAdam": (
        adam,
        {"adam_w_mode": EITHER, "bias_correction": EITHER, "weight_decay": (0.0, 0.1)},
        1.0,
    ),
    "FusedAdagrad": (adagrad, {"adagrad_w_mode": EITHER, "weight_decay": (0.0, 0.1)}, 1.0),
    "FusedLAMB": (partial(lamb, size=3.0), LAMB, 3.0),
    "FusedMixedPrecisionLamb": (partial(lamb, size=3.0), LAMB, 3.0),
    "FusedNovoGrad": (
        novograd,
        dict.fromkeys(("grad_averaging", "bias_correction", "reg_inside_moment"), EITHER)
        | {"weight_decay": (0.01,)},
        1.0,
    ),
}


def cases(kind: str) -> list[Any]:
    """The class with values for its arguments; `make test` has any two values together."""
    values = FORMULAS[kind][1].values()
    every, some = itertools.product(*values), pairs(*values)
    return tiered([(kind, each) for each in every], [(kind, each) for each in some])


@pytest.mark.parametrize(("kind", "values"), [case for kind in FORMULAS for case in cases(kind)])
def test_fused_optimizers_are_the_formulas(device: str, kind: str, values: tuple[Any, ...]) -> None:
    formula, arguments, size = FORMULAS[kind]
    given = {"lr": 0.02, **dict(zip(arguments, values, strict=True))}
    params = parameters(device)
    wanted = formula(start(params), 4, all_of(kind, given))
    compare(train(getattr(optimizers, kind)(params, **given), params, size=size), wanted)


def test_fused_adam_of_late_groups_and_loaded_states_without_correction(device: str) -> None:
    """A group that is added later, and a resume, are without bias correction, too."""
    params = parameters(device)
    wanted = adam(start(params), 4, all_of("FusedAdam", {"bias_correction": False}))
    optimizer = optimizers.FusedAdam(params[:2], bias_correction=False)
    optimizer.add_param_group({"params": params[2:]})
    train(optimizer, params, 2)
    resumed = optimizers.FusedAdam([{"params": params[:2]}, {"params": params[2:]}])
    resumed.load_state_dict(through_a_file(optimizer.state_dict(), weights_only=True))
    assert [group["bias_correction"] for group in resumed.param_groups] == [False, False]
    for step in (2, 3):
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = torch.from_numpy(np.array(grad)).to(device)
        resumed.step()
    compare(start(params), wanted)


@pytest.mark.parametrize("wd_after_momentum", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"weight_decay": 0.1},
    ],
)
def test_fused_sgd(device: str, options: dict[str, Any], wd_after_momentum: bool) -> None:
    given = {"lr": 0.1, "wd_after_momentum": wd_after_momentum, **options}
    params = parameters(device)
    wanted = sgd(start(params), 4, all_of("FusedSGD", given))
    compare(train(optimizers.FusedSGD(params, **given), params), wanted)


# What the rules of csrc/core do for Apex's classes alone, in the order of their operations.
LR, DECAY, BETAS, EPS = 0.05, 0.1, (0.9, 0.98), 1e-6
F32 = np.float32


def sgd_decoupled(g: Any, w: Any, t: int, b: Any) -> tuple[Any, ...]:
    b = F32(0.9) * b + F32(1 if t == 1 else 0.5) * g
    return F32(1 - LR * DECAY) * w - F32(LR) * b, b


def adagrad_decoupled(g: Any, w: Any, t: int, h: Any) -> tuple[Any, ...]:
    h = h + g * g
    return F32(1 - LR * DECAY) * w - F32(LR) * (g / (np.sqrt(h) + F32(EPS))), h


def lamb_l2(g: Any, w: Any, t: int, m: Any, v: Any) -> tuple[Any, ...]:
    g = g + F32(DECAY) * w
    m, v = F32(BETAS[0]) * m + g, F32(BETAS[1]) * v + (F32(1 - BETAS[1]) * g) * g
    root = np.sqrt(v) * F32(1 / np.sqrt(1 - BETAS[1] ** t)) + F32(EPS)
    update = m * F32(1 / (1 - BETAS[0] ** t)) / root
    ratio = reference.norm(w) / reference.norm(update)
    return w - F32(LR * ratio) * update, m, v


EXACT: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "FusedSGD": (sgd_decoupled, 1, {"momentum": 0.9, "dampening": 0.5, "wd_after_momentum": True}),
    "FusedAdagrad": (adagrad_decoupled, 1, {"eps": EPS, "adagrad_w_mode": True}),
    "FusedLAMB": (
        lamb_l2,
        2,
        {"betas": BETAS, "adam_w_mode": False, "grad_averaging": False, "max_grad_norm": None},
    ),
}


@pytest.mark.parametrize("kind", EXACT)
def test_steps_are_the_formulas_bit_for_bit(device: str, kind: str) -> None:
    function, count, given = EXACT[kind]
    param = nn.Parameter(torch.from_numpy(random(500, 1)).to(device))
    optimizer = getattr(optimizers, kind)([param], lr=LR, weight_decay=DECAY, **given)
    w, states = random(500, 1), [np.zeros(500, np.float32)] * count
    for t in range(1, 5):
        grad = random(500, 10 + t)
        param.grad = torch.from_numpy(grad).to(device)
        optimizer.step()
        w, *states = function(grad, w, t, *states)
        assert_same(array(param), w, f"{kind}, step {t}")


def test_the_defaults_are_apexs() -> None:
    """Positions and defaults, as in its documentation."""
    adam = "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none capturable"
    novograd = "lr bias_correction betas eps weight_decay amsgrad reg_inside_moment grad_averaging"
    lamb = "bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging"
    wanted = {
        "FusedAdam": f"{adam} master_weights",
        "FusedNovoGrad": f"{novograd} norm_type init_zero set_grad_none",
        "FusedSGD": (
            "lr momentum dampening weight_decay nesterov wd_after_momentum "
            "materialize_master_grads set_grad_none"
        ),
        "FusedLAMB": f"lr {lamb} set_grad_none max_grad_norm use_nvlamb",
        "FusedMixedPrecisionLamb": (
            f"lr step {lamb} max_grad_norm use_nvlamb reduced_precision_dtype"
        ),
        "FusedAdagrad": "lr eps weight_decay set_grad_none adagrad_w_mode",
    }
    assert set(wanted) == set(KINDS) == set(optimizers.__all__)
    for kind, names in wanted.items():
        shown = list(inspect.signature(getattr(optimizers, kind)).parameters.values())[1:]
        assert [p.name for p in shown if p.kind is not p.KEYWORD_ONLY] == names.split()
    assert all_of("FusedLAMB", {})["max_grad_norm"] == 1.0
    assert all_of("FusedLAMB", {})["eps"] == 1e-6
    assert all_of("FusedAdam", {})["weight_decay"] == 0.0
    assert all_of("FusedNovoGrad", {})["betas"] == (0.9, 0.999)
    assert all_of("FusedSGD", {})["set_grad_none"] is False


@pytest.mark.parametrize(
    ("kind", "given", "error", "match"),
    [
        ("FusedAdam", {"amsgrad": True}, RuntimeError, r"amsgrad=True.*optim.AdamW\(amsgrad=True"),
        ("FusedLAMB", {"amsgrad": True}, RuntimeError, "amsgrad=True"),
        ("FusedMixedPrecisionLamb", {"step": 3}, ValueError, "step=3"),
        ("FusedNovoGrad", KINDS["FusedNovoGrad"] | {"norm_type": 0}, ValueError, "norm_type=0"),
        ("FusedNovoGrad", KINDS["FusedNovoGrad"] | {"init_zero": True}, ValueError, "init_zero"),
        ("FusedSGD", {}, ValueError, "required optimization parameter lr"),
        ("FusedAdam", {"lrr": 0.1}, TypeError, "lrr"),
        ("FusedAdam", {"lr": -1.0}, ValueError, "lr must not be negative"),
    ],
)
def test_what_the_rule_lacks_is_named(
    kind: str, given: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        getattr(optimizers, kind)(parameters("cpu"), **given)


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_old_forms_of_step_raise(name: str) -> None:
    params = parameters("cpu")
    optimizer = optimizers.FusedAdam(params)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        optimizer.step(**{name: [1.0]})
    train(optimizer, params, 1)
    assert optimizer.step(lambda: 3.0) == 3.0


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_zero_grad_copies_pickles_and_hooks(kind: str) -> None:
    params = parameters("cpu")
    optimizer = getattr(optimizers, kind)(params, **KINDS[kind])
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    train(optimizer, params, 2)
    assert calls == [1, 1]
    optimizer.zero_grad()
    assert all((p.grad is None) == (kind != "FusedSGD") for p in params)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert repr(other) == repr(optimizer)
        train(other, other.param_groups[0]["params"], 1)
        other.zero_grad()
    assert isinstance(torch.optim.lr_scheduler.StepLR(optimizer, 1), object)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_low_precision_has_masters(kind: str, dtype: torch.dtype) -> None:
    """200 small steps arrive, which the weights alone would round away."""
    param = nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = getattr(optimizers, kind)([param], **KINDS[kind] | {"lr": 1e-4})
    for _ in range(200):
        param.grad = torch.full_like(param, 0.5)
        optimizer.step()
    assert (param < 1).all()


def test_capturable_makes_lr_a_tensor(device: str) -> None:
    params = parameters(device)
    optimizer = optimizers.FusedAdam(params[:2], lr=0.1, capturable=True)
    optimizer.add_param_group({"params": params[2:], "lr": 0.2})
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [(float(r), r.device.type) for r in rates] == [
        (pytest.approx(0.1), device),
        (pytest.approx(0.2), device),
    ]
    train(optimizer, params)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_groups_may_bring_the_rate(kind: str) -> None:
    """And then no default is needed; a group without one is refused where there is none."""
    params, twins = parameters("cpu"), parameters("cpu")
    others = {name: value for name, value in KINDS[kind].items() if name != "lr"}
    groups = [{"params": params[:2], "lr": 0.25}, {"params": params[2:], "lr": 0.5}]
    optimizer = getattr(optimizers, kind)(groups, **others)
    for each in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [group["lr"] for group in each.param_groups] == [0.25, 0.5]
        late = {"params": [nn.Parameter(torch.ones(2))]}
        if kind == "FusedSGD":
            with pytest.raises(ValueError, match=r"required optimization parameter lr|lr must"):
                each.add_param_group(late)
        each.add_param_group({**late, "lr": 0.125})
        assert [group["lr"] for group in each.param_groups] == [0.25, 0.5, 0.125]
    groups = [{"params": twins[:2], "lr": 0.25}, {"params": twins[2:], "lr": 0.5}]
    twin = getattr(optimizers, kind)(groups, **others, lr=3.0)
    assert all(map(np.array_equal, train(optimizer, params), train(twin, twins)))


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, amp.GradScaler])
@pytest.mark.parametrize(
    ("kind", "dtype", "larc"), paired(sorted(KINDS), ("float32", "bfloat16", "float16"), (0, 1))
)
def test_gradients_are_true_after_a_step_of_a_grad_scaler(
    device: str, kind: str, dtype: str, larc: bool, scaler: Any
) -> None:
    """As with Apex's: its scaler's step leaves them unscaled, its capturable step unscales."""
    if scaler is torch.amp.GradScaler:
        skip_unless_torch_unscales(device, DTYPES[dtype])
    kept: dict[str, Any] = {"weight_decay": 0.0}  # which LARC adds to gradients
    kept |= {"max_grad_norm": None} if larc and "max_grad_norm" in all_of(kind, {}) else {}
    for options in ({}, {"capturable": True}) if kind == "FusedAdam" else ({},):
        param = nn.Parameter(torch.tensor([1.0, -2.0], device=device, dtype=DTYPES[dtype]))
        optimizer = getattr(optimizers, kind)([param], **KINDS[kind] | kept | options)
        stepped = LARC(optimizer, trust_coefficient=1e6) if larc else optimizer
        scales = scaler(device, init_scale=8.0, growth_interval=1)
        for factor in (1.0, 3.0):
            optimizer.zero_grad()
            scales.scale((param.float() * factor).sum()).backward()
            assert param.grad is not None
            scales.step(stepped)
            scales.update()
            assert param.grad.tolist() == [factor, factor]
        assert scales.get_scale() == 32.0
        before = param.detach().clone()
        optimizer.zero_grad()
        scales.scale(param.float().sum() * torch.inf).backward()
        scales.step(stepped)
        assert torch.equal(param, before)


def test_a_state_dict_of_apex_loads() -> None:
    """There a group has the step count, and parameters have none."""
    params = parameters("cpu")
    optimizer = optimizers.FusedAdam(params)
    train(optimizer, params, 3)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        for name in set(state) - {"exp_avg", "exp_avg_sq"}:
            del state[name]
    saved["param_groups"][0]["step"] = 3
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = optimizers.FusedAdam(others)
    resumed.load_state_dict(saved)
    compare(train(resumed, others, 1), train(optimizer, params, 1))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_state_dict_of_older_groups_loads(kind: str) -> None:
    """What a group of 0.2.0, or of Apex, lacks has the optimizer's value."""
    params = parameters("cpu")
    optimizer = getattr(optimizers, kind)(params, **KINDS[kind])
    train(optimizer, params, 2)
    saved = optimizer.state_dict()
    for name in ("adam_w_mode", "adagrad_w_mode", "wd_after_momentum", "grad_averaging"):
        saved["param_groups"][0].pop(name, None)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = getattr(optimizers, kind)(others, **KINDS[kind])
    resumed.load_state_dict(saved)
    compare(train(resumed, others, 1), train(optimizer, params, 1))


def test_gradient_release_without_bias_correction() -> None:
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    released = optimizers.FusedAdam(model.parameters(), bias_correction=False)
    plain = optimizers.FusedAdam(twin.parameters(), bias_correction=False)
    released.attach(model)
    for _ in range(2):
        for each, optimizer in ((model, released), (twin, plain)):
            each(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.weight, twin.weight)


@pytest.mark.skipif(not PRETEND_GPU, reason="only the pretend GPU counts waits")
def test_dividing_gradients_after_a_step_waits_for_nothing() -> None:
    from pretend_gpu.device import ledger

    params = parameters("cuda")
    optimizer = optimizers.FusedAdam(params, capturable=True)
    scaler = amp.GradScaler("cuda", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(sum(p.sum() for p in params)).backward()
        with ledger() as found:
            scaler.step(optimizer)
            scaler.update()
        assert step == 0 or (found.syncs, found.waits) == ([], 0)
    assert all((p.grad == 1).all() for p in params)
