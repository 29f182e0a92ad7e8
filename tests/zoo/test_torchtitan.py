"""amp_mp's optimizers in torchtitan's container, scheduler, clipping and checkpoints (DCP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import raw_bytes
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.distributed.utils import clip_grad_norm_

import amp_mp as amp

BF16 = torch.bfloat16


class Optimizers(OptimizersContainer):
    """As docs/loops.md has it."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return getattr(amp.optim, name)

    @staticmethod
    def _build_impl_kwargs(config: Any) -> dict[str, Any]:
        return {}

    def _post_init(self, parameters: Any) -> None:
        super()._post_init(parameters)
        for optimizer in self.optimizers:
            optimizer.init_state()


class Run:
    """The parts of a torchtitan Trainer that know the optimizer, and its training step."""

    def __init__(self, memory: str, prepared: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
        param, self.dtype = (None, BF16) if prepared else (BF16, torch.float32)
        fully_shard(self.model, mp_policy=MixedPrecisionPolicy(param, torch.float32))
        if prepared:
            amp.prepare(self.model, BF16)
        numbers = {"lr": 1e-2, "memory": memory}
        groups = [
            ParamGroupConfig(
                pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**numbers, **more}
            )
            for pattern, more in ((r"bias$", {"weight_decay": 0.0}), (r".*", {}))
        ]
        self.optimizers = Optimizers.Config(param_groups=groups).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=40)
        self.checkpoints = CheckpointManager.Config(
            enable=True, interval=5, keep_latest_k=0, last_save_model_only=False
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
        )
        self.checkpoints.states.pop("dataloader")

    def train(self, first: int, last: int, save: bool = False) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(32, 16, generator=generator).to(self.dtype)
            self.optimizers.zero_grad()
            out = self.model(x).float()
            loss = nn.functional.mse_loss(out, x.float().mean(1, keepdim=True))
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
            self.optimizers.step()
            self.schedulers.step()
            if save:
                self.checkpoints.save(step)
            losses.append(loss.item())
        return losses

    def bits(self) -> bytes:
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        state = {n: p.to_local() for n, p in self.model.state_dict().items()}
        local = [
            {k: getattr(v, "_local_tensor", v) for k, v in each.items()}
            for found in states
            for each in found.values()
        ]
        return raw_bytes([state, local])


def save_and_resume(memory: str, prepared: bool) -> str:
    """What is printed if a resumed run has the bits of one that never stopped."""
    through = Run(memory, prepared)
    losses = through.train(1, 10, save=True)
    again = Run(memory, prepared)
    assert again.checkpoints.load(step=5)
    assert again.train(6, 10) == losses[5:]
    assert again.bits() == through.bits()
    losses += through.train(11, 30)
    assert losses[-1] < losses[0] / 4, losses
    return f"SAME {memory} {prepared}"


CASES = [("exact", False), ("lean", True), ("tiny", True)]


def test_a_resumed_run_on_two_processes(run_on: Any) -> None:
    script = f"""
import os, tempfile
import torch.distributed as dist
from test_torchtitan import save_and_resume
dist.init_process_group("gloo")
for memory, prepared in {CASES}:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    os.chdir(folder[0])
    os.write(1, (save_and_resume(memory, prepared) + "\\n").encode())
dist.destroy_process_group()
"""
    found = [line for line in run_on(2, script) if line.startswith("SAME")]
    assert sorted(found) == sorted(2 * [f"SAME {memory} {kind}" for memory, kind in CASES])


def test_other_classes_and_clipping_in_the_step() -> None:
    with pytest.raises(NotImplementedError):  # the reason for the class above
        OptimizersContainer._resolve_optimizer_factory("Muon")
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1))
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 1e-3})
        for pattern, name in (("weight$", "Muon"), (".*", "AdamW"))
    ]
    config = Optimizers.Config(
        param_groups=groups, optimizer_factory_kwargs_by_name={"AdamW": {"max_grad_norm": 0.5}}
    )
    muon, adamw = config.build(model_parts=[model])
    assert (type(muon), type(adamw)) == (amp.optim.Muon, amp.optim.AdamW)
    assert (muon.max_grad_norm, adamw.max_grad_norm) == (None, 0.5)
    model(torch.randn(8, 16)).square().mean().backward()
    muon.step()
    adamw.step()
