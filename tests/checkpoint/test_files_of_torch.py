"""What torch.optim and torch's own checkpoints write is read by amp.checkpoint.load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import LOW, MASTER_BITS, PRESETS, make, masters, network, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import amp_mp as amp

LR = 1e-2
# The names at the top of a file, and how torch makes the state dict.
WAYS: dict[str, tuple[list[str], StateDictOptions]] = {
    "plain": (["model", "optim"], StateDictOptions()),
    "other names": (["net", "o"], StateDictOptions()),
    "nested": (["app.model", "app.optimizer"], StateDictOptions()),
    "flat": (["model", "optim"], StateDictOptions(flatten_optimizer_state_dict=True)),
    "full": (["model", "optim"], StateDictOptions(full_state_dict=True)),
    "full on the CPU": (
        ["model", "optim"],
        StateDictOptions(full_state_dict=True, cpu_offload=True),
    ),
    "at the top": (["", ""], StateDictOptions()),
}


def write(path: Path, model: nn.Module, optimizer: Any, way: str) -> None:
    names, options = WAYS[way]
    parts = [
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizer, options=options),
    ]
    state: dict[str, Any] = {}
    for name, part in zip(names, parts, strict=True):
        if not name:
            state |= part
        elif "." in name:
            outer, inner = name.split(".")
            state.setdefault(outer, {})[inner] = part
        else:
            state[name] = part
    dcp.save(state, checkpoint_id=path)


def check_masters(found: dict[str, Tensor], wanted: dict[str, Any], bits: int) -> None:
    for name, values in wanted.items():
        bound = 0.0 if bits == 24 else 2.0**-bits
        # Below float32's range of normal numbers a split is exact to its last place.
        torch.testing.assert_close(found[name], values.float(), rtol=bound, atol=1e-38)


def step_both(ours: nn.Module, mine: Any, theirs: nn.Module, optimizer: Any) -> None:
    """The same gradients, which bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(int(mine.state[next(ours.parameters())]["step"]))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        grad = torch.randn(a.shape, generator=generator).bfloat16()
        a.grad, b.grad = grad.to(a.dtype), grad.to(b.dtype)
    mine.step()
    optimizer.step()


def largest_of_32(x: Tensor) -> Tensor:
    """For each element the largest of its group."""
    groups = x.unflatten(-1, (-1, 32))
    return groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)


class Bound:
    """How far AdamW's weights may be from torch's, by how its moments and masters are stored.

    An update is lr * (m / c1) / (sqrt(v / c2) + eps). A stored m is off by one last place: 2^-24 of
    itself in float32, 2^-7 in bfloat16 (rounded stochastically), and in m8 3/64 of the largest of
    32; a stored v by 2^-8 of itself, and its root by half of that. In log8 v is off by an eighth
    each time that it is stored, three times, so the root by a factor of (9/8)^(3/2) = 1.2; where v
    is below the floor the update is too small, by all of it at most. Moments are averages, so no
    error grows. Each step also rounds the weight, 2^-16 of it with a remainder of 8 bits, 2^-11
    with one of 4, and one last place without a master.
    """

    def __init__(self, preset: str, param: Tensor, state: dict[str, Any]) -> None:
        self.preset, self.param, self.state = preset, param, state
        self.largest, self.off = state["exp_avg"].abs(), torch.zeros_like(param)
        self.store = {24: 2.0**-22, 16: 2.0**-15, 11: 2.0**-10, 8: 2.0**-6}[MASTER_BITS[preset]]

    def step(self) -> None:
        """Called after torch's step."""
        m, v, count = self.state["exp_avg"], self.state["exp_avg_sq"], float(self.state["step"])
        self.largest = torch.maximum(self.largest, m.abs())
        relative: Any = 2.0**-20 if MASTER_BITS[self.preset] == 24 else 2.0**-7
        error = relative * self.largest
        groups = m.dim() > 1 and m.shape[-1] % 32 == 0
        if groups and self.preset in ("tiny", "micro", "nano", "masterless"):
            error = largest_of_32(self.largest) * 3 / 64
        root = (v / (1 - 0.999**count)).sqrt() + 1e-8
        if groups and self.preset in ("micro", "nano", "masterless"):
            floor = v < 2.0**-26 * 64 / 31 * largest_of_32(v)
            error, relative = 1.2 * error, torch.where(floor, 1.0, 0.2)
        self.off += LR / (1 - 0.9**count) * (error + relative * m.abs()) / root
        self.off += self.store * self.param.abs()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("way", WAYS)
def test_a_file_of_adamw_gives_masters_moments_and_steps(
    way: str, preset: str, tmp_path: Path
) -> None:
    model = network()
    theirs = torch.optim.AdamW(model.parameters(), lr=LR)
    train(model, theirs, 3)
    write(tmp_path / "c", model, theirs, way)
    other, ours = make(preset)
    amp.checkpoint.load(tmp_path / "c", other, ours)
    bits = MASTER_BITS[preset]
    check_masters(masters(other, ours), model.state_dict(), bits)
    for (name, param), own in zip(other.named_parameters(), model.parameters(), strict=True):
        rounding = 2.0**-8 + 2.0**-15 if param.dtype == LOW else 0.0
        assert bool(((param - own).abs() <= rounding * own.abs()).all()), name
        state = ours.state[param]
        assert float(state["step"]) == 3
    found = ours.torch_state_dict()["state"]
    if bits == 24:
        for number, state in theirs.state_dict()["state"].items():
            assert torch.equal(found[number]["exp_avg"], state["exp_avg"])
            assert torch.equal(found[number]["exp_avg_sq"], state["exp_avg_sq"])
    bounds = [Bound(preset, p, theirs.state[p]) for p in model.parameters()]
    for _ in range(2):
        step_both(other, ours, model, theirs)
        for bound in bounds:
            bound.step()
    for (name, values), bound in zip(masters(other, ours).items(), bounds, strict=True):
        assert bool(((values - bound.param).abs() <= bound.off).all()), name


@pytest.mark.parametrize("preset", PRESETS)
def test_a_file_of_pure_bfloat16_weights_makes_them_the_masters(
    preset: str, tmp_path: Path
) -> None:
    """torch's moments are bfloat16 there; what an optimizer had before is gone."""
    model = network().to(LOW)
    theirs = torch.optim.AdamW(model.parameters(), lr=LR)
    train(model, theirs, 3)
    write(tmp_path / "c", model, theirs, "plain")
    for stepped in (0, 2):
        other = amp.apex.fp16_utils.convert_network(network(), LOW)
        other[1].to(LOW)
        ours = amp.optim.AdamW(other.parameters(), lr=LR, memory=preset)
        train(other, ours, stepped, seed=5)
        amp.checkpoint.load(tmp_path / "c", other, ours)
        for name, values in masters(other, ours).items():
            assert torch.equal(values, model.state_dict()[name].float()), name
        found = ours.torch_state_dict()["state"]
        for number, state in theirs.state_dict()["state"].items():
            assert float(found[number]["step"]) == 3
            if preset not in ("tiny", "micro", "nano", "masterless"):
                assert torch.equal(found[number]["exp_avg"], state["exp_avg"].float())


@pytest.mark.parametrize(
    ("kind", "ours", "options"),
    [
        (torch.optim.AdamW, amp.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, amp.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, amp.optim.SGD, {}),
        (torch.optim.Adam, amp.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, amp.optim.Adagrad, {}),
        (torch.optim.Adamax, amp.optim.Adamax, {}),
        (torch.optim.Adadelta, amp.optim.Adadelta, {"rho": 0.8}),
        (torch.optim.NAdam, amp.optim.NAdam, {"momentum_decay": 0.1}),
        (torch.optim.RAdam, amp.optim.RAdam, {"decoupled_weight_decay": True}),
        (torch.optim.RMSprop, amp.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    ],
)
@pytest.mark.parametrize("way", ["plain", "flat"])
def test_files_of_other_optimizers_go_on_as_torch_does(
    kind: Any, ours: Any, options: dict[str, Any], way: str, tmp_path: Path
) -> None:
    model = network()
    theirs = kind(model.parameters(), lr=LR, **options)
    train(model, theirs, 3)
    write(tmp_path / "c", model, theirs, way)
    other = amp.prepare(network(), LOW)
    mine = ours(other.parameters(), lr=1.0)
    amp.checkpoint.load(tmp_path / "c", other, mine)
    check_masters(masters(other, mine), model.state_dict(), 24)
    assert mine.param_groups[0]["lr"] == LR
    assert all(mine.param_groups[0][name] == value for name, value in options.items())
    for _ in range(2):
        step_both(other, mine, model, theirs)
    # The same float32 arithmetic in another order: some roundings of the update, which is at most
    # lr * 10 here, and of the weight.
    for name, values in masters(other, mine).items():
        wanted = model.state_dict()[name]
        bound = 2.0**-18 * 10 * LR + 2.0**-22 * wanted.abs()
        assert bool(((values - wanted).abs() <= bound).all()), name


@pytest.mark.parametrize("way", ["plain", "flat"])
def test_a_file_of_torchs_muon_has_no_count_and_is_loaded(way: str, tmp_path: Path) -> None:
    model = nn.Linear(24, 16, bias=False)
    theirs = torch.optim.Muon(model.parameters(), lr=LR)
    x = torch.randn(8, 24)
    for _ in range(3):
        model(x).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    write(tmp_path / "c", model, theirs, way)
    other = amp.prepare(nn.Linear(24, 16, bias=False), LOW)
    mine = amp.optim.Muon(other.parameters())
    amp.checkpoint.load(tmp_path / "c", other, mine)
    check_masters(masters(other, mine), model.state_dict(), 24)
    state = mine.state[other.weight]
    assert torch.equal(state["momentum_buffer"], theirs.state[model.weight]["momentum_buffer"])
    assert state["step"] == 1


@pytest.mark.parametrize("way", ["plain", "flat"])
def test_groups_rates_that_are_tensors_and_parameters_without_gradient(
    way: str, tmp_path: Path
) -> None:
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    groups = [{"params": [*model[0].parameters()], "lr": torch.tensor(0.5)}]
    groups.append({"params": [*model[1].parameters(), *model[2].parameters(), model.unused]})
    theirs = torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.9))
    for param in [*model[0].parameters(), *model[2].parameters()]:
        param.grad = torch.ones_like(param)
    theirs.step()
    write(tmp_path / "c", model, theirs, way)
    other = network()
    other.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    amp.prepare(other, LOW)
    own = [{"params": [*other[2].parameters(), other.unused]}, {"params": [*other[0].parameters()]}]
    mine = amp.optim.AdamW(own, lr=1.0)
    amp.checkpoint.load(tmp_path / "c", other, mine)
    assert [float(group["lr"]) for group in mine.param_groups] == [LR, 0.5]
    assert {group["betas"] for group in mine.param_groups} == {(0.8, 0.9)}
    assert [float(mine.state[p]["step"]) for p in (other[0].weight, other.unused)] == [1, 0]
    assert torch.equal(masters(other, mine)["unused"], torch.ones(2))
