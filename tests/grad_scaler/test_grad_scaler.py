"""amp.GradScaler and torch's own, with fused optimizers and torch's: the same steps, fewer passes.

Gradients are set by hand, scaled by a power of two: exact in each dtype, so that a scaler with a
fused optimizer must give the very bits which that optimizer gives with the true gradients.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import raw_bytes, skip_unless_torch_unscales
from torch import Tensor, nn
from watching import watching

import amp_mp as amp

SCALE = 2.0**10
SCALERS = {"amp": amp.GradScaler, "torch": torch.amp.GradScaler}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (amp.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adam": (amp.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (amp.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
}


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """The same each time: every test and every arm starts from the same numbers."""
    source = torch.Generator().manual_seed(1)
    shapes = [(40, 30), (30,), (1,)]
    return [
        nn.Parameter((torch.rand(s, generator=source) * 2 - 1).to(device, dtype)) for s in shapes
    ]


def gradients(device: str, dtype: torch.dtype, step: int) -> list[Tensor]:
    """True gradients: numbers of float16 and of bfloat16, times SCALE too."""
    source = torch.Generator().manual_seed(100 + step)
    made = [torch.randn(p.shape, generator=source).bfloat16() for p in parameters("cpu")]
    return [g.clamp(2.0**-6, 4).copysign(g).to(device, dtype) for g in made]


def set_gradients(params: list[nn.Parameter], step: int, scale: float, bad: float = 0.0) -> None:
    dtype, device = params[0].dtype, params[0].device
    for param, grad in zip(params, gradients(str(device), dtype, step), strict=True):
        param.grad = grad * scale
    if bad:
        params[1].grad[7] = bad


def one_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.scale(torch.ones(1, device=optimizer.param_groups[0]["params"][0].device))
    scaler.step(optimizer)
    scaler.update()


def make_scaler(name: str, device: str, **arguments: Any) -> torch.amp.GradScaler:
    return SCALERS[name](device, **{"init_scale": SCALE, **arguments})


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return raw_bytes([params, optimizer.state_dict()["state"]])


def test_it_is_a_torch_scaler_with_torchs_defaults(device: str) -> None:
    scaler = amp.GradScaler(device)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.state_dict() == torch.amp.GradScaler(device).state_dict()
    assert amp.GradScaler(device, enabled=False).state_dict() == {}
    assert amp.GradScaler()._device == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaler_name", SCALERS)
@pytest.mark.parametrize("name", KINDS)
def test_a_fused_step_under_a_scaler_equals_one_with_true_gradients_bit_for_bit(
    device: str, name: str, scaler_name: str, dtype: torch.dtype
) -> None:
    if scaler_name == "torch":
        skip_unless_torch_unscales(device, dtype)
    fused, arguments = KINDS[name]
    params, twins = parameters(device, dtype), parameters(device, dtype)
    optimizer, plain = fused(params, **arguments), fused(twins, **arguments)
    scaler = make_scaler(scaler_name, device, growth_interval=2)
    for step in range(6):
        set_gradients(params, step, scaler.get_scale())
        set_gradients(twins, step, 1.0)
        one_step(scaler, optimizer)
        plain.step()
    assert scaler.get_scale() == 8 * SCALE  # the scale moved meanwhile
    assert state_of(optimizer) == state_of(plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_gradients_are_true_when_an_optimizer_of_torch_steps(
    device: str, kind: Any, dtype: torch.dtype
) -> None:
    """float16 ones included, which torch's scaler refuses to unscale."""
    params, twins = parameters(device, dtype), parameters(device, dtype)
    optimizer, plain = kind(params, lr=0.01), kind(twins, lr=0.01)
    scaler = make_scaler("amp", device)
    for step in range(3):
        set_gradients(params, step, SCALE)
        set_gradients(twins, step, 1.0)
        one_step(scaler, optimizer)
        plain.step()
        assert raw_bytes([p.grad for p in params]) == raw_bytes([p.grad for p in twins])
    assert state_of(optimizer) == state_of(plain)


@pytest.mark.parametrize("scale", [3.0, 1000.0, 2.0**20 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unscaling_rounds_as_torch_does(device: str, dtype: torch.dtype, scale: float) -> None:
    """One product with the reciprocal, which is rounded to float32 once, from double."""
    skip_unless_torch_unscales(device, dtype)
    found, wanted = (
        [nn.Parameter(torch.zeros(2000, dtype=dtype, device=device))] for _ in range(2)
    )
    found[0].grad = (torch.randn(2000, device=device) * 1e3).to(dtype)
    wanted[0].grad = found[0].grad.clone()
    for name, params in (("amp", found), ("torch", wanted)):
        scaler = make_scaler(name, device, init_scale=scale)
        scaler.scale(torch.ones(1, device=device))
        scaler.unscale_(torch.optim.SGD(params, lr=1.0))
    assert raw_bytes(found[0].grad) == raw_bytes(wanted[0].grad)


# Overflow.


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("scaler_name", SCALERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_an_overflow_changes_no_byte_and_halves_the_scale(
    device: str, name: str, dtype: torch.dtype, scaler_name: str, bad: float
) -> None:
    if scaler_name == "torch":
        skip_unless_torch_unscales(device, dtype)
    fused, arguments = KINDS[name]
    params = parameters(device, dtype)
    optimizer = fused(params, **arguments)
    scaler = make_scaler(scaler_name, device)
    for step in range(2):
        set_gradients(params, step, SCALE)
        one_step(scaler, optimizer)
        assert not optimizer.step_was_skipped
    before = state_of(optimizer)
    set_gradients(params, 2, SCALE, bad)
    one_step(scaler, optimizer)
    assert state_of(optimizer) == before  # step counts too
    assert optimizer.step_was_skipped
    assert scaler.get_scale() == SCALE / 2
    set_gradients(params, 3, SCALE / 2)
    one_step(scaler, optimizer)
    assert not optimizer.step_was_skipped
    assert state_of(optimizer) != before


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_optimizer_of_torch_steps_as_under_torchs_scaler(
    device: str, dtype: torch.dtype, bad: float
) -> None:
    """Those unscale themselves; float64 is theirs and torch's scaler's alone."""
    params, twins = parameters(device, dtype), parameters(device, dtype)
    for name, each in (("amp", params), ("torch", twins)):
        each.append(nn.Parameter(torch.ones(2, device=device)))  # never has a gradient
        optimizer = torch.optim.AdamW(each, lr=0.1, fused=True)
        scaler = make_scaler(name, device)
        for step, value in enumerate((0.0, bad, 0.0)):
            set_gradients(each[:-1], step, scaler.get_scale(), value)
            one_step(scaler, optimizer)
        assert scaler.get_scale() == (SCALE / 2 if bad else SCALE)
    assert raw_bytes(params) == raw_bytes(twins)


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": True}, {"dampening": 0.5}, {"maximize": True, "weight_decay": 0.1}],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("unscaled", [False, True])
def test_the_step_after_skipped_first_ones_is_the_first_of_torchs_fused_sgd(
    device: str, unscaled: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second group has its first gradient later, which overflows too."""
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, math.nan))
    results = []
    for name, skips in (("amp", 2), ("torch", 0)):
        params, late = parameters(device), parameters(device)
        groups = [{"params": params}, {"params": late}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True, **options)
        scaler = make_scaler(name, device)
        for step in range(4):
            for bad in [math.inf] * skips * (step in (0, 2)) + [0.0]:
                scaler.scale(torch.ones(1, device=device))
                set_gradients(params, step, scaler.get_scale(), bad)
                if step >= 2:
                    set_gradients(late, step, scaler.get_scale(), bad)
                if unscaled:
                    scaler.unscale_(optimizer)
                one_step(scaler, optimizer)
        results.append(state_of(optimizer))
    assert results[0] == results[1]


def test_parameters_of_torchs_fused_sgd_get_gradients_one_after_another(device: str) -> None:
    """With torch's scaler a TypeError; the host does not wait for the device."""
    results = []
    for fused in (True, False):
        params = parameters(device)
        optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.5, fused=fused)
        scaler = make_scaler("amp", device)
        for count in range(1, 4):
            for param, grad in zip(
                params[:count], gradients(device, torch.float32, count), strict=False
            ):
                param.grad = grad * SCALE
            scaler.scale(torch.ones(1, device=device))
            with watching() if fused and device == "cuda" else nullcontext() as seen:
                scaler.step(optimizer)
            assert seen is None or seen.waits == 0
            scaler.update()
        results.append(params)
    for found, wanted in zip(*results, strict=True):  # three steps, each rounded once or twice
        torch.testing.assert_close(found, wanted, rtol=2.0**-20, atol=2.0**-20)


# Gradients as they are: read once, written never.


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_step_leaves_the_gradients_as_they_were(
    device: str, dtype: torch.dtype, bad: float
) -> None:
    params = parameters(device, dtype)
    optimizer = amp.optim.AdamW(params, lr=0.1, max_grad_norm=0.1)
    set_gradients(params, 0, SCALE, bad)
    versions = [p.grad._version for p in params]
    before = raw_bytes([p.grad for p in params])
    one_step(make_scaler("amp", device), optimizer)
    assert raw_bytes([p.grad for p in params]) == before
    assert [p.grad._version for p in params] == versions


# Unscaling and clipping by hand, and folded.


@pytest.mark.parametrize("scaler_name", SCALERS)
@pytest.mark.parametrize("name", KINDS)
def test_unscale_then_clip_then_step(device: str, name: str, scaler_name: str) -> None:
    fused, arguments = KINDS[name]
    params, twins = parameters(device), parameters(device)
    optimizer, plain = fused(params, **arguments), fused(twins, **arguments)
    scaler = make_scaler(scaler_name, device)
    for step in range(3):
        set_gradients(params, step, SCALE)
        set_gradients(twins, step, 1.0)
        scaler.scale(torch.ones(1, device=device))
        scaler.unscale_(optimizer)
        assert raw_bytes([p.grad for p in params]) == raw_bytes([p.grad for p in twins])
        for each in (params, twins):
            nn.utils.clip_grad_norm_(each, 1.0)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    assert state_of(optimizer) == state_of(plain)


@pytest.mark.parametrize("kind", [amp.optim.SGD, torch.optim.SGD])
def test_an_overflow_found_by_unscale_is_skipped_by_step(device: str, kind: Any) -> None:
    params = parameters(device)
    optimizer = kind(params, lr=0.1)
    scaler = make_scaler("amp", device)
    set_gradients(params, 0, SCALE)
    one_step(scaler, optimizer)
    before = state_of(optimizer)
    set_gradients(params, 1, SCALE, float("inf"))
    scaler.scale(torch.ones(1, device=device))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert state_of(optimizer) == before
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("max_norm", [1.0, 1e4], ids=["clipping", "not clipping"])
@pytest.mark.parametrize("scaler_name", SCALERS)
@pytest.mark.parametrize("name", KINDS)
def test_a_folded_clip_equals_torchs_on_the_unscaled_gradients(
    device: str, name: str, scaler_name: str, max_norm: float
) -> None:
    fused, arguments = KINDS[name]
    params, twins = parameters(device), parameters(device)
    optimizer = fused(params, **arguments, max_grad_norm=max_norm)
    plain = fused(twins, **arguments)
    scaler = make_scaler(scaler_name, device)
    for step in range(3):
        set_gradients(params, step, SCALE)
        set_gradients(twins, step, 1.0)
        one_step(scaler, optimizer)
        norm = nn.utils.clip_grad_norm_(twins, max_norm)
        plain.step()
        # n = 1231 squares added in float32 are off by n 2^-24 of their sum at most, its root by
        # half of that.
        assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1231 * 2.0**-24)
    if max_norm > norm:
        assert state_of(optimizer) == state_of(plain)
    # A clipped gradient that is off by r = 2^-14 of itself (the norm, from above) moves SGD's
    # weights by lr |g| r / (1 - momentum) and AdamW's, where it cancels but for the moments of
    # several steps, by lr r: below 0.1 r either way, each step.
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=0, atol=3 * 0.1 * 2.0**-14)


def test_with_amp_scaling_off_the_scaler_unscales_in_place(device: str) -> None:
    params, twins = parameters(device), parameters(device)
    optimizer = amp.optim.SGD(params, lr=0.1, amp_scaling=False)
    set_gradients(params, 0, SCALE)
    set_gradients(twins, 0, 1.0)
    one_step(make_scaler("amp", device), optimizer)
    assert raw_bytes([p.grad for p in params]) == raw_bytes([p.grad for p in twins])
    amp.optim.SGD(twins, lr=0.1).step()
    assert raw_bytes(params) == raw_bytes(twins)


@pytest.mark.parametrize(
    ("name", "dtype", "wanted"),
    [
        ("torch.amp.grad_scaler", torch.float32, True),
        ("lightning.fabric.plugins.precision.amp", torch.float32, False),
        ("lightning.fabric.plugins.precision.amp", torch.bfloat16, False),
        ("lightning.fabric.plugins.precision.amp", torch.float16, True),
        ("lightning_fabric.plugins.precision.amp", torch.float32, False),
    ],
)
def test_lightning_unscales_and_clips_gradients_that_torch_unscales(
    name: str, dtype: torch.dtype, wanted: bool
) -> None:
    """Lightning refuses to clip where it is told that the optimizer unscales."""
    optimizer = amp.optim.AdamW([torch.ones(2, dtype=dtype, requires_grad=True)])
    names: dict[str, Any] = {"__name__": name, "optimizer": optimizer}
    exec("found = getattr(optimizer, '_step_supports_amp_scaling', None)", names)
    assert names["found"] is wanted


# The scaler's own state.


@pytest.mark.parametrize(("source", "sink"), [("amp", "torch"), ("torch", "amp"), ("amp", "amp")])
def test_snapshots_are_interchangeable_with_torchs(device: str, source: str, sink: str) -> None:
    script = [0.0, 0.0, float("inf"), 0.0, 0.0, 0.0, 0.0, float("nan"), 0.0, 0.0, 0.0]
    params = parameters(device)
    optimizer = amp.optim.SGD(params, lr=0.0)

    def follow(scaler: torch.amp.GradScaler, steps: list[float]) -> list[float]:
        scales = []
        for bad in steps:
            set_gradients(params, 0, scaler.get_scale(), bad)
            one_step(scaler, optimizer)
            scales.append(scaler.get_scale())
        return scales

    first = make_scaler(source, device, growth_interval=3)
    follow(first, script[:5])
    second = make_scaler(sink, device, init_scale=1.0)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    found = follow(second, script[5:])
    assert found == follow(first, script[5:])
    # At the snapshot one overflow, then two clean steps: the next is the third.
    assert found == [s * SCALE / 2 for s in (2, 2, 1, 1, 1, 2)]


# What is left to torch.


@pytest.mark.parametrize("bad", [0.0, float("inf")])
@pytest.mark.parametrize("case", ["float64", "sparse", "strided"])
def test_gradients_that_only_torch_takes_are_unscaled_by_torch(
    device: str, case: str, bad: float
) -> None:
    param = nn.Parameter(torch.zeros(4, 6, device=device))
    if case == "float64":
        param = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64, device=device))
        param.grad = torch.full_like(param, SCALE)
    elif case == "sparse":
        rows = torch.tensor([[1, 3]], device=device)
        full = torch.full((2, 6), SCALE, device=device)
        param.grad = torch.sparse_coo_tensor(rows, full, (4, 6), check_invariants=True)
    else:
        param.grad = torch.full((6, 4), SCALE, device=device).t()
    values = param.grad._values() if case == "sparse" else param.grad
    if bad:
        values[1, 1] = bad
    optimizer = torch.optim.SGD([param], lr=1.0)
    one_step(make_scaler("amp", device), optimizer)
    touched = [1, 3] if case == "sparse" else [0, 1, 2, 3]
    wanted = torch.zeros(4, 6)
    wanted[touched] = 0.0 if bad else -1.0
    assert torch.equal(param.detach().cpu().float(), wanted)


@pytest.mark.parametrize("unscaled", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sparse_gradients_of_torchs_optimizers_are_taken_in_every_dtype(
    device: str, dtype: torch.dtype, unscaled: bool
) -> None:
    """Row 2 has two gradients; a policy that asks for the largest gets it; an inf skips."""
    table = nn.Embedding(4, 8, sparse=True, device=device, dtype=dtype)
    table.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.25)
    policy, wanted = (amp.scaling.LogMax(scale_max=2.0**30) for _ in range(2))
    scaler = amp.GradScaler(device, loss_scale=policy)
    for factor in (0.5, float("inf"), 0.5):
        optimizer.zero_grad()
        rows = table(torch.tensor([1, 2, 2], device=device))
        scaler.scale((rows.float() * factor).sum()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        wanted.update(factor == float("inf"), 1.0 if factor < 1.0 else 0.0)
        assert scaler.get_scale() == pytest.approx(wanted.scale, rel=2.0**-22)
    assert table.weight[:, 0].tolist() == [1.0, 0.75, 0.5, 1.0]


# Other policies.


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "amp"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_policy_moves_the_scale(device: str, fused: bool, unscaled: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = (amp.optim if fused else torch.optim).SGD([weight], lr=0.0)
    policy = amp.scaling.LogMax(scale_max=2.0**30)
    wanted = amp.scaling.LogMax(scale_max=2.0**30)
    scaler = amp.GradScaler(device, loss_scale=policy)
    assert scaler.get_scale() == 1.0
    for factor in (2.0**-4, 2.0**-6, math.inf, 2.0**-5, 0.0):
        optimizer.zero_grad()
        scaler.scale((weight * torch.tensor([1.0, 0.5, 0.0, -0.25], device=device)
                      * factor).nansum() if factor != math.inf
                     else (weight * factor).sum()).backward()  # fmt: skip
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        wanted.update(factor == math.inf, 0.0 if factor == math.inf else factor)
        # the scale travels as float32
        assert scaler.get_scale() == pytest.approx(wanted.scale, rel=2.0**-22)
    resumed = amp.GradScaler(device, loss_scale="LogMax")
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.state_dict() == scaler.state_dict()
    with pytest.raises(ValueError, match="expected a snapshot of Backoff"):
        amp.GradScaler(device, loss_scale="Backoff").load_state_dict(scaler.state_dict())


def test_a_static_policy_skips_overflows_and_keeps_its_scale(device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = amp.optim.SGD([weight], lr=1.0)
    scaler = amp.GradScaler(device, loss_scale=128.0)
    for factor, left in ((math.inf, 1.0), (1.0, 0.0)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 128.0
        assert weight.tolist() == [left] * 4
    scaler.update(64.0)
    assert scaler.get_scale() == 64.0
    with pytest.raises(ValueError, match="loss_scale"):
        amp.GradScaler(device, loss_scale="Best")
