"""amp.float32_of: one weight's float32 value, whichever optimizer has stepped it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules import STORAGES, cases
from torch import Tensor, nn

import amp_mp as amp

LOW = [torch.bfloat16, torch.float16]
OPTIMIZERS = [*(name for name in STORAGES if name != "masterless"), "FP16_Optimizer"]


def made(device: str, dtype: torch.dtype) -> tuple[nn.Linear, Tensor]:
    """A layer, and the float32 weight that `prepare` has rounded."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 16, bias=False).to(device)
    full = layer.weight.detach().clone()
    return (layer if dtype == torch.float32 else amp.prepare(layer, dtype)), full


def optimizer_of(layer: nn.Linear, name: str) -> Any:
    if name == "FP16_Optimizer":
        return amp.FP16_Optimizer(torch.optim.SGD(layer.parameters(), lr=2.0**-10), verbose=False)
    return amp.optim.SGD(layer.parameters(), lr=2.0**-10, **STORAGES[name])


def step(layer: nn.Linear, optimizer: Any) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    if isinstance(optimizer, amp.FP16_Optimizer):
        optimizer.update_master_grads()
    optimizer.step()


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_before_a_step_it_is_what_prepare_has_rounded(device: str, dtype: torch.dtype) -> None:
    layer, full = made(device, dtype)
    assert torch.equal(amp.float32_of(layer.weight), full)


@pytest.mark.parametrize(("name", "dtype"), cases(OPTIMIZERS, LOW))
def test_after_steps_it_is_the_master_also_without_its_optimizer(
    device: str, dtype: torch.dtype, name: str
) -> None:
    """Updates of 2^-10 are lost in the weights. A split24 has 2^-17 of a weight below 2^-2."""
    layer, full = made(device, dtype)
    optimizer = optimizer_of(layer, name)
    for _ in range(3):
        step(layer, optimizer)
    wanted = full - 3 * 2.0**-10
    close = 0.0 if name in ("float32", "FP16_Optimizer") else 2.0**-24
    if name in ("lean", "tiny", "micro"):
        close = 3 * 2.0**-19
    if name == "nano":
        close = 3 * 2.0**-14  # rounded at random: by less than a 16th of a weight's last place
    for _ in range(2):
        found = amp.float32_of(layer.weight, optimizer)
        assert (found - wanted).abs().max() <= close
        assert torch.equal(found, amp.float32_state_dict(layer)["weight"])
        optimizer = None


@pytest.mark.parametrize("name", ["exact", "float32"])
def test_a_written_weight_has_its_bits_for_the_optimizer_that_goes_on(
    device: str, name: str
) -> None:
    """The elements that were not written; alone, and for a new optimizer, the weight counts."""
    layer, _ = made(device, torch.bfloat16)
    optimizer = optimizer_of(layer, name)
    step(layer, optimizer)
    before = amp.float32_of(layer.weight)
    with torch.no_grad():
        layer.weight[0] = 0.5
    assert torch.equal(amp.float32_of(layer.weight), layer.weight.float())
    found = amp.float32_of(layer.weight, optimizer)
    assert torch.equal(found[1:], before[1:])
    assert not torch.equal(found[1:], layer.weight[1:].float())
    assert torch.equal(found[0].bfloat16(), layer.weight[0])


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_it_is_a_copy_laid_out_as_the_weight(device: str, dtype: torch.dtype, steps: int) -> None:
    layer = nn.Conv2d(4, 8, 3, bias=False).to(device, memory_format=torch.channels_last)
    if dtype != torch.float32:
        amp.prepare(layer, dtype)
    optimizer = amp.optim.SGD(layer.parameters(), lr=0.1, memory="float32")
    for _ in range(steps):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    weight, before = layer.weight.detach().clone(), amp.float32_of(layer.weight)
    found = amp.float32_of(layer.weight)
    assert not found.requires_grad
    assert found.dtype == torch.float32
    assert found.device == weight.device
    assert found.stride() == weight.stride()
    found.zero_()
    assert torch.equal(layer.weight, weight)
    assert torch.equal(amp.float32_of(layer.weight), before)


def test_a_tensor_without_bits_is_cast(device: str) -> None:
    table = torch.tensor([1.5, -0.0], dtype=torch.float16, device=device)
    assert torch.equal(amp.float32_of(table), table.float())


def test_wrong_arguments_are_named(device: str) -> None:
    layer, _ = made(device, torch.bfloat16)
    for wrong in (layer, "weight", None, [layer.weight]):
        with pytest.raises(
            TypeError, match=r"weight must be a tensor.* found a \w+; float32_state"
        ):
            amp.float32_of(wrong)
    for dtype in (torch.float64, torch.int64, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=rf"found {dtype}, which has no master.*\.float\(\)"):
            amp.float32_of(torch.ones(3, dtype=dtype, device=device))
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, found Li"):
        amp.float32_of(layer.weight, layer)


def test_an_optimizer_without_masters_leaves_those_of_another(device: str) -> None:
    """What is read for the other one is what it goes on with."""
    weight = nn.Parameter(torch.linspace(0.5, 2, 64, device=device).bfloat16())
    keeper = amp.optim.SGD([weight], lr=1e-4)
    other = amp.optim.SGD([weight], lr=0.5, master="none")
    for optimizer, grad in (keeper, 1.0), (other, 0.0):
        weight.grad = torch.full_like(weight, grad)
        optimizer.step()
    found = amp.float32_of(weight, keeper)
    assert not torch.equal(found, weight.float())
    weight.grad = torch.zeros_like(weight)
    keeper.step()
    assert torch.equal(amp.float32_of(weight), found)
