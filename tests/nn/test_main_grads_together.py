"""attach_main_grads together with optimizers, scalers, casting, compilation, threads and DDP."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import amp_mp as amp

LOW = (torch.bfloat16, torch.float16)
BFLOAT16 = torch.bfloat16


def mlp(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1))
    return amp.prepare(model.to(device), dtype) if dtype in LOW else model.to(device)


def train(model: nn.Module, optimizer: Any, scaler: Any, steps: int, parts: int) -> list[float]:
    """The losses, step by step; each step is made of several micro-batches."""
    weight = next(model.parameters())
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        losses.append(0.0)
        for _ in range(parts):
            x = torch.randn(16, 8, generator=generator).to(weight.device)
            out = model(x.to(weight.dtype)).float()
            loss = nn.functional.mse_loss(out, x[:, :2].prod(1, keepdim=True).tanh()) / parts
            scaler.scale(loss).backward()
            losses[-1] += loss.item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def clip_first(scaler: Any, model: nn.Module) -> Any:
    step = scaler.step

    def clip_and_step(optimizer: torch.optim.Optimizer) -> None:
        scaler.unscale_(optimizer)
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.5).isfinite()
        step(optimizer)

    scaler.step = clip_and_step
    return scaler


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("module", [amp, torch.amp], ids=["amp_mp", "torch"])
@pytest.mark.parametrize("dtype", LOW)
def test_training_follows_float32(dtype: torch.dtype, module: Any, clip: bool, device: str) -> None:
    def run(dtype: torch.dtype) -> list[float]:
        model = mlp(device, dtype)
        memory = {"memory": "exact"} if dtype in LOW else {}
        optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, **memory)
        scaler = module.GradScaler(device, init_scale=2.0**10)
        with amp.attach_main_grads(model):
            train_scaler = clip_first(scaler, model) if clip else scaler
            return train(model, optimizer, train_scaler, steps=25, parts=4)

    found, wanted = run(dtype), run(torch.float32)
    assert sum(wanted[-5:]) < 0.5 * sum(wanted[:5])
    for a, b in zip(found, wanted, strict=True):
        assert abs(a - b) < 0.05 * b


@pytest.mark.parametrize("kind", ["release", "measure"])
def test_an_attached_optimizer_makes_the_same_steps(kind: str, device: str) -> None:
    def run(attach: bool) -> Any:
        model = mlp(device, BFLOAT16)
        optimizer = amp.optim.AdamW(model.parameters(), memory="exact", check_overflow=True)
        with amp.attach_main_grads(model):
            if attach:
                optimizer.attach(model, **{kind: True})
            train(model, optimizer, amp.GradScaler(enabled=False), steps=3, parts=1)
        return raw_bytes([model.state_dict(), optimizer.state_dict()])

    assert run(True) == run(False)


def test_fp16_optimizer_hands_float32_gradients_to_its_masters(device: str) -> None:
    model = mlp(device, torch.float16)
    optimizer = amp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    with amp.attach_main_grads(model):
        x = torch.ones(4, 8, device=device, dtype=torch.float16)
        optimizer.backward(model(x).float().square().mean())
        masters = optimizer.param_groups[0]["params"]
        for master, param in zip(masters, model.parameters(), strict=True):
            assert param.grad is not None
            assert param.grad.dtype == torch.float32
            scale = optimizer.loss_scale
            torch.testing.assert_close(master.grad, param.grad / scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("low", [BFLOAT16, None], ids=["low-precision", "float32"])
@pytest.mark.parametrize("table", ["apex", "torch.autocast"])
def test_casting_runs_as_it_does_without(
    table: str, low: torch.dtype | None, request: pytest.FixtureRequest, device: str
) -> None:
    if table == "apex":
        request.getfixturevalue("apex")
    layer = nn.Linear(64, 48).to(device, low or torch.float32)
    for rows in (2, 4096):  # on a CPU Apex's table leaves the small product in float32
        x = torch.randn(rows, 64, device=device, requires_grad=True)
        results = []
        for attach in (False, True):
            layer.zero_grad()
            x.grad = None
            handle = amp.attach_main_grads(layer) if attach else None
            with torch.autocast(device, BFLOAT16):
                out = layer(x)
                amp.casting.backward(out.float().sin().sum())
            results.append([out, x.grad, layer.weight.grad, layer.bias.grad])
            if handle is not None:
                handle.remove()
        (out, grad_x, *rounded), (same_out, same_grad_x, *found) = results
        assert torch.equal(out, same_out)
        assert torch.equal(grad_x, same_grad_x)
        for a, b in zip(found, rounded, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.to(b.dtype), b, rtol=2.0**-7, atol=1e-2)


def test_threads_that_share_a_weight_lose_nothing() -> None:
    layer = nn.Linear(512, 512, bias=False).to(BFLOAT16)
    x = torch.ones(64, 512, dtype=BFLOAT16)

    def work() -> None:
        for _ in range(20):
            layer(x).backward(x)

    with amp.attach_main_grads(layer):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (layer.weight.grad == 4 * 20 * 64).all()


@pytest.mark.slow
def test_compiled_models_keep_float32_gradients() -> None:
    layer = nn.Linear(4, 3).to(BFLOAT16)
    x = torch.ones(2, 4, dtype=BFLOAT16)
    with amp.attach_main_grads(layer):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            compiled(x).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32
        assert (layer.weight.grad == 4).all()


def test_distributed_data_parallel_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4).to(BFLOAT16)
    init = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=init, rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(layer)
        with pytest.raises(ValueError, match=r"model\.0 is a DistributedDataParallel, whose"):
            amp.attach_main_grads(nn.Sequential(wrapped))
        x = torch.ones(2, 4, dtype=BFLOAT16)
        with amp.attach_main_grads(layer):
            with torch.no_grad():
                wrapped(x)
            with pytest.raises(RuntimeError, match="takes no float32 gradients"):
                wrapped(x)
    finally:
        torch.distributed.destroy_process_group()
    assert layer.weight.grad_dtype == BFLOAT16
