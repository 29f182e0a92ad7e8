"""amp_mp's optimizers in torchtitan's container, scheduler, clipping and checkpoints (DCP)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import raw_bytes
from pages import blocks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.distributed.utils import clip_grad_norm_

import amp_mp as amp

BF16 = torch.bfloat16


PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"
ON_PAGE: dict[str, Any] = {"__name__": "__main__"}
for block in blocks(PAGE.read_text()):
    if "Optimizers(Opt" in block:  # the page's classes, without its training
        exec(block, ON_PAGE)
Optimizers, Float16Optimizers = ON_PAGE["Optimizers"], ON_PAGE["Float16Optimizers"]


class Run:
    """The parts of a torchtitan Trainer that know the optimizer, and its training step."""

    def __init__(self, memory: str | None, kind: str) -> None:
        """kind: "bfloat16" or "float16", in which float32 shards are gathered; "prepared", bfloat16
        shards; or "float32", with torchtitan's AdamW.
        """
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
        self.dtype = BF16 if kind == "prepared" else torch.float32
        gathered = None if kind == "prepared" else getattr(torch, kind)
        fully_shard(self.model, mp_policy=MixedPrecisionPolicy(gathered, torch.float32))
        if kind == "prepared":
            amp.prepare(self.model, BF16)
        numbers = {"lr": 1e-2} if memory is None else {"lr": 1e-2, "memory": memory}
        groups = [
            ParamGroupConfig(
                pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**numbers, **more}
            )
            for pattern, more in ((r"bias$", {"weight_decay": 0.0}), (r".*", {}))
        ]
        self.is_half = kind == "float16"
        made = {"float16": Float16Optimizers, "float32": OptimizersContainer}.get(kind, Optimizers)
        config = made.Config(param_groups=groups)
        if kind == "float32":
            config.implementation = "for-loop"
        if self.is_half:
            config.optimizer_factory_kwargs_by_name = {"AdamW": {"max_grad_norm": 1.0}}
        self.optimizers = config.build(model_parts=[self.model])
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
        self.trainer = SimpleNamespace(
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            loss_fn=lambda *given: (nn.functional.mse_loss(*given), {}),
            checkpointer=self.checkpoints,
        )
        if self.is_half:
            ON_PAGE["in_float16"](self.trainer)

    def train(
        self, first: int, last: int, save: bool = False, overflows: Sequence[int] = ()
    ) -> list[float]:
        """overflows: steps with an inf on process 1 alone; where no loss is scaled, no step."""
        losses = []
        for step in range(first, last + 1):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(32, 16, generator=generator).to(self.dtype)
            self.optimizers.zero_grad()
            out = self.model(x).float()
            loss, _ = self.trainer.loss_fn(out, x.float().mean(1, keepdim=True))
            loss.backward()
            losses.append(loss.item())
            if step in overflows and not self.is_half:
                continue
            if step in overflows and dist.get_rank() == 1:
                self.model[0].weight.grad.to_local().view(-1)[-1] = float("inf")
            limit = 1e30 if self.is_half else 1.0
            clip_grad_norm_(self.model.parameters(), limit, foreach=True)
            self.optimizers.step()
            self.schedulers.step()
            if save:
                self.checkpoints.save(step)
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


def save_and_resume(memory: str, kind: str) -> str:
    """What is printed if a resumed run has the bits of one that never stopped."""
    through = Run(memory, kind)
    losses = through.train(1, 10, save=True)
    again = Run(memory, kind)
    assert again.checkpoints.load(step=5)
    assert again.train(6, 10) == losses[5:]
    assert again.bits() == through.bits()
    losses += through.train(11, 30)
    assert losses[-1] < losses[0] / 4, losses
    return f"SAME {memory} {kind}"


CASES = [("exact", "bfloat16"), ("lean", "prepared"), ("tiny", "prepared"), ("exact", "float16")]


def in_float16() -> str:
    """What is printed if float16 trains as float32 without the steps in which process 1 has an inf.

    Beside it the scales, and how far the schedule is.
    """
    half, plain = Run("exact", "float16"), Run(None, "float32")
    overflows = (4, 5, 9)
    losses = half.train(1, 20, overflows=overflows)
    torch.testing.assert_close(
        torch.tensor(losses),
        torch.tensor(plain.train(1, 20, overflows=overflows)),
        rtol=0.01,
        atol=1e-3,
    )
    before, scale = half.bits(), half.optimizers.scaler.get_scale()
    half.train(21, 21, overflows=[21])
    assert half.bits() == before
    assert half.optimizers.scaler.get_scale() == scale / 2
    rates = [run.schedulers.schedulers[0].last_epoch for run in (half, plain)]
    return f"SAME {scale:g} {rates}"


def test_a_resumed_run_on_two_processes(run_on: Any) -> None:
    script = f"""
import os, tempfile
import torch.distributed as dist
from test_torchtitan import in_float16, save_and_resume
dist.init_process_group("gloo")
os.write(1, (in_float16() + "\\n").encode())
for memory, kind in {CASES}:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    os.chdir(folder[0])
    os.write(1, (save_and_resume(memory, kind) + "\\n").encode())
dist.destroy_process_group()
"""
    found = [line for line in run_on(2, script) if line.startswith("SAME")]
    wanted = ["SAME 8192 [17, 17]", *(f"SAME {memory} {kind}" for memory, kind in CASES)]
    assert sorted(found) == sorted(2 * wanted)


@pytest.mark.parametrize("chunks", [0, 2])
def test_losses_in_float16_carry_the_scale_and_are_logged_without(chunks: int) -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8), nn.Linear(8, 16)
    scaler = amp.GradScaler("cpu", init_scale=2.0**10)
    x, labels, found = torch.randn(2, 4, 8), torch.randint(16, (2, 4)), []
    for scaled in (False, True):
        loss_fn: Any = CrossEntropyLoss(CrossEntropyLoss.Config())
        if chunks:
            loss_fn = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=chunks))
            loss_fn.set_lm_head(head)
        trainer = SimpleNamespace(
            optimizers=SimpleNamespace(scaler=scaler),
            lr_schedulers=SimpleNamespace(step=None),
            loss_fn=loss_fn,
            checkpointer=SimpleNamespace(states={}),
        )
        if scaled:
            ON_PAGE["in_float16"](trainer)
        hidden = body(x)
        loss, _ = trainer.loss_fn(hidden if chunks else head(hidden), labels, torch.tensor(8))
        loss.backward()
        params = [*body.parameters(), *head.parameters()]
        found.append((loss, [param.grad for param in params]))
        body.zero_grad()
        head.zero_grad()
    (loss, grads), (logged, scaled_grads) = found
    assert torch.equal(loss, logged)
    assert raw_bytes([grad * 2.0**10 for grad in grads]) == raw_bytes(scaled_grads)


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
