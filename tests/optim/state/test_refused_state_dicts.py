"""load_state_dict refuses what no step could go on with, by name and before the first byte."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from everything import error_of, everything
from mutations import mutated
from rules import KINDS, is_allowed
from tiers import full
from torch import nn

import amp_mp as amp

PRESETS = ("float32", "exact", "lean", "tiny", "micro", "nano", "masterless")
WITHOUT_STEP = ("SGD", "LARS")  # torch's SGD, and Apex's LARC around it, count no steps
Spoil = Callable[[dict[str, Any]], None]


def stepped(
    kind: str,
    memory: str = "exact",
    steps: int = 2,
    device: str = "cpu",
    groups: int = 1,
    **options: Any,
) -> tuple[nn.ParameterList, Any]:
    """Three parameters and their optimizer; of two groups the second has the last one."""
    torch.manual_seed(0)
    shapes = ((4, 32), (8, 8) if kind == "Muon" else (5,), (2, 64))
    half = torch.float16 if is_allowed(memory, torch.float16) else torch.bfloat16
    dtypes = (torch.bfloat16, torch.float32, half)
    params = nn.ParameterList(
        [torch.randn(shape).to(device, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    )
    own: list[Any] = list(params)
    given = own if groups == 1 else [{"params": own[:2]}, {"params": own[2:]}]
    settings = {"lr": 1e-2, **KINDS.get(kind, {}), **options}
    optimizer = getattr(amp.optim, kind)(given, memory=memory, **settings)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return params, optimizer


def refused(
    optimizer: Any, params: nn.ParameterList, saved: Any, words: str, kind: Any = ValueError
) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = everything(params, optimizer, scheduler)
    group = optimizer.param_groups[0]
    with pytest.raises(kind, match=words):
        optimizer.load_state_dict(saved)
    assert everything(params, optimizer, scheduler) == before
    assert optimizer.param_groups[0] is group
    optimizer.step()


def entry(name: str, value: Any) -> Spoil:
    return lambda saved: saved["state"][1].update({name: value})


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


STEPS: dict[str, tuple[Any, str]] = {
    "negative": (number(-1.0), "'step' of parameter 1 .*-1"),
    "NaN": (number(float("nan")), "'step' of parameter 1 .*nan"),
    "infinite": (number(float("inf")), "'step' of parameter 1 .*inf"),
    "half a step": (number(1.5), "'step' of parameter 1 .*1.5"),
    "negative number": (-3, "'step' of parameter 1 .*-3"),
    "text": ("2", "'step' of parameter 1 .*'2'"),
    "list": ([2], r"'step' of parameter 1 .*\[2\]"),
    "meta": (torch.ones((), device="meta"), "'step' of parameter 1 .*meta"),
    "complex": (torch.ones((), dtype=torch.complex64), "'step' of parameter 1"),
    "two": (torch.ones(2), "'step' of parameter 1 .*one number"),
    "sparse": (torch.ones(1).to_sparse(), "'step' of parameter 1 .*sparse"),
}


# One check of the count serves every optimizer, and knows nothing of how moments are stored.
@pytest.mark.parametrize(
    ("case", "kind"),
    [*((case, "AdamW") for case in STEPS), *(("NaN", kind) for kind in KINDS if kind != "AdamW")],
)
def test_a_step_count_that_cannot_be(case: str, kind: str) -> None:
    value, words = STEPS[case]
    params, optimizer = stepped(kind)
    saved = copy.deepcopy(stepped(kind, steps=3)[1].state_dict())
    saved["state"][1]["step"] = value
    refused(optimizer, params, saved, words)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_without_a_step_count(kind: str) -> None:
    params, optimizer = stepped(kind)
    saved = copy.deepcopy(stepped(kind, steps=3)[1].state_dict())
    del saved["state"][1]["step"]
    if kind in WITHOUT_STEP:
        optimizer.load_state_dict(saved)
        optimizer.step()
        return
    refused(optimizer, params, saved, "'step' of parameter 1 is missing")


def of_one_number(codes: torch.Tensor) -> torch.Tensor:
    return codes.flatten()[0].expand(codes.shape)


def every_second(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes, codes], -1)[..., 0]


@pytest.mark.parametrize("spoil", [of_one_number, every_second])
@pytest.mark.parametrize("entry", ["exp_avg_m8", "exp_avg_m8_scale", "exp_avg_sq_log8"])
@pytest.mark.parametrize("memory", ["exact", "micro"])
def test_codes_that_share_scales_must_be_dense(memory: str, entry: str, spoil: Any) -> None:
    """Groups are of neighbours in memory."""
    params, optimizer = stepped("AdamW", memory, betas=(0.9, 0.95))
    saved = copy.deepcopy(stepped("AdamW", "micro", betas=(0.9, 0.95))[1].state_dict())
    saved["state"][2][entry] = spoil(saved["state"][2][entry])
    refused(optimizer, params, saved, f"'{entry}' of parameter 2 is not dense in memory")


def a_state(number: int, value: Any) -> Spoil:
    return lambda saved: saved["state"].update({number: value})


def whole(key: str, value: Any) -> Spoil:
    return lambda saved: saved.update({key: value})


def replaced(**entries: Any) -> Spoil:
    return lambda saved: saved["state"][0].update(entries)


def dropped(name: str) -> Spoil:
    return lambda saved: saved["state"][0].pop(name)


def ones(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.ones(shape or (4, 32), dtype=dtype)


def in_group(**values: Any) -> Spoil:
    return lambda saved: saved["param_groups"][0].update(values)


FILES: dict[str, tuple[Spoil, str]] = {
    "sparse moment": (entry("exp_avg", torch.ones(5).to_sparse()), "'exp_avg' .*parameter 1.*spar"),
    "moment on meta": (entry("exp_avg", torch.ones(5, device="meta")), "'exp_avg' .*1.*meta"),
    "no memory": (entry("exp_avg", torch._efficientzerotensor(5)), "'exp_avg' .*parameter 1"),
    "scales of nothing": (entry("exp_avg_scale", torch.ones(3)), "'exp_avg_scale' of parameter 1"),
    "strange on meta": (entry("mine", torch.ones(5, device="meta")), "'mine' of parameter 1.*meta"),
    "no dict": (a_state(1, [1.0]), "'state' of parameter 1.*dict.*list"),
    "a tensor": (a_state(1, torch.ones(5)), "'state' of parameter 1.*dict.*Tensor"),
    "states in a list": (whole("state", [1]), "'state'.*dict.*list"),
    "no groups": (whole("param_groups", None), "'param_groups'.*list.*None"),
    "group of text": (whole("param_groups", ["lr"]), "param_group 0.*dict.*str"),
    "no params": (lambda saved: saved["param_groups"][0].pop("params"), "param_group 0.*'params'"),
    "params of text": (in_group(params="012"), "param_group 0.*'params'.*'012'"),
    "lists as params": (in_group(params=[[0], 1, 2]), "param_group 0.*'params'"),
    "fewer params": (in_group(params=[0, 1]), "param_group 0 .*2 param.*3"),
    "more groups": (lambda saved: saved["param_groups"].append({"params": []}), "2 param_gr.*1"),
    "amsgrad": (in_group(amsgrad=torch.ones(3)), "param_group 0: amsgrad must be True or False"),
    "maximize": (in_group(maximize="yes"), "param_group 0: maximize must be True or False.*'yes'"),
    "lr on meta": (in_group(lr=torch.ones((), device="meta")), "param_group 0: lr must be"),
    "complex lr": (in_group(lr=torch.ones((), dtype=torch.cfloat)), "param_group 0: lr must be"),
}


# What is wrong with a file of one preset alone.
FILES_OF: dict[str, tuple[str, Spoil, str]] = {
    "remainder float": (
        "exact",
        replaced(remainder16=ones(torch.float32)),
        "'remainder16' of parameter 0 has dtype torch.float32, but 'split32' is stored as "
        "torch.uint8",
    ),
    "remainder int64": ("lean", replaced(remainder8=ones(torch.int64)), "'remainder8' of par"),
    "remainder int8": ("exact", replaced(remainder16=ones(torch.int8)), "'remainder16' .*int8"),
    "remainder shape": (
        "exact",
        replaced(remainder16=ones(torch.uint8, 4, 32)),
        r"'remainder16' of parameter 0 has shape \(4, 32\), but its bytes have shape \(4, 32, 2\)",
    ),
    "remainder of 16-bit integers": (
        "exact",
        replaced(remainder16=ones(torch.int16)),
        "'remainder16' of parameter 0 has dtype torch.int16, but",
    ),
    "half a byte an element of another shape": (
        "nano",
        replaced(remainder4=ones(torch.uint8, 4, 32)),
        r"'remainder4' of parameter 0 has ",
    ),
    "half a byte an element as numbers": (
        "nano",
        replaced(remainder4=ones(torch.float32, 4, 16)),
        "'remainder4' of parameter 0 has .*torch.float32",
    ),
    "m8 without scale": (
        "tiny",
        dropped("exp_avg_m8_scale"),
        "'exp_avg_m8' .* no 'exp_avg_m8_scale'",
    ),
    "m8 with few scales": (
        "tiny",
        replaced(exp_avg_m8_scale=ones(torch.float32, 2)),
        "'exp_avg_m8_scale' of parameter 0 has 2 elements",
    ),
    "log8 without scale": (
        "micro",
        dropped("exp_avg_sq_log8_scale"),
        "'exp_avg_sq_log8' .* no 'exp_avg_sq_log8_scale'",
    ),
    "scales that became numbers": (
        "micro",
        replaced(exp_avg_sq_log8_scale=ones(torch.float32, 4, 1)),
        "'exp_avg_sq_log8_scale' of parameter 0 has 4 elements of torch.float32, must have 4 of "
        "torch.uint8",
    ),
    "a moment in codes of squares": (
        "micro",
        replaced(exp_avg_log8=ones(torch.uint8), exp_avg_m8=None),
        "'exp_avg_log8' of parameter 0 is stored as 'log8', but can be float32, ",
    ),
    "codes that became numbers": (
        "tiny",
        replaced(exp_avg_m8=ones(torch.bfloat16)),
        "'exp_avg_m8' of parameter 0 has dtype torch.bfloat16, but 'm8' is stored as torch.int8",
    ),
    "squares that became numbers": (
        "lean",
        replaced(exp_avg_sq_ue8m8=ones(torch.float32)),
        "'exp_avg_sq_ue8m8' of parameter 0 has dtype torch.float32",
    ),
    "codes without a name for them": (
        "tiny",
        replaced(exp_avg_sq=ones(torch.int8), exp_avg_sq_ue8m8=None),
        "'exp_avg_sq' of parameter 0 has dtype torch.int8, must be floating-point",
    ),
    "a moment without sign": (
        "lean",
        replaced(exp_avg_ue8m8=ones(torch.bfloat16), exp_avg=None),
        "'exp_avg_ue8m8' of parameter 0 is stored as 'ue8m8', but can be float32, ",
    ),
    "twice": (
        "lean",
        replaced(exp_avg_sq=ones(torch.float32)),
        "'exp_avg_sq' of parameter 0 is there as 'exp_avg_sq_ue8m8', too",
    ),
    "another shape": (
        "exact",
        replaced(exp_avg=ones(torch.float32, 4)),
        r"'exp_avg' of parameter 0 has shape \(4,\).*\(4, 32\)",
    ),
    "integers": ("exact", replaced(exp_avg=ones(torch.int32)), "'exp_avg' .*torch.int32"),
    "truths": ("exact", replaced(exp_avg_sq=ones(torch.bool)), "'exp_avg_sq' .*torch.bool"),
    "complex": ("exact", replaced(exp_avg=ones(torch.complex64)), "'exp_avg' .*complex64"),
    "a list": ("exact", replaced(exp_avg=[1.0]), "'exp_avg' of parameter 0 is not a tensor"),
    "no squares": ("exact", dropped("exp_avg_sq"), "'exp_avg_sq' of parameter 0 is missing"),
    "None for squares": ("lean", replaced(exp_avg_sq_ue8m8=None), "'exp_avg_sq' .* is missing"),
    "integer master": ("exact", replaced(master=ones(torch.int32)), "'master' .*torch.int32"),
    "rounding": ("exact", in_group(rounding="sideways"), "param_group 0: rounding must be"),
    "lr": ("exact", in_group(lr=None), "param_group 0: lr must be a number, found None"),
    "seed": ("exact", in_group(seed=-1), "param_group 0: seed must be"),
    "betas": ("exact", in_group(betas=(0.9,)), "param_group 0: betas must be two numbers"),
    "no state": ("exact", lambda saved: saved.pop("state"), r"\['state'\] missing"),
}


@pytest.mark.parametrize(
    ("memory", "spoil", "words"),
    [
        *(
            pytest.param(memory, *file, id=f"{case}-{memory}")
            for (case, file), memory in zip(FILES.items(), itertools.cycle(PRESETS))
        ),
        *(pytest.param(*file, id=case) for case, file in FILES_OF.items()),
    ],
)
def test_a_damaged_state_dict(device: str, memory: str, spoil: Spoil, words: str) -> None:
    params, optimizer = stepped("AdamW", memory, device=device)
    saved = copy.deepcopy(stepped("AdamW", memory, steps=3, device=device)[1].state_dict())
    spoil(saved)
    refused(optimizer, params, saved, words)


@pytest.mark.parametrize("value", [None, 3, [("state", {})]])
def test_what_is_no_state_dict(value: Any) -> None:
    params, optimizer = stepped("AdamW")
    refused(optimizer, params, value, "state_dict must be a dict, found", TypeError)


OTHERS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, {}, ("AdamW", "Lion", "Adagrad", "RMSprop", "Adadelta", "LAMB")),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, ("AdamW", "Lion", "Adagrad", "NovoGrad")),
    "AdamW": (torch.optim.AdamW, {}, ("SGD", "LARS", "Adagrad", "RMSprop", "Adadelta")),
    "RMSprop": (torch.optim.RMSprop, {}, ("AdamW", "SGD", "Adagrad", "Adamax")),
    "Adagrad": (torch.optim.Adagrad, {}, ("AdamW", "SGD", "RMSprop", "Adadelta")),
    "Adadelta": (torch.optim.Adadelta, {}, ("AdamW", "SGD", "Adagrad", "Lion")),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("theirs", OTHERS)
def test_a_file_of_another_optimizer(theirs: str, steps: int) -> None:
    make, options, kinds = OTHERS[theirs]
    for kind in kinds:
        params, optimizer = stepped(kind)
        twins = [nn.Parameter(param.detach().clone()) for param in params]
        other = make(twins, lr=0.1, **options)
        for _ in range(steps):
            for twin in twins:
                twin.grad = torch.ones_like(twin)
            other.step()
        refused(optimizer, params, other.state_dict(), "another optimizer")
        assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_post_hook_that_fails_leaves_the_optimizer(kind: str) -> None:
    params, optimizer = stepped(kind)
    saved = copy.deepcopy(stepped(kind, "micro", steps=3)[1].state_dict())

    def fails(_: Any) -> None:
        raise RuntimeError("mine")

    optimizer.register_load_state_dict_post_hook(fails)
    before = everything(params, optimizer)
    with pytest.raises(RuntimeError, match="mine"):
        optimizer.load_state_dict(saved)
    assert everything(params, optimizer) == before


def named(order: str, groups: tuple[int, ...] = (4,), **options: Any) -> tuple[Any, Any]:
    """AdamW over parameters of one shape, by name, whose weights and moments their names give."""
    torch.manual_seed(0)
    values = {name: torch.randn(4, 32).bfloat16() for name in "abcdefgh"}
    params = {name: nn.Parameter(values[name].clone()) for name in order}
    pairs, made = list(params.items()), []
    for count in groups:
        made.append({"params": pairs[:count]})
        pairs = pairs[count:]
    optimizer = amp.optim.AdamW(made, **options)
    for name, param in params.items():
        param.grad = torch.full_like(param, "abcdefgh".index(name) + 1.0)
    return params, optimizer


@pytest.mark.parametrize("memory", PRESETS)
@pytest.mark.parametrize("groups", [(4,), (2, 2)])
def test_parameters_are_matched_by_their_names(groups: tuple[int, ...], memory: str) -> None:
    _, optimizer = named("abcd", groups, memory=memory)
    optimizer.param_groups[-1]["lr"] = 0.5
    optimizer.step()
    saved = optimizer.state_dict()
    order = "dbca" if groups == (4,) else "dcba"
    params, other = named(order, groups, memory=memory)
    other.load_state_dict(saved)
    for name, param in params.items():
        own = {n: saved["state"]["abcd".index(name)][n] for n in other.state[param]}
        shown = other.state_dict()["state"][order.index(name)]
        assert all(torch.equal(shown[n], value) for n, value in own.items()), name
        rate = next(g["lr"] for g in other.param_groups if name in g["param_names"])
        assert rate == next(g["lr"] for g in optimizer.param_groups if name in g["param_names"])
    assert [n for group in other.param_groups for n in group["param_names"]] == list(order)


@pytest.mark.parametrize(
    ("order", "groups", "words"),
    [
        ("abce", (4,), "'e'.*not in the file|'e'"),
        ("abcd", (1, 3), "'a'|param_group"),
        ("acbd", (2, 2), "'a'|'c'|param_group"),
    ],
)
def test_parameters_of_other_names_are_refused(
    order: str, groups: tuple[int, ...], words: str
) -> None:
    source = (2, 2) if len(groups) == 2 else (4,)
    _, optimizer = named("abcd", source)
    optimizer.step()
    params, other = named(order, groups)
    before = everything(list(params.values()), other)
    with pytest.raises(ValueError, match=f"({words}).*nothing was loaded"):
        other.load_state_dict(optimizer.state_dict())
    assert everything(list(params.values()), other) == before


@pytest.mark.parametrize("named_side", ["file", "optimizer"])
def test_names_on_one_side_alone_count_by_position_as_in_torch(named_side: str) -> None:
    _, optimizer = named("abcd")
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    params, other = named("dcba")
    if named_side == "file":
        other = amp.optim.AdamW(params.values())
    else:
        del saved["param_groups"][0]["param_names"]
    other.load_state_dict(saved)
    held = other.state_dict()["state"]
    assert all(torch.equal(held[0][n], v) for n, v in saved["state"][0].items())


@pytest.mark.parametrize(
    ("key", "meant"), [("memroy", "memory"), ("weight_decy", "weight_decay"), ("beta", "betas")]
)
@pytest.mark.parametrize("entry_point", ["constructor", "add_param_group"])
def test_a_misspelt_option_of_a_group_gives_a_warning(
    entry_point: str, key: str, meant: str
) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    group = {"params": [params[1]], key: 1}

    def constructor() -> Any:
        return amp.optim.AdamW([{"params": params[:1]}, group])

    def add_param_group() -> Any:
        optimizer = amp.optim.AdamW(params[:1])
        optimizer.add_param_group(group)
        return optimizer

    call = constructor if entry_point == "constructor" else add_param_group
    with pytest.warns(UserWarning, match=f"has '{key}', .* is '{meant}' meant") as found:
        optimizer = call()
    assert {warning.filename for warning in found} == {__file__}, "the line of the script"
    assert optimizer.param_groups[1][key] == 1


@pytest.mark.parametrize("key", ["max_grad_norm", "check_overflow", "amp_scaling"])
@pytest.mark.parametrize("kind", [*KINDS, "Muon"])
def test_an_option_of_the_whole_optimizer_in_a_group_is_refused(kind: str, key: str) -> None:
    params = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    make = getattr(amp.optim, kind)
    with pytest.raises(ValueError, match=f"{key} holds for the whole optimizer"):
        make([{"params": params, key: 2.0}])
    optimizer = make(params[:1])
    before = everything(params, optimizer)
    with pytest.raises(ValueError, match=f"{key} holds for the whole optimizer"):
        optimizer.add_param_group({"params": [params[1]], key: 2.0})
    assert everything(params, optimizer) == before


@pytest.mark.parametrize("kind", KINDS)
def test_other_peoples_keys_stay_as_in_torch(kind: str) -> None:
    others = {"initial_lr": 1.0, "lr_scale": 0.5, "name": "head", "max_lr": 1.0, "min_lr": 0.1}
    others |= {"base_momentum": 0.8, "max_momentum": 0.9, "fix_step": True, "swa_lr": 0.1}
    params = [nn.Parameter(torch.ones(3))]
    optimizer = getattr(amp.optim, kind)([{"params": params, **others}])
    params[0].grad = torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert others.items() <= optimizer.param_groups[0].items()


MUTATED: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    ("AdamW", {"amsgrad": False}),
    ("SGD", {"momentum": 0.0}),
    ("RMSprop", {"centered": True}),
    ("Muon", {}),
]
IN_A_CASE, CASES = 20, 100


@pytest.mark.parametrize("case", [c if c < 15 else full(c) for c in range(CASES)])
@pytest.mark.filterwarnings("ignore:amp_mp")
def test_mutated_state_dicts(case: int) -> None:
    """300 in `make test`, 2,000 in `make test-all`."""
    refused = 0
    for seed in range(case * IN_A_CASE, (case + 1) * IN_A_CASE):
        choose = random.Random(seed)
        kind, options = MUTATED[seed % len(MUTATED)]
        source, target = choose.choice(PRESETS), choose.choice(PRESETS)
        saved = mutated(choose, stepped(kind, source, groups=2, **options)[1].state_dict())
        params, optimizer = stepped(kind, target, 1, groups=2, **options)
        before = everything(params, optimizer)
        error = error_of(optimizer.load_state_dict, saved)
        if error is not None:
            refused += 1
            wrong = (seed, kind, source, target, error)
            assert isinstance(error, ValueError | TypeError), wrong
            assert str(error).startswith("state_dict: "), wrong
            assert "nothing was loaded" in str(error), wrong
            assert everything(params, optimizer) == before, wrong
        for param in params:
            param.grad = torch.ones_like(param)
        assert error_of(optimizer.step) is None, (seed, kind, source, target, error)
    assert refused > IN_A_CASE // 4
