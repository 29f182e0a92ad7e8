"""Tests of the pretend GPU itself. emulators/test_pretend_gpu.py runs them."""

from __future__ import annotations

import ctypes

import pytest
import torch
from pretend_gpu.device import delayed_streams, ledger
from torch import Tensor, nn

from amp_mp import _C


def ones(*size: int) -> Tensor:
    return torch.ones(*size, device="cuda")


def test_operators_that_compute_are_counted_and_views_are_not() -> None:
    x, wide = ones(4, 6), torch.ones(3)
    with ledger() as found:
        y = x.view(6, 4).t()[1:].unsqueeze(0).detach()
        assert (y.shape, y.data_ptr()) == ((1, 3, 6), x[0, 1:].data_ptr())
        torch.empty(7, device="cuda")
    assert (found.operators, found.syncs) == ([], [])
    with ledger() as found:
        x.mul_(2).sum()
        torch._foreach_add_([x, y], 1.0)
        wide.add_(1)  # the CPU's
    assert found.operators == [
        "aten::mul.out",
        "aten::sum.IntList_out",
        "aten::_foreach_add_.Scalar",
    ]
    assert (found.syncs, found.launches) == ([], 0)


def test_what_waits_is_counted_by_name() -> None:
    x = ones(3)
    with ledger() as found:
        x[x > 0] = 2.0  # masked_fill: the host need not know how many
        x.add_(torch.tensor(1.0))
    assert (found.syncs, found.waits) == ([], 0)
    with ledger() as found:
        assert x.sum().item() == 9
        assert x.cpu().device.type == "cpu"
        torch.ones(3).cuda()
        x[x > 0]
        torch.equal(x, x)
        torch.cuda.synchronize()
    down, up = "copy_ to the host", "copy_ to the device"
    names = ["aten::_local_scalar_dense", down, up, "aten::nonzero", "aten::equal"]
    assert found.syncs == [*names, "torch.cuda.synchronize"]
    assert found.waits == 6


def test_memory_is_poisoned_until_it_is_written() -> None:
    assert torch.empty(100, device="cuda").isnan().all()
    assert (torch.empty(100, device="cuda", dtype=torch.int32) == -1).all()


def test_two_devices_and_the_host_do_not_mix() -> None:
    first, second = ones(2), torch.ones(2, device="cuda:1")
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device == second.device
    assert torch.empty(1, device="cuda").device == first.device == torch.device("cuda:0")
    assert torch.equal(first, second.to("cuda:0"))
    for other in (second, torch.ones(2)):
        with pytest.raises(RuntimeError, match="same device"):
            first + other
        with pytest.raises(ValueError, match="must be on cuda:0"):
            _C.measure([first, other])


def test_results_that_are_resized_and_results_in_place_arrive() -> None:
    x, out = ones(3, 2), torch.empty(0, device="cuda")
    torch.add(x, 1, out=out)
    assert out.cpu().tolist() == [[2.0, 2.0]] * 3
    index = out.resize_(0).long()
    torch.sort(torch.tensor([2.0, 1.0], device="cuda"), out=(out, index))
    assert (out.tolist(), index.tolist()) == ([1.0, 2.0], [1, 0])
    assert x.resize_(4, 2).device.type == "cuda"
    assert x[:3].eq(1).all()
    assert x[3:].isnan().all()


def test_training_on_it_gives_the_numbers_of_the_cpu() -> None:
    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3))
        data = torch.randn(8, 5)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = model(data.to(device)).log_softmax(-1).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    for found, wanted in zip(trained("cuda"), trained("cpu"), strict=True):
        torch.testing.assert_close(found, wanted)


def test_autocast_casts_as_on_a_gpu() -> None:
    x = ones(4, 4).requires_grad_()
    with torch.autocast("cuda", torch.float16):
        product = x @ x
        assert product.dtype == torch.float16
        assert product.softmax(-1).dtype == torch.float32
    product.softmax(-1, dtype=torch.float32).square().sum().backward()
    assert x.grad.isfinite().all()


def test_a_captured_launch_is_repeated_with_the_memory_of_its_time() -> None:
    source, target = ones(1000), torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with ledger() as found, torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        between = torch.empty(1000, device="cuda")
        _C.copy_([between], [source], multiplier=3.0)
        _C.copy_([target], [between])
        del between
    assert not torch.cuda.is_current_stream_capturing()
    assert (graph.launches, found.launches, found.operators) == (2, 0, [])
    assert target.eq(0).all()
    with ledger() as found:
        graph.replay()
    assert target.eq(3).all()
    assert (found.launches, found.operators, found.waits) == (2, [], 0)
    source.fill_(5)
    graph.replay()
    assert target.eq(15).all()


def test_a_graph_that_reads_freed_memory_is_found_out() -> None:
    source, target = ones(100), ones(100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _C.copy_([target], [source])
    del source
    graph.replay()
    assert target.isnan().all()


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: x.item(),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(1), non_blocking=True),
        lambda x: x.nonzero(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.CUDAGraph().capture_begin(),
    ],
)
def test_a_capture_refuses_what_a_graph_would_not_hold(refused: object) -> None:
    x, graph = ones(1), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.view(1, 1).t()
        with pytest.raises(RuntimeError, match=r"captur"):
            refused(x)
    assert x.eq(1).all()
    assert graph.launches == 0


def test_a_graph_is_recorded_once_and_replayed_when_it_is_complete() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="has not been captured"):
        graph.replay()
    with torch.cuda.graph(graph):
        pass
    with pytest.raises(RuntimeError, match="recorded already"):
        graph.capture_begin()


def test_operators_of_torch_are_captured_and_repeated() -> None:
    x, graph = ones(3).requires_grad_(), torch.cuda.CUDAGraph()
    total = ones(3)
    with torch.cuda.graph(graph):
        loss = (x * 2).relu().sum()
        (grad,) = torch.autograd.grad(loss, [x])
        total.add_(grad)
        scaled = torch._foreach_mul([total, grad], 3.0)
        filled = torch.zeros(3, device="cuda")
    assert total.eq(1).all()
    for step in range(1, 4):
        x.data.fill_(step if step < 3 else -1)
        graph.replay()
        slope = 2.0 if step < 3 else 0.0
        assert loss.item() == 3 * slope * step
        assert total.tolist() == [1.0 + 2 * min(step, 2)] * 3
        assert [t[0].item() for t in scaled] == [3 * total[0].item(), 3 * slope]
        assert filled.eq(0).all()


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
