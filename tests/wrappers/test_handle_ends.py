"""Where an amp.init ends, alone and among others, and what a file keeps of its handle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from handles import Start, weight_on
from helpers import autocast_state
from torch import nn

import amp_mp as amp
from amp_mp.scaling import Backoff


def in_force(device: str) -> tuple[Any, ...]:
    """The casts of this thread, and the policies of two operators that the tables differ in."""
    table = amp.policies(device)
    return autocast_state(), table.get("aten::softmax.int"), table.get("aten::exp")


@pytest.mark.parametrize("times", [1, 3])
def test_a_notebooks_cell_is_switched_off_at_once(device: str, times: int) -> None:
    before = autocast_state()
    for _ in range(times):
        handle = amp.init(device_type=device, dtype=torch.bfloat16)
    assert handle.is_active()
    handle.deactivate()
    assert not handle.is_active()
    assert autocast_state() == before


def test_casts_end_with_the_block_also_after_an_error(device: str) -> None:
    before = autocast_state()
    with amp.init(device_type=device, dtype=torch.bfloat16) as handle:
        assert handle.is_active()
    assert autocast_state() == before
    with pytest.raises(ZeroDivisionError), amp.init(device_type=device, dtype=torch.bfloat16):
        1 // 0  # noqa: B018
    assert autocast_state() == before
    with pytest.raises(RuntimeError, match=r"was deactivated; amp\.init\(\) switches"), handle:
        pass


def test_a_script_that_dropped_its_handle_casts_on_after_a_block(device: str) -> None:
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    amp.init(device_type=device, dtype=torch.float16)
    found = in_force(device)
    with amp.init(device_type=device, dtype=torch.bfloat16, policies="torch"):
        pass
    assert in_force(device) == found
    torch.set_autocast_enabled(device, before[0])
    torch.set_autocast_dtype(device, before[1])
    amp.casting.uninstall()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_handles_end_in_any_order(device: str, order: tuple[int, ...]) -> None:
    settings: list[dict[str, Any]] = [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "policies": "torch", "enable_caching": False},
        {"dtype": torch.bfloat16, "allow_banned": True},
    ]
    amp.init(device_type=device, dtype=torch.bfloat16).deactivate()  # adds what stays
    before, alone = in_force(device), []
    for each in settings:
        with amp.init(device_type=device, **each):
            alone.append((in_force(device), amp.policies(device)["aten::binary_cross_entropy"]))
    handles = [amp.init(device_type=device, **each) for each in settings]
    left = [0, 1, 2]
    for ends in order:
        handles[ends].deactivate()
        left.remove(ends)
        found = in_force(device), amp.policies(device)["aten::binary_cross_entropy"]
        assert (found == alone[left[-1]]) if left else (found[0] == before)


def test_a_change_for_a_block_leaves_what_init_allowed(device: str) -> None:
    with amp.init(device_type=device, dtype=torch.bfloat16, allow_banned=True):
        with amp.set_policy("aten::gelu", "float32"):
            pass
        assert amp.policies(device)["aten::binary_cross_entropy"] == "float32"


def test_wrapped_optimizers_scales_are_resumed_or_refused_before_any_change(
    start: Start, device: str
) -> None:
    def script() -> tuple[Any, Any]:
        handle = start(loss_scale=Backoff(init_scale=16.0))
        weight = weight_on(device)
        return handle, handle.wrap_optimizer(torch.optim.SGD([weight], lr=1.0), num_loss=2)

    handle, optimizer = script()
    optimizer.loss_scalers[1].scale = 4.0
    kept = handle.state_dict()
    resumed, again = script()
    resumed.load_state_dict(kept)
    assert [policy.scale for policy in again.loss_scalers] == [16.0, 4.0]
    kept["loss_scalers"][0]["scale"] = 2.0
    kept["loss_scalers"][1]["scale"] = float("nan")
    with pytest.raises(ValueError, match="scale"):
        resumed.load_state_dict(kept)
    assert [policy.scale for policy in again.loss_scalers] == [16.0, 4.0]
    with pytest.raises(ValueError, match=r"expected loss_scalers of 1 losses, found 2; call wrap"):
        start(loss_scale=2.0).load_state_dict(kept)


def test_a_disabled_handle_has_every_attribute_of_an_enabled_one(device: str) -> None:
    with amp.init(device_type=device, dtype=torch.bfloat16) as on:
        pass
    with amp.init(enabled=False) as off:
        assert vars(off).keys() == vars(on).keys()
        assert off.state_dict() == {}
        off.load_state_dict(on.state_dict())
        assert off.loss_scaler.scale == 1.0
    off.deactivate()


@pytest.mark.parametrize("policies", ["apex", "torch"])
def test_small_products_follow_the_rule_of_their_table(policies: str) -> None:
    """ "apex": float32 where that is faster on a CPU. "torch": low precision, whatever the size."""
    small, layer = torch.ones(4, 4), nn.Linear(4, 4)
    wanted = {"apex": torch.float32, "torch": torch.bfloat16}[policies]
    with amp.init(device_type="cpu", dtype=torch.bfloat16, policies=policies):
        products = [small @ small, small[0] @ small, torch.addmm(small, small, small), layer(small)]
        assert {product.dtype for product in products} == {wanted}
