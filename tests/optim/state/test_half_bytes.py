"""split20, the master that adds half a byte to a bfloat16 weight: where it is, and what it keeps.

test_storage.py has its numbers, test_rules.py its steps, and contract/ what scripts do around them.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import reference_formats as formats
import torch
from cuts import as_rank, block, shard
from helpers import array, assert_same, random, raw_bytes, through_a_file
from rules import found_master, raw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import amp_mp as amp

LOW = torch.bfloat16
SHORT = {"betas": (0.9, 0.99)}
NANO: dict[str, Any] = {"memory": "nano", **SHORT}


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    for number, param in enumerate(params):
        values = torch.from_numpy(random(param.numel(), 100 * seed + number, 0.1))
        param.grad = values.view(param.shape).to(param)


def stepped(params: list[nn.Parameter], steps: int = 2, **options: Any) -> amp.optim.AdamW:
    optimizer = amp.optim.AdamW(params, lr=1e-2, **options)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return optimizer


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=LOW)


# A weight, and the shape of its remainders, two neighbours of a row in a byte; None: split24's.
PLACES: dict[str, tuple[Tensor, tuple[int, ...] | None]] = {
    "matrix": (ones(4, 6), (4, 3)),
    "filters": (ones(3, 2, 2, 8), (3, 2, 2, 4)),
    "odd last dimension": (ones(3, 2, 5), (3, 5)),
    "dimensions of 1": (ones(2, 1, 1, 6), (2, 1, 1, 3)),
    "odd rows": (ones(4, 7), None),
    "vector": (ones(64), None),
    "column": (ones(64, 1), None),
    "row": (ones(1, 64), None),
    "number": (ones(), None),
    "empty": (ones(0, 32), None),
    "transposed": (ones(6, 8).t(), None),
    "channels_last": (ones(2, 4, 2, 2).to(memory_format=torch.channels_last), None),
}


@pytest.mark.parametrize("place", PLACES)
def test_two_neighbours_of_a_row_share_a_byte_or_split24_takes_its_place(
    device: str, place: str
) -> None:
    value, shape = PLACES[place]
    param = nn.Parameter(value.to(device))
    optimizer = stepped([param], **NANO)
    state = optimizer.state[param]
    entry = "remainder8" if shape is None else "remainder4"
    assert [name for name in state if name.startswith(("master", "remainder"))] == [entry]
    held = state[entry]
    assert held.dtype == (torch.int8 if shape is None else torch.uint8)
    assert tuple(held.shape) == (tuple(param.shape) if shape is None else shape)
    report = optimizer.memory_report()
    assert report.bytes.get(entry, 0) == held.numel()
    assert optimizer.param_groups[0]["master"] == "split20"
    twin = nn.Parameter(param.detach().clone())
    other = amp.optim.AdamW([twin], lr=1e-2, **NANO)
    other.load_state_dict(through_a_file(optimizer.state_dict(), True, device))
    assert raw_bytes([*other.state[twin].values()]) == raw_bytes([*state.values()])


def test_a_process_without_rows_has_remainders_of_no_rows() -> None:
    with as_rank(1, 2):
        whole, mesh = ones(1, 4, 6), init_device_mesh("cpu", (2,))
        part = shard(whole, mesh, block(whole.shape, (2, 1, 1), 1))
        param = nn.Parameter(part)
        param.grad = part.clone()
        optimizer = amp.optim.AdamW([param], **NANO)
        optimizer.step()
        held = optimizer.state[param]["remainder4"]
        assert held.shape == (1, 4, 3)
        assert held.to_local().shape == (0, 4, 3)


def test_the_other_arrays_of_nano_are_those_of_micro(device: str) -> None:
    found = []
    for master in ("split20", "split24"):
        param = nn.Parameter(torch.from_numpy(random(64 * 64, 1)).view(64, 64).to(device, LOW))
        memory = "nano" if master == "split20" else "micro"
        state = stepped([param], 1, memory=memory, **SHORT).state[param]
        found.append({n: raw_bytes(t) for n, t in state.items() if not n.startswith("remainder")})
    assert found[0] == found[1]


def rows_of_every_remainder() -> np.ndarray:
    """float32 numbers at, beside and between all that split20 holds near a few weights."""
    uppers = np.array([0, 1, 0x7F, 0x80, 0x3F80, 0xBF81, 0x4049, 0x7F7E, 0xFF7E], np.uint32)
    lowers = np.arange(0, 1 << 16, 0x400, dtype=np.uint32)[:, None] + np.array([0, 1, 0x3FF])
    return (uppers[:, None] << 16 | lowers.reshape(-1).astype(np.uint32)).view(np.float32)


def test_what_prepare_rounded_is_kept_to_the_nearest_beside_the_weight(device: str) -> None:
    """A tie of prepare's went to the even weight, which stays; no random bit is drawn."""
    wide = rows_of_every_remainder()
    model = nn.Linear(wide.shape[1], wide.shape[0], bias=False).to(device)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(wide))
    amp.prepare(model, LOW)
    kept = model.weight.detach().clone()
    optimizer = amp.optim.AdamW(model.parameters(), **NANO, seed=5)
    optimizer.init_state()
    assert torch.equal(model.weight, kept)
    weight = reference.store(wide.reshape(-1), "bfloat16", saturating=False)
    wanted = formats.beside(wide.reshape(-1), weight, "split20", "bfloat16")
    state = optimizer.state[model.weight]
    assert np.array_equal(raw(state["remainder4"]).view(np.uint8), wanted)
    found = array(amp.float32_of(model.weight, optimizer)).reshape(-1)
    assert_same(found, found_master(state, model.weight, "split20"), "master")
    normal = np.abs(wide.reshape(-1)) > 2.0**-126
    place = np.exp2(np.frexp(wide.reshape(-1).astype(np.float64))[1] - 1 - 7.0)[normal]
    off = np.abs(found.astype(np.float64) - wide.reshape(-1))[normal] / place
    assert off.max() <= 1 / 16
    assert np.quantile(off, 0.95) <= 1 / 32


FINER = ("split24", "split32", "float32")


@pytest.mark.parametrize("master", FINER)
@pytest.mark.parametrize("way", ["a file", "the group"])
def test_other_masters_take_its_numbers_exactly_and_give_them_back(
    device: str, way: str, master: str
) -> None:
    shapes = [(33, 64), (5, 7), (9,)]
    params = [
        nn.Parameter(torch.from_numpy(random(int(np.prod(s)), n)).view(s).to(device, LOW))
        for n, s in enumerate(shapes)
    ]
    model = nn.ParameterList(params)
    optimizer = stepped(params, **NANO)
    wanted = amp.float32_state_dict(model, optimizer)
    before = raw_bytes([*optimizer.state[params[0]].values()])
    assert not torch.equal(wanted["0"], params[0].float())

    def become(optimizer: Any, master: str) -> Any:
        if way == "the group":
            optimizer.param_groups[0]["master"] = master
            optimizer.init_state()
            return optimizer
        other = amp.optim.AdamW(params, **NANO, master=master)
        other.load_state_dict(through_a_file(optimizer.state_dict(), True, device))
        return other

    optimizer = become(optimizer, master)
    assert not any("remainder4" in state for state in optimizer.state.values())
    for name, value in amp.float32_state_dict(model, optimizer).items():
        # Half way between two weights a float32 master is the number beside, to round to this one.
        rtol = 2.0**-23 if master == "float32" else 0
        torch.testing.assert_close(value, wanted[name], rtol=rtol, atol=0)
    optimizer = become(optimizer, "split20")
    assert raw_bytes([*optimizer.state[params[0]].values()]) == before
    assert "remainder8" in optimizer.state[params[1]]


def test_float16_is_refused_by_name_and_nothing_changes(device: str) -> None:
    """By the first step at the latest, whatever names the master; float32 weights have none."""
    for options in (NANO, {"master": "split20"}):
        model = nn.Linear(8, 4, device=device).half()
        give_gradients([*model.parameters()], 0)
        before = raw_bytes([p.detach() for p in model.parameters()])
        with pytest.raises(ValueError, match=r"weight.*torch.float16.*split20"):
            amp.optim.AdamW(model.named_parameters(), **options).step()
        assert raw_bytes([p.detach() for p in model.parameters()]) == before
        with pytest.raises(ValueError, match=r"parameter 0 of group 0.*torch.float16.*split20"):
            amp.optim.AdamW(model.parameters(), **options).init_state()
        wide = nn.Parameter(torch.ones(4, 8, device=device))
        state = stepped([wide], **options).state[wide]
        assert not [name for name in state if name.startswith(("master", "remainder"))]


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "a file"])
def test_a_copy_goes_on_with_the_same_bits(device: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 5)).to(device, LOW)
    optimizer = stepped([*model.parameters()], **NANO, seed=2**40)
    if kind == "deepcopy":
        other, again = copy.deepcopy((model, optimizer))
    elif kind == "pickle":
        other, again = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        other = copy.deepcopy(model)
        again = amp.optim.AdamW(other.parameters(), **NANO)
        again.load_state_dict(through_a_file(optimizer.state_dict(), True, device))
    for each, own in ((optimizer, model), (again, other)):
        for step in (2, 3):
            give_gradients([*own.parameters()], step)
            each.step()
    weights = [raw_bytes([p.detach() for p in own.parameters()]) for own in (model, other)]
    assert weights[0] == weights[1]
    assert raw_bytes(again.state_dict()["state"]) == raw_bytes(optimizer.state_dict()["state"])


def test_updates_below_its_last_place_count_on_average_down_to_a_512th(device: str) -> None:
    """To nearest no master would ever move. Eight random bits know nothing below a 512th."""
    place, steps = 2.0**-11, 200

    def moved(part: float) -> Tensor:
        weight = nn.Parameter(torch.full((200, 160), 1.5, dtype=LOW, device=device))
        optimizer = amp.optim.SGD([weight], lr=0.5, master="split20")
        for _ in range(steps):
            weight.grad = torch.full_like(weight, 2 * part * place)
            optimizer.step()
        return (1.5 - amp.float32_of(weight, optimizer).double()) / place

    for part in (1 / 64, 1 / 256):  # what eight bits express
        # Each of 32,000 masters moves a binomial number of places: 200 draws at `part`.
        deviation = (steps * part * (1 - part) / 32_000) ** 0.5
        assert float(moved(part).mean()) == pytest.approx(steps * part, abs=5 * deviation)
    assert not moved(1 / 600).any()


def channels_last(param: nn.Parameter) -> None:
    param.data = param.data.to(memory_format=torch.channels_last)


def transposed(param: nn.Parameter) -> None:
    param.data = param.data.transpose(0, 1).contiguous().transpose(0, 1)


def cloned(param: nn.Parameter) -> None:
    param.data = param.data.clone()


@pytest.mark.parametrize("turn", [channels_last, transposed, cloned])
def test_a_weight_that_is_laid_out_otherwise_keeps_its_master(
    device: str, turn: Callable[[nn.Parameter], None]
) -> None:
    """split24 holds the numbers meanwhile; back in rows they are in half a byte again."""
    values = torch.from_numpy(random(8 * 6 * 3 * 3, 1)).view(8, 6, 3, 3).to(device, LOW)
    param = nn.Parameter(values)
    optimizer = stepped([param], **NANO)
    wanted, before = amp.float32_of(param, optimizer), raw(optimizer.state[param]["remainder4"])
    turn(param)
    assert torch.equal(amp.float32_of(param, optimizer), wanted)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    give_gradients([param], 2)
    optimizer.step()
    assert ("remainder4" in optimizer.state[param]) == param.is_contiguous()
    assert torch.equal(amp.float32_of(param, optimizer), wanted)
    param.data = param.data.contiguous()
    optimizer.step()
    assert np.array_equal(raw(optimizer.state[param]["remainder4"]), before)
    assert torch.equal(amp.float32_of(param, optimizer), wanted)
