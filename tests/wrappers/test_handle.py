"""amp.init and its handle, amp.autocast: casts on and off, and Apex's other names.

Exact comparisons use small integers and powers of two, which every format here holds.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from handles import LOW, OPTIMIZERS, Start, scaled_backward, weight_on
from helpers import autocast_state
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import amp_mp as amp
from amp_mp.scaling import Backoff

pytestmark = pytest.mark.usefixtures("cast_products")


def product(weight: Tensor) -> Tensor:
    """2 x weight, in which a cast shows: a product of a size that a CPU casts."""
    twice = 2 * torch.eye(256, device=weight.device)
    return torch.mm(twice, weight.repeat(128, 128))[:2, :2]


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("switch", [amp.init, amp.autocast])
def test_casts_are_of_the_calling_thread(device: str, switch: Any) -> None:
    """A worker thread has an autocast region of its own, as README says."""
    weight = weight_on(device)

    def work() -> torch.dtype:
        with amp.autocast(device_type=device):
            return product(weight).dtype

    with switch(device_type=device):
        assert product(weight).dtype in LOW
        assert in_thread(lambda: product(weight)).dtype == torch.float32
        assert in_thread(work) in LOW
        assert in_thread(lambda: product(weight)).dtype == torch.float32
    with switch(device_type=device):
        assert in_thread(work) in LOW
    assert product(weight).dtype == torch.float32


# Switched off.


def test_a_disabled_handle_changes_nothing(device: str) -> None:
    before = autocast_state()
    handle = amp.init(enabled=False, device_type=device)
    assert autocast_state() == before
    assert not handle.is_active()
    assert (handle.has_cache, handle.cache) == (False, {})
    handle._clear_cache()
    with handle._disable_casts():
        assert autocast_state() == before
    weight = weight_on(device)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    loss = weight.sum() * float("inf")
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
        assert autocast_state() == before
        scaled_loss.backward()
    assert torch.isinf(weight.grad).all()
    optimizer.step()  # nothing is checked, nothing is skipped
    assert torch.isinf(weight).all()
    handle._deactivate()
    assert autocast_state() == before


# Casts.


@pytest.mark.parametrize("dtype", LOW)
def test_casts_happen_from_init_to_deactivate(
    start: Start, device: str, dtype: torch.dtype
) -> None:
    weight = weight_on(device)
    assert product(weight).dtype == torch.float32
    handle = start(dtype=dtype)
    assert handle.is_active()
    assert product(weight).dtype == dtype
    handle._deactivate()
    assert not handle.is_active()
    assert product(weight).dtype == torch.float32


def test_the_default_dtype_is_the_fast_one(start: Start, device: str) -> None:
    start()
    wanted = {"cuda": torch.float16, "cpu": torch.bfloat16}[device]
    assert product(weight_on(device)).dtype == wanted


@pytest.mark.parametrize("before", [(True, torch.float16, False), (False, torch.bfloat16, True)])
def test_deactivate_puts_the_threads_state_back(
    start: Start, device: str, before: tuple[bool, torch.dtype, bool]
) -> None:
    start(dtype=torch.bfloat16)._deactivate()  # the first in a process adds hooks that stay
    left = autocast_state()
    torch.set_autocast_enabled(device, before[0])
    torch.set_autocast_dtype(device, before[1])
    torch.set_autocast_cache_enabled(before[2])
    set_by_user, hooks = autocast_state(), len(torch_optimizer._global_optimizer_post_hooks)
    handle = start(dtype=torch.bfloat16, enable_caching=not before[2])
    assert autocast_state() != set_by_user
    assert torch.is_autocast_cache_enabled() is not before[2]
    handle._deactivate()
    assert autocast_state() == set_by_user
    handle._deactivate()  # the second time does nothing
    assert autocast_state() == set_by_user
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks
    torch.set_autocast_cache_enabled(left[0])
    torch.set_autocast_enabled(device, left[1][device][0])
    torch.set_autocast_dtype(device, left[1][device][1])


def test_casts_are_off_inside_scale_loss_and_disable_casts(start: Start, device: str) -> None:
    handle = start(dtype=torch.bfloat16, loss_scale=8.0)
    weight = weight_on(device)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for block in (
        handle.scale_loss(weight.sum(), optimizer),
        amp.casting.disable_casts(device),
        handle._disable_casts(),
    ):
        assert product(weight).dtype == torch.bfloat16
        with block:
            assert not handle.is_active()
            assert product(weight).dtype == torch.float32
        assert handle.is_active()
        assert product(weight).dtype == torch.bfloat16
    with pytest.raises(ZeroDivisionError), handle._disable_casts():
        1 // 0  # noqa: B018
    assert handle.is_active()


@pytest.mark.parametrize("fails_in", ["the step", "the closure"])
@pytest.mark.parametrize("name", ["torch SGD", "torch AdamW", "amp SGD", "amp AdamW"])
def test_casts_are_on_again_after_a_step_that_raised(
    start: Start, device: str, name: str, fails_in: str
) -> None:
    """Also while the exception is kept, whose traceback holds every frame of the step."""
    start(dtype=torch.bfloat16)
    weight = weight_on(device)
    optimizer = OPTIMIZERS[name]([weight])

    def closure() -> Tensor:
        if fails_in == "the closure":
            raise RuntimeError("no more data")
        loss = product(weight).sum()
        amp.casting.backward(loss)
        weight.data = torch.ones(3, 3, device=device)  # no longer of the gradient's shape
        return loss

    kept: Exception | None = None
    try:
        optimizer.step(closure)
    except (RuntimeError, ValueError) as error:
        kept = error
    assert kept is not None
    assert product(weight_on(device)).dtype == torch.bfloat16


def test_a_failed_step_outside_a_region_leaves_casts_off(device: str) -> None:
    with amp.autocast(device, torch.bfloat16):
        weight = weight_on(device)

    def closure() -> Tensor:
        raise RuntimeError("no more data")

    with pytest.raises(RuntimeError, match="no more data"):
        torch.optim.SGD([weight]).step(closure)
    assert not torch.is_autocast_enabled(device)


def test_autocast_is_torchs_own_with_the_fast_dtype(device: str) -> None:
    weight = weight_on(device)
    region = amp.autocast(device)
    assert isinstance(region, torch.autocast)
    with region:
        assert product(weight).dtype == {"cuda": torch.float16, "cpu": torch.bfloat16}[device]
        with amp.autocast(device, enabled=False):
            assert product(weight).dtype == torch.float32
    for dtype in LOW:
        with amp.autocast(device, dtype, cache_enabled=False):
            assert product(weight).dtype == dtype
            assert not torch.is_autocast_cache_enabled()
    assert product(weight).dtype == torch.float32


def test_without_a_device_type_the_gpu_is_meant_where_there_is_one() -> None:
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert amp.autocast().device == wanted
    assert amp.casting.disable_casts().device == wanted


@pytest.mark.parametrize("function", [amp.init, amp.autocast])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"device_type": "tpu"}, "device_type"),
        ({"dtype": torch.float64}, "dtype"),
        ({"dtype": torch.float32}, "dtype"),
    ],
)
def test_bad_arguments_are_named(
    function: Callable[..., Any], arguments: dict[str, Any], name: str
) -> None:
    before = autocast_state()
    with pytest.raises(ValueError, match=f"^{name} must"):
        function(**arguments)
    assert autocast_state() == before


@pytest.mark.parametrize("scale", [0, -1.0, "auto", float("nan")])
def test_a_bad_loss_scale_is_named_and_switches_nothing_on(scale: Any) -> None:
    before = autocast_state()
    with pytest.raises(ValueError, match="loss_scale"):
        amp.init(loss_scale=scale)
    assert autocast_state() == before


def test_verbose_says_what_is_switched_on(
    start: Start, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start(dtype=torch.bfloat16, verbose=True, loss_scale=8.0)
    said = capsys.readouterr().out
    assert all(word in said for word in ("bfloat16", device, "8"))


# Apex's other names.


def test_the_handle_has_apexs_members(start: Start, device: str, cast_products: None) -> None:
    handle = start(dtype=torch.bfloat16, loss_scale=8.0)
    assert handle.has_cache
    linear = nn.Linear(256, 256).to(device)
    linear(torch.ones(64, 256, device=device))
    assert {id(tensor) for tensor in handle.cache} == {id(p) for p in linear.parameters()}
    assert all(copy.dtype == torch.bfloat16 for copy in handle.cache.values())
    handle._clear_cache()
    assert handle.cache == {}
    assert handle._default_scaler.loss_scale == handle._default_scaler._loss_scale == 8.0
    handle._default_scaler._loss_scale = 4.0
    assert handle.loss_scaler.scale == 4.0
    with pytest.raises(ValueError, match="above 0"):
        handle._default_scaler.loss_scale = 0.0


def test_backward_on_the_unscaled_loss_warns_and_works(start: Start, device: str) -> None:
    handle = start(dtype=torch.bfloat16, loss_scale=8.0)
    weight = weight_on(device)
    optimizer, loss = torch.optim.SGD([weight]), weight.sum()
    with handle.scale_loss(loss, optimizer), pytest.warns(UserWarning, match="unscaled loss"):
        loss.backward(retain_graph=True)
    assert weight.grad is not None
    assert bool((weight.grad == 1 / 8).all()), "as the warning says"
    loss.backward()  # outside the block it is an ordinary loss


def test_a_wrapped_optimizer_scales_each_loss_by_its_own_scale(start: Start, device: str) -> None:
    handle = start(loss_scale=Backoff(init_scale=16.0))
    a, b = weight_on(device), weight_on(device)
    optimizer = handle.wrap_optimizer(torch.optim.SGD([a, b], lr=1.0), num_loss=2)
    with pytest.raises(RuntimeError, match=r"after handle\.wrap_optimizer"):
        handle.scale_loss(a.sum(), optimizer.optimizer).__enter__()
    before = a.detach().clone()
    scaled_backward(optimizer, a.sum())
    scaled_backward(optimizer, (a + b).sum() * float("inf"))
    assert [policy.scale for policy in optimizer.loss_scalers] == [16.0, 8.0]
    with pytest.raises(RuntimeError, match=r"num_loss=2 times before a step.*num_loss=3"):
        optimizer.scale_loss(a.sum()).__enter__()
    optimizer.step()
    assert torch.equal(a, before), "one loss has overflowed"
    optimizer.zero_grad()
    for loss in (a.sum(), (a + b).sum()):
        scaled_backward(optimizer, loss)
    assert a.grad is not None
    assert bool((a.grad == 2).all()), "each unscaled once, by its own scale"
    optimizer.step()
    assert torch.equal(a, before - 2)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    with pytest.raises(NotImplementedError, match="FP16_Optimizer"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("num_loss", [0, -1, 1.5, True])
def test_a_wrong_number_of_losses_is_refused(start: Start, device: str, num_loss: Any) -> None:
    handle = start(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="num_loss must be a whole number above 0"):
        handle.wrap_optimizer(torch.optim.SGD([weight_on(device)]), num_loss)
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer.*found list"):
        handle.wrap_optimizer([], 1)
