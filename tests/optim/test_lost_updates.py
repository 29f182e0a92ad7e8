"""When an update is lost because the weight is too large beside it: why there are float32 masters.

A weight is stored to p bits after the point. In its binade steps are 2^-p of the power of two below
it; an update under half a step rounds away, one of exactly half a step goes to the even neighbour.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import _C

PRECISIONS = [(torch.float16, 10), (torch.bfloat16, 7)]


def weights(dtype: torch.dtype, p: int, k: int, device: str) -> Tensor:
    """2^k (1 + m / 2^p) for every m."""
    exact = (1 + torch.arange(2**p, dtype=torch.float64) / 2**p) * 2.0**k
    return exact.to(dtype).to(device)


def next_above(x: Tensor) -> Tensor:
    """Of the format's numbers; on the CPU, where torch has it for float16."""
    return torch.nextafter(x.cpu(), torch.tensor(math.inf, dtype=x.dtype)).to(x.device)


def next_below(x: Tensor) -> Tensor:
    return -next_above(-x)


@pytest.mark.parametrize(("dtype", "p"), PRECISIONS)
@pytest.mark.parametrize("k", [-1, 0, 1, 5])
def test_up_to_2_to_the_minus_12_of_a_weight_all_is_lost_above_2_to_the_minus_11_nothing(
    device: str, dtype: torch.dtype, p: int, k: int
) -> None:
    """float16; for bfloat16 2^-9 and 2^-8."""
    w = weights(dtype, p, k, device)
    small, large = w * 2.0 ** -(p + 2), w * 2.0 ** -(p + 1)  # exact
    assert torch.equal(w + small, w)
    assert torch.equal(w - small, w)
    # At the ratio itself a power of two does not grow: a tie.
    assert (w + large == w).tolist() == [True] + [False] * (2**p - 1)
    assert (w - large != w).all()
    larger = next_above(large)
    assert (w + larger != w).all()
    assert (w - larger != w).all()


@pytest.mark.parametrize(("dtype", "p"), PRECISIONS)
def test_between_the_two_it_depends_on_the_mantissa(
    device: str, dtype: torch.dtype, p: int
) -> None:
    """Lost below half a step, 2^-(p + 1) in [1, 2); at half a step the even neighbour wins."""
    half_step = torch.tensor(2.0 ** -(p + 1), dtype=dtype, device=device)
    less, more = next_below(half_step), next_above(half_step)
    w = weights(dtype, p, 0, device)
    odd = torch.arange(2**p, device=device) % 2 == 1
    assert torch.equal(w + less, w)
    assert torch.equal(w + half_step != w, odd)
    assert (w + more != w).all()
    # Below a power of two steps are half as large, so 1 shrinks already above a quarter step.
    assert torch.equal(w[1:] - less, w[1:])
    one = w[0]
    assert one - half_step / 2 == one
    assert one - next_above(half_step / 2) == 1 - 2.0 ** -(p + 1)


@pytest.mark.parametrize(
    ("dtype", "quantum"), [(torch.float16, 2.0**-24), (torch.bfloat16, 2.0**-133)]
)
def test_subnormal_weights_move_by_quanta(device: str, dtype: torch.dtype, quantum: float) -> None:
    updates = [quantum / 4, quantum / 2, quantum * 0.75, quantum]
    moved = {2: [2, 2, 3, 3], 3: [3, 4, 4, 4]}  # even and odd
    for start, wanted in moved.items():
        sums = torch.tensor([start * quantum + u for u in updates], device=device)
        by_amp = torch.empty_like(sums, dtype=dtype)
        _C.copy_([by_amp], [sums])
        for stored in (sums.to(dtype), by_amp):
            assert (stored.double() / quantum).tolist() == wanted


@pytest.mark.parametrize(("dtype", "p"), PRECISIONS)
def test_a_float32_master_keeps_the_updates_that_the_weight_loses(
    device: str, dtype: torch.dtype, p: int
) -> None:
    """Four quarter steps: nothing in low precision, a step with a master."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=dtype, device=device))
    lost = weight.detach().clone()
    gradient = torch.full_like(lost, -(2.0 ** -(p + 2)))
    optimizer = amp.optim.SGD([weight], lr=1.0)
    for _ in range(4):
        lost -= gradient
        weight.grad = gradient.clone()
        optimizer.step()
    assert lost.item() == 1.0
    assert weight.item() == 1 + 2.0**-p


NAMES = {"RMSprop": "alpha", "Adadelta": "rho"}  # of the decay; of the others it is betas[1]
# Optimizers with a state stored as log8 under memory="micro", by their decay.
DECAYS: dict[str, Callable[[Any, float], Any]] = {
    "AdamW": lambda p, d: amp.optim.AdamW(p, betas=(0.9, d), memory="micro"),
    "Adam": lambda p, d: amp.optim.Adam(p, betas=(0.9, d), memory="micro"),
    "NAdam": lambda p, d: amp.optim.NAdam(p, betas=(0.9, d), memory="micro"),
    "LAMB": lambda p, d: amp.optim.LAMB(p, betas=(0.9, d), memory="micro"),
    "RMSprop": lambda p, d: amp.optim.RMSprop(p, alpha=d, memory="micro"),
    "Adadelta": lambda p, d: amp.optim.Adadelta(p, rho=d, memory="micro"),
    "AdamW, nano": lambda p, d: amp.optim.AdamW(p, betas=(0.9, d), memory="nano"),
    "AdamW, exp_avg_sq": lambda p, d: amp.optim.AdamW(p, betas=(0.9, d), exp_avg_sq="log8"),
}


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(40, dtype=torch.bfloat16))


def caught(run: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [each for each in found if str(each.message).startswith("amp_mp")]


@pytest.mark.parametrize("name", DECAYS)
def test_log8_with_a_slow_decay(name: str) -> None:
    for decay in (0.5, 0.99):
        assert caught(lambda decay=decay: DECAYS[name]([weight()], decay)) == []
    (found,) = caught(lambda: DECAYS[name]([weight()], 0.999))
    argument = NAMES.get(name, "betas[1]")
    assert f"{argument}=0.999 scatter: by 14 %" in str(found.message)
    assert found.filename == __file__
    for decay in (0.9999, 0.99999):
        with pytest.raises(ValueError, match=r"log8.* would stand still; take"):
            DECAYS[name]([weight()], decay)


def test_an_added_group_with_log8() -> None:
    optimizer = amp.optim.AdamW([weight()])
    group = {"params": [weight()], "memory": "micro", "betas": (0.9, 0.9999)}
    with pytest.raises(ValueError, match="would stand still"):
        optimizer.add_param_group(dict(group))
    assert len(optimizer.param_groups) == 1
    (found,) = caught(lambda: optimizer.add_param_group({**group, "betas": (0.9, 0.995)}))
    assert found.filename == __file__


def test_half_a_byte_at_rates_that_it_drowns_in_noise() -> None:
    """A new group's rate before any schedule; a warm-up from 0 and other masters say nothing."""
    for lr, count in ((1e-6, 1), (torch.tensor(1e-6), 1), (1e-4, 0), (0.0, 0)):
        found = caught(lambda lr=lr: amp.optim.SGD([weight()], lr=lr, memory="nano"))
        assert len(found) == count, lr
        for each in found:
            assert "lr=1e-06" in str(each.message)
            assert each.filename == __file__
    assert len(caught(lambda: amp.optim.SGD([weight()], lr=1e-6, master="split20"))) == 1
    assert caught(lambda: amp.optim.SGD([weight()], lr=1e-6, memory="lean")) == []
    optimizer = amp.optim.SGD([weight()], lr=1e-3, memory="lean")
    group = {"params": [weight()], "memory": "nano", "lr": 1e-6}
    assert len(caught(lambda: optimizer.add_param_group(group))) == 1


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adam", "RMSprop", "Adagrad"])
def test_a_torch_optimizer_over_prepared_weights_warns_at_its_first_step(name: str) -> None:
    def train(wrap: Callable[[Any], Any], prepares: bool = True) -> tuple[list[Any], Any]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        amp.prepare(model if prepares else nn.Linear(2, 2), torch.bfloat16)
        optimizer = wrap(getattr(torch.optim, name)(model.parameters(), lr=0.1))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        found = [each for _ in range(3) for each in caught(optimizer.step)]
        return found, raw_bytes(model.state_dict())

    (found,), _ = train(lambda optimizer: optimizer)
    assert found.filename == __file__
    assert f"torch.optim.{name} updates low-precision weights" in str(found.message)
    assert "FP16_Optimizer" in str(found.message)
    assert train(lambda optimizer: optimizer, prepares=False)[0] == []
    model = amp.prepare(nn.Linear(3, 2), torch.bfloat16)
    inner = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    fp16 = amp.FP16_Optimizer(inner, verbose=False)
    fp16.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    assert caught(fp16.step) == []
    if hasattr(amp.optim, name):
        model = amp.prepare(nn.Linear(3, 2), torch.bfloat16)
        ours = getattr(amp.optim, name)(model.parameters(), lr=0.1)
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        assert caught(ours.step) == []


@pytest.mark.parametrize("hooked", [False, True])
def test_a_step_without_any_gradient_so_far_says_so_once(device: str, hooked: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = amp.optim.SGD([weight], lr=1.0)
    if hooked:  # a hook of a script's own changes nothing about it
        optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="no parameter of this optimizer has a gradient, nor had"):
        optimizer.step()
    optimizer.step()


def test_a_step_that_is_skipped_for_an_overflow_has_had_gradients(device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = amp.optim.SGD([weight], lr=1.0)
    with amp.init(device_type=device, loss_scale="dynamic", dtype=torch.float16) as handle:
        with handle.scale_loss(weight.sum() * float("inf"), optimizer) as scaled:
            scaled.backward()
        optimizer.step()  # its gradients are hidden from it
        optimizer.zero_grad()
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
