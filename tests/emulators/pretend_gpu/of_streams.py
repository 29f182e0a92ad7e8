"""Tests of the pretend GPU's delayed streams. emulators/test_pretend_gpu.py runs them."""

from __future__ import annotations

import ctypes

import pytest
import torch
from pretend_gpu.device import delayed_streams
from torch import Tensor

from amp_mp import _C


def ones(*size: int) -> Tensor:
    return torch.ones(*size, device="cuda")


def tripled(x: Tensor) -> Tensor:
    """By a kernel of amp_mp's."""
    out = torch.empty_like(x)
    _C.copy_([out], [x], multiplier=3.0)
    return out


def on_host(x: Tensor) -> list[float]:
    """What is in the memory now, without waiting."""
    return list((ctypes.c_float * x.numel()).from_address(x.data_ptr()))


@pytest.mark.parametrize("seed", range(5))
def test_delayed_kernels_run_when_their_stream_is_waited_for(seed: int) -> None:
    stream = torch.cuda.Stream()
    waits = [
        torch.cuda.synchronize,
        torch.cuda.default_stream().synchronize,
        lambda: torch.cuda.default_stream().record_event().synchronize(),
        lambda: stream.wait_stream(torch.cuda.default_stream()) or stream.synchronize(),
        lambda: ones(1).item(),
    ]
    with delayed_streams(seed):
        x = ones(2)
        for wait in waits:
            y = tripled(x)
            assert not torch.cuda.current_stream().query()
            stream.synchronize()
            assert on_host(y) != [3.0, 3.0]
            wait()
            assert on_host(y) == [3.0, 3.0]
        y = tripled(x)
    assert on_host(y) == [3.0, 3.0]


def test_delayed_streams_run_in_every_order_that_events_permit() -> None:
    def outcome(seed: int, ordered: bool) -> float:
        with delayed_streams(seed):
            x, first, second = ones(1), torch.cuda.Stream(), torch.cuda.Stream()
            target = torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(first):
                _C.copy_([target], [x], multiplier=2.0)
            if ordered:
                second.wait_stream(first)
            with torch.cuda.stream(second):
                _C.copy_([target], [x], multiplier=5.0)
            torch.cuda.synchronize()
            return on_host(target)[0]

    assert {outcome(seed, False) for seed in range(30)} == {2.0, 5.0}
    assert {outcome(seed, True) for seed in range(30)} == {5.0}


def test_operators_of_torch_are_delayed_as_kernels_are() -> None:
    def outcome(seed: int, ordered: bool) -> list[float]:
        with delayed_streams(seed):
            x, beside = ones(2), torch.cuda.Stream()
            if ordered:
                beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                y = torch.cat([x * 2, x.add(1.5).clamp(max=2.0)]).sum()
                total = torch._foreach_add([y, y], 1.0)[1].add_(0.5).view(1)
            torch.cuda.synchronize()
            return on_host(total)

    assert {tuple(outcome(seed, True)) for seed in range(30)} == {(9.5,)}
    assert len({str(outcome(seed, False)) for seed in range(30)}) > 1


def test_operators_that_are_delayed_refuse_what_does_not_fit_at_their_call() -> None:
    with delayed_streams(1):
        x, wide = ones(2), torch.ones(2, device="cuda", dtype=torch.long)
        with pytest.raises(RuntimeError, match="size of tensor"):
            x + ones(3)
        with pytest.raises(RuntimeError, match="can't be cast"):
            wide.mul_(0.5)
        assert torch.equal(x + wide, ones(2) * 2)


@pytest.mark.parametrize("records", [False, True])
def test_memory_that_another_stream_uses_has_to_be_recorded(records: bool) -> None:
    def outcome(seed: int) -> bool:
        with delayed_streams(seed):
            x, beside = ones(1), torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                y = tripled(x)
                if records:
                    x.record_stream(beside)
            del x
            torch.cuda.synchronize()
            return on_host(y) == [3.0]

    assert {outcome(seed) for seed in range(30)} == ({True} if records else {True, False})


def test_delayed_replays_and_memory_that_is_freed_keep_their_streams_order() -> None:
    with delayed_streams(1):
        source, target, graph = ones(1), ones(1), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            between = tripled(source)
            _C.copy_([target], [between])
        graph.replay()
        assert on_host(target) == [1.0]
        x = tripled(tripled(ones(1)))  # two are freed before they are read
        torch.cuda.synchronize()
        assert (on_host(target), on_host(x)) == ([3.0], [9.0])


def test_memory_that_is_freed_is_handed_out_at_once_to_its_own_stream() -> None:
    with delayed_streams(1):
        x, beside = tripled(ones(1)), torch.cuda.Stream()
        before = x.data_ptr()
        del x
        with torch.cuda.stream(beside):
            assert torch.empty(1, device="cuda").data_ptr() != before
        x = torch.empty(1, device="cuda")
        assert x.data_ptr() == before
        _C.copy_([x], [ones(1)], multiplier=7.0)
        torch.cuda.synchronize()
        assert on_host(x) == [7.0]


def test_memory_that_is_recorded_makes_no_stream_wait() -> None:
    """An order that only the pretend GPU knew would hide a wait that is missing."""

    def outcome(seed: int) -> float:
        with delayed_streams(seed):
            x, beside, target = ones(1), torch.cuda.Stream(), torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(beside):
                _C.copy_([target], [x], multiplier=2.0)
                x.record_stream(beside)
            del x
            _C.copy_([target], [ones(1)], multiplier=5.0)
            torch.cuda.synchronize()
            return on_host(target)[0]

    assert {outcome(seed) for seed in range(30)} == {2.0, 5.0}
