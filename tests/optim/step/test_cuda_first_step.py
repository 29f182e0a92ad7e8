"""What the first steps on a GPU cost: copies of step counts, hooks, and waits after an error."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers import PRETEND_GPU
from torch import nn
from watching import watching

import amp_mp as amp

DEVICE = "cuda"
pytestmark = pytest.mark.usefixtures("cuda")


def params_of(count: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(8, device=DEVICE)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def storages(optimizer: Any) -> set[int]:
    return {state["step"].untyped_storage().data_ptr() for state in optimizer.state.values()}


@pytest.mark.parametrize("make", ["step", "init_state", "load_state_dict of torch"])
def test_all_new_step_counts_are_one_tensor(make: str) -> None:
    params = params_of(10)
    optimizer = amp.optim.AdamW(params)
    if make == "init_state":
        optimizer.init_state()
    else:
        optimizer.step()
    if make == "load_state_dict of torch":
        theirs = torch.optim.AdamW(params)
        theirs.step()
        optimizer.load_state_dict(theirs.state_dict())
        optimizer.step()
    assert len(storages(optimizer)) == 1
    wanted = {"step": 1.0, "init_state": 0.0}.get(make, 2.0)
    assert [float(state["step"]) for state in optimizer.state.values()] == [wanted] * 10


def test_a_first_step_of_more_tensors_copies_no_more_numbers() -> None:
    seen = []
    for count in (2, 8):
        optimizer = amp.optim.SGD(params_of(count), lr=0.1)  # without states of its own
        with watching() as found:
            optimizer.step()
        seen.append(found.others)
    assert seen[0] == seen[1]


def test_what_was_made_together_is_loaded_and_stepped_alone() -> None:
    """A copy of one parameter's state does not depend on the others'."""
    params = params_of(3)
    optimizer = amp.optim.AdamW(params)
    optimizer.step()
    kept = {name: value.clone() for name, value in optimizer.state[params[0]].items()}
    optimizer.state[params[0]] = kept
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2.0, 2.0, 2.0]


def test_a_step_that_could_not_be_queued_is_not_waited_for() -> None:
    optimizer = amp.optim.AdamW(params_of(1), check_overflow=True)
    optimizer.step()
    reports, group = optimizer._stepper.native.log.reports, optimizer.param_groups[0]
    assert reports is not None
    assert reports.newest(True) is not None
    group["lr"] = torch.ones(2, device=DEVICE)
    with pytest.raises(ValueError, match="lr must be one number"):
        optimizer.step()
    with watching() as found:
        report = reports.newest(True)
    assert found.waits == 0
    group["lr"] = 0.1
    optimizer.step()
    later = reports.newest(True)
    assert report is not None
    assert later is not None
    assert (report.number, later.number) == (1, 2)


@pytest.mark.skipif(not PRETEND_GPU, reason="a real GPU says neither")
def test_the_host_asks_each_device_about_its_own_stream() -> None:
    """On a new thread device 0 is the current one: a question there would open a context."""
    import amp_mp_pretend_gpu as gpu

    param = nn.Parameter(torch.zeros(4, device="cuda:1"))
    param.grad = torch.ones_like(param)
    optimizer = amp.optim.AdamW([param], max_grad_norm=1.0)
    for _ in range(2):
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        assert gpu.asked_device() == 1


@pytest.mark.skipif(not PRETEND_GPU, reason="a real GPU cannot be asked for this")
@pytest.mark.parametrize("has_memory", [True, False])
def test_memory_of_the_host_is_allocated_beside_a_capture_or_refused_alone(
    has_memory: bool,
) -> None:
    """Neither ends another thread's capture, or is reported by the next kernel."""
    import amp_mp_pretend_gpu as gpu

    error = gpu.allocate_on_host(beside_a_capture=has_memory, has_memory=has_memory)
    assert error == ("" if has_memory else "out of memory")
    params = params_of(2)
    amp.optim.AdamW(params, max_grad_norm=1.0).step()
    assert all(bool((p < 1).all()) for p in params)


@pytest.mark.skipif(not PRETEND_GPU, reason="the driver of a real GPU is as it is")
@pytest.mark.parametrize("stepped", [False, True])
def test_a_driver_that_is_too_old_is_named_with_both_versions(stepped: bool) -> None:
    import amp_mp_pretend_gpu as gpu

    params = params_of(2)
    optimizer = amp.optim.AdamW(params, max_grad_norm=1.0)
    if stepped:
        optimizer.step()
    before = [p.detach().clone() for p in params]
    gpu.set_driver(12040)
    try:
        with pytest.raises(RuntimeError, match="version is insufficient") as error:
            optimizer.step()
    finally:
        gpu.set_driver(13000)
    assert "kernels need CUDA 13.0, this driver has 12.4; update the driver" in str(error.value)
    assert all(torch.equal(p, kept) for p, kept in zip(params, before, strict=True))
    optimizer.step()
