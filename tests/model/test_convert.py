"""convert_network, and Apex's other conversions of whole models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from converting import BATCH_NORM, FLOAT32, INTEGERS, NORMS, Model, converters, float32_in
from helpers import raw_bytes
from torch import nn

import amp_mp as amp
from amp_mp.apex.fp16_utils import BN_convert_float, network_to_half, tofp16
from amp_mp.model.convert import convert_network
from amp_mp.model.selection import keep_fp32

LOW = [torch.float16, torch.bfloat16]
F32 = torch.float32


# convert_network.


@converters
@pytest.mark.parametrize("dtype", LOW)
def test_parameters_and_buffers_are_converted_in_place_and_norms_are_not(
    device: str, dtype: torch.dtype, convert: Any
) -> None:
    """Nor integers; and prepare leaves float64."""
    model = Model().to(device)
    staying = NORMS | INTEGERS | ({"wide"} if convert is amp.prepare else set())
    objects = dict(model.named_parameters(remove_duplicate=False))
    values = {name: t.clone() for name, t in model.state_dict().items()}
    assert convert(model, dtype) is model
    assert all(objects[n] is p for n, p in model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        wanted = values[name] if name in staying else values[name].float().to(dtype)
        assert raw_bytes(tensor) == raw_bytes(wanted), name


def test_shared_parameters_and_buffers_stay_shared(device: str) -> None:
    with torch.device(device):  # Module.to() would give each of two names a buffer of its own
        model = convert_network(Model(), torch.bfloat16)
    assert model.head.weight is model.embed.weight
    assert model.same.data_ptr() == model.table.data_ptr()


@pytest.mark.parametrize("source", [F32, torch.float64, torch.bfloat16])
def test_float16_weights_saturate_nan_stays_and_gradients_overflow(
    device: str, source: torch.dtype
) -> None:
    values = [1e5, -1e5, math.inf, 65520.0, math.nan, 1.0]
    model = nn.Linear(6, 1, bias=False).to(device, source)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values]))
    model.weight.grad = torch.full_like(model.weight, 1e5)
    convert_network(model, torch.float16)
    found = model.weight.flatten().tolist()
    assert found[:4] + found[5:] == [65504.0, -65504.0, 65504.0, 65504.0, 1.0]
    assert math.isnan(found[4])
    assert model.weight.grad.dtype == torch.float16
    assert model.weight.grad.tolist() == [[math.inf] * 6]


def test_back_to_float32_is_exact_for_what_was_low(device: str) -> None:
    model = convert_network(Model().to(device), torch.bfloat16)
    low = {name: t.clone() for name, t in model.state_dict().items()}
    convert_network(model, F32)
    assert float32_in(model) == FLOAT32 | {"wide"}
    assert all(torch.equal(t, low[name].to(t.dtype)) for name, t in model.state_dict().items())


# Apex's helpers.


@pytest.mark.parametrize("dtype", LOW)
def test_network_to_half_casts_input_and_weights_and_keeps_batch_norms(
    device: str, dtype: torch.dtype
) -> None:
    body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8)).to(device)
    body.append(keep_fp32(nn.Sequential(nn.Linear(8, 3)), "0")).to(device)
    half = network_to_half(body, dtype)
    assert isinstance(half[0], tofp16)
    assert half[1] is body
    assert half(torch.randn(4, 8, device=device)).dtype == dtype
    low = {name for name, t in half.state_dict().items() if t.dtype == dtype}
    assert low == {f"1.{i}.{name}" for i in (0, 2) for name in ("weight", "bias")}


def test_network_to_half_is_float16_unless_told_and_takes_no_other() -> None:
    assert network_to_half(nn.Linear(2, 2))[1].weight.dtype == torch.float16
    with pytest.raises(ValueError, match=r"^dtype must be .*found torch.float32"):
        network_to_half(nn.Linear(2, 2), F32)


def test_bn_convert_float_turns_batch_norms_and_nothing_else_into_float32(device: str) -> None:
    model = Model().to(device).half()
    rounded = model.body[1].running_var.clone()
    assert BN_convert_float(model) is model
    assert float32_in(model) == BATCH_NORM
    assert model.body[1].num_batches_tracked.dtype == torch.int64
    assert torch.equal(model.body[1].running_var, rounded.float())
    assert BN_convert_float(nn.BatchNorm2d(3).half()).weight.dtype == F32


@pytest.mark.parametrize("dtype", LOW)
def test_tofp16_casts_floats_plainly_and_passes_the_rest(device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([1 / 3, 65520.0], device=device)
    assert torch.equal(tofp16(dtype)(x), x.to(dtype))
    tokens = torch.arange(3, device=device)
    assert tofp16(dtype)(tokens) is tokens
    assert repr(tofp16()) == "tofp16(torch.float16)"


# Masters kept by hand.


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand_train_as_fp16_optimizer_does(device: str, flat: bool) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(device, torch.bfloat16)

    x = torch.ones(5, 4, device=device, dtype=torch.bfloat16)
    hand, wrapped = network(), network()
    params, masters = amp.apex.fp16_utils.prep_param_lists(hand, flat_master=flat)
    assert len(masters) == (1 if flat else 4)
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.5)
    reference = amp.FP16_Optimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.5), verbose=False
    )
    for _ in range(3):
        hand.zero_grad()
        hand(x).float().square().mean().backward()
        amp.apex.fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
        optimizer.step()
        amp.apex.fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
        reference.zero_grad(set_to_none=True)
        reference.backward(wrapped(x).float().square().mean())
        reference.step()
    assert raw_bytes([*hand.parameters()]) == raw_bytes([*wrapped.parameters()])


def test_absent_gradients_of_masters_by_hand(device: str) -> None:
    net = nn.Linear(2, 2).to(device, torch.float16)
    params, masters = amp.apex.fp16_utils.prep_param_lists(net)
    net.weight.grad = torch.ones_like(net.weight)
    amp.apex.fp16_utils.model_grads_to_master_grads(params, masters)
    assert masters[0].grad is not None
    assert masters[1].grad is None
    params, (flat,) = amp.apex.fp16_utils.prep_param_lists(net, flat_master=True)
    amp.apex.fp16_utils.model_grads_to_master_grads(params, [flat], flat_master=True)
    assert flat.grad is not None
    assert flat.grad.tolist() == [1.0] * 4 + [0.0] * 2
    net.bias.data = net.bias.data.float()
    with pytest.raises(ValueError, match="flat_master needs parameters of one dtype"):
        amp.apex.fp16_utils.prep_param_lists(net, flat_master=True)
