"""Tiny language models of transformers, speech among them, and an LSTM."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from cases import Batch, case, logits_of, tokens
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 96, 64, 2, 4, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 4 * LENGTH,
}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HALF: dict[str, Any] = {"num_key_value_heads": HEADS // 2}


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the next token."""
    logits = logits_of(model(input_ids=batch["tokens"]))
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), batch["tokens"][:, 1:].flatten()
    )


def text() -> Batch:
    return {"tokens": tokens(VOCABULARY, 4, LENGTH)}


def causal(name: str, kind: str, configuration: str = "", **more: Any) -> None:
    """A decoder-only model by the first parts of its classes' names."""
    config = getattr(hf, f"{configuration or kind}Config")
    model = getattr(hf, f"{kind}ForCausalLM")
    case(name, text, next_token)(lambda: model(config(**{**SIZES, **ENDS, **more})))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = hf.GPT2Config(n_positions=LENGTH, **sizes, **drop, **ENDS)
    return hf.GPT2LMHeadModel(config)


case("GPT-2", text, next_token)(gpt2)
causal("Llama", "Llama", **HALF)
causal("Qwen3", "Qwen3", head_dim=16, **HALF)
causal("Gemma 2", "Gemma2", head_dim=16, query_pre_attn_scalar=16, sliding_window=8, **HALF)
causal(
    "Gemma 3",
    "Gemma3",
    "Gemma3Text",
    head_dim=16,
    query_pre_attn_scalar=16,
    sliding_window=8,
    **HALF,
)
causal("Mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2, **HALF)
causal("Phi-3", "Phi3", **HALF)
causal("GPT-NeoX", "GPTNeoX")
causal("Mamba", "Mamba", state_size=8, num_heads=HEADS)
causal("Mamba-2", "Mamba2", state_size=8, num_heads=8, head_dim=16, n_groups=1, chunk_size=8)


def masked(model: nn.Module, batch: Batch) -> Tensor:
    logits = logits_of(model(input_ids=batch["tokens"]))
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def with_labels() -> Batch:
    return {"tokens": tokens(VOCABULARY, 4, LENGTH), "labels": tokens(VOCABULARY, 4, LENGTH)}


@case("BERT", with_labels, masked)
def bert() -> nn.Module:
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForMaskedLM(hf.BertConfig(**SIZES, **drop, pad_token_id=0))


@case("ModernBERT", with_labels, masked)
def modern_bert() -> nn.Module:
    ends = {**ENDS, "cls_token_id": 1, "sep_token_id": 2}
    return hf.ModernBertForMaskedLM(hf.ModernBertConfig(**SIZES, **ends, local_attention=8))


def sequence(model: nn.Module, batch: Batch) -> Tensor:
    found = model(input_ids=batch["tokens"], decoder_input_ids=batch["labels"])
    logits = logits_of(found)[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())


@case("T5", with_labels, sequence)
def t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 128, "num_layers": LAYERS, "num_heads": HEADS}
    config = hf.T5Config(
        vocab_size=VOCABULARY, dropout_rate=0.0, feed_forward_proj="gated-gelu", **sizes
    )
    return hf.T5ForConditionalGeneration(config)


def speech() -> Batch:
    return {"features": torch.randn(2, 20, 64), "labels": tokens(VOCABULARY, 2, 12)}


def transcribe(model: nn.Module, batch: Batch) -> Tensor:
    found = model(input_features=batch["features"], decoder_input_ids=batch["labels"])
    logits = logits_of(found)[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())


@case("Whisper", speech, transcribe)
def whisper() -> nn.Module:
    layers = {"encoder_layers": LAYERS, "decoder_layers": LAYERS}
    heads = {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    widths = {"d_model": WIDTH, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    places = {"max_source_positions": 32, "max_target_positions": 32, "num_mel_bins": 20}
    ends = {
        **ENDS,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, dropout=0.0, **layers, **heads, **widths, **places, **ends
    )
    return hf.WhisperForConditionalGeneration(config)


class RecurrentModel(nn.Module):
    """Embedding, two LSTM layers, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(input_ids))[0]))


case("LSTM", text, next_token)(RecurrentModel)
