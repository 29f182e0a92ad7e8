"""Training in stages, with a new trainer and so a new optimizer for each: no update is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from helpers import raw_bytes
from peft import LoraConfig, get_peft_model
from test_lightning import Net, fit
from test_transformers_trainer import sentences, tiny_llama
from torch import nn
from transformers import Trainer, TrainingArguments

import amp_mp as amp

BF16 = torch.bfloat16
LR = 1e-4
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    yield
    for each in (AcceleratorState, GradientState, PartialState):
        each._reset_state()


def total(model: nn.Module) -> torch.Tensor:
    """A loss whose gradients are 1."""
    return sum((p.float().sum() for p in model.parameters() if p.requires_grad), torch.zeros(()))


def values(model: nn.Module) -> torch.Tensor:
    found = amp.float32_state_dict(model)
    trained = [found[name].flatten() for name, p in model.named_parameters() if p.requires_grad]
    return torch.cat([each.double() for each in trained])


class Falls(Net):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return total(self.net)


@pytest.mark.parametrize("memory", ["exact", "float32", "lean"])
def test_ten_fits_of_lightning(memory: str) -> None:
    net = Falls("__init__", kind=amp.optim.SGD, lr=LR, memory=memory)
    before = values(net)
    for _ in range(10):
        fit(net, epochs=1, limit_train_batches=2)
    assert ((values(net) - before + 20 * LR).abs() < 0.2 * LR).all()


class FallingTrainer(Trainer):
    def compute_loss(self, model: nn.Module, *_: Any, **__: Any) -> torch.Tensor:
        return total(model)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_six_trainers_of_transformers(tmp_path: Path, memory: str, adapters: bool) -> None:
    """AdamW: each step moves every weight by the rate. adapters: LoRA's, in bfloat16."""
    model: Any = tiny_llama()
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    amp.prepare(model, BF16)
    before = values(model)
    for stage in range(6):
        args = TrainingArguments(
            output_dir=str(tmp_path / str(stage)),
            per_device_train_batch_size=8,
            max_steps=2,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        choice = amp.integrations.trainer.optimizer(args, memory=memory)
        trainer = FallingTrainer(
            model, args, train_dataset=sentences(), optimizer_cls_and_kwargs=choice
        )
        trainer.train()
    moved = values(model) - before
    assert ((moved + 12 * LR).abs() < 0.5 * LR).all()


def test_accelerates_optimizer_loads_and_saves(tmp_path: Path) -> None:
    """Float32 weights after a step; and what checkpoint.save wrote with it."""
    accelerator = Accelerator(cpu=True)

    def made(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = amp.prepare(nn.Linear(16, 16), BF16)
        found: Any = accelerator.prepare(model, amp.optim.AdamW(model.parameters(), lr=0.01))
        accelerator.backward(total(model))
        found[1].step()
        found[1].zero_grad()
        return found

    model, optimizer = made(0)
    wanted = {
        name: torch.randn_like(p, dtype=torch.float32) for name, p in model.named_parameters()
    }
    amp.load_float32_state_dict(model, optimizer, wanted)
    assert raw_bytes(amp.float32_state_dict(model, optimizer)) == raw_bytes(wanted)
    amp.checkpoint.save(tmp_path / "c", model, optimizer)
    other, fresh = made(1)
    amp.checkpoint.load(tmp_path / "c", other, fresh)
    assert raw_bytes(amp.float32_state_dict(other)) == raw_bytes(wanted)
    states = [o.optimizer.state_dict()["state"] for o in (optimizer, fresh)]
    assert raw_bytes(states[0]) == raw_bytes(states[1])
