"""A small GPT over bytes, and the text that the examples train it on; plain PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

END_OF_FILE = 256  # The token after the 256 tokens of the bytes.
VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 257, 64, 64, 4, 2, 16


class Block(nn.Module):
    """Causal attention and a feed-forward layer, both pre-normalised and residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(batch, time, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """Maps tokens [batch, time] to logits [batch, time, VOCABULARY]; ties embedding and head."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.norm(self.blocks(self.dropout(x))))


def text(num_tokens: int = 500_000) -> np.ndarray:
    """Returns source code of the standard library as int32 [num_tokens]."""
    tokens: list[int] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        tokens += [*path.read_bytes(), END_OF_FILE]
        if len(tokens) >= num_tokens:
            break
    return np.array(tokens[:num_tokens], np.int32)
