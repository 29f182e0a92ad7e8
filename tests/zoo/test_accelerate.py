"""amp_mp in a loop of Accelerate: one process, and FSDP2 on two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from helpers import raw_bytes
from torch import nn

import amp_mp as amp

BF16 = torch.bfloat16


def forget() -> None:
    """Accelerate keeps its settings for the process."""
    for each in (AcceleratorState, GradientState, PartialState):
        each._reset_state()


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    yield
    forget()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))


def batches(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 16, generator=generator).to(dtype) for _ in range(count)]


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, dtype: torch.dtype, count: int = 8
) -> list[float]:
    losses = []
    for x in batches(count, dtype):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x).float(), x.float().mean(1, keepdim=True))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_a_prepared_model_gets_the_bits_of_a_plain_loop(memory: str, every: int) -> None:
    def made() -> tuple[nn.Module, amp.optim.AdamW]:
        model = amp.prepare(network(), BF16)
        return model, amp.optim.AdamW(model.parameters(), memory=memory, max_grad_norm=0.1)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    model, optimizer = accelerator.prepare(*made())
    train(accelerator, model, optimizer, BF16)
    plain, plain_optimizer = made()
    for step, x in enumerate(batches(8, BF16), 1):
        loss = nn.functional.mse_loss(plain(x).float(), x.float().mean(1, keepdim=True))
        (loss / every).backward()
        if step % every == 0:
            plain_optimizer.step()
            plain_optimizer.zero_grad()
    assert raw_bytes(model.state_dict()) == raw_bytes(plain.state_dict())


def test_save_state_and_load_state_keep_every_bit(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = amp.prepare(network(), BF16)
    optimizer = amp.optim.AdamW(model.parameters(), memory="lean")
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer, BF16)
    accelerator.save_state(str(tmp_path))
    through = train(accelerator, model, optimizer, BF16)
    after = raw_bytes(model.state_dict())
    accelerator.load_state(str(tmp_path))
    assert train(accelerator, model, optimizer, BF16) == through
    assert raw_bytes(model.state_dict()) == after


def test_under_mixed_precision_float32_weights_are_cast_by_autocast() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = network()
    model, optimizer = accelerator.prepare(model, amp.optim.AdamW(model.parameters(), lr=1e-2))
    losses = train(accelerator, model, optimizer, torch.float32, 30)
    assert losses[-1] < losses[0] / 2
    assert all(p.dtype == torch.float32 for p in model.parameters())


def shard_and_train(kind: str, mixed: str) -> list[str]:
    """The dtypes of the shards, and how the states are kept."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, mixed_precision=mixed)
    # What Accelerate does itself where there are GPUs; on CPUs it takes DDP.
    if mixed != "no":
        plugin.set_mixed_precision(mixed)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.num_processes == 2
    model = network()
    if kind == "converted":
        model.to(BF16)
    if kind == "prepared too early":
        amp.prepare(model, BF16, keep_fp32_only=[])
    optimizer = amp.optim.AdamW(model.parameters(), lr=1e-2, memory="lean", max_grad_norm=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    dtype = torch.float32
    if kind == "prepared":  # after the sharding
        dtype = BF16
        amp.prepare(model, dtype, keep_fp32_only=[])
    if kind == "prepared too early":
        with pytest.raises(RuntimeError, match="was prepared before it was sharded"):
            train(accelerator, model, optimizer, BF16)
        return ["refused"]
    losses = train(accelerator, model, optimizer, dtype, 30)
    assert losses[-1] < losses[0] / 2, losses
    states = {type(s["exp_avg"]).__name__ for s in optimizer.optimizer.state.values()}
    return sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()} | states)


def test_fsdp2_on_two_processes(run_on: Any) -> None:
    script = """
import os
from test_accelerate import forget, shard_and_train
kinds = [("float32", "bf16"), ("prepared", "no"), ("converted", "bf16")]
for kind, mixed in [*kinds, ("prepared too early", "no")]:
    os.write(1, (" ".join(["FOUND", *shard_and_train(kind, mixed)]) + "\\n").encode())
    forget()
"""
    found = [line for line in run_on(2, script) if line.startswith("FOUND")]
    # Under mixed precision Accelerate makes float32 shards of a bfloat16 model too.
    kinds = ["FOUND DTensor bfloat16"] * 2 + ["FOUND DTensor float32"] * 4
    assert sorted(found) == [*kinds, "FOUND refused", "FOUND refused"]
