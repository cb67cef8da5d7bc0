"""The policy: a decoder-only transformer over characters, a few hundred thousand parameters.

One set of weights, two ways through it: `forward` reads whole sequences (training), `step` one more token of each
sequence with the keys and values of the earlier ones kept in a cache (generation). Both give the same
logits, up to rounding. A row of `step` does not depend on the other rows, nor on its own number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor, nn

__all__ = ["Cache", "Policy", "PolicyConfig"]

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys and values of one layer


@dataclass(frozen=True)
class PolicyConfig:
    """The shape of a policy."""

    vocabulary: int
    context: int  # tokens of prompt and response together, at most
    width: int = 128
    layers: int = 2
    heads: int = 8


class Cache:
    """Keys and values of every layer, for so many sequences: (rows, heads, context, width / heads) each."""

    def __init__(self, config: PolicyConfig, rows: int) -> None:
        shape = (rows, config.heads, config.context, config.width // config.heads)
        self.keys = [torch.zeros(shape) for _ in range(config.layers)]
        self.values = [torch.zeros(shape) for _ in range(config.layers)]

    def attend(self, layer: int, positions: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Keep the keys and values of one token a row, and attend to all that its row has up to its position."""
        rows = torch.arange(len(positions))
        kept_keys, kept_values = self.keys[layer], self.values[layer]
        kept_keys[rows, :, positions] = keys[:, :, 0]
        kept_values[rows, :, positions] = values[:, :, 0]
        seen = torch.arange(kept_keys.shape[2]) <= positions[:, None]
        return F.scaled_dot_product_attention(
            queries, kept_keys[: len(rows)], kept_values[: len(rows)], attn_mask=seen[:, None, None]
        )


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what comes in."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.forward_norm = nn.LayerNorm(config.width)
        self.forward_in = nn.Linear(config.width, 4 * config.width)
        self.forward_out = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        rows, tokens, width = hidden.shape
        projected = self.queries_keys_values(self.attention_norm(hidden))
        queries, keys, values = projected.view(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = attend(queries, keys, values).transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + self.attention_out(attended)
        return hidden + self.forward_out(F.gelu(self.forward_in(self.forward_norm(hidden))))  # type: ignore[no-any-return]


class Policy(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary)
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits after every token of whole sequences: (rows, tokens) to (rows, tokens, vocabulary)."""
        hidden = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, partial(F.scaled_dot_product_attention, is_causal=True))
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits after one more token of the first rows of a cache: (rows,) to (rows, vocabulary).

        Row i gets `tokens[i]` at `positions[i]`, and sees what it got at earlier positions.
        """
        hidden = (self.token_embedding(tokens) + self.position_embedding(positions)).unsqueeze(1)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, partial(cache.attend, layer, positions))
        return self.head(self.norm(hidden[:, 0]))  # type: ignore[no-any-return]
