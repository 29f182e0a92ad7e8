"""Tests of the pretend GPU itself. emulators/test_pretend_gpu.py runs them."""

from __future__ import annotations

import pytest
import torch
from pretend_gpu.device import ledger
from torch import Tensor

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
