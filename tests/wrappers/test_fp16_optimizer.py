"""FP16_Optimizer: masters, scaled gradients and steps.

Where a test compares exactly, its numbers are small integers and powers of two: then every product
and sum below is exact in float16, and float32 arithmetic on paper is the oracle.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import LOSES_UPDATES, raw_bytes, warns
from torch import Tensor, nn
from wrapping import INNER, LOW, Mixed, everything, masters_of, wrap

import amp_mp as amp


def with_whole_weights(model: nn.Module, low: int = -2, high: int = 3) -> nn.Module:
    """The model with small integers for weights."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(low, high, param.shape))
    return model


def whole_numbers(*shape: int, device: str) -> Tensor:
    return torch.randint(-3, 4, shape, device=device).float()


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
    clearings: list[Callable[[], object]] = [
        lambda: None,
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        model.zero_grad,
        lambda: [p.grad.data.zero_() for p in model.parameters()],
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


APEX = amp.apex.fp16_utils.FP16_Optimizer
CLEARED = [
    (amp.FP16_Optimizer, {}, True),
    (amp.FP16_Optimizer, {"set_to_none": False}, False),
    (APEX, {}, False),
    (APEX, {"set_grads_to_None": True}, True),
    (APEX, {"set_to_none": True}, True),
    (amp.FP16_Optimizer, {"set_to_none": True}, True),
    (amp.compat.MixedPrecisionOptimizerWrapper, {}, True),
]


@pytest.mark.parametrize(("kind", "how", "to_none"), CLEARED)
@pytest.mark.parametrize("inner", INNER)
def test_zero_grad_clears_masters_and_model(
    device: str, inner: str, kind: Any, how: dict[str, bool], to_none: bool
) -> None:
    model = Mixed(torch.float16).to(device)
    optimizer = kind(INNER[inner](model.parameters()))
    optimizer.backward(model(torch.ones(1, 4, device=device)).sum())
    optimizer.zero_grad(**how)
    for param in [*model.parameters(), *masters_of(optimizer)]:
        if to_none:
            assert param.grad is None
        elif param.grad is not None:  # copies of masters have none
            assert torch.count_nonzero(param.grad) == 0


WRAPPERS: dict[str, Callable[..., Any]] = {
    "FP16_Optimizer": lambda inner: amp.FP16_Optimizer(inner, verbose=False),
    "enabled=False": lambda inner: amp.FP16_Optimizer(inner, verbose=False, enabled=False),
    "OpenSeq2Seq": amp.compat.MixedPrecisionOptimizerWrapper,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("inner", INNER)
def test_layers_without_gradients_stay_where_they_are(
    device: str, inner: str, wrapper: str
) -> None:
    """By README's recipe: one that is frozen in mid-training, and an expert that got no token."""
    experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3)).to(device)
    amp.prepare(experts, torch.bfloat16)
    optimizer = WRAPPERS[wrapper](INNER[inner](experts.parameters()))
    x = torch.ones(4, 8, dtype=torch.bfloat16, device=device)

    def train(*chosen: int) -> None:
        loss = sum(experts[i](x).float().square().mean() for i in chosen)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()

    with warns(LOSES_UPDATES, wrapper == "enabled=False" and inner.startswith("torch")):
        for _ in range(3):
            train(0, 1, 2)
    experts[0].requires_grad_(False)
    before = raw_bytes([*experts[:2].parameters()])
    for _ in range(3):
        train(2, 0)
    assert raw_bytes([*experts[:2].parameters()]) == before


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


@pytest.mark.parametrize(("own", "given"), [(0.5, 2.0), (2.0, 0.5), (None, 0.5)])
def test_of_two_norms_the_smaller_clips(device: str, own: float | None, given: float) -> None:
    """An optimizer's max_grad_norm holds beside a larger one of clip_master_grads."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16, device=device))
    optimizer = wrap(amp.optim.SGD([param], lr=1.0, max_grad_norm=own), static_loss_scale=64.0)
    optimizer.backward((param.float() * 4).sum())  # a norm of 8
    assert optimizer.clip_master_grads(given) == 8
    optimizer.step()
    assert param[0].item() == -0.25  # .5 / 8 * 4


# Steps.


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


@pytest.mark.parametrize("where", [0, 1], ids=["Muon's", "AdamW's"])
def test_around_muon_both_rules_count(device: str, where: int) -> None:
    """An overflow of either lowers the loss scale, and the norm is that of all gradients."""
    params = [
        nn.Parameter(torch.ones(6, 4, device=device)),
        nn.Parameter(torch.ones(8, device=device)),
    ]
    groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
    inner = amp.optim.Muon(groups, lr=0.01, others={"lr": 0.01})
    args = {"init_scale": 64.0}
    optimizer = amp.FP16_Optimizer(
        inner, dynamic_loss_scale=True, dynamic_loss_args=args, verbose=False
    )
    optimizer.backward(
        sum(p.sum() * (math.inf if i == where else 1.0) for i, p in enumerate(params))
    )
    assert optimizer.overflow
    optimizer.step()
    assert optimizer.loss_scale == 32.0
    optimizer.zero_grad()
    optimizer.backward(params[0].sum() + params[1].sum())
    assert optimizer.clip_master_grads(1.0) == pytest.approx(math.sqrt(6 * 4 + 8))


def test_the_norm_of_an_overflow_is_inf(device: str) -> None:
    """Also with a static loss scale, which checks nothing itself; torch's clip says so, too."""
    param = nn.Parameter(torch.ones(2, device=device))
    inner = amp.optim.SGD([param], lr=0.1, check_overflow=True)
    optimizer = amp.FP16_Optimizer(inner, static_loss_scale=4.0, verbose=False)
    optimizer.backward((param * torch.tensor([3.0, math.inf], device=device)).sum())
    assert optimizer.clip_master_grads(1.0) == math.inf


def test_a_load_between_clipping_and_the_step_keeps_the_clipping(device: str) -> None:
    """The optimizer then has new tensors, of which nothing is measured yet."""
    param = nn.Parameter(torch.zeros(2, device=device))
    inner = amp.optim.SGD([param], lr=1.0, momentum=0.9)
    optimizer = amp.FP16_Optimizer(inner, static_loss_scale=4.0, verbose=False)
    optimizer.backward((param * torch.tensor([3.0, 4.0], device=device)).sum())
    assert optimizer.clip_master_grads(1.0) == 5.0
    inner.load_state_dict(inner.state_dict())
    optimizer.step()
    assert param.tolist() == pytest.approx([-0.6, -0.8], rel=2.0**-22)


def test_clipping_is_of_the_gradients_that_it_has_seen(device: str) -> None:
    """Not of those after zero_grad, nor of what the script has written since."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16, device=device))
    inner = amp.optim.SGD([weight], lr=1.0, max_grad_norm=5.0)
    optimizer = wrap(inner, static_loss_scale=64.0)
    true = torch.tensor([3.0, 4.0], device=device)

    def backward(factor: float) -> None:
        optimizer.backward((weight.float() * true * factor).sum())

    backward(1.0)
    assert optimizer.clip_master_grads(1.0) == 5.0
    optimizer.zero_grad()
    backward(10.0)
    optimizer.step()
    assert weight.tolist() == [-3.0, -4.0]  # by max_grad_norm alone
    optimizer.zero_grad()
    backward(1.0)
    assert optimizer.clip_master_grads(10.0) == 5.0
    weight.grad.mul_(4)
    optimizer.step()
    assert weight.tolist() == [-6.0, -8.0]


def test_gradients_that_are_freed_in_backward_cannot_be_scaled(device: str) -> None:
    model = nn.Linear(2, 1, device=device).half()
    inner = amp.optim.SGD(model.parameters(), lr=1.0)
    optimizer = wrap(inner, static_loss_scale=64.0)
    inner.attach(model)
    before = raw_bytes([*model.parameters()])
    with pytest.raises(ValueError, match=r"backward: .* attach .* scaler=amp_mp.GradScaler"):
        optimizer.backward(model(torch.ones(1, 2, device=device).half()).sum())
    assert raw_bytes([*model.parameters()]) == before


@pytest.mark.parametrize("inner", [torch.optim.SGD, amp.optim.SGD])
def test_a_later_loss_at_a_scale_of_1_rounds_no_earlier_gradient(device: str, inner: Any) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16, device=device))
    optimizer = wrap(inner([weight], lr=1.0), static_loss_scale=2.0**16)
    optimizer.backward(weight.float().sum() * 2.0**-30)
    optimizer.loss_scale = 1.0
    optimizer.backward(weight.float().sum() * 0)
    (param,) = optimizer.param_groups[0]["params"]
    assert param.grad.tolist() == [2.0**-30] * 2


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda weight: weight.float().sum(),
    "sparse": lambda weight: (
        nn.functional.embedding(torch.tensor([0, 2]), weight, sparse=True).float().sum()
    ),
}


@pytest.mark.parametrize("second", LOSSES)
@pytest.mark.parametrize("first", LOSSES)
def test_sparse_and_dense_gradients_of_one_weight_add_up(first: str, second: str) -> None:
    """As of an embedding whose weights are those of the last layer, too."""
    weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float16))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), static_loss_scale=8.0)
    optimizer.backward(LOSSES[first](weight))
    optimizer.backward(LOSSES[second](weight))
    true = sum(torch.tensor([1.0, name == "dense", 1.0]) for name in (first, second))
    grad = masters_of(optimizer)[0].grad
    assert (grad.to_dense() if grad.is_sparse else grad).tolist() == [[x, x] for x in true.tolist()]


def test_a_gradient_with_a_graph_stays_differentiable(device: str) -> None:
    weight = nn.Parameter(torch.full((2,), 3.0, dtype=torch.float16, device=device))
    optimizer = amp.optim.SGD([weight], lr=1.0)
    policy = amp.scaling.Static(8.0)
    with (
        amp.init(device_type=device, dtype=torch.float16, loss_scale=policy) as handle,
        handle.scale_loss(weight.square().sum(), optimizer) as scaled,
    ):
        scaled.backward(create_graph=True)
    assert weight.grad.tolist() == [6.0, 6.0]
    assert weight.grad.requires_grad
