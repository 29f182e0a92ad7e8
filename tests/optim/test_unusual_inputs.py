"""What ended a process once: other containers of parameters, tensors without memory, threads."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from forked import Script, run_each
from rules import RULES
from tiers import paired
from torch import Tensor, nn

import amp_mp as amp
from amp_mp.optim.base import stepper_of

PRESETS = ("float32", "exact", "lean", "tiny", "micro", "nano", "masterless")
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "ParameterList": nn.ParameterList,
}
STRANGERS: dict[str, Callable[[list[Any]], Any]] = {
    "set": set,
    "generator": lambda params: (p for p in params),
    "Tensor": lambda params: params[0].detach(),
    "str": lambda params: "weight",
    "dict": lambda params: dict(enumerate(params)),
    "NoneType": lambda params: None,
}


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)).to(dtype)


def give_gradients(model: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def tensors_of(model: nn.Module, optimizer: amp.optim.FusedOptimizer) -> list[Tensor]:
    held = [state[name] for state in optimizer.state.values() for name in sorted(state)]
    return [t.detach().clone() for t in [*model.parameters(), *held]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plain(model: nn.Module, optimizer: Any) -> None:
    for seed in (1, 2, 3):
        give_gradients(model, seed)
        optimizer.step()


def with_scaler(model: nn.Module, optimizer: Any, unscales: bool = False) -> None:
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    for seed in (1, 2, 3):
        scaler.scale(torch.ones(()))
        give_gradients(model, seed)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


UNSCALED_FIRST = pytest.param(partial(with_scaler, unscales=True), id="unscaled_first")


def released(model: nn.Module, optimizer: Any) -> None:
    with optimizer.attach(model):
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            model(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def resumed(model: nn.Module, optimizer: Any) -> None:
    optimizer.init_state()
    plain(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.memory_report() is not None
    plain(model, optimizer)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("train", [plain, with_scaler, UNSCALED_FIRST, released, resumed])
@pytest.mark.parametrize("first", ["new", "has stepped"])
def test_a_group_may_hold_its_parameters_in_any_sequence(
    container: str, train: Callable[[nn.Module, Any], None], first: str
) -> None:
    found = []
    for change in (list, CONTAINERS[container]):
        model = network()
        optimizer = amp.optim.AdamW(model.parameters(), memory="lean", max_grad_norm=1.0)
        if first == "has stepped":
            plain(model, optimizer)
        group = optimizer.param_groups[0]
        group["params"] = change(group["params"])
        train(model, optimizer)
        found.append(tensors_of(model, optimizer))
    assert same(*found)


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("first", ["new", "has stepped"])
def test_what_is_no_sequence_of_parameters_is_named(kind: str, first: str) -> None:
    model = network()
    optimizer = amp.optim.AdamW(model.parameters(), memory="lean")
    if first == "has stepped":
        plain(model, optimizer)
    give_gradients(model)
    before = tensors_of(model, optimizer)
    group = optimizer.param_groups[0]
    group["params"] = STRANGERS[kind](group["params"])
    with pytest.raises(TypeError, match=f"params of a param_group must be .* found a .*{kind}"):
        optimizer.step()
    assert same(before, tensors_of(model, optimizer))


@pytest.mark.parametrize(
    ("memory", "rule", "train"),
    paired(PRESETS, ["adamw", "sgd", "lion", "lamb", "lars"], ["step", "scaler", "clip"]),
)
def test_a_zero_tensor_as_gradient_counts_as_zeros(memory: str, rule: str, train: str) -> None:
    found = []
    for zeros in (torch.zeros, torch._efficientzerotensor):
        model = network()
        make, options = RULES[rule]
        more = {"max_grad_norm": 1.0} if train == "clip" else {}
        optimizer = make(model.parameters(), **options, **more, memory=memory)
        scaler = amp.GradScaler("cpu", init_scale=4.0, enabled=train == "scaler")
        for _ in range(2):
            give_gradients(model)
            for param in model[0].parameters():
                param.grad = zeros(param.shape, dtype=param.dtype)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        found.append(tensors_of(model, optimizer))
    assert same(*found)


def test_torchs_scaler_order_with_a_zero_tensor_is_an_error_by_name() -> None:
    """torch's unscaling cannot write a ZeroTensor either."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    give_gradients(model)
    model[0].weight.grad = torch._efficientzerotensor(32, 32, dtype=torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match=r"shape \[32, 32\].*ZeroTensor"):
        scaler.step(optimizer)
    assert same(before, [p.detach().clone() for p in model.parameters()])


def zero_tensor(t: Tensor) -> Tensor:
    return torch._efficientzerotensor(t.shape, dtype=t.dtype)


def shrunk(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("lose", [zero_tensor, shrunk])
@pytest.mark.parametrize("memory", PRESETS)
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_a_state_without_memory_is_named(
    lose: Callable[[Tensor], Tensor], memory: str, rule: str
) -> None:
    make, options = RULES[rule]
    for name in sorted(entries_of(rule, memory)):
        model = network()
        optimizer = make(model.parameters(), **options, memory=memory)
        plain(model, optimizer)
        give_gradients(model)
        before = tensors_of(model, optimizer)
        states = optimizer.state[model[0].weight]
        kept = states[name]
        states[name] = lose(kept)
        with pytest.raises(ValueError, match=r"of parameter 0 of group 0.*no memory"):
            optimizer.step()
        states[name] = kept
        assert same(before, tensors_of(model, optimizer)), name


def entries_of(rule: str, memory: str) -> set[str]:
    """The tensors of a parameter's shape, or of its groups', in the state."""
    make, options = RULES[rule]
    model = network()
    optimizer = make(model.parameters(), **options, memory=memory)
    optimizer.init_state()
    state = optimizer.state[model[0].weight]
    return {name for name, held in state.items() if held.numel() > 2}


@pytest.mark.parametrize("where", ["gradient", "weight"])
def test_memory_that_was_freed_is_named(where: str) -> None:
    model = network()
    optimizer = amp.optim.AdamW(model.parameters(), memory="lean")
    plain(model, optimizer)
    give_gradients(model)
    weight = model[0].weight
    others = [p.detach().clone() for p in model.parameters() if p is not weight]
    owner = weight.grad if where == "gradient" else weight.data
    assert owner is not None
    owner.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"the {where} of parameter 0 of group 0.*no memory"):
        optimizer.step()
    assert same(others, [p.detach() for p in model.parameters() if p is not weight])


def test_steps_from_two_threads_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = amp.optim.AdamW(model.parameters(), memory="lean")
    give_gradients(model)
    ended: list[str] = []

    def other() -> None:
        optimizer.step()
        ended.append("second")

    thread = threading.Thread(target=other)
    stepper = stepper_of(optimizer)
    check = stepper.check

    def check_slowly(*args: Any) -> None:
        if not thread.is_alive() and not ended:
            thread.start()
            time.sleep(0.2)  # the second thread could step now
            ended.append("first")
        check(*args)

    monkeypatch.setattr(stepper, "check", check_slowly)
    optimizer.step()
    thread.join()
    assert ended == ["first", "second"]
    assert optimizer.state[model[0].weight]["step"] == 2


THREADS = """
import threading
import torch
import amp_mp as amp

params = [torch.nn.Parameter(torch.zeros(64)) for _ in range(400)]
optimizer = amp.optim.AdamW(params, {options})
for p in params:
    p.grad = torch.ones_like(p)
errors = []


def train():
    try:
        for _ in range(60):
            optimizer.step()
    except BaseException as error:
        errors.append(error)


threads = [threading.Thread(target=train) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert optimizer.state[params[0]]["step"] == 240
"""


@pytest.mark.slow
def test_steps_of_four_threads_are_as_many_steps() -> None:
    """In processes of their own, whose end is seen where a race breaks the memory."""
    scripts = [THREADS.format(options=options) for options in ("", "max_grad_norm=1.0")]
    runs = [Script(["-c", script]) for script in scripts]
    for done in run_each(runs):
        assert done.returncode == 0, done.stderr[-2000:]
