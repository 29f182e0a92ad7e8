"""OpenSeq2Seq's wrapper, regularizers and configuration switch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from handles import Start, scaled_backward
from helpers import raw_bytes
from torch import Tensor, nn

import amp_mp as amp
from amp_mp import compat
from amp_mp.scaling import Backoff, LogMax

LOW = [torch.float16, torch.bfloat16]


def weight_of(values: Any, dtype: torch.dtype, device: str) -> nn.Parameter:
    return nn.Parameter(torch.as_tensor(values, dtype=torch.float32).to(device, dtype))


# The wrapper.


@pytest.mark.parametrize("dtype", LOW)
def test_one_step_in_its_order(device: str, dtype: torch.dtype) -> None:
    """Gradient to float32, regularization, 1/S, clip, step, rounded weight: by hand."""
    weight = weight_of([1.0, -2.0, 3.0], dtype, device)
    compat.mp_regularizer_wrapper(compat.l2_half(2.0**-4))(weight)
    wrapper = compat.MixedPrecisionOptimizerWrapper(torch.optim.SGD([weight], lr=0.5), 8.0)
    wrapper.backward((weight * torch.tensor([1.0, 2.0, 4.0], device=device).to(dtype)).sum())
    (master,) = wrapper.fp32_from_fp16_groups[0]
    true = torch.tensor([1.0, 2.0, 4.0]) + torch.tensor([1.0, -2.0, 3.0]) / 16
    assert master.grad is not None
    assert torch.equal(master.grad.cpu(), true)
    wrapper.clip_master_grads(1.0)
    clipped = true * (1.0 / (true.double().norm() + 1e-6)).float()
    torch.testing.assert_close(master.grad.cpu(), clipped, rtol=2.0**-22, atol=0)
    wrapper.step()
    assert torch.equal(master.cpu(), torch.tensor([1.0, -2.0, 3.0]) - 0.5 * master.grad.cpu())
    assert torch.equal(weight, master.to(dtype))


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, True, "Best"])
def test_a_scale_that_is_none_is_refused(scale: Any) -> None:
    with pytest.raises(ValueError, match="loss_scale"):
        compat.MixedPrecisionOptimizerWrapper(torch.optim.SGD([nn.Parameter(torch.ones(1))]), scale)


def test_a_whole_number_is_a_scale_and_none_is_one(device: str) -> None:
    for given, scale in ((None, 1.0), (10, 10.0), (10.5, 10.5)):
        weight = weight_of([1.0], torch.float16, device)
        wrapper = compat.MixedPrecisionOptimizerWrapper(torch.optim.SGD([weight]), given)
        assert wrapper.loss_scale == scale
        assert not wrapper.dynamic_loss_scale


@pytest.mark.parametrize("scale", ["Backoff", "LogMax", LogMax(scale_max=2.0**10)])
def test_a_skipped_step_moves_the_scale_and_nothing_else(device: str, scale: Any) -> None:
    weight = weight_of([1.0, 2.0], torch.float16, device)
    inner = torch.optim.Adam([weight], lr=0.1)
    wrapper = compat.MixedPrecisionOptimizerWrapper(inner, scale)
    for factor in (2.0**-9, 2.0**-10):  # below Backoff's start of 2^24 over float16's largest
        wrapper.zero_grad()
        wrapper.backward((weight.float() * factor).sum())
        wrapper.step()
    wrapper.zero_grad()
    before, state = wrapper.loss_scale, raw_bytes([weight, inner.state_dict()["state"]])
    wrapper.backward((weight.float() * math.inf).sum())
    assert wrapper.overflow
    wrapper.step()
    assert wrapper.loss_scale < before
    assert raw_bytes([weight, inner.state_dict()["state"]]) == state


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_sparse_gradients_are_unscaled_and_update_their_rows(
    device: str, dtype: torch.dtype, scale: float
) -> None:
    table = nn.Embedding(6, 4, sparse=True, device=device, dtype=dtype)
    start = table.weight.detach().float().clone()
    wrapper = compat.MixedPrecisionOptimizerWrapper(
        torch.optim.SGD(table.parameters(), lr=0.25), scale
    )
    rows = torch.tensor([1, 3, 3], device=device)
    wrapper.backward(table(rows).sum())
    (master,) = wrapper.fp32_from_fp16_groups[0]
    assert master.grad is not None
    assert master.grad.is_sparse
    assert master.grad.dtype == torch.float32
    wrapper.step()
    counts = torch.tensor([0.0, 1, 0, 2, 0, 0], device=device).unsqueeze(1)
    assert torch.equal(master, start - 0.25 * counts)
    assert torch.equal(table.weight, master.to(dtype))


def test_an_overflow_among_sparse_values_skips(device: str) -> None:
    table = nn.Embedding(6, 4, sparse=True, device=device, dtype=torch.float16)
    wrapper = compat.MixedPrecisionOptimizerWrapper(torch.optim.SGD(table.parameters()), "Backoff")
    before = raw_bytes(table.weight)
    wrapper.backward(table(torch.tensor([2], device=device)).float().sum() * 1e6)
    assert wrapper.overflow
    wrapper.step()
    assert raw_bytes(table.weight) == before


def test_iter_size_adds_in_float32_and_steps_once(device: str) -> None:
    """1 + 3 x 2^-11 in float16 would stay 1 three times over."""
    weight = weight_of([0.0], torch.float16, device)
    inner = torch.optim.SGD([weight], lr=1.0)
    wrapper = compat.MixedPrecisionOptimizerWrapper(inner, 4.0, iter_size=4)
    wrapper.backward((weight * 4.0).sum())
    for _ in range(3):
        with pytest.raises(RuntimeError, match="of iter_size=4"):
            wrapper.step()
        wrapper.backward((weight * 2.0**-9).sum())
    (master,) = wrapper.fp32_from_fp16_groups[0]
    assert master.grad is not None
    assert master.grad.item() == 1 + 3 * 2.0**-11
    wrapper.step()
    assert master.item() == -(1 + 3 * 2.0**-11)
    wrapper.zero_grad()
    wrapper.backward((weight * 4.0).sum())


def test_a_regularizer_counts_once_a_step_whatever_iter_size(device: str) -> None:
    weight = weight_of([2.0], torch.float16, device)
    compat.mp_regularizer_wrapper(compat.l2_half(0.25))(weight)
    wrapper = compat.MixedPrecisionOptimizerWrapper(torch.optim.SGD([weight], lr=1.0), iter_size=2)
    for after in (0.5, -0.625):  # w - (1 + 0.25 w), from 2 on
        for _ in range(2):
            wrapper.backward(weight.sum())
        (master,) = wrapper.fp32_from_fp16_groups[0]
        assert master.grad is not None
        assert master.grad.item() == 1 + 0.25 * master.item()
        wrapper.step()
        wrapper.zero_grad()
        assert master.item() == after


@pytest.mark.parametrize("delays", [False, True])
def test_a_regularizer_counts_once_however_many_losses_a_step_has(
    device: str, delays: bool
) -> None:
    weight = weight_of([2.0], torch.float16, device)
    compat.mp_regularizer_wrapper(compat.l2_half(0.25))(weight)
    wrapper = compat.MixedPrecisionOptimizerWrapper(torch.optim.SGD([weight], lr=1.0), 8.0)
    wrapper.backward(weight.sum(), update_master_grads=not delays)
    wrapper.backward(weight.sum())
    wrapper.update_master_grads()  # once more changes nothing
    (master,) = wrapper.fp32_from_fp16_groups[0]
    assert master.grad.item() == 2 + 0.25 * 2


def test_one_overflow_skips_the_whole_group_of_iterations(device: str) -> None:
    weight = weight_of([1.0], torch.float16, device)
    wrapper = compat.MixedPrecisionOptimizerWrapper(
        torch.optim.SGD([weight], lr=1.0), Backoff(init_scale=2.0), iter_size=2
    )
    wrapper.backward((weight * math.inf).sum())
    wrapper.backward(weight.sum())
    wrapper.step()
    assert (weight.item(), wrapper.loss_scale) == (1.0, 1.0)


@pytest.mark.full
def test_least_squares_reaches_the_exact_solution(device: str) -> None:
    """The source's own test: 10 x 10, Adam with lr .05, 6000 steps, within 0.01."""
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(10, 10)) / np.sqrt(10) + np.eye(10)
    wanted = generator.normal(size=10)
    x = torch.tensor(matrix, dtype=torch.float16, device=device)
    y = torch.tensor(matrix @ wanted, dtype=torch.float16, device=device)
    solution = np.linalg.solve(x.double().cpu().numpy(), y.double().cpu().numpy())
    weight = weight_of(np.zeros(10), torch.float16, device)
    wrapper = compat.MixedPrecisionOptimizerWrapper(torch.optim.Adam([weight], lr=0.05), 16.0)
    for _ in range(6000):
        wrapper.zero_grad()
        wrapper.backward(((x.float() @ weight.float()) - y.float()).square().mean())
        wrapper.step()
    (master,) = wrapper.fp32_from_fp16_groups[0]
    assert np.abs(master.detach().cpu().numpy() - solution).max() < 0.01


# Parameters that come later.


def test_a_parameter_unfrozen_or_added_later_gets_a_master(device: str) -> None:
    first, frozen = (weight_of([1.0, 2.0], torch.float16, device) for _ in range(2))
    frozen.requires_grad_(False)
    optimizer = amp.FP16_Optimizer(torch.optim.SGD([first, frozen], lr=1.0), 2.0, verbose=False)
    optimizer.backward(first.sum())
    optimizer.step()
    assert frozen.tolist() == [1.0, 2.0]
    frozen.requires_grad_(True)
    late = weight_of([4.0], torch.float16, device)
    optimizer.param_groups[0]["params"].append(late)
    optimizer.zero_grad()
    optimizer.backward(first.sum() + 2 * frozen.sum() + late.sum())
    optimizer.step()
    assert [p.dtype for p in optimizer.param_groups[0]["params"]] == [torch.float32] * 3
    assert (first.tolist(), frozen.tolist(), late.tolist()) == ([-1.0, 0.0], [-1.0, 0.0], [3.0])


# Regularizers.


@pytest.mark.parametrize("dtype", LOW)
def test_a_low_precision_weight_is_recorded_and_others_are_computed(
    device: str, dtype: torch.dtype
) -> None:
    regularizer = compat.mp_regularizer_wrapper(compat.l2_sum(0.5))
    assert regularizer(weight_of([1.0, 2.0], dtype, device)) is None
    assert regularizer(weight_of([1.0, 2.0], torch.float32, device)).item() == 2.5


def added(regularizer: Callable[[Tensor], Any], values: Any, scale: float, device: str) -> Tensor:
    """What the wrapper adds to a gradient of zero."""
    weight = weight_of(values, torch.float16, device)
    wrapped = compat.mp_regularizer_wrapper(regularizer)
    wrapped(weight)
    wrapped(weight)  # as a training loop would: still one term
    wrapper = compat.MixedPrecisionOptimizerWrapper(torch.optim.SGD([weight]), scale)
    wrapper.backward((weight * 0).sum())
    (master,) = wrapper.fp32_from_fp16_groups[0]
    assert master.grad is not None
    return master.grad


CASES: dict[str, tuple[Callable[[Tensor], Any], list[float]]] = {
    "l2_sum": (compat.l2_sum(0.25), [1.0, -0.5, 0.0]),
    "l2_half": (compat.l2_half(0.25), [0.5, -0.25, 0.0]),
    "l1": (compat.l1(0.25), [0.25, -0.25, 0.0]),
    "any function": (lambda w: (w**3).sum(), [12.0, 3.0, 0.0]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_each_regularizer(device: str, name: str) -> None:
    regularizer, wanted = CASES[name]
    assert added(regularizer, [2.0, -1.0, 0.0], 8.0, device).tolist() == wanted


def test_in_float16_nine_terms_in_ten_vanish_and_none_in_the_wrapper(device: str) -> None:
    values = np.random.default_rng(0).normal(0, 1e-3, 100_000).astype(np.float32)
    coefficient = 1e-5
    weight = weight_of(values, torch.float16, device)
    half = torch.tensor(coefficient, dtype=torch.float16, device=device) * weight.detach()
    lost = ((half == 0) & (weight != 0)).float().mean().item()
    assert 0.85 < lost < 0.999
    found = [added(compat.l2_half(coefficient), values, scale, device) for scale in (1.0, 2.0**15)]
    assert not bool((found[0] == 0)[weight != 0].any())
    wanted = np.float32(coefficient) * weight.detach().float().cpu().numpy()
    assert np.array_equal(found[0].cpu().numpy(), wanted)
    assert torch.equal(*found), "independent of the scale, bit for bit"


# The switch.


def net_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"dtype": "mixed"}, 1.0),
        ({"dtype": "mixed", "loss_scale": 10.0, "batch": 3}, 10.0),
        ({"dtype": "mixed", "loss_scaling": 512}, 512.0),
        ({"dtype": "mixed", "automatic_loss_scaling": " backoff "}, 2.0**24),
        ({"dtype": "mixed", "loss_scaling": "LogMax"}, 1.0),
        (
            {
                "dtype": "mixed",
                "loss_scaling": "Backoff",
                "loss_scaling_params": {"scale_max": 256.0},
            },
            256.0,
        ),
    ],
)
def test_mixed_converts_the_model_and_wraps_the_optimizer(
    config: dict[str, Any], scale: float
) -> None:
    net, optimizer = compat.mixed_precision(*net_and_optimizer(), config)
    assert net[0].weight.dtype == torch.bfloat16
    assert net[1].weight.dtype == torch.float32
    assert isinstance(optimizer, compat.MixedPrecisionOptimizerWrapper)
    assert optimizer.loss_scale == scale
    optimizer.backward(net(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean())
    optimizer.step()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", torch.float16, None])
def test_other_dtypes_are_without_a_wrapper(dtype: Any) -> None:
    net, optimizer = net_and_optimizer()
    config = {} if dtype is None else {"dtype": dtype}
    converted, same = compat.mixed_precision(net, optimizer, config)
    assert same is optimizer
    wanted = {None: torch.float32}.get(dtype) or getattr(torch, str(dtype).split(".")[-1])
    assert converted[0].weight.dtype == wanted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dtype": "half"}, 'dtype must be "mixed"'),
        ({"dtype": "mixed", "loss_scaling": "Best"}, "Unknown scaling algorithm: Best"),
        (
            {"dtype": "mixed", "loss_scale": 2.0, "automatic_loss_scaling": "Backoff"},
            "automatic_loss_scaling and loss_scale were both given",
        ),
        ({"loss_scaling": "Backoff"}, 'needs dtype "mixed"'),
        (
            {"dtype": "mixed", "loss_scaling": "LogMax", "loss_scaling_params": {"beta": 1}},
            "loss_scaling_params: .*beta",
        ),
        ({"dtype": "mixed", "loss_scaling_params": {"beta1": 0.9}}, "loss_scaling_params needs"),
        ({"dtype": "mixed", "loss_scale": -1.0}, "loss_scale must be finite and above 0"),
        ({"dtype": "mixed", "low_precision": "int8"}, "low_precision must be"),
    ],
)
def test_a_wrong_configuration_is_refused_and_the_model_left_alone(
    config: dict[str, Any], message: str
) -> None:
    net, optimizer = net_and_optimizer()
    with pytest.raises(ValueError, match=message):
        compat.mixed_precision(net, optimizer, config)
    assert net[0].weight.dtype == torch.float32


# Overflows that no scale can cure.


@pytest.mark.parametrize("through", ["FP16_Optimizer", "scale_loss"])
def test_a_nan_that_no_scale_cures_is_told_once_with_its_parameter(
    start: Start, device: str, through: str
) -> None:
    good, bad = (nn.Parameter(torch.ones(n, device=device)) for n in (2, 3))
    inner = torch.optim.SGD([("encoder.weight", good), ("head.bias", bad)], lr=0.0)
    policy = Backoff(scale_min=1.0, scale_max=4.0)
    if through == "scale_loss":
        handle, optimizer = start(dtype=torch.bfloat16, loss_scale=policy), inner
        backward = lambda loss: scaled_backward(handle, loss, inner)  # noqa: E731
    else:
        optimizer = amp.FP16_Optimizer(inner, loss_scale=policy, verbose=False)
        backward = optimizer.backward
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for factor in [1.0, *[math.nan] * 12]:
            optimizer.zero_grad()
            backward(good.sum() + (bad * factor).sum())
            optimizer.step()
    messages = [str(w.message) for w in told if "no scale can cure" in str(w.message)]
    assert len(messages) == 1
    assert "since step 2" in messages[0]
    assert "loss scale is 1, which cannot fall" in messages[0]
    assert "head.bias" in messages[0]
    assert "encoder.weight" not in messages[0]


def test_bfloat16_may_be_checked_without_scaling(device: str) -> None:
    weight = weight_of([1.0], torch.bfloat16, device)
    for check, left in ((False, math.inf), (True, 1.0)):
        optimizer = amp.FP16_Optimizer(
            torch.optim.SGD([nn.Parameter(weight.detach().clone())], lr=1.0),
            verbose=False,
            check_overflow=check,
        )
        (param,) = optimizer.fp16_groups[0]
        optimizer.backward((param * -math.inf).sum())
        optimizer.step()
        assert (param.item(), optimizer.loss_scale) == (left, 1.0)
