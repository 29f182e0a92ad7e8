"""amp_mp in the Trainer of transformers: training, clipping, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raw_bytes
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import amp_mp as amp

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2))


def sentences(count: int = 64) -> list[dict[str, Any]]:
    """Counting, which is easy to learn."""
    starts = torch.arange(count)[:, None]
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(16)) % 64]


def trained(
    folder: Path, resume: str | None = None, memory: str | None = "lean", **given: Any
) -> Trainer:
    """Twelve steps; a checkpoint after each sixth of them."""
    usual: dict[str, Any] = {
        **{"output_dir": str(folder), "per_device_train_batch_size": 8, "max_steps": 12},
        **{"save_steps": 6, "logging_steps": 1, "learning_rate": 3e-3, "report_to": "none"},
        **{"use_cpu": True, "disable_tqdm": True, "weight_decay": 0.1},
    }
    args = TrainingArguments(**{**usual, **given})
    choice = amp.integrations.trainer.optimizer(args, memory=memory)
    model = amp.prepare(tiny_llama(), torch.bfloat16)
    trainer = Trainer(model, args, train_dataset=sentences(), optimizer_cls_and_kwargs=choice)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def optimizer_of(trainer: Trainer) -> amp.optim.AdamW:
    return trainer.optimizer.optimizer  # Accelerate's wrapper is around it


def everything(trainer: Trainer) -> bytes:
    return raw_bytes([trainer.model.state_dict(), optimizer_of(trainer).state_dict()["state"]])


def test_it_learns_with_the_trainers_groups_and_numbers(tmp_path: Path) -> None:
    trainer = trained(tmp_path, adam_beta2=0.95, max_grad_norm=0.5, max_steps=30)
    optimizer = optimizer_of(trainer)
    assert isinstance(optimizer, amp.optim.AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    norms = [p for n, p in trainer.model.named_parameters() if "norm" in n]
    assert {id(p) for p in optimizer.param_groups[1]["params"]} == {id(p) for p in norms}
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert (optimizer.max_grad_norm, trainer.args.max_grad_norm) == (0.5, 0.0)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    assert trainer.model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("memory", ["exact", "lean", "tiny"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path: Path, memory: str) -> None:
    through = trained(tmp_path, memory=memory)
    resumed = trained(tmp_path, str(tmp_path / "checkpoint-6"), memory)
    assert resumed.state.global_step == 12
    assert everything(resumed) == everything(through)


def test_the_norm_in_the_log_is_that_before_clipping(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_grad_norm=0.1)
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert min(logged) > 0.1
    assert optimizer_of(trainer).grad_norm == pytest.approx(logged[-1], rel=1e-2)


def test_it_clips_once_as_the_trainer_would(tmp_path: Path) -> None:
    """Gradients are accumulated over two batches, and the rate of learning is warmed up."""
    given = {"gradient_accumulation_steps": 2, "warmup_steps": 3, "max_grad_norm": 0.1}
    losses = []
    for clips in (True, False):
        args = TrainingArguments(
            **{"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_steps": 6},
            **{"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, **given},
        )
        choice: Any = (torch.optim.AdamW, {"lr": args.learning_rate, "weight_decay": 0.0})
        if clips:
            choice = amp.integrations.trainer.optimizer(args)
        trainer = Trainer(tiny_llama(), args, train_dataset=sentences())
        trainer.optimizer_cls_and_kwargs = choice
        trainer.train()
        losses.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_bf16_of_the_trainer_is_for_float32_weights(tmp_path: Path) -> None:
    args = TrainingArguments(
        **{"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_steps": 10},
        **{"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "bf16": True},
    )
    choice = amp.integrations.trainer.optimizer(args, lr=3e-3)
    trainer = Trainer(
        tiny_llama(), args, train_dataset=sentences(), optimizer_cls_and_kwargs=choice
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.95 * losses[0]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_what_is_given_comes_first_and_other_classes_have_other_numbers() -> None:
    args = TrainingArguments(use_cpu=True, report_to="none", learning_rate=0.5)
    kind, numbers = amp.integrations.trainer.optimizer(
        args, amp.optim.SGD, momentum=0.9, max_grad_norm=2.0
    )
    assert kind is amp.optim.SGD
    assert numbers == {"lr": 0.5, "momentum": 0.9, "max_grad_norm": 2.0}
