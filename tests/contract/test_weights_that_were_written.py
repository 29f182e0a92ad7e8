"""The parameter the user sees is the truth: what is written into it is what the next step sees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import DTYPES, array, assert_same, on, random, state_names
from rules import RULES, STORAGES, Expected, cases, found_master, found_state, is_allowed
from tiers import paired
from torch import Tensor, nn
from torch.nn.utils import prune as pruning

import amp_mp as amp

SHAPE = (33, 96)
LOW = ("bfloat16", "float16")
STORED = {**STORAGES, "no master": {"master": "none"}}


def prune(p: Tensor) -> None:
    p.mul_((torch.arange(p.numel(), device=p.device).view(p.shape) % 3 > 0).to(p.dtype))


def load_best(p: Tensor) -> None:
    holder = nn.Module()
    holder.weight = p
    holder.load_state_dict({"weight": torch.from_numpy(random(p.numel(), 77)).view(p.shape)})


def into_data(p: Tensor) -> None:
    p.data[3:9, ::5] = 0.25


def into_numpy(p: Tensor) -> None:
    p.data.view(torch.int16).cpu().numpy()  # a look, which writes nothing
    p.data.view(torch.int16)[0, :7] = 0x0101


def exchange(p: Tensor) -> None:
    p.data = p.data * 0.5


def nothing_finite(p: Tensor) -> None:
    flat = p.view(-1)
    flat[5], flat[6], flat[7], flat[8], flat[9] = torch.inf, -torch.inf, torch.nan, 0.0, -0.0


WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda p: p[::2].zero_(),
    "mul_(0)": lambda p: p[1::4].mul_(0),
    "clamp_": lambda p: p.clamp_(-0.05, 0.05),
    "clamp_(min=0)": lambda p: p.clamp_(min=0),
    "neg_": lambda p: p.neg_(),
    "a pruning mask": prune,
    "a zeroed row": lambda p: p[7].fill_(0),
    "load_state_dict": load_best,
    ".data": into_data,
    "bits": into_numpy,
    "another tensor": exchange,
    "an average": lambda p: p.lerp_(torch.ones_like(p), 0.3),
    "infinities and NaN": nothing_finite,
}


@pytest.mark.parametrize(
    ("rule", "storage", "dtype"), paired(RULES, STORED, LOW, allowed=is_allowed)
)
def test_every_rule_goes_on_from_what_was_written(
    device: str, rule: str, storage: str, dtype: str
) -> None:
    """Bit for bit the reference, whose master follows the contract; moments stay."""
    kind, numbers = RULES[rule]
    weight = on(device, random(33 * 96, 1), DTYPES[dtype]).view(SHAPE)
    param = nn.Parameter(weight)
    optimizer = kind([param], **numbers, **STORED[storage])
    want = Expected(rule, param, 0, state_names(optimizer), **STORED[storage])
    writes = [*WRITES.values()]
    if rule not in ("adamw", "sgd", "plain sgd", "lion"):
        writes = writes[:-1]  # a NaN in a norm skips the step or spoils all of a tensor
    for step, write in enumerate([lambda p: None, *writes]):
        with torch.no_grad():
            write(param)
        want.write(array(param))
        grad = on(device, random(param.numel(), 100 + step, 1e-2), param.dtype).view(SHAPE)
        param.grad = grad
        want.step(array(grad), np.float32(1))
        optimizer.step()
        what = f"{rule}, {storage}, step {step}"
        assert_same(array(param).reshape(-1), want.visible, f"{what}: weight")
    state = optimizer.state[param]
    assert_same(found_master(state, param, want.formats["master"]), want.master, "master")
    for name, values in want.states.items():
        assert_same(found_state(state, name, want.formats[name]), values, name)


def by_pruning(model: nn.Linear) -> None:
    pruning.l1_unstructured(model, "weight", 0.9)
    pruning.remove(model, "weight")


ZEROS: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda m: m.weight[::2].zero_(),
    ".data": lambda m: m.weight.data[::2].fill_(-0.0),
    "a mask of magnitudes": lambda m: m.weight.mul_(m.weight.abs() > 1),
    "prune.remove": by_pruning,
}


@pytest.mark.parametrize("write", ZEROS)
@pytest.mark.parametrize(
    ("storage", "dtype"), cases([*STORED, "before a step", "FP16_Optimizer"], LOW)
)
def test_a_weight_written_to_zero_is_zero_everywhere(
    device: str, dtype: str, storage: str, write: str
) -> None:
    """Also its sign: a mask makes -0 of what was negative."""
    model = nn.Linear(96, 33, bias=False).to(device)
    amp.prepare(model, DTYPES[dtype])
    if storage == "FP16_Optimizer":
        optimizer = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    else:
        optimizer = amp.optim.SGD(model.parameters(), lr=0.1, **STORED.get(storage, {}))
    for _ in range(storage != "before a step"):
        model.weight.grad = on(device, random(33 * 96, 2), DTYPES[dtype]).view(SHAPE)
        if storage == "FP16_Optimizer":
            optimizer.update_master_grads()
        optimizer.step()
    with torch.no_grad():
        ZEROS[write](model)
    zero = model.weight == 0
    assert zero.sum() > 33 * 96 / 3
    average = amp.AveragedModel(model, optimizer)
    with optimizer.masters(model.weight) as master:
        edited = master.clone()
    saved = [optimizer.state_dict()["fp32_from_fp16"][0][0]] if "FP16" in storage else []
    for found in (
        amp.float32_state_dict(model, optimizer)["weight"],
        average.float32_state_dict()["weight"],
        edited,
        *saved,
    ):
        assert torch.equal(found == 0, zero)
        assert torch.equal(found[zero].signbit(), model.weight[zero].signbit())


@pytest.mark.parametrize("name", ["Adam", "SGD", "RAdam"])
@pytest.mark.parametrize("dtype", LOW)
def test_fp16_optimizer_goes_on_from_what_was_written(device: str, name: str, dtype: str) -> None:
    """Around torch's optimizers: bit for bit torch on float32 weights that were written alike."""
    low = DTYPES[dtype]
    model = nn.Linear(96, 33, bias=False).to(device, low)
    twin = nn.Linear(96, 33, bias=False).to(device)
    twin.load_state_dict(model.state_dict())
    make = getattr(torch.optim, name)
    optimizer = amp.FP16_Optimizer(make(model.parameters(), lr=0.01), verbose=False)
    plain = make(twin.parameters(), lr=0.01)
    for step, write in enumerate([lambda p: None, *WRITES.values()][:-1]):
        with torch.no_grad():
            rounded = reference_rounded(twin.weight, low)
            write(model.weight)
            kept = rounded.view(torch.int16) == model.weight.view(torch.int16)
            twin.weight.copy_(torch.where(kept, twin.weight, model.weight.float()))
        model.weight.grad = on(device, random(33 * 96, 100 + step, 1e-2), low).view(SHAPE)
        twin.weight.grad = model.weight.grad.float()
        optimizer.update_master_grads()
        optimizer.step()
        plain.step()
        (master,) = optimizer.fp32_from_fp16_groups[0]
        assert torch.equal(master, twin.weight), step
        assert torch.equal(model.weight, reference_rounded(twin.weight, low)), step


def reference_rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max if dtype == torch.float16 else torch.inf
    return weight.detach().clamp(-most, most).to(dtype)


def test_masters_of_an_fp16_optimizer_may_be_written_too(device: str) -> None:
    """As scripts for Apex do: the masters then reach the weights after the next step."""
    model = nn.Linear(8, 4, bias=False).to(device).half()
    optimizer = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.5), verbose=False)
    (master,) = optimizer.fp32_from_fp16_groups[0]
    with torch.no_grad():
        master.fill_(0.25)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.update_master_grads()
    optimizer.step()
    assert (model.weight == -0.25).all()
