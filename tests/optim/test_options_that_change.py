"""A group's options that a script changes between two steps: the next step follows them.

The oracle is a new optimizer that has the options from the start and loads the states so far.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import array, random, raw_bytes
from torch import Tensor, nn

import amp_mp as amp

CHANGES = [
    {"exp_avg": "m8"},
    {"exp_avg": "i8"},
    {"master": "split20"},
    {"exp_avg": "bfloat16", "exp_avg_sq": "float16_root"},
    {"master": "float32"},
    {"master": "split32", "exp_avg": "float32"},
    {"master": "split24", "exp_avg_sq": "ue8m8"},
    {"master": "none", "rounding": "stochastic"},
]


def param_of(device: str, values: Tensor | None = None) -> nn.Parameter:
    if values is None:
        values = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    return nn.Parameter(values.clone().to(device))


def fill(param: nn.Parameter, step: int) -> None:
    source = torch.Generator().manual_seed(10 + step)
    param.grad = torch.randn(param.shape, generator=source).to(param)


def train(param: nn.Parameter, optimizer: Any, steps: range) -> None:
    for step in steps:
        fill(param, step)
        optimizer.step()


def state_of(optimizer: Any, param: nn.Parameter) -> dict[str, Tensor]:
    return dict(optimizer.state[param])


@pytest.mark.parametrize("memory", ["exact", "tiny", "nano"])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_formats_and_rounding_may_change_between_steps(
    device: str, change: dict[str, str], memory: str
) -> None:
    param = param_of(device)
    optimizer = amp.optim.AdamW([param], lr=0.01, memory=memory)
    train(param, optimizer, range(3))
    other = param_of(device, param.detach())
    oracle = amp.optim.AdamW([other], lr=0.01, memory=memory, **change)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group |= change
    oracle.load_state_dict(saved)
    optimizer.param_groups[0] |= change
    train(param, optimizer, range(3, 6))
    train(other, oracle, range(3, 6))
    assert raw_bytes(param.detach()) == raw_bytes(other.detach())
    assert raw_bytes(state_of(optimizer, param)) == raw_bytes(state_of(oracle, other))


def test_offload_of_a_cpu_moves_nothing() -> None:
    param = param_of("cpu", torch.randn(64, 96).bfloat16())
    optimizer = amp.optim.AdamW([param], lr=0.01, memory="tiny", offload="state")
    train(param, optimizer, range(1))
    before = {name: t.data_ptr() for name, t in state_of(optimizer, param).items()}
    optimizer.param_groups[0]["offload"] = None
    train(param, optimizer, range(1, 2))
    assert {name: t.data_ptr() for name, t in state_of(optimizer, param).items()} == before
    assert optimizer.memory_report().host == {}


@pytest.mark.parametrize("release", [False, True])
def test_a_master_may_change_while_gradients_are_released(device: str, release: bool) -> None:
    model = nn.Linear(32, 4).to(device, torch.bfloat16)
    optimizer = amp.optim.AdamW(model.parameters(), lr=0.01)
    if release:
        optimizer.attach(model)
    for step in range(3):
        if step == 2:
            optimizer.param_groups[0]["exp_avg"] = "m8"
        model(torch.ones(2, 32, device=device, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert "exp_avg_m8" in optimizer.state[model.weight]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounding": "up"}, "rounding must be one of"),
        ({"master": "half"}, "master"),
        ({"exp_avg": "int3"}, "exp_avg"),
        ({"memory": "tiny"}, "memory in a param_group is for new optimizers"),
        ({"seed": -1}, "seed must be"),
        ({"seed": None}, "seed must be"),
        ({"lr": None}, "lr must be"),
        ({"betas": None}, "betas must be"),
        ({"eps": "x"}, "eps must be"),
        ({"weight_decay": []}, "weight_decay must be"),
        ({"amsgrad": torch.ones(3)}, "amsgrad must be"),
        ({"maximize": torch.ones(3)}, "maximize must be"),
    ],
)
def test_an_option_that_cannot_be_changes_nothing(
    device: str, change: dict[str, Any], message: str
) -> None:
    params = [param_of(device) for _ in range(2)]
    optimizer = amp.optim.AdamW([{"params": [p]} for p in params], lr=0.01)
    for p in params:
        fill(p, 0)
    optimizer.step()
    before = raw_bytes([p.detach() for p in params]), raw_bytes(optimizer.state_dict()["state"])
    optimizer.param_groups[1] |= change
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert raw_bytes([p.detach() for p in params]) == before[0]
    assert raw_bytes(optimizer.state_dict()["state"]) == before[1]


@pytest.mark.parametrize("split", [2, 8])
def test_muons_blocks_may_change_between_steps(device: str, split: int) -> None:
    param = param_of(device)
    optimizer = amp.optim.Muon([param], lr=0.01)
    train(param, optimizer, range(2))
    other = param_of(device, param.detach())
    oracle = amp.optim.Muon([{"params": [other], "split": split}], lr=0.01)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["split"] = split
    oracle.load_state_dict(saved)
    optimizer.param_groups[0]["split"] = split
    train(param, optimizer, range(2, 4))
    train(other, oracle, range(2, 4))
    assert raw_bytes(param.detach()) == raw_bytes(other.detach())


def test_blocks_that_do_not_fit_change_nothing(device: str) -> None:
    param = param_of(device)
    optimizer = amp.optim.Muon([param], lr=0.01)
    train(param, optimizer, range(2))
    before = raw_bytes(param.detach()), raw_bytes(state_of(optimizer, param))
    optimizer.param_groups[0]["split"] = 3
    with pytest.raises(ValueError, match="8 rows, which do not fall into 3 equal blocks"):
        train(param, optimizer, range(2, 3))
    assert raw_bytes(param.detach()) == before[0]
    assert raw_bytes(state_of(optimizer, param)) == before[1]


def test_a_group_may_be_taken_away_between_steps(device: str) -> None:
    params = [param_of(device) for _ in range(2)]
    optimizer = amp.optim.AdamW([{"params": [p]} for p in params], lr=0.01)
    for step in range(2):
        for p in params:
            fill(p, step)
        optimizer.step()
        before = params[1].detach().clone()
        del optimizer.param_groups[1:]
    assert torch.equal(params[1], before)


LR, DECAY = 0.01, 0.2


def adamw(m: Tensor, v: Tensor, g: Tensor, step: int) -> Tensor:
    """Adam's update in float64; m and v move in place."""
    m += 0.1 * (g - m)
    v += 0.01 * (g * g - v)
    return m / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)


def lion(m: Tensor, _: Tensor, g: Tensor, __: int) -> Tensor:
    """Lion's update in float64."""
    update = (0.9 * m + 0.1 * g).sign()
    m += 0.01 * (g - m)
    return update


@pytest.mark.parametrize(("kind", "rule"), [(amp.optim.AdamW, adamw), (amp.optim.Lion, lion)])
def test_a_step_is_algorithm_1_of_the_paper(device: str, kind: Any, rule: Any) -> None:
    """Chen et al. 2025: x = x - lr (u + decay 1[u x >= 0] x), in float64."""
    param = nn.Parameter(torch.from_numpy(random(1000, 1)).to(device).view(10, 100))
    with torch.no_grad():
        param[0] = 0
    optimizer = kind([param], lr=LR, betas=(0.9, 0.99), weight_decay=DECAY, cautious=True)
    x = param.detach().cpu().double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(1, 6):
        param.grad = torch.from_numpy(random(1000, 10 + step)).to(device).view(10, 100)
        param.grad[1] = 0
        u = rule(m, v, param.grad.cpu().double(), step)
        assert 0 < int((u * x < 0).sum()) < 900
        x = x - LR * (u + DECAY * (u * x >= 0) * x)
        optimizer.step()
        torch.testing.assert_close(param.detach().cpu().double(), x, rtol=0, atol=1e-6 * step)


def test_muon_decays_where_the_orthogonal_update_agrees(device: str) -> None:
    weight, grad = random(64 * 48, 1).reshape(64, 48), random(64 * 48, 2).reshape(64, 48)
    found = {}
    for name, options in {"u": {"weight_decay": 0.0}, "cautious": {"cautious": True}}.items():
        param = nn.Parameter(torch.from_numpy(weight.copy()).to(device))
        param.grad = torch.from_numpy(grad).to(device)
        amp.optim.Muon([param], **{"lr": LR, "weight_decay": DECAY, **options}).step()
        found[name] = param.detach().cpu().double()
    x = torch.from_numpy(weight).double()
    u = x - found["u"]
    wanted = x - u - LR * DECAY * (u * x >= 0) * x
    torch.testing.assert_close(found["cautious"], wanted, rtol=0, atol=4e-6)
    assert (u * x < 0).any()


def test_the_master_has_the_sign(device: str) -> None:
    """Below half of the least bfloat16 the parameter is 0, and its master is not."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16, device=device))
    optimizer = amp.optim.Lion([param], lr=LR, weight_decay=50.0, master="float32", cautious=True)
    optimizer.init_state()
    tiny = 2.0**-135  # rounds to 0 in bfloat16
    optimizer.state[param]["master"].copy_(torch.tensor([tiny, -tiny]))
    param.grad = torch.full_like(param, 1.0)
    twin = nn.Parameter(torch.tensor([tiny, -tiny], device=device))
    twin.grad = torch.ones_like(twin)
    other = amp.optim.Lion([twin], lr=LR, weight_decay=50.0, cautious=True)
    optimizer.step()
    other.step()
    assert torch.equal(optimizer.state[param]["master"], twin)


def test_groups_may_differ_and_a_file_without_it_means_no(device: str) -> None:
    first, second = (nn.Parameter(torch.full((4,), -1.0, device=device)) for _ in range(2))
    groups = [{"params": [first], "cautious": True}, {"params": [second]}]
    optimizer = amp.optim.AdamW(groups, lr=LR, weight_decay=DECAY)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert array(first) == pytest.approx(-1.0 - LR, rel=1e-6)  # the update moves it away from 0
    assert array(second) == pytest.approx(-1.0 + LR * DECAY - LR, rel=1e-6)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["cautious"]
    optimizer.load_state_dict(state)
    assert [group["cautious"] for group in optimizer.param_groups] == [False, False]


@pytest.mark.parametrize("kind", [amp.optim.NAdam, amp.optim.RAdam])
def test_an_l2_penalty_cannot_be_cautious(kind: Any) -> None:
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="cautious is for decoupled weight decay"):
        kind(params, weight_decay=DECAY, cautious=True)
    kind(params, weight_decay=DECAY, decoupled_weight_decay=True, cautious=True)
    with pytest.raises(TypeError, match="Adam has no argument 'cautious'"):
        amp.optim.Adam(params, cautious=True)
    with pytest.raises(ValueError, match="cautious must be True or False"):
        amp.optim.AdamW(params, cautious="yes")  # type: ignore[arg-type]
