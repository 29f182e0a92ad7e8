"""FP16_Optimizer: masters, scaled gradients, skipped steps, snapshots, and what each is good for.

Where a test compares exactly, its numbers are small integers and powers of two: then every product
and sum below is exact in float16, and float32 arithmetic on paper is the oracle.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import _C
from amp_mp.scaling import Backoff, Policy, Static

LOW = [torch.float16, torch.bfloat16]
INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "torch Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "amp SGD": lambda params: amp.optim.SGD(params, lr=0.05, momentum=0.9, master="float32"),
    "amp AdamW": lambda params: amp.optim.AdamW(params, lr=0.01, master="float32"),
}


class Mixed(nn.Module):
    """A low-precision layer, then a float32 one."""

    def __init__(self, dtype: torch.dtype, inputs: int = 4) -> None:
        super().__init__()
        self.low = nn.Linear(inputs, 3, dtype=dtype)
        self.high = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x.to(self.low.weight.dtype)).float())


def with_whole_weights(model: nn.Module, low: int = -2, high: int = 3) -> nn.Module:
    """The model with small integers for weights."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(low, high, param.shape))
    return model


def whole_numbers(*shape: int, device: str) -> Tensor:
    return torch.randint(-3, 4, shape, device=device).float()


def wrap(inner: torch.optim.Optimizer, **arguments: Any) -> amp.FP16_Optimizer:
    return amp.FP16_Optimizer(inner, verbose=False, **arguments)


def masters_of(optimizer: amp.FP16_Optimizer) -> list[Tensor]:
    """In the order of the parameters; amp_mp's optimizers have theirs in the state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state.get(p, {}).get("master", p) for p in params]


def train_step(model: nn.Module, optimizer: amp.FP16_Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    optimizer.backward(model(x).float().square().mean())
    optimizer.step()


def everything(model: nn.Module, optimizer: amp.FP16_Optimizer) -> Any:
    """Every byte that a skipped step must leave alone: model, masters, inner state."""
    state = optimizer.state_dict()
    inner = state["optimizer_state_dict"]["state"]
    return raw_bytes([model.state_dict(), state["fp32_from_fp16"], inner])


def reloaded(value: Any) -> Any:
    """Through a file, as from an untrusted source."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# Masters.


@pytest.mark.parametrize("dtype", LOW)
def test_masters_take_the_places_of_parameters_in_the_very_same_lists(
    device: str, dtype: torch.dtype
) -> None:
    model = Mixed(dtype).to(device)
    model.low.bias.requires_grad_(False)
    groups = [
        {"params": [model.high.weight, model.low.weight], "lr": 0.5},
        {"params": [model.low.bias, model.high.bias]},
    ]
    inner = torch.optim.SGD(groups, lr=0.25)
    param_groups, lists = inner.param_groups, [group["params"] for group in inner.param_groups]
    optimizer = wrap(inner)
    assert optimizer.param_groups is inner.param_groups is param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    for group, params in zip(param_groups, lists, strict=True):
        assert group["params"] is params
    assert [group["lr"] for group in param_groups] == [0.5, 0.25]
    assert lists[0][0] is model.high.weight
    assert lists[1][0] is model.low.bias  # frozen
    assert lists[1][1] is model.high.bias
    master = lists[0][1]
    assert master.dtype == torch.float32
    assert master.is_leaf
    assert master.requires_grad
    assert torch.equal(master, model.low.weight.float())
    assert model.low.weight.dtype == dtype


@pytest.mark.parametrize("created", ["before", "after"])
def test_a_scheduler_of_the_wrapped_optimizer_sets_the_learning_rate(
    device: str, created: str
) -> None:
    weight = nn.Parameter(torch.full((2,), 8.0, dtype=torch.float16, device=device))
    inner = torch.optim.SGD([weight], lr=1.0)
    if created == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
        optimizer = wrap(inner)
    else:
        optimizer = wrap(inner)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(weight.sum())  # the gradient is 1
        optimizer.step()
        scheduler.step()
        found.append(weight[0].item())
    assert found == [7.0, 6.5, 6.25]  # by 1, 1/2, 1/4


@pytest.mark.parametrize("dtype", LOW)
def test_state_moves_to_the_masters_and_is_widened(device: str, dtype: torch.dtype) -> None:
    model = nn.Linear(4, 3, dtype=dtype, device=device)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 4, dtype=dtype, device=device)).sum().backward()
    inner.step()
    before = {name: dict(inner.state[p]) for name, p in model.named_parameters()}
    optimizer = wrap(inner)
    assert len(optimizer.state) == 2
    for (name, param), master in zip(model.named_parameters(), masters_of(optimizer), strict=True):
        assert param not in optimizer.state
        for key, value in before[name].items():
            assert optimizer.state[master][key].dtype == torch.float32
            assert torch.equal(optimizer.state[master][key], value.float())


@pytest.mark.parametrize("dtype", LOW)
def test_wrapping_a_fused_optimizer_that_has_stepped_changes_nothing_in_its_course(
    device: str, dtype: torch.dtype
) -> None:
    """Its masters, which hold more than the weights do, are the wrapper's: there is one copy."""
    alone, wrapped = (nn.Linear(64, 8, dtype=dtype, device=device) for _ in range(2))
    wrapped.load_state_dict(alone.state_dict())
    plain = amp.optim.AdamW(alone.parameters(), lr=1e-3, master="float32")
    inner = amp.optim.AdamW(wrapped.parameters(), lr=1e-3, master="float32")
    optimizer: Any = inner
    for step in range(6):
        if step == 3:
            optimizer = wrap(inner)
            assert optimizer.fp16_groups == [list(wrapped.parameters())]
            assert optimizer.param_groups[0]["params"] == list(wrapped.parameters())
            assert raw_bytes(masters_of(optimizer)) == raw_bytes(
                [plain.state[p]["master"] for p in alone.parameters()]
            )
        for p, q in zip(alone.parameters(), wrapped.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        plain.step()
        if step >= 3:
            optimizer.update_master_grads()
        optimizer.step()
    for p, q, master in zip(
        alone.parameters(), wrapped.parameters(), masters_of(optimizer), strict=True
    ):
        assert torch.equal(p, q)
        assert torch.equal(plain.state[p]["master"], master)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_parameter_of_another_dtype_is_refused_by_place_and_nothing_changed(
    dtype: torch.dtype,
) -> None:
    params = [nn.Parameter(torch.ones(3).half()), nn.Parameter(torch.ones(5, 2, dtype=dtype))]
    inner = torch.optim.SGD(params, lr=1.0)
    with pytest.raises(TypeError, match=r"parameter 1 of group 0 .*\(5, 2\).*" + str(dtype)):
        wrap(inner)
    assert all(p is q for p, q in zip(inner.param_groups[0]["params"], params, strict=True))


def test_a_frozen_parameter_may_have_any_dtype() -> None:
    frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    optimizer = wrap(torch.optim.SGD([frozen, nn.Parameter(torch.ones(2).half())], lr=1.0))
    assert masters_of(optimizer)[0] is frozen


def test_an_added_group_gets_masters(device: str) -> None:
    first, second = (
        nn.Parameter(torch.full((2,), 4.0, dtype=torch.float16, device=device)) for _ in range(2)
    )
    optimizer = wrap(torch.optim.SGD([first], lr=1.0), static_loss_scale=8.0)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    optimizer.backward((first + second).sum())
    optimizer.step()
    assert first.tolist() == [3.0, 3.0]
    assert second.tolist() == [3.5, 3.5]
    assert masters_of(optimizer)[1].dtype == torch.float32


def test_an_added_group_of_another_dtype_is_refused_and_gone() -> None:
    optimizer = wrap(torch.optim.SGD([nn.Parameter(torch.ones(2).half())], lr=1.0))
    with pytest.raises(TypeError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
    assert len(optimizer.param_groups) == 1


def test_verbose_says_what_is_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    amp.FP16_Optimizer(torch.optim.SGD(Mixed(torch.float16).parameters(), lr=1.0))
    assert "2 parameters with float32 masters, 2 float32" in capsys.readouterr().out
    wrap(torch.optim.SGD(Mixed(torch.float16).parameters(), lr=1.0))
    assert capsys.readouterr().out == ""


# Gradients.


def true_gradients(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    """torch's, of the same model in float32."""
    twin = copy.deepcopy(model).float()
    loss_of(twin).backward()
    return [p.grad for p in twin.parameters()]


@pytest.mark.parametrize("scale", [0.5, 1.0, 128.0, 2.0**10])
@pytest.mark.parametrize("dtype", LOW)
def test_backward_gives_masters_the_true_gradients_and_leaves_the_model_scaled_ones(
    device: str, dtype: torch.dtype, scale: float
) -> None:
    model = with_whole_weights(Mixed(dtype).to(device))
    x = whole_numbers(1, 4, device=device)
    wanted = true_gradients(model, lambda twin: twin(x).sum())
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=scale)
    optimizer.backward(model(x).sum())
    for master, param, grad in zip(masters_of(optimizer), model.parameters(), wanted, strict=True):
        assert torch.equal(master.grad, grad)
        if param.dtype == dtype:
            assert torch.equal(param.grad.float(), scale * grad)
            assert master.grad.dtype == torch.float32


def test_a_gradient_below_float16_survives_where_the_scale_lifts_it(device: str) -> None:
    tiny = 2.0**-30
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16, device=device))
    found = []
    for scale in (1.0, 2.0**10):
        optimizer = wrap(torch.optim.SGD([weight], lr=1.0), static_loss_scale=scale)
        optimizer.backward(weight.float().sum() * tiny)
        found.append(masters_of(optimizer)[0].grad.item())
        weight.grad = None
    assert found == [0.0, tiny]


@pytest.mark.parametrize(
    "at_once", [[True, True], [False, True], [True, False], [False, False], [True, False, True]]
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_accumulated_gradients_are_each_divided_by_the_scale_exactly_once(
    device: str, at_once: list[bool], dynamic: bool
) -> None:
    model = with_whole_weights(Mixed(torch.float16).to(device))
    batches = [whole_numbers(1, 4, device=device) for _ in at_once]
    wanted = true_gradients(model, lambda twin: sum(twin(x).sum() for x in batches))
    scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 128.0}}
    optimizer = wrap(
        torch.optim.SGD(model.parameters(), lr=1.0),
        **(scale if dynamic else {"static_loss_scale": 128.0}),
    )
    for x, update in zip(batches, at_once, strict=True):
        optimizer.backward(model(x).sum(), update_master_grads=update)
    if not at_once[-1]:
        optimizer.update_master_grads()
    for master, grad in zip(masters_of(optimizer), wanted, strict=True):
        assert torch.equal(master.grad, grad)


def test_the_next_iteration_starts_from_nothing_however_gradients_were_cleared(device: str) -> None:
    model = with_whole_weights(Mixed(torch.float16).to(device))
    x = whole_numbers(1, 4, device=device)
    wanted = true_gradients(model, lambda twin: twin(x).sum())
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), static_loss_scale=128.0)
    clearings: list[Callable[[], None]] = [
        lambda: None,
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_grads_to_None=True),
        lambda: optimizer.zero_grad(set_to_none=True),
        model.zero_grad,
    ]
    for clear in clearings:
        clear()
        optimizer.backward(model(x).sum())
        for master, grad in zip(masters_of(optimizer), wanted, strict=True):
            assert torch.equal(master.grad, grad)
        optimizer.step()


def test_an_error_in_backward_leaves_the_gradients_true(device: str) -> None:
    model = with_whole_weights(Mixed(torch.float16).to(device))
    x = whole_numbers(1, 4, device=device)
    wanted = true_gradients(model, lambda twin: 2 * twin(x).sum())
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), static_loss_scale=128.0)
    optimizer.backward(model(x).sum())
    with pytest.raises(RuntimeError, match="does not require grad"):
        optimizer.backward(x.sum())
    optimizer.backward(model(x).sum())
    for master, grad in zip(masters_of(optimizer), wanted, strict=True):
        assert torch.equal(master.grad, grad)


def test_a_retained_graph_can_be_used_again(device: str) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16, device=device))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), static_loss_scale=8.0)
    loss = weight.square().sum()
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward(loss)
    assert masters_of(optimizer)[0].grad.item() == 4.0


def test_a_parameter_without_gradient_has_a_master_without_one(device: str) -> None:
    model = Mixed(torch.float16).to(device)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=8.0)
    optimizer.backward(model(torch.ones(1, 4, device=device)).sum())
    optimizer.zero_grad(set_to_none=True)
    before = everything(model, optimizer)
    optimizer.backward(model.high.weight.sum() * 0)
    assert optimizer.inspect_master_grad_data()[0][:2] == [None, None]
    optimizer.step()
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("how", [{}, {"set_grads_to_None": True}, {"set_to_none": True}])
def test_zero_grad_clears_masters_and_model(device: str, how: dict[str, bool]) -> None:
    model = Mixed(torch.float16).to(device)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer.backward(model(torch.ones(1, 4, device=device)).sum())
    optimizer.zero_grad(**how)
    for param in [*model.parameters(), *masters_of(optimizer)]:
        if how:
            assert param.grad is None
        else:
            assert torch.count_nonzero(param.grad) == 0


def test_inspecting_gives_the_gradients_of_the_masters_group_by_group(device: str) -> None:
    model = Mixed(torch.float16).to(device)
    groups = [{"params": list(model.low.parameters())}, {"params": list(model.high.parameters())}]
    optimizer = wrap(torch.optim.SGD(groups, lr=1.0), static_loss_scale=4.0)
    optimizer.backward(model(torch.ones(1, 4, device=device)).sum())
    found = optimizer.inspect_master_grad_data()
    for group, grads in zip(optimizer.param_groups, found, strict=True):
        for param, grad in zip(group["params"], grads, strict=True):
            assert grad.data_ptr() == param.grad.data_ptr()
            assert not grad.requires_grad


@pytest.mark.parametrize("norm_type", [2, 2.0, 1, 3, float("inf")])
@pytest.mark.parametrize("share", [0.01, 0.5, 2.0], ids=["much", "half", "nothing"])
def test_clipping_equals_torch_on_a_float32_model(
    device: str, norm_type: float, share: float
) -> None:
    model = Mixed(torch.float16, inputs=200).to(device)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=64.0)
    optimizer.backward(model(torch.randn(8, 200, device=device)).square().sum())
    twins = [nn.Parameter(m.detach().clone()) for m in masters_of(optimizer)]
    for twin, master in zip(twins, masters_of(optimizer), strict=True):
        twin.grad = master.grad.clone()
    norm = float(nn.utils.get_total_norm([t.grad for t in twins], norm_type))
    wanted = nn.utils.clip_grad_norm_(twins, share * norm, norm_type)
    found = optimizer.clip_master_grads(share * norm, norm_type)
    # A float32 sum of n positive terms is off by n 2^-24 of itself at most, and n = 611 here; the
    # powers, roots and the two products after it by a few 2^-24 more.
    rtol = 620 * 2.0**-24
    assert found == pytest.approx(float(wanted), rel=rtol)
    for twin, master in zip(twins, masters_of(optimizer), strict=True):
        torch.testing.assert_close(master.grad, twin.grad, rtol=0 if share > 1 else rtol, atol=0)


# Steps.


@pytest.mark.parametrize("dtype", LOW)
def test_after_a_step_the_weights_are_the_rounded_masters(device: str, dtype: torch.dtype) -> None:
    model = Mixed(dtype).to(device)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1e-4), static_loss_scale=16.0)
    for _ in range(3):
        train_step(model, optimizer, torch.randn(5, 4, device=device))
    rounded_off = 0
    for param, master in zip(model.parameters(), masters_of(optimizer), strict=True):
        assert torch.equal(param, master.to(param.dtype))
        rounded_off += int((param.float() != master).sum())
    assert rounded_off > 0  # the masters know more


@pytest.mark.parametrize("name", INNER)
def test_masters_move_exactly_as_float32_parameters_with_the_same_gradients(
    device: str, name: str
) -> None:
    weight = nn.Parameter(torch.randn(300, device=device).half())
    twin = nn.Parameter(weight.detach().float())
    optimizer = wrap(INNER[name]([weight]), static_loss_scale=2.0)
    float32 = INNER[name]([twin])
    for _ in range(5):
        true = torch.randn(300, device=device).half().float()
        weight.grad = (2 * true).half()
        twin.grad = true
        optimizer.update_master_grads()
        optimizer.step()
        float32.step()
        assert torch.equal(masters_of(optimizer)[0], twin)
        assert torch.equal(weight, twin.half())


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float16, 65504.0), (torch.bfloat16, 65536.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_master_beyond_float16_gives_the_largest_weight_never_infinity(
    device: str, dtype: torch.dtype, wanted: float, sign: int
) -> None:
    weight = nn.Parameter(torch.full((9,), sign * 60000.0, dtype=dtype, device=device))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0))
    master = masters_of(optimizer)[0]
    weight.grad = (sign * 65536.0 - master.detach()).neg().to(torch.bfloat16).to(dtype)
    optimizer.update_master_grads()
    optimizer.step()
    assert (master.abs() > 65520).all()  # rounds to infinity by IEEE 754
    assert weight.tolist() == [sign * wanted] * 9
    weight.grad = None
    master.grad = torch.full_like(master, float("-inf") * sign)
    optimizer.step()
    assert torch.isinf(master).all()
    assert torch.isinf(weight).all() == (dtype == torch.bfloat16)


def test_a_nan_in_a_master_is_a_nan_in_the_weight(device: str) -> None:
    weight = nn.Parameter(torch.ones(9, dtype=torch.float16, device=device))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0))
    with torch.no_grad():
        masters_of(optimizer)[0][4] = float("nan")
    optimizer.step()
    assert torch.isnan(weight).tolist() == [i == 4 for i in range(9)]


# Overflow.


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("layer", ["low", "high"])
@pytest.mark.parametrize("name", INNER)
def test_overflow_changes_no_byte_says_so_and_training_goes_on(
    device: str, name: str, layer: str, bad: float, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Mixed(torch.float16).to(device)
    optimizer = wrap(
        INNER[name](model.parameters()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 1024.0},
    )
    x = torch.randn(3, 4, device=device)
    for _ in range(2):
        train_step(model, optimizer, x)
    before = everything(model, optimizer)
    capsys.readouterr()

    optimizer.zero_grad()
    optimizer.backward(model(x).sum() + getattr(model, layer).weight[1, 2] * bad)
    assert optimizer.overflow
    assert optimizer.step() is None
    assert everything(model, optimizer) == before
    message = "OVERFLOW! Skipping step. Attempted loss scale: 1024.0, reducing to 512.0"
    assert message in capsys.readouterr().out
    assert optimizer.loss_scale == 512.0

    train_step(model, optimizer, x)
    assert not optimizer.overflow
    assert capsys.readouterr().out == ""
    after = everything(model, optimizer)
    assert all(after[0][key] != before[0][key] for key in before[0])  # every tensor of the model


def test_after_an_overflow_there_are_no_master_gradients_to_clip_or_inspect(device: str) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), dynamic_loss_scale=True)
    optimizer.backward(weight.sum() * float("inf"))
    assert optimizer.clip_master_grads(1.0) == -1.0
    with pytest.warns(UserWarning, match="overflow"):
        assert optimizer.inspect_master_grad_data() is None


def test_a_static_scale_checks_nothing(device: str) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), static_loss_scale=128.0)
    optimizer.backward(weight[0] * float("inf"))
    optimizer.step()
    assert not optimizer.overflow
    assert masters_of(optimizer)[0][0] == float("-inf")
    assert optimizer.loss_scale == 128.0


def test_the_scale_follows_its_policy(device: str) -> None:
    """Doubled after two clean steps, halved on overflow, at least 1, at most 16."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    policy = Backoff(scale_max=16.0, step_window=2, init_scale=4.0)
    optimizer = wrap(torch.optim.SGD([weight], lr=0.0), loss_scale=policy)
    found = []
    for overflow in "..!!..!!!.........":
        optimizer.zero_grad()
        optimizer.backward(weight.sum() * (float("inf") if overflow == "!" else 1.0))
        optimizer.step()
        found.append(optimizer.loss_scale)
    assert found == [4, 8, 4, 2, 2, 4, 2, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16]


def test_two_backwards_of_which_the_first_overflows_are_one_skipped_step(device: str) -> None:
    model = Mixed(torch.float16).to(device)
    policy = Backoff(init_scale=8.0)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0), loss_scale=policy)
    before = everything(model, optimizer)
    x = torch.randn(3, 4, device=device)
    for factor in (float("inf"), 1.0):
        optimizer.backward(model(x).sum() * factor)
    optimizer.step()
    assert everything(model, optimizer) == before
    assert optimizer.loss_scale == 4.0


def test_the_loss_scale_can_be_set(device: str) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), static_loss_scale=128.0)
    optimizer.loss_scale = 2
    optimizer.backward(weight.sum())
    assert weight.grad.tolist() == [2.0, 2.0]
    assert masters_of(optimizer)[0].grad.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="scale"):
        optimizer.loss_scale = 0
    assert optimizer.loss_scale == 2.0


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, Static(1.0)),
        ({"static_loss_scale": 128}, Static(128.0)),
        ({"loss_scale": 8.0}, Static(8.0)),
        ({"loss_scale": "Backoff"}, Backoff()),
        ({"loss_scale": Backoff(step_window=3)}, Backoff(step_window=3)),
        (
            {"dynamic_loss_scale": True, "static_loss_scale": 128.0},
            Backoff(1.0, 2.0**126, 2.0, 1000, init_scale=2.0**32),
        ),
        ({"loss_scale": "dynamic"}, Backoff(1.0, 2.0**126, 2.0, 1000, init_scale=2.0**32)),
        (
            {
                "dynamic_loss_scale": True,
                "dynamic_loss_args": {"init_scale": 8.0, "scale_factor": 4.0, "scale_window": 5},
            },
            Backoff(1.0, 2.0**126, 4.0, 5, init_scale=8.0),
        ),
    ],
)
def test_the_scale_arguments_mean(arguments: dict[str, Any], wanted: Policy) -> None:
    optimizer = wrap(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), **arguments)
    assert optimizer.loss_scaler.state_dict() == wanted.state_dict()
    assert optimizer.dynamic_loss_scale == isinstance(wanted, Backoff)


# Closures.


def bowl(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Least squares of 8 equations for 4 weights, in float16 and well conditioned."""
    x, y = torch.randn(8, 4).half(), torch.randn(8, 1)
    return nn.Linear(4, 1, bias=False).half().to(device), x.to(device), y.to(device)


def test_lbfgs_reaches_the_minimum_and_each_evaluation_sees_the_newest_masters(device: str) -> None:
    model, x, y = bowl(device)
    optimizer = wrap(torch.optim.LBFGS(model.parameters(), lr=0.5), static_loss_scale=128.0)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        assert torch.equal(model.weight, masters_of(optimizer)[0].half())
        seen.append(model.weight.detach().clone())
        loss = (model(x).float() - y).square().mean()
        optimizer.backward(loss)
        return loss

    first = optimizer.step(closure)
    for _ in range(4):
        optimizer.step(closure)
    assert len(seen) > 5  # several evaluations a step
    assert any(not torch.equal(weight, seen[0]) for weight in seen)
    solution = torch.linalg.lstsq(x.double().cpu(), y.double().cpu()).solution.flatten()
    # The gradient X'r is off by 2^-11 of its 8 terms, each below 2.6 (|x| < 2.2, |r| < 1.2), and
    # the inverse of X'X, of norm 0.53, takes that to the solution: 11 x 2^-11, and rounding a
    # weight adds 2^-12.
    assert (model.weight.detach().cpu().flatten() - solution).abs().max() < 16 * 2.0**-11
    assert isinstance(first, Tensor)


def test_an_overflow_in_a_closure_is_repeated_with_a_lower_scale(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x, y = bowl(device)
    optimizer = wrap(torch.optim.LBFGS(model.parameters(), lr=0.5), dynamic_loss_scale=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x).float() - y).square().mean()
        optimizer.backward(loss)
        return loss

    before = closure().item()
    optimizer.overflow = False  # of that look at the loss
    optimizer.step(closure)
    assert closure().item() < before
    assert "OVERFLOW! Skipping step. Attempted loss scale: 4294967296.0" in capsys.readouterr().out
    assert 1.0 < optimizer.loss_scale < 2.0**32


def test_a_closure_that_no_scale_can_cure_raises_and_the_next_step_evaluates_again(
    device: str,
) -> None:
    model, x, y = bowl(device)
    optimizer = wrap(
        torch.optim.LBFGS(model.parameters()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 8.0},
    )
    factor = float("nan")
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (model(x).float() - y).square().mean() * factor
        optimizer.backward(loss)
        return loss

    before = model.weight.clone()
    with pytest.raises(RuntimeError, match=r"lowest loss scale, 1\.0"):
        optimizer.step(closure)
    assert calls == 4  # with scale 8, 4, 2, 1
    assert torch.equal(model.weight, before)
    factor = 1.0
    optimizer.step(closure)
    assert not torch.equal(model.weight, before)


# Snapshots.


def assert_plain(value: Any) -> None:
    """Made of nothing but what weights_only=True loads and any format can hold."""
    assert type(value) in (dict, list, tuple, int, float, bool, str, type(None), Tensor), value
    if isinstance(value, dict):
        assert_plain(list(value))
        assert_plain(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            assert_plain(item)


@pytest.mark.parametrize("name", INNER)
def test_a_snapshot_is_plain_and_keeps_apex_names(device: str, name: str) -> None:
    model = Mixed(torch.float16).to(device)
    optimizer = wrap(INNER[name](model.parameters()), dynamic_loss_scale=True)
    train_step(model, optimizer, torch.randn(3, 4, device=device))
    saved = optimizer.state_dict()
    assert_plain(saved)
    assert set(saved) == {
        "loss_scaler",
        "dynamic_loss_scale",
        "overflow",
        "first_closure_call_this_step",
        "optimizer_state_dict",
        "fp32_from_fp16",
    }
    assert raw_bytes(reloaded(saved)) == raw_bytes(saved)


@pytest.mark.parametrize("name", INNER)
def test_a_snapshot_follows_neither_the_optimizer_it_came_from_nor_the_one_it_went_to(
    device: str, name: str
) -> None:
    x = torch.randn(3, 4, device=device)
    model, other = (Mixed(torch.float16).to(device) for _ in range(2))
    optimizer = wrap(INNER[name](model.parameters()))
    train_step(model, optimizer, x)
    saved = optimizer.state_dict()
    before = raw_bytes(saved)
    train_step(model, optimizer, x)
    assert raw_bytes(saved) == before
    second = wrap(INNER[name](other.parameters()))
    second.load_state_dict(saved)
    train_step(other, second, x)
    assert raw_bytes(saved) == before


@pytest.mark.parametrize("scale", ["static", "dynamic"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", INNER)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(
    device: str, name: str, dtype: torch.dtype, scale: str
) -> None:
    inputs = [torch.randn(3, 4, device=device) for _ in range(8)]
    inputs[1][0] = inputs[5][0] = float("inf")  # skipped under a dynamic scale, else left out
    if scale == "static":
        inputs = [x for x in inputs if x.isfinite().all()]

    def start() -> tuple[nn.Module, amp.FP16_Optimizer]:
        model = Mixed(dtype).to(device)
        policy: Any = Backoff(init_scale=64.0, step_window=2) if scale == "dynamic" else 64.0
        return model, wrap(INNER[name](model.parameters()), loss_scale=policy)

    model, optimizer = start()
    for x in inputs[:4]:
        train_step(model, optimizer, x)
    saved = reloaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed_model, resumed = start()
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for x in inputs[4:]:
        train_step(model, optimizer, x)
        train_step(resumed_model, resumed, x)
    assert everything(resumed_model, resumed) == everything(model, optimizer)
    assert resumed.loss_scaler.state_dict() == optimizer.loss_scaler.state_dict()


def loader(sizes: tuple[int, ...], **arguments: Any) -> amp.FP16_Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(size).half())]} for size in sizes]
    return wrap(torch.optim.SGD(groups, lr=1.0, momentum=0.9), **arguments)


def without(key: str) -> dict[str, Any]:
    saved = loader((2, 3)).state_dict()
    del saved[key]
    return saved


def with_one_group_less_inside() -> dict[str, Any]:
    saved = loader((2, 3), static_loss_scale=4.0).state_dict()
    saved["optimizer_state_dict"]["param_groups"].pop()
    return saved


BAD_SNAPSHOTS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "another shape": (lambda: loader((2, 4)).state_dict(), r"fp32_from_fp16 .*\(4,\).*\(3,\)"),
    "another number of groups": (lambda: loader((2,)).state_dict(), "fp32_from_fp16"),
    "no scale there is": (
        lambda: {**loader((2, 3)).state_dict(), "loss_scaler": {"policy": "Best"}},
        "policy must be one of",
    ),
    "torch's part does not fit": (with_one_group_less_inside, "parameter groups"),
    "no overflow": (lambda: without("overflow"), "overflow"),
    "no masters": (lambda: without("fp32_from_fp16"), "fp32_from_fp16"),
    "no scale": (lambda: without("loss_scaler"), "loss_scaler"),
}


@pytest.mark.parametrize("name", BAD_SNAPSHOTS)
def test_a_snapshot_that_does_not_fit_is_refused_before_anything_is_changed(name: str) -> None:
    make, words = BAD_SNAPSHOTS[name]
    optimizer = loader((2, 3), static_loss_scale=16.0)
    before = raw_bytes(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(make())
    assert raw_bytes(optimizer.state_dict()) == before


def test_the_snapshots_kind_of_scale_counts(device: str) -> None:
    """As in Apex: a run that was dynamic stays so, however the new optimizer was made."""

    def fresh(**arguments: Any) -> amp.FP16_Optimizer:
        param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
        return amp.FP16_Optimizer(torch.optim.SGD([param], lr=1.0), verbose=False, **arguments)

    source, target = fresh(dynamic_loss_scale=True), fresh(static_loss_scale=8.0)
    source.backward((source.fp16_groups[0][0] * float("inf")).sum())
    source.step()
    target.load_state_dict(source.state_dict())
    assert target.loss_scaler.state_dict() == source.loss_scaler.state_dict()
    assert target.dynamic_loss_scale
    target.backward((target.fp16_groups[0][0] * float("inf")).sum())
    assert target.overflow


@pytest.mark.parametrize("copier", [pickle.dumps, copy.deepcopy, copy.copy])
def test_it_cannot_be_pickled_or_copied(copier: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match="state_dict"):
        copier(loader((2,)))


def test_it_cannot_be_unpickled() -> None:
    with pytest.raises(RuntimeError, match="load_state_dict"):
        amp.FP16_Optimizer.__new__(amp.FP16_Optimizer).__setstate__({})


# Around amp_mp's own optimizers: the same results, and no copies.

FUSED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "AdamW": (
        lambda p: amp.optim.AdamW(p, lr=1e-2, master="float32"),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    ),
    "SGD": (
        lambda p: amp.optim.SGD(p, lr=0.1, momentum=0.9, master="float32"),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    ),
}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", FUSED)
def test_the_folded_path_equals_the_one_with_copies(
    device: str, name: str, clip: float | None
) -> None:
    ours, torchs = (Mixed(torch.float16).to(device) for _ in range(2))
    torchs.load_state_dict(ours.state_dict())
    folded = wrap(FUSED[name][0](ours.parameters()), dynamic_loss_scale=True)
    copied = wrap(FUSED[name][1](torchs.parameters()), dynamic_loss_scale=True)
    for optimizer in (folded, copied):
        optimizer.loss_scale = 256.0
    for step in range(8):
        x = torch.randn(5, 4, device=device) * (math.inf if step == 3 else 1.0)
        for optimizer, model in ((folded, ours), (copied, torchs)):
            optimizer.zero_grad()
            optimizer.backward(model(x).float().square().mean())
            if clip is not None:
                norm = optimizer.clip_master_grads(clip)
                assert (norm == -1) == (step == 3)
            optimizer.step()
        assert folded.loss_scale == copied.loss_scale
        for a, b in zip(masters_of(folded), masters_of(copied), strict=True):
            # float32 updates in another order of operations: a few roundings of 2^-24 a step
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)


def test_the_folded_path_makes_no_second_copy(device: str) -> None:
    model = Mixed(torch.bfloat16).to(device)
    inner = amp.optim.AdamW(model.parameters(), lr=1e-2, master="float32")
    optimizer = wrap(inner, static_loss_scale=8.0)
    params = list(model.parameters())
    assert [p for group in optimizer.param_groups for p in group["params"]] == params
    optimizer.backward(model(torch.randn(5, 4, device=device)).float().sum())
    low = optimizer.fp16_groups[0][0]
    (inspected, *_), *_ = optimizer.inspect_master_grad_data() or [[None]]
    assert inspected is not None
    assert torch.equal(inspected, low.grad.float() / 8), "made for the occasion"
    assert all(master.grad is None for _, master in optimizer._masters.pairs())
    optimizer.step()
    snapshot = optimizer.state_dict()
    saved = [t for group in snapshot["fp32_from_fp16"] for t in group]
    inside = [s["master"] for s in snapshot["optimizer_state_dict"]["state"].values()
              if "master" in s]  # fmt: skip
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in inside], "in a file once"


@pytest.mark.parametrize("arguments", [{"dynamic_loss_scale": True}, {"static_loss_scale": 8.0}])
def test_the_folded_path_reads_gradients_once_clipping_included(
    device: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Mixed(torch.bfloat16).to(device)
    optimizer = wrap(amp.optim.SGD(model.parameters(), lr=0.1), **arguments)
    optimizer.loss_scale = 8.0
    train_step(model, optimizer, torch.randn(5, 4, device=device))
    reads = []
    measure, operators = _C.Slots.measure, dict(_C.operators)

    def measured(slots: _C.Slots) -> _C.Measurement:
        reads.append("before the step")
        return measure(slots)

    def step(*args: Any) -> None:
        if args[5]:
            reads.append("in the step")
        operators["plain_sgd_"](*args)

    monkeypatch.setattr(_C.Slots, "measure", measured)
    monkeypatch.setitem(_C.operators, "plain_sgd_", step)
    optimizer.zero_grad()
    optimizer.backward(model(torch.randn(5, 4, device=device)).float().sum())
    optimizer.clip_master_grads(0.5)
    optimizer.step()
    assert reads == ["before the step"]


def test_snapshots_go_from_one_path_to_the_other(device: str) -> None:
    first, second = (Mixed(torch.float16).to(device) for _ in range(2))
    copied = wrap(torch.optim.AdamW(first.parameters(), lr=1e-2), static_loss_scale=8.0)
    for _ in range(3):
        train_step(first, copied, torch.randn(5, 4, device=device))
    second.load_state_dict(first.state_dict())
    inner = amp.optim.AdamW(second.parameters(), lr=1e-2, master="float32")
    folded = wrap(inner, static_loss_scale=8.0)
    folded.load_state_dict(copied.state_dict())
    for a, b in zip(masters_of(folded), masters_of(copied), strict=True):
        assert torch.equal(a, b)
    third = Mixed(torch.float16).to(device)
    again = wrap(amp.optim.AdamW(third.parameters(), lr=1e-2, master="float32"))
    again.load_state_dict(folded.state_dict())
    assert raw_bytes(again.state_dict()) == raw_bytes(folded.state_dict())


# What masters and scaling are for.

SIZE = 64
STEPS = 700
LEARNING_RATE = 2.0**15


def hadamard(size: int) -> Tensor:
    """A matrix of +-1 with H'H = size I."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return matrix


def test_four_arms(device: str) -> None:
    """float16 with masters and scaling trains as float32 does; without either it does not train.

    The task is the regression mean((X w - X w*)^2) with X = 2^-13 H, H'H = 64 I. Its gradient is
    g = (2 / 64) X'X (w - w*) = 2^-25 (w - w*), and |w - w*| starts in [0.3, 0.9], hence

    - without scaling: |g| < 2^-25, half of the smallest float16 number, so every gradient rounds
      to 0 (and so do no weights: they are ordinary numbers);
    - without masters: w is in [2, 4), where ulp(w) = 2^-9, and lr |g| = 2^15 2^-25 |w - w*| is
      below 2^-10 = ulp(w) / 2, so every w - lr g rounds back to w, however exact g is;
    - with both: each step takes w - w* to (1 - 2^-10) of itself, 700 of them to half, and so the
      loss to 1/4. A scale of 128 lifts g to 2^-18, where float16's spacing, 2^-24, is 2^-6 of it
      and rounding to nearest mostly averages out. The rest of the 1 % allows for weights rounded
      to 2^-10 of a difference of 0.2 or more, and for steps that the dynamic scale skips, 0.2 %
      each: from 2^32 it takes two or three until 2^32 X (w - w*) / 32 is below 65504.
    """
    x = 2.0**-13 * hadamard(SIZE).to(device)
    start = (2.01 + 1.97 * torch.rand(SIZE, device=device)).half().float()
    sign = torch.where(torch.rand(SIZE, device=device) < 0.5, -1.0, 1.0)
    target = x @ (start - sign * (0.3 + 0.6 * torch.rand(SIZE, device=device)))

    def model_in(dtype: torch.dtype) -> nn.Linear:
        model = nn.Linear(SIZE, 1, bias=False, device=device)
        with torch.no_grad():
            model.weight.copy_(start)
        return model.to(dtype)

    def loss_of(model: nn.Linear) -> Tensor:
        return (model(x.to(model.weight.dtype)).float().squeeze(1) - target).square().mean()

    def final(model: nn.Linear) -> float:
        residual = x.double() @ model.weight.detach().double().squeeze(0) - target.double()
        return float(residual.square().mean())

    def sgd(model: nn.Linear, lr: float = LEARNING_RATE) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=lr)

    def with_torch(dtype: torch.dtype, scale: float) -> float:
        """The scaled loss and a learning rate divided by the scale: only masters are missing."""
        model = model_in(dtype)
        optimizer = sgd(model, LEARNING_RATE / scale)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (loss_of(model) * scale).backward()
            optimizer.step()
        return final(model)

    def with_masters(**arguments: Any) -> float:
        model = model_in(torch.float16)
        optimizer = wrap(sgd(model), **arguments)
        for _ in range(STEPS):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model))
            optimizer.step()
        return final(model)

    losses = {
        "at the start": final(model_in(torch.float32)),
        "float32": with_torch(torch.float32, 1.0),
        "masters, static 128": with_masters(static_loss_scale=128.0),
        "masters, dynamic": with_masters(dynamic_loss_scale=True),
        "no masters, scale 128": with_torch(torch.float16, 128.0),
        "masters, no scale": with_masters(static_loss_scale=1.0),
    }
    float32 = losses["float32"]
    assert float32 < losses["at the start"] / 3, losses
    assert losses["masters, static 128"] == pytest.approx(float32, rel=0.01), losses
    assert losses["masters, dynamic"] == pytest.approx(float32, rel=0.01), losses
    assert losses["no masters, scale 128"] > 2 * float32, losses
    assert losses["masters, no scale"] > 2 * float32, losses
