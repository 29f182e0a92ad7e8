"""Arguments, parameters and states that cannot be are refused by name, before anything changes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import raw_bytes, through_a_file
from torch import Tensor, nn

import amp_mp as amp

AdamW = amp.optim.AdamW
FORMATS = [None, "exact", "lean", "tiny", "micro", "nano", "masterless"]


def weight(device: str, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    param = nn.Parameter(torch.linspace(-1, 1, 128, device=device).reshape(4, 32).to(dtype))
    param.grad = torch.ones_like(param)
    return param


def stepped(device: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    optimizer = AdamW([weight(device, dtype)], lr=1e-2, **options)
    optimizer.step()
    return optimizer


WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "lr of a configuration file": ({"lr": "1e-3"}, "lr must be a number, found '1e-3'"),
    "no lr": ({"lr": None}, "lr must be a number, found None"),
    "lr True": ({"lr": True}, "lr must be a number, found True"),
    "lr an array": ({"lr": np.ones(1)}, r"lr must be a number, found array\(\[1.\]\)"),
    "lr of NumPy's True": ({"lr": np.array(True)}, "lr must be a number"),
    "lr complex": ({"lr": np.array(1j)}, "lr must be a number"),
    "beta NaN": ({"betas": (Decimal("NaN"), 0.9)}, r"betas\[0\] must be in"),
    "lr NaN": ({"lr": float("nan")}, "lr must not be negative"),
    "lr below 0": ({"lr": -1.0}, "lr must not be negative"),
    "lr a vector": ({"lr": torch.ones(2)}, r"lr must be a number .* found shape \(2,\)"),
    "eps": ({"eps": "1e-8"}, "eps must be a number"),
    "eps below 0": ({"eps": -1e-8}, "eps must not be negative"),
    "decay": ({"weight_decay": None}, "weight_decay must be a number"),
    "decay below 0": ({"weight_decay": -0.1}, "weight_decay must not be negative"),
    "clip True": ({"max_grad_norm": True}, "max_grad_norm must be a number, found True"),
    "clip text": ({"max_grad_norm": "1.0"}, "max_grad_norm must be a number, found '1.0'"),
    "clip 0": ({"max_grad_norm": 0}, "max_grad_norm must be positive or None, found 0"),
    "one beta": ({"betas": (0.9,)}, r"betas must be two numbers, found \(0.9,\)"),
    "three betas": ({"betas": (0.9, 0.99, 0.999)}, "betas must be two numbers"),
    "a number for betas": ({"betas": 0.9}, "betas must be two numbers, found 0.9"),
    "beta text": ({"betas": ("0.9", 0.99)}, r"betas\[0\] must be a number, found '0.9'"),
    "beta 1": ({"betas": (0.9, 1.0)}, r"betas\[1\] must be in \[0, 1\), found 1.0"),
    "negative seed": ({"seed": -1}, r"seed must be a whole number of \[0, 2\^64\)"),
    "seed of 65 bits": ({"seed": 2**64}, "seed must be a whole number"),
    "half a seed": ({"seed": 1.5}, "seed must be a whole number"),
    "seed True": ({"seed": True}, "seed must be a whole number"),
    "rounding": (
        {"rounding": "sideways"},
        "rounding must be one of nearest, stochastic; found 'sideways'",
    ),
    "memory": (
        {"memory": "huge"},
        "memory must be one of float32, exact, lean, tiny, micro, nano, masterless; found 'huge'",
    ),
    "squares in codes": (
        {"exp_avg_sq": "m8"},
        "exp_avg_sq must be one of float32, float16, bfloat16, float16_root, ue8m8, log8",
    ),
    "moments as roots": ({"exp_avg": "float16_root"}, "exp_avg must be one of float32"),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_an_argument_that_cannot_be_is_refused_by_name(device: str, case: str) -> None:
    wrong, message = WRONG_ARGUMENTS[case]
    with pytest.raises(ValueError, match=message):
        AdamW([weight(device)], **wrong)


OF_ONE_KIND: list[tuple[str, dict[str, Any], str]] = [
    ("AdamW", {"differentiable": True}, "differentiable=True is not supported"),
    ("SGD", {"nesterov": True}, "nesterov needs momentum"),
    (
        "SGD",
        {"master": "half"},
        "must be one of float32, split32, split24, split20, none; found 'half'",
    ),
    ("SGD", {"momentum_form": "new"}, "momentum_form must be one of unscaled"),
    (
        "SGD",
        {"momentum": 0.9, "dampening": 0.1, "momentum_form": "scaled"},
        'momentum_form="scaled" has no dampening',
    ),
    ("Lion", {"exp_avg": "ue8m8"}, "exp_avg must be one of float32, float16, bfloat16, m8, i8"),
    (
        "RMSprop",
        {"centered": True, "square_avg": "ue8m8"},
        'square_avg must be "float32" if centered',
    ),
    ("Adadelta", {"rho": 1.5}, r"rho must be in \[0, 1\], found 1.5"),
    ("Adadelta", {"rho": "0.9"}, "rho must be a number, found '0.9'"),
    ("Adadelta", {"eps": -1.0}, "eps must not be negative, found -1.0"),
    ("Adadelta", {"acc_delta": "m8"}, "acc_delta must be one of float32"),
    ("NAdam", {"momentum_decay": -1.0}, "momentum_decay must not be negative"),
    ("NAdam", {"betas": (1.0, 0.9)}, r"betas\[0\] must be in \[0, 1\)"),
    ("RAdam", {"betas": (0.9, 1.0)}, r"betas\[1\] must be in \[0, 1\)"),
    ("RAdam", {"differentiable": True}, "differentiable=True is not supported"),
]


@pytest.mark.parametrize(("kind", "wrong", "message"), OF_ONE_KIND)
def test_an_argument_of_one_kind_is_refused_by_name(
    kind: str, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(amp.optim, kind)([weight("cpu")], **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"momory": "lean"}, r"AdamW has no argument 'momory'.*memory"),
        ({"process_groups": ("pp",)}, "process_groups must be .* found str"),
    ],
)
def test_an_argument_of_another_name_or_type_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        AdamW([weight("cpu")], **wrong)


@pytest.mark.parametrize("case", [c for c in WRONG_ARGUMENTS if not c.startswith("clip")])
def test_an_entry_of_a_group_that_cannot_be_is_refused_and_the_group_is_not_added(
    device: str, case: str
) -> None:
    wrong, message = WRONG_ARGUMENTS[case]
    with pytest.raises(ValueError, match=message):
        AdamW([{"params": [weight(device)], **wrong}])
    optimizer = AdamW([weight(device)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weight(device)], **wrong})
    assert len(optimizer.param_groups) == 1
    optimizer.step()


RULES_OF_GROUPS = {
    "AdamW": [{"amsgrad": True}, {}],
    "Adam": [{}, {"amsgrad": True}],
    "SGD": [{"momentum": 0.9}, {}],
    "RMSprop": [{"centered": True}, {"momentum": 0.9}, {}],
}


@pytest.mark.parametrize("kind", RULES_OF_GROUPS)
def test_groups_may_have_rules_of_their_own_as_in_torch(device: str, kind: str) -> None:
    """Also a group that comes later, and after a state dict has been loaded."""
    torch.manual_seed(0)
    of_groups = RULES_OF_GROUPS[kind]
    mine, theirs = ([nn.Parameter(torch.ones(40, device=device)) for _ in of_groups] for _ in "ab")

    def made(library: Any, params: list[nn.Parameter]) -> Any:
        groups = [{"params": [p], **own} for p, own in zip(params, of_groups, strict=True)]
        optimizer = getattr(library, kind)(groups[:1], lr=1e-2)
        for group in groups[1:]:
            optimizer.add_param_group(group)
        return optimizer

    ours, torchs = made(amp.optim, mine), made(torch.optim, theirs)
    for step in range(4):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(40, device=device)
            b.grad = a.grad.clone()
        ours.step()
        torchs.step()
        if step == 1:
            saved = copy.deepcopy(ours.state_dict())
            ours = made(amp.optim, mine)
            ours.load_state_dict(saved)
    for a, b, group in zip(mine, theirs, ours.param_groups, strict=True):
        # 4 steps of .01, and a few roundings of numbers near 1 in each.
        torch.testing.assert_close(a, b, rtol=0, atol=4 * 4 * 2.0**-24)
        kept, wanted = (
            {name for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
            for state in (ours.state[a], torchs.state[b])
        )
        assert kept - {"momentum_buffer"} == wanted - {"momentum_buffer"}
        if not group.get("centered"):  # which keeps one always
            assert kept == wanted


def test_a_centered_group_has_float32_squares_beside_others(device: str) -> None:
    first, second = weight(device), weight(device)
    groups = [{"params": [first], "centered": True}, {"params": [second]}]
    optimizer = amp.optim.RMSprop(groups, memory="lean")
    for param in (first, second):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[first]["square_avg"].dtype == torch.float32
    assert "square_avg_ue8m8" in optimizer.state[second]
    wrong = {"params": [weight(device)], "centered": True, "square_avg": "bfloat16"}
    with pytest.raises(ValueError, match=r"square_avg must be .float32. if centered"):
        optimizer.add_param_group(wrong)


NUMBERS: dict[str, Callable[[float], Any]] = {
    "float64": np.float64,
    "float16": np.float16,
    "array": np.array,
    "Decimal": lambda x: Decimal(str(x)),
    "float32 tensor": torch.tensor,
    "bfloat16 tensor": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    "float16 tensor": lambda x: torch.tensor([x], dtype=torch.float16),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_read_as_their_values(device: str, name: str) -> None:
    """As torch's optimizer steps with the floats; also from a schedule, and through a file."""
    number, given = NUMBERS[name], {"weight_decay": 0.125, "momentum": 0.75, "lr": 0.5}

    def loss(param: nn.Parameter) -> torch.Tensor:
        return param.square().sum() / 4

    param, twin = (nn.Parameter(torch.full((4,), 3.0, device=device)) for _ in range(2))
    optimizer = amp.optim.SGD([param], max_grad_norm=number(64), **each_as(number, given))
    plain = torch.optim.SGD([twin], **given)
    for step in range(4):
        for each in (optimizer, plain):
            each.zero_grad()
        loss(param).backward()
        loss(twin).backward()
        optimizer.step()
        plain.step()
        assert torch.equal(param, twin)  # every number has few bits: nothing is rounded
        optimizer.param_groups[0].update(each_as(number, {"lr": 0.25, "weight_decay": 0.5}))
        plain.param_groups[0].update({"lr": 0.25, "weight_decay": 0.5})
        if step == 1:
            saved = through_a_file(optimizer.state_dict(), weights_only=True)
            optimizer = amp.optim.SGD([param], **each_as(number, given))
            optimizer.load_state_dict(saved)
    adamw = AdamW([weight(device)], betas=(number(0.5), number(0.75)))
    assert [float(beta) for beta in adamw.param_groups[0]["betas"]] == [0.5, 0.75]


def each_as(number: Callable[[float], Any], given: dict[Any, float]) -> dict[Any, Any]:
    return {name: number(value) for name, value in given.items()}


def unreduced(device: str) -> nn.Parameter:
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    return nn.Parameter(DTensor.from_local(torch.ones(4, 32), mesh, [Partial()]))


WRONG_PARAMETERS: dict[str, tuple[Callable[[str], nn.Parameter], str]] = {
    "complex": (
        lambda device: nn.Parameter(torch.ones(3, dtype=torch.complex64, device=device)),
        "parameter 1 of group 0 has dtype torch.complex64.*torch.optim",
    ),
    "meta": (
        lambda device: nn.Parameter(torch.ones(3, device="meta")),
        "parameter 1 of group 0 is on the meta device.*to_empty",
    ),
    "DTensor": (unreduced, "parameter 1 of group 0 has the placement P.*must be sharded or repl"),
}


@pytest.fixture
def _one_process(tmp_path: Any) -> Any:
    store = dist.FileStore(os.fspath(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("case", WRONG_PARAMETERS)
def test_a_parameter_that_cannot_be_stepped_is_refused_when_it_is_given(
    device: str, case: str
) -> None:
    make, message = WRONG_PARAMETERS[case]
    with pytest.raises(TypeError, match=message):
        AdamW([weight(device), make(device)])
    optimizer = AdamW([weight(device)])
    with pytest.raises(TypeError, match=message.replace("1 of group 0", "0 of group 1")):
        optimizer.add_param_group({"params": make(device)})
    assert len(optimizer.param_groups) == 1
    if case != "meta":
        frozen = make(device).requires_grad_(False)
        AdamW([weight(device), frozen]).step()


@pytest.mark.parametrize("memory", FORMATS)
def test_a_first_step_in_inference_mode_is_refused_and_a_later_one_works(
    device: str, memory: str | None
) -> None:
    param = weight(device, torch.bfloat16)
    before = raw_bytes(param)
    optimizer = AdamW([param], memory=memory)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside"):
        optimizer.step()
    assert not optimizer.state
    assert raw_bytes(param) == before
    optimizer.step()
    assert raw_bytes(param) != before
    optimizer.step()


def entry_is_of(entry: str, name: str) -> bool:
    """Whether an entry holds the state of a name, in any format."""
    ends = ("", "_m8", "_m8_scale", "_ue8m8", "_log8", "_log8_scale", "_root")
    return entry in [f"{name}{end}" for end in ends]


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_state_that_was_lost_is_named_and_nothing_changed(
    device: str, memory: str | None, name: str
) -> None:
    optimizer = stepped(device, memory=memory)
    (param,) = optimizer.param_groups[0]["params"]
    for entry in [e for e in optimizer.state[param] if entry_is_of(e, name)]:
        del optimizer.state[param][entry]
    before = raw_bytes([param, optimizer.state_dict()])
    with pytest.raises(ValueError, match=f"parameter 0 of group 0 has no '{name}'"):
        optimizer.step()
    assert raw_bytes([param, optimizer.state_dict()]) == before
    optimizer.state[param].clear()  # what the message says
    optimizer.step()


# Hooks around load_state_dict.


@pytest.mark.parametrize("memory", FORMATS)
def test_post_hooks_see_the_state_as_it_will_be(device: str, memory: str | None) -> None:
    source, sink = stepped(device, memory=memory), stepped(device, memory=memory)
    source.step()
    seen: list[Any] = []
    sink.register_load_state_dict_post_hook(lambda o: seen.append(raw_bytes(o.state_dict())))
    sink.load_state_dict(source.state_dict())
    assert seen == [raw_bytes(source.state_dict())] == [raw_bytes(sink.state_dict())]


@pytest.mark.parametrize("memory", FORMATS)
def test_edits_of_post_hooks_stay(device: str, memory: str | None) -> None:
    """A user's hook forgets the moments and lowers the learning rate after a load."""

    def hook(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            entry = next(e for e in state if entry_is_of(e, "exp_avg_sq"))
            state[entry] = torch.zeros_like(state[entry])
        optimizer.param_groups[0]["lr"] = 0.125

    optimizer = stepped(device, memory=memory)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_post_hook(hook)
    optimizer.load_state_dict(saved)
    (state,) = optimizer.state.values()
    entry = next(e for e in state if entry_is_of(e, "exp_avg_sq"))
    assert not state[entry].any()
    assert optimizer.param_groups[0]["lr"] == 0.125
    optimizer.step()


def test_what_a_pre_hook_repairs_is_loaded(device: str) -> None:
    def hook(_: Any, saved: dict[str, Any]) -> None:
        saved["param_groups"][0]["rounding"] = "nearest"

    saved = copy.deepcopy(stepped(device, memory="exact").state_dict())
    saved["param_groups"][0]["rounding"] = "sideways"
    optimizer = stepped(device, memory="exact")
    optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["rounding"] == "nearest"


# Entries that some rules read, of which each of these optimizers lacks at least one.
FOREIGN = {"bias_correction": False, "use_nvlamb": True, "always_adapt": True, "cautious": True}
FOREIGN |= {"lr_decay": 0.5, "initial_accumulator_value": "high"}


@pytest.mark.parametrize(
    "kind",
    [
        amp.optim.Adam,
        AdamW,
        amp.optim.LAMB,
        amp.apex.optimizers.FusedAdam,
        amp.apex.optimizers.FusedLAMB,
    ],
)
def test_a_scripts_own_entries_of_a_param_group_are_not_read(device: str, kind: Any) -> None:
    stepped_to = []
    for own in ({}, FOREIGN):
        param = weight(device)
        optimizer = kind([param], weight_decay=0.5)
        group = optimizer.param_groups[0]
        group |= {name: value for name, value in own.items() if name not in group}
        for _ in range(2):
            optimizer.step()
        stepped_to.append(param.detach())
    assert torch.equal(*stepped_to)


def errors() -> dict[str, tuple[Callable[[str], None], type, str]]:
    def step_with(
        make: Callable[[str], tuple[torch.Tensor, torch.Tensor]],
    ) -> Callable[[str], None]:
        def act(device: str) -> None:
            data, grad = make(device)
            param = nn.Parameter(data)
            optimizer = amp.optim.AdamW([("layer.weight", param)], max_grad_norm=1.0)
            param.grad_dtype = None
            param.grad = grad
            before = raw_bytes([data])
            try:
                optimizer.step()
            finally:
                assert raw_bytes([data]) == before

        return act

    def shared(device: str) -> None:
        storage = torch.zeros(10, device=device)
        params = [nn.Parameter(storage[:6]), nn.Parameter(storage[5:])]
        for p in params:
            p.grad = torch.ones_like(p)
        amp.optim.SGD(params, lr=0.1).step()

    def gaps(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(4, 4, device=device)[:, ::2], torch.ones(4, 2, device=device)

    def sparse(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3, 2, device=device), torch.ones(3, 2, device=device).to_sparse()

    def double(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.zeros(3, dtype=torch.float64, device=device),) * 2

    def double_grad(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3, device=device), torch.zeros(3, dtype=torch.float64, device=device)

    name = r"parameter 0 of group 0 \('layer.weight'\)"
    return {
        "sparse gradient": (step_with(sparse), TypeError, f"gradient of {name}.*sparse=False"),
        "float64 parameter": (step_with(double), TypeError, f"{name} has dtype torch.float64"),
        "float64 gradient": (step_with(double_grad), TypeError, f"gradient of {name}.*Double"),
        "weight with gaps": (step_with(gaps), ValueError, f"weight of {name}.*contiguous tensor"),
        "shared memory": (shared, ValueError, "parameter 0 of group 0 and .*parameter 1.*share"),
    }


@pytest.mark.parametrize("case", errors())
def test_what_cannot_be_stepped_is_refused_by_name(device: str, case: str) -> None:
    act, kind, message = errors()[case]
    with pytest.raises(kind, match=message):
        act(device)
