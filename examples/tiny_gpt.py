"""A small GPT over bytes: 0.4 million parameters in the default size, all of it in plain PyTorch.

It knows nothing of replicas or fault tolerance; `train_ddp.py` adds those from outside.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # a token is a byte
HEADS = 4  # of attention; the width is a multiple of it


class TinyGPT(nn.Module):
    """Decoder-only transformer: `[batch, time]` int64 tokens to `[batch, time, 256]` logits."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = HEADS, context: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        out: Tensor = hidden + self.perceptron(hidden)
        return out

    def attention(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        query, key, value = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.query_key_value(hidden).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte; a guess at random costs 5.55."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
