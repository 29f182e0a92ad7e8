"""apex.parallel on two processes of this machine, and its batch norm on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import distributed as dist
from torch import nn

from amp_mp.apex import parallel


def two_processes() -> dict[Any, Any]:
    rank = dist.get_rank()
    found: dict[Any, Any] = {}
    options: list[dict[str, Any]] = [
        {"message_size": 10, "num_allreduce_streams": 2, "prof": True},
        {"allreduce_always_fp32": True},
        {"gradient_average": False},
        {"gradient_predivide_factor": 2.0},
        {"gradient_average": False, "gradient_predivide_factor": 2.0},
    ]
    for i, given in enumerate(options):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        wrapped = parallel.DistributedDataParallel(model, **given)
        wrapped(torch.randn(6, 4)).sum().backward()
        mean = model[1].running_mean.clone()
        found[i] = (model[2].bias.grad.clone(), model[0].weight.detach().clone(), mean)
        wrapped(torch.randn(6, 4))
    # float16 gradients whose sum float16 does not have
    large = nn.Linear(1, 1).half()
    wrapped = parallel.DistributedDataParallel(large, allreduce_always_fp32=True)
    (wrapped(torch.full((1, 1), 4e4).half()) * 1.0).sum().backward()
    found["large"] = large.weight.grad.clone()
    unused = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    unused.forward = lambda x: unused[0](x)  # type: ignore[method-assign]
    delayed = parallel.DistributedDataParallel(unused, delay_allreduce=True)
    for _ in range(2):
        delayed(torch.ones(1, 1)).backward()
    delayed.disable_allreduce()
    unused.zero_grad()
    delayed(torch.full((1, 1), rank + 1.0)).backward()
    found["own"] = unused[0].weight.grad.clone()
    delayed.enable_allreduce()
    torch.manual_seed(rank)
    reduced = nn.Linear(2, 1)
    reducer = parallel.Reducer(reduced)
    reduced(torch.full((1, 2), float(rank))).backward()
    reducer.reduce()
    found["reducer"] = (reduced.weight.grad.clone(), reduced.weight.detach().clone())
    grads = [torch.full((2,), float(rank)), torch.tensor([rank * 2.0], dtype=torch.float16)]
    parallel.Reducer(grads).reduce()
    found["list"] = grads
    for name, value in (("shared_param", True), ("retain_allreduce_buffers", True)):
        with pytest.raises(ValueError, match=f"{name}=True is not supported: "):
            parallel.DistributedDataParallel(model, **{name: value})
    with pytest.raises(TypeError, match="no argument 'nothing'"):
        parallel.DistributedDataParallel(model, nothing=1)
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("distributed")
def test_two_processes() -> None:
    zero, one = on_ranks(2, two_processes)
    for i, bias in enumerate((6.0, 6.0, 12.0, 6.0, 6.0)):
        for found in (zero[i], one[i]):
            assert torch.allclose(found[0], torch.full((2,), bias))
        assert torch.equal(zero[i][1], one[i][1])  # the weights are those of process 0
        assert not torch.equal(zero[i][2], one[i][2])  # running means stay each process's own
    assert zero["large"].item() == one["large"].item() == 40000.0
    assert (zero["own"].item(), one["own"].item()) == (1.0, 2.0)
    for found in (zero, one):
        assert torch.equal(found["reducer"][0], torch.full((1, 2), 0.5))
        assert torch.equal(found["reducer"][1], zero["reducer"][1])
        assert [g.tolist() for g in found["list"]] == [[0.5, 0.5], [1.0]]


def test_syncbn_on_one_process() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4)))
    x = torch.randn(2, 3, 5, 5)
    wanted = plain(x)
    other = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4)))
    converted = parallel.convert_syncbn_model(other)
    assert type(converted[1]) is type(converted[2][0]) is parallel.SyncBatchNorm
    converted.load_state_dict({**plain.state_dict(), **dict(plain.named_parameters())})
    torch.testing.assert_close(converted(x), wanted)
    assert type(parallel.convert_syncbn_model(nn.BatchNorm1d(3))) is parallel.SyncBatchNorm


@pytest.mark.parametrize("shape", [(6, 3), (4, 5, 3), (2, 5, 4, 3)])
def test_syncbn_of_channels_in_the_last_dimension(shape: tuple[int, ...]) -> None:
    """Also converted, and with the relu that Apex fuses, of a second tensor added or not."""
    x, z = torch.randn(shape, requires_grad=True), torch.randn(shape)
    weight, bias = torch.rand(3), torch.randn(3)
    flat = x.reshape(-1, 3)
    wanted = (flat - flat.mean(0)) / (flat.var(0, unbiased=False) + 1e-5).sqrt()
    wanted = (wanted * weight + bias).view(shape)
    plain = nn.BatchNorm2d(3)
    converted = parallel.convert_syncbn_model(nn.Sequential(plain), channel_last=True)[0]
    fused = parallel.SyncBatchNorm(3, 1e-5, 0.1, channel_last=True, fuse_relu=True)
    for norm in (converted, fused):
        norm.load_state_dict({**plain.state_dict(), "weight": weight, "bias": bias})
        assert isinstance(norm, nn.SyncBatchNorm)
    torch.testing.assert_close(converted(x), wanted)
    torch.testing.assert_close(fused(x), wanted.relu())
    torch.testing.assert_close(fused(x, z), (wanted + z).relu())
    assert fused(x).shape == shape
    fused.eval()
    mean, var = fused.running_mean, fused.running_var
    wanted = ((flat - mean) / (var + 1e-5).sqrt() * weight + bias).view(shape).relu()
    torch.testing.assert_close(fused(x), wanted)
    first = parallel.SyncBatchNorm(3, fuse_relu=True)
    torch.testing.assert_close(first(flat), nn.BatchNorm1d(3)(flat).relu())
