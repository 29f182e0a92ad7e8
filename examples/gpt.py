"""A small decoder-only transformer (GPT) over bytes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # one token per byte value


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Scaled dot-product attention in which each position sees itself and earlier positions.

    All arguments and the result have shape (batch, heads, time, head width) and the same dtype.
    """
    batch, heads, time, head_width = query.shape
    if query.device.type != "cpu" or time > 512:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    # On a CPU torch's fused attention is slower in bfloat16 than in float32. Batched matrix
    # products are not, and up to some hundred positions they are as fast as the fused kernel in
    # float32.
    query, key, value = (x.reshape(batch * heads, time, -1) for x in (query, key, value))
    future = query.new_full((time, time), float("-inf")).triu(1)
    scores = torch.baddbmm(future, query, key.transpose(1, 2), alpha=head_width**-0.5)
    return (scores.softmax(-1) @ value).view(batch, heads, time, head_width)


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a GELU MLP four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map the residual stream (batch, time, width) to one of the same shape and dtype."""
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        attended = causal_attention(*qkv.permute(2, 0, 3, 1, 4))
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Byte-level language model with learned positions and an untied output head.

    Args:
        layers: number of transformer blocks.
        width: size of the residual stream; a multiple of ``heads``.
        heads: attention heads per block.
        context: longest sequence, in tokens.

    The blocks and the head compute in the dtype of the head's weight, so the precision changes with
    the parameters' dtype. The logits are always float32.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual branches are scaled so that their sum does not grow with depth.
                depth = 2 * layers if name.endswith("_out.weight") else 1
                nn.init.normal_(parameter, std=(2.5 * width * depth) ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, time, 256), float32, of the byte after each of ``tokens``.

        ``tokens`` is an int64 tensor (batch, time); time must not exceed the context.
        """
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits.float()
