"""`optimizer.masters`: float32 masters that a script reads and writes, whatever stores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import reference_formats as formats
import torch
from helpers import DTYPES, LOSES_UPDATES, array, assert_same, random, raw_bytes, warns
from rules import MASTERED, PRESETS, STORAGES, cases, is_allowed
from tiers import paired
from torch import Tensor, nn

import amp_mp as amp

BF16 = torch.bfloat16
STORED = {**STORAGES, "no master": {"master": "none"}}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "empty": lambda t: t[:0],
    "a number": lambda t: t[0, 0].clone(),
}


def everything(optimizer: Any, params: Any) -> Any:
    """All bytes that an edit may change, and the version counters."""
    params = list(params)
    return raw_bytes([p.detach() for p in params]), raw_bytes(optimizer.state_dict()["state"])


def a_model(device: str, dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 3)).to(device)
    return amp.prepare(model, dtype)


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    first = next(model.parameters())
    for _ in range(steps):
        x = torch.randn(8, 32, device=first.device, dtype=first.dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def master_now(optimizer: Any, param: Tensor) -> Tensor:
    with optimizer.masters(param) as master:
        return master.clone()


def kept(values: np.ndarray, dtype: str, master: str) -> tuple[np.ndarray, np.ndarray]:
    """What a format holds of float32 numbers: the master and the parameter."""
    if dtype == "float32":
        return values, values
    if master.startswith("split"):
        parts = formats.nearest(values, master, dtype)
        return formats.decode(parts, master, dtype), formats.decode(parts[:1], dtype)
    rounded = reference.store(values, dtype, saturating=True)
    return (rounded if master == "none" else values), rounded


@pytest.mark.parametrize(
    ("storage", "dtype", "layout", "steps"),
    paired(STORED, DTYPES, LAYOUTS, [0, 1], allowed=is_allowed),
)
def test_what_is_written_is_kept_as_its_format_keeps_it(
    device: str, storage: str, dtype: str, layout: str, steps: int
) -> None:
    values = torch.from_numpy(random(33 * 64, 1)).view(33, 64)
    param = nn.Parameter(LAYOUTS[layout](values.to(device, DTYPES[dtype])))
    optimizer = amp.optim.AdamW([param], lr=1e-2, **STORED[storage])
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    special = torch.from_numpy(random(33 * 64, 2, special=True)).view(33, 64)
    with optimizer.masters(param) as master:
        assert master.dtype == torch.float32
        assert not master.requires_grad
        assert master.stride() == param.stride()
        master.copy_(LAYOUTS[layout](special))
    format = STORED[storage].get("master", PRESETS[STORED[storage].get("memory")][0])
    if layout != "rows" and format == "split20":
        format = "split24"
    with np.errstate(all="ignore"):
        wanted, visible = kept(array(LAYOUTS[layout](special)), dtype, format)
    assert_same(array(master_now(optimizer, param)), wanted, "master")
    assert_same(array(param), visible, "parameter")
    if format in ("float32", "split32") and dtype == "bfloat16":  # no bit is lost
        written = array(LAYOUTS[layout](special))
        finite = np.abs(written) < 3.38e38
        if format == "split32":
            written = np.where(np.abs(written) < 2.0**-134, 0, written)  # a weight of 0
        assert np.array_equal(wanted[finite], written[finite])


@pytest.mark.parametrize("width", [1, 27])
@pytest.mark.parametrize(("storage", "dtype"), cases(STORED, DTYPES))
def test_a_block_without_changes_changes_nothing(
    device: str, storage: str, dtype: str, width: int
) -> None:
    """No byte, and no version counter: on CUDA one that the master's has not advanced either."""
    values = torch.from_numpy(random(998 * width, 1)).view(-1, 2 * width).squeeze()
    param = nn.Parameter(values.to(device, DTYPES[dtype]))
    optimizer = amp.optim.AdamW([param], lr=1e-2, **STORED[storage])
    for written in range(2):
        if written:  # the master is what the parameter says
            param.grad = torch.ones_like(param)
            optimizer.step()
            with torch.no_grad():
                param[::3] *= 1.5
        before, version = everything(optimizer, [param]), param._version
        with optimizer.masters():
            pass
        assert param._version == version
        with optimizer.masters(param) as master:
            master.mul_(1)
        assert param._version == version or device != "cpu"
        if device == "cpu" or written:  # elsewhere the first write makes the state
            assert everything(optimizer, [param]) == before


def test_masters_come_in_the_places_of_the_parameters(device: str) -> None:
    model = a_model(device)
    optimizer = amp.optim.AdamW(model.parameters())
    first, second = model[0].weight, model[2].weight
    with optimizer.masters(first) as master:
        assert master.shape == first.shape
    with optimizer.masters(dict(model.named_parameters())) as masters:
        assert list(masters) == [name for name, _ in model.named_parameters()]
        masters["2.weight"].fill_(2)
    assert bool((second == 2).all())
    with optimizer.masters(p for p in model.parameters()) as masters:
        assert [m.shape for m in masters] == [p.shape for p in model.parameters()]
    with optimizer.masters() as masters:
        assert [m.shape for m in masters] == [p.shape for p in model.parameters()]
    with optimizer.masters(nn.ParameterList([second, first])) as (a, b):
        assert (a.shape, b.shape) == (second.shape, first.shape)
    with optimizer.masters([[first], (second, first)]) as ((a,), (b, c)):
        assert a is c
        assert b.shape == second.shape
    with optimizer.masters([]) as masters:
        assert masters == []


def in_a_block(optimizer: Any, call: Callable[[], object], params: Any = None) -> None:
    with optimizer.masters(params) as masters:
        for master in [masters] if isinstance(masters, Tensor) else masters:
            master.add_(1)
        call()


def test_steps_and_loads_in_the_block_are_refused(device: str) -> None:
    model = a_model(device)
    optimizer = amp.optim.AdamW(model.parameters())
    train(model, optimizer)
    saved = optimizer.state_dict()
    scaler = amp.GradScaler(device)
    scaler.scale(model(torch.ones(2, 32, device=device, dtype=BF16)).float().sum()).backward()
    before = everything(optimizer, model.parameters())
    for call, name in (
        (optimizer.step, "step"),
        (lambda: scaler.step(optimizer), "step"),
        (lambda: optimizer.load_state_dict(saved), "load_state_dict"),
    ):
        with pytest.raises(RuntimeError, match=rf"^{name}\(\) inside of a block of masters\(\)"):
            in_a_block(optimizer, call, model[0].weight)
        assert everything(optimizer, model.parameters()) == before
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is in a block of masters\(\)"):
        in_a_block(optimizer, lambda: optimizer.masters().__enter__(), model[0].weight)
    with optimizer.masters(model[0].weight) as one, optimizer.masters(model[2].weight) as other:
        one.zero_(), other.zero_()
    assert not model[0].weight.any()
    assert not model[2].weight.any()


@pytest.mark.parametrize("ours", [True, False])
def test_a_block_and_a_swap_of_averages_exclude_each_other(device: str, ours: bool) -> None:
    """Whoever asks, by whichever optimizer; what is borrowed is free again after the block."""
    model = a_model(device)
    optimizer = amp.optim.AdamW(model.parameters())
    train(model, optimizer)
    average = amp.AveragedModel(model, optimizer)
    if ours:
        other: Any = amp.optim.SGD(model.parameters(), lr=0.1)
    else:
        other = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
        other.backward(model(torch.ones(2, 32, device=device, dtype=BF16)).float().sum())
    saved, of_other = optimizer.state_dict(), other.state_dict()
    before = everything(optimizer, model.parameters())
    calls: tuple[Callable[[], object], ...] = (
        other.step,
        lambda: other.load_state_dict(of_other),
        lambda: average.swap().__enter__(),
        lambda: other.masters(model[0].weight).__enter__(),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"block of masters\(\)"):
            in_a_block(optimizer, call, [model[0].weight, model[2].bias])
        assert everything(optimizer, model.parameters()) == before
    for call in (
        *calls[:3],
        optimizer.masters().__enter__,
        lambda: optimizer.load_state_dict(saved),
    ):
        with average.swap():
            inside = everything(optimizer, model.parameters())
            with pytest.raises(RuntimeError, match=r"inside of AveragedModel.swap\(\)"):
                call()
            assert everything(optimizer, model.parameters()) == inside
        assert everything(optimizer, model.parameters()) == before
    train(model, optimizer)


def test_a_borrowed_float32_parameter_can_be_exchanged_afterwards(device: str) -> None:
    model = nn.Linear(4, 4).to(device)
    optimizer, average = amp.optim.SGD(model.parameters(), lr=0.1), amp.AveragedModel(model)
    with optimizer.masters(), pytest.raises(RuntimeError, match="block of masters"):
        optimizer.step()
    with average.swap():
        pass
    amp.optim.forget(optimizer)
    other = nn.Parameter(torch.ones(4, 4, device=device))
    torch.utils.swap_tensors(model.weight, other)
    assert bool((model.weight == 1).all())


def test_gradient_release_goes_on_from_what_was_written(device: str) -> None:
    model = a_model(device)
    optimizer = amp.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(2, 32, device=device, dtype=BF16)
    with optimizer.attach(model):
        model(x).float().sum().backward()
        with pytest.raises(RuntimeError, match=r"attach\) inside of a block of masters"):
            in_a_block(optimizer, torch.enable_grad()(lambda: model(x).float().sum().backward()))
        optimizer.zero_grad()
        with optimizer.masters(model[2].bias) as bias:
            bias.fill_(1 + 2**-20)
        model(x).float().sum().backward()
        wanted = torch.full_like(bias, 1 + 2**-20) - 0.5 * 2
        assert torch.equal(master_now(optimizer, model[2].bias), wanted)


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        (lambda own, other: other, ValueError, r"^params, a tensor of shape \(7, 3\), is not one"),
        (lambda own, other: {"a": own, "head": other}, ValueError, r"^params\['head'\], a tensor"),
        (lambda own, other: [own, None], TypeError, r"^params\[1\] must be one of .*found None"),
        (lambda own, other: "0.weight", TypeError, r"^params must be .*named_parameters\(\)\)"),
        (lambda own, other: [("w", own)], TypeError, r"^params\[0\]\[0\] must be .*found 'w'"),
        (lambda own, other: nn.Linear(2, 2), TypeError, r"^params must be .*found Linear"),
        (lambda own, other: own.detach(), ValueError, "is not one of this optimizer's"),
    ],
)
def test_what_is_no_parameter_of_the_optimizer_is_refused(
    params: Callable[[Any, Any], Any], error: type[Exception], text: str
) -> None:
    own, other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(7, 3))
    optimizer = amp.optim.AdamW([own])
    with pytest.raises(error, match=text):
        in_a_block(optimizer, lambda: None, params(own, other))
    assert bool((own == 1).all())


def spoil(optimizer: Any, param: Any, masters: Any) -> dict[str, tuple[Callable[[], Any], str]]:
    """What goes wrong in a block, and how the error at its end begins."""

    def write() -> None:
        param.mul_(2)

    def exchange() -> None:
        masters[0] = masters[0] * 2

    return {
        "written": (write, "parameter 0 of group 0 or its state was written inside"),
        "another memory": (lambda: setattr(param, "data", param.data * 2), "parameter 0 of group"),
        "exchanged": (exchange, "a master was exchanged for another object"),
        "another dtype": (
            lambda: setattr(masters[0], "data", masters[0].data.double()),
            "the master of parameter 0 of group 0 was float32",
        ),
    }


@pytest.mark.parametrize("what", ["written", "another memory", "exchanged"])
def test_what_would_be_lost_at_the_end_is_an_error(device: str, what: str) -> None:
    params = [nn.Parameter(torch.ones(3, 32, device=device, dtype=BF16)) for _ in range(2)]
    optimizer = amp.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    second = raw_bytes(params[1].detach())

    def run() -> None:
        with optimizer.masters() as masters:
            masters[0].add_(1)
            masters[1].add_(1)
            spoil(optimizer, params[0], masters)[what][0]()

    with pytest.raises(RuntimeError, match=f"^{spoil(optimizer, params[0], [])[what][1]}"):
        run()
    assert raw_bytes(params[1].detach()) == second


def test_moments_that_are_taken_away_in_a_block_leave_what_is_written(device: str) -> None:
    param = nn.Parameter(torch.ones(3, 32, device=device, dtype=BF16))
    optimizer = amp.optim.AdamW([param], lr=0.0, weight_decay=0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with optimizer.masters(param) as master:
        master.add_(2.0**-12)
        optimizer.state.clear()
    assert bool((master_now(optimizer, param) == 1 + 2.0**-12).all())
    assert bool((amp.float32_of(param) == 1 + 2.0**-12).all())


def test_a_prepared_model_shows_what_was_rounded_and_keeps_it(device: str) -> None:
    """Before the first step; a look does not take the values away from another optimizer."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 33).to(device)
    model = amp.prepare(nn.Sequential(nn.Linear(64, 33)).to(device), BF16)
    model.load_state_dict({f"0.{n}": v for n, v in plain.state_dict().items()})
    optimizer = amp.optim.SGD(model.parameters(), lr=0.5)
    weight = model[0].weight
    assert torch.equal(master_now(optimizer, weight), plain.weight)
    other = amp.optim.SGD(model.parameters(), lr=0.5)
    with other.masters(weight) as master:
        assert torch.equal(master, plain.weight)
        master[:3] += 2**-12
    weight.grad = torch.ones_like(weight)
    other.step()
    with torch.no_grad():
        plain.weight[:3] += 2**-12
    assert torch.equal(master_now(other, weight), plain.weight.detach() - 0.5)


@pytest.mark.parametrize("storage", STORAGES)
def test_addresses_stay(device: str, storage: str) -> None:
    model = a_model(device)
    optimizer = amp.optim.AdamW(model.parameters(), **STORAGES[storage])
    train(model, optimizer)

    def addresses() -> list[int]:
        held = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return [t.data_ptr() for t in [*model.parameters(), *held]]

    before = addresses()
    with optimizer.masters() as masters:
        torch._foreach_mul_(masters, 1.01)
    assert addresses() == before


@pytest.mark.parametrize("storage", MASTERED)
def test_what_is_written_in_another_layout_stays_with_the_weight(device: str, storage: str) -> None:
    """The master follows its parameter there as another tensor, which float32_of has to read."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(4, 8, 3, 3, device=device).bfloat16())
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, **STORAGES[storage])
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    model.to(memory_format=torch.channels_last)
    with optimizer.masters(model.weight) as master:
        master[1:] *= 1.01
    wanted = master_now(optimizer, model.weight)
    assert not torch.equal(wanted, model.weight.float())
    for given in ((), (optimizer,)):
        assert torch.equal(amp.float32_state_dict(model, *given)["weight"], wanted)


@pytest.mark.parametrize("kind", ["torch", "fused", "larc", "switched off"])
def test_other_optimizers_have_the_same_method(device: str, kind: str) -> None:
    model = a_model(device)
    params = [*model.parameters()]
    if kind in ("torch", "switched off"):
        inner: Any = torch.optim.SGD(params, lr=0.5)
    else:
        inner = amp.optim.SGD(params, lr=0.5)
    optimizer = (
        amp.apex.parallel.LARC(inner)
        if kind == "larc"
        else amp.FP16_Optimizer(inner, verbose=False, enabled=kind != "switched off")
    )
    weight = model[0].weight
    with optimizer.masters([weight, model[2].bias]) as (master, bias):
        master.fill_(1 + 2**-12)
        bias.fill_(3)
    low = kind == "switched off"
    assert bool((master_now(optimizer, weight) == (1 if low else 1 + 2**-12)).all())
    assert bool((weight == 1).all())
    if kind == "larc":
        return
    with pytest.raises(RuntimeError, match=r"step\(\) inside of a block of masters"):
        in_a_block(optimizer, optimizer.step)
    loss = (model[0].weight.float() * 0.25).sum()
    optimizer.zero_grad()
    optimizer.backward(loss)
    with warns(LOSES_UPDATES, low):
        optimizer.step()
    wanted = 0.875 if low else 1 + 2**-12 - 0.125
    assert bool((master_now(optimizer, weight) == wanted).all())


def test_masters_of_fp16_optimizer_that_were_written_by_hand(device: str) -> None:
    """As Apex's scripts write them: a block begins from there."""
    model = a_model(device)
    optimizer = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), verbose=False)
    own = optimizer.fp32_from_fp16_groups[0][0]
    with torch.no_grad():
        own.fill_(1 + 2**-12)
    with optimizer.masters(model[0].weight) as master:
        master.mul_(2)
    assert bool((own == 2 + 2**-11).all())
    assert bool((model[0].weight == 2).all())
    with torch.no_grad():
        model[0].weight.fill_(3)  # a parameter that is written still counts
    assert bool((master_now(optimizer, model[0].weight) == 3).all())


def test_where_there_are_no_masters_to_edit(device: str) -> None:
    model = a_model(device)
    optimizer = amp.optim.AdamW(model.parameters())
    train(model, optimizer)
    averaged = amp.AveragedModel(model, optimizer, decay=0.5)
    averaged.update()
    with averaged.swap(), pytest.raises(RuntimeError, match=r"masters\(\) inside of AveragedMod"):
        in_a_block(optimizer, lambda: None)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inside of torch.inference_mo"):
        in_a_block(optimizer, lambda: None)
    with torch.no_grad():
        in_a_block(optimizer, lambda: None)
    meta = nn.Parameter(torch.ones(2, device="meta"))
    frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    optimizer.add_param_group({"params": [frozen]})
    with pytest.raises(TypeError, match=r"parameter 0 of group 1 has dtype torch.float64"):
        in_a_block(optimizer, lambda: None, frozen)
    with pytest.raises(ValueError, match="is not one of this optimizer's parameters"):
        in_a_block(optimizer, lambda: None, meta)
