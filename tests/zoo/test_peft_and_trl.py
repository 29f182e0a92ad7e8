"""LoRA adapters of peft over a prepared base, and trl's SFTTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_transformers_trainer import optimizer_of, sentences, tiny_llama
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import amp_mp as amp

BF16, FP32 = torch.bfloat16, torch.float32
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def test_float32_adapters_over_a_prepared_base(tmp_path: Path) -> None:
    base = amp.prepare(tiny_llama().requires_grad_(False), BF16)
    frozen = base.model.layers[0].self_attn.q_proj.weight
    assert frozen.dtype == BF16
    before = frozen.clone()
    model = get_peft_model(base, LoraConfig(**LORA))
    assert {p.dtype for p in adapters(model)} == {FP32}
    optimizer = amp.optim.AdamW(adapters(model), lr=1e-2, memory="lean")
    tokens = torch.stack([each["input_ids"] for each in sentences(16)])
    losses = []
    for _ in range(30):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert torch.equal(frozen, before)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {value.dtype for value in saved.values()} == {FP32}
    again = PeftModel.from_pretrained(amp.prepare(tiny_llama(), BF16), tmp_path)
    assert again(input_ids=tokens, labels=tokens).loss.item() < 0.95 * losses[0]


def test_prepare_after_peft_converts_the_adapters_too() -> None:
    model = amp.prepare(get_peft_model(tiny_llama(), LoraConfig(**LORA)), BF16)
    assert {p.dtype for p in adapters(model)} == {BF16}


def test_sft(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0")
    rows = [{"input_ids": each["input_ids"].tolist()} for each in sentences()]
    args = SFTConfig(
        **{"output_dir": str(tmp_path), "max_steps": 20, "per_device_train_batch_size": 8},
        **{"report_to": "none", "use_cpu": True, "bf16": False, "logging_steps": 1},
        **{"learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True},
    )
    choice = amp.integrations.trainer.optimizer(args, memory="lean")
    trainer = SFTTrainer(
        amp.prepare(tiny_llama(), BF16),
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=choice,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 2
    assert (optimizer_of(trainer).max_grad_norm, args.max_grad_norm) == (1.0, 0.0)
    assert trainer.model.lm_head.weight.dtype == BF16
