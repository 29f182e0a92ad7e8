"""The fused optimizers as torch.optim.Optimizers: torch's results, skipping, state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DTYPES, raw_bytes
from rules import TWINS
from torch import nn

import amp_mp as amp

Make = Callable[[Any], torch.optim.Optimizer]


def model(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 5)).to(device)
    return net if dtype == torch.float32 else amp.prepare(net, dtype)


def scripted_grads(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in net.parameters():
        grad = torch.randn(param.shape, generator=generator) * 0.1
        param.grad = grad.to(param.device, param.dtype)


def run(make: Make, device: str, dtype: torch.dtype, steps: int) -> torch.Tensor:
    torch.manual_seed(1)
    net = model(device).to(dtype)
    optimizer = make(net.parameters())
    for step in range(steps):
        scripted_grads(net, step)
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


@pytest.mark.parametrize("name", TWINS)
def test_hundred_steps_follow_torch(device: str, name: str) -> None:
    """At most twice as far from torch's float64 run as torch's own float32 run is.

    Both do the same few float32 operations an element and step, in another order.
    """
    kind, arguments = TWINS[name]
    ours, torchs = getattr(amp.optim, kind), getattr(torch.optim, kind)
    exact = run(lambda p: torchs(p, **arguments), device, torch.float64, 100)
    theirs = run(lambda p: torchs(p, **arguments), device, torch.float32, 100)
    found = run(lambda p: ours(p, **arguments), device, torch.float32, 100)
    assert (found - exact).norm() <= 2 * (theirs - exact).norm()
    assert (found - exact).abs().max() <= 2 * (theirs - exact).abs().max()


SQUARING = [name for name, (kind, _) in TWINS.items() if kind not in ("Adagrad", "Adamax", "SGD")]


@pytest.mark.parametrize("name", SQUARING)
def test_gradients_whose_square_overflows_move_the_weight_as_torchs_do(
    device: str, name: str
) -> None:
    """The average of squares is finite as far as torch's, which weighs a gradient first.

    torch's loop over single tensors divides NAdam's average before the root, and overflows there.
    """
    kind, arguments = TWINS[name]
    weights = []
    for module, loop in ((torch.optim, {"foreach": True}), (amp.optim, {})):
        weight = nn.Parameter(torch.ones(300, device=device))
        optimizer = getattr(module, kind)([weight], **arguments, **loop)
        for grad in (2e19, -2e19, 1.0, 1e20):
            weight.grad = torch.full_like(weight, grad)
            optimizer.step()
        weights.append(weight.detach())
    assert not torch.equal(weights[0], torch.ones_like(weights[0]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=0)


BAD = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
OTHERS = [amp.optim.Adadelta, amp.optim.NAdam, amp.optim.RAdam]


@pytest.mark.parametrize("kind", [amp.optim.AdamW, amp.optim.Adam, amp.optim.SGD, *OTHERS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_element_anywhere_leaves_every_byte(
    device: str, kind: type, dtype: str, bad: str
) -> None:
    torch.manual_seed(0)
    sizes = [(1,), (7,), (65,), (4097,), (3, 5)]
    params = [nn.Parameter(torch.randn(s).to(device, DTYPES[dtype])) for s in sizes]
    arguments = {"momentum": 0.9} if kind is amp.optim.SGD else {}
    lr = 10.0 if kind is amp.optim.Adadelta else 0.01  # float16 weights are to move
    optimizer = kind(params, lr=lr, max_grad_norm=1.0, **arguments)
    scaler = amp.GradScaler(device, init_scale=1024.0, growth_interval=3)

    def step(where: tuple[int, int] | None) -> None:
        for p in params:
            p.grad = torch.full_like(p, 0.5)
        if where is not None:
            params[where[0]].grad.view(-1)[where[1]] = BAD[bad]
        scaler.step(optimizer)
        scaler.update()

    scaler.scale(torch.ones((), device=device))
    step(None)
    positions = [
        (tensor, at)
        for tensor, p in enumerate(params)
        for at in sorted({0, p.numel() // 2, p.numel() - 1})
    ]
    for where in positions:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0, "_growth_tracker": 0})
        before = raw_bytes([params, optimizer.state_dict()["state"]])
        step(where)
        assert raw_bytes([params, optimizer.state_dict()["state"]]) == before, where
        assert optimizer.step_was_skipped
        assert scaler.get_scale() == 512.0
    for scale in (512.0, 512.0, 1024.0):  # training goes on, and the scale grows again
        before = raw_bytes(params)
        step(None)
        assert raw_bytes(params) != before
        assert not optimizer.step_was_skipped
        assert scaler.get_scale() == scale
    assert optimizer.state[params[0]]["step"].item() == 4


def test_gradients_are_checked_unless_nothing_asks(device: str) -> None:
    param = nn.Parameter(torch.ones(3, device=device))
    for arguments, skipped in (
        ({}, True),
        ({"check_overflow": False}, False),
        ({"check_overflow": False, "max_grad_norm": 1.0}, True),
    ):
        optimizer = amp.optim.SGD([param], lr=0.0, **arguments)
        param.grad = torch.tensor([1.0, float("inf"), 1.0], device=device)
        optimizer.step()
        assert optimizer.step_was_skipped == skipped


def test_amsgrad_of_a_checkpoint_is_taken_over(device: str) -> None:
    """As in torch: the file's param_groups say what the optimizer is."""
    theirs = torch.optim.AdamW((net := model(device)).parameters(), lr=1e-2, amsgrad=True)
    mine = amp.optim.AdamW((own := model(device)).parameters(), lr=1e-2)
    for step in range(10):
        if step == 5:
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
            own.load_state_dict(net.state_dict())
        for n in (net, own):
            scripted_grads(n, step if step < 5 else 100)  # smaller ones follow
            for param in n.parameters():
                param.grad.mul_(10.0 if step < 5 else 1e-3)
        theirs.step()
        mine.step()
    for a, b in zip(net.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=5 * 8 * 2.0**-24 * 1e-2)
        largest = mine.state[b]["max_exp_avg_sq"]
        torch.testing.assert_close(largest, theirs.state[a]["max_exp_avg_sq"])
        assert (largest > mine.state[b]["exp_avg_sq"]).all()


def test_schedulers_tensor_lr_closures_hooks_and_new_groups_work(device: str) -> None:
    net = model(device)
    ours = amp.optim.AdamW(net[0].parameters(), lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=0.5)
    seen: list[str] = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        ours.zero_grad()
        loss = net(torch.ones(2, 17, device=device)).square().sum()
        loss.backward()
        return loss

    assert ours.step(closure) > 0
    scheduler.step()
    assert float(ours.param_groups[0]["lr"]) == pytest.approx(0.05)
    ours.add_param_group({"params": list(net[2].parameters()), "lr": 1e-3})
    before = raw_bytes(list(net[2].parameters()))
    closure()
    ours.step()
    assert raw_bytes(list(net[2].parameters())) != before
    assert seen == ["before", "after"] * 2


def test_momentum_may_begin_later(device: str) -> None:
    param = nn.Parameter(torch.ones(5, device=device))
    optimizer = amp.optim.SGD([param], lr=0.1)
    for momentum in (0.0, 0.9, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        param.grad = torch.ones_like(param)
        optimizer.step()
    # buffer: none, 1, 1.9
    torch.testing.assert_close(param.detach(), torch.full_like(param, 1 - 0.1 * (1 + 1 + 1.9)))


def test_state_that_was_moved_or_replaced_is_used(device: str) -> None:
    """Code in the wild replaces state tensors, or the data of parameters: both are noticed."""
    param = nn.Parameter(torch.zeros(4, device=device))
    optimizer = amp.optim.SGD([param], lr=1.0, momentum=0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state[param]["momentum_buffer"] = torch.full_like(param, 10.0)
    optimizer.step()
    assert param.detach().tolist() == [-7.0] * 4  # -1 - (0.5 * 10 + 1)
    param.data = torch.zeros(4, device=device)
    optimizer.step()
    assert param.detach().tolist() == [-4.0] * 4  # 0 - (0.5 * 6 + 1)


@pytest.mark.parametrize("weight", ["contiguous", "channels_last"])
@pytest.mark.parametrize("grad", ["contiguous", "channels_last", "gaps", "expanded"])
def test_any_layout_of_a_gradient_is_right(device: str, weight: str, grad: str) -> None:
    values = torch.randn(4, 6, 5, 3, device=device)
    forms = {
        "contiguous": values,
        "channels_last": values.to(memory_format=torch.channels_last),
        "gaps": torch.randn(4, 6, 5, 6, device=device)[..., ::2],
        "expanded": torch.randn(1, 6, 1, 3, device=device).expand(4, 6, 5, 3),
    }
    param = nn.Parameter(forms[weight].clone(memory_format=torch.preserve_format))
    before, twin = param.detach().clone(), nn.Parameter(param.detach().clone())
    param.grad = forms[grad]
    twin.grad = forms[grad].clone()
    amp.optim.AdamW([param], lr=0.1).step()
    torch.optim.AdamW([twin], lr=0.1).step()
    torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-7)
    assert param.stride() == before.stride()


@pytest.mark.parametrize("values", [torch.randn(6, 4).t(), torch.randn(())], ids=["t", "0-dim"])
def test_dense_parameters_of_any_shape_work(device: str, values: torch.Tensor) -> None:
    param = nn.Parameter(values.clone().to(device))
    before = param.detach().clone()
    param.grad = torch.ones_like(param)
    amp.optim.SGD([param], lr=1.0).step()
    torch.testing.assert_close(param.detach(), before - 1)


def test_a_backward_over_an_updated_weight_raises(device: str) -> None:
    """Version counters are bumped, so autograd notices that what it saved is gone."""
    weight = nn.Parameter(torch.randn(3, 3, device=device))
    x = torch.randn(2, 3, device=device, requires_grad=True)
    loss = ((x @ weight) @ weight).sum()
    weight.grad = torch.ones_like(weight)
    amp.optim.SGD([weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.full
def test_more_than_two_to_the_31_elements(device: str) -> None:
    """64-bit offsets: a float16 tensor of 2^31 + 3 elements, 4 GiB, measured and copied."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else _free_memory()
    if free < 6 * 2**30:
        pytest.fail(f"this test needs 6 GiB of free memory, there are {free / 2**30:.1f}")
    count = 2**31 + 3
    x = torch.zeros(count, dtype=torch.float16, device=device)
    x[-1] = 3.0
    x[2**31 - 1] = float("inf")
    squares, largest, bad = amp._C.measure([x])[-1].tolist()
    assert (squares, largest, bad) == (9.0, 3.0, 1.0)
    amp._C.copy_([x], [x], multiplier=0.5)
    assert x[2**31 - 2 :].tolist() == [0.0, float("inf"), 0.0, 0.0, 1.5]


def _free_memory() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if "MemAvailable" in line)
