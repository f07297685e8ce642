"""Language models in the shapes that benches need, in plain torch: no other package, no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """A decoder. "gpt2": learned positions, layer norms, GELU; "llama": rotary ones, RMS norms, a gate."""

    family: str
    vocabulary: int
    context: int
    layers: int
    width: int
    heads: int
    hidden: int

    def flops(self, num_params: int, tokens: int) -> float:
        """Of one training step: 6 a weight and token, and attention's products (Kaplan et al., 2020)."""
        looked_up = self.vocabulary * self.width + self.context * self.width * (self.family == "gpt2")
        tied = self.vocabulary * self.width  # the head multiplies by the table that was looked up in
        return tokens * (
            6.0 * (num_params - looked_up + tied) + 12.0 * self.layers * self.width * self.context
        )


SHAPES: Mapping[str, Shape] = {
    "GPT-2 124M": Shape("gpt2", 50304, 1024, 12, 768, 12, 3072),
    "Llama 1B": Shape("llama", 32000, 2048, 16, 2048, 16, 5632),
    "tiny GPT-2": Shape("gpt2", 256, 32, 2, 32, 2, 64),
    "tiny Llama": Shape("llama", 256, 32, 2, 32, 2, 64),
}


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, is_llama = shape, shape.family == "llama"
        norm = nn.RMSNorm if is_llama else nn.LayerNorm
        self.before, self.after = norm(shape.width), norm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=not is_llama)
        self.out = nn.Linear(shape.width, shape.width, bias=not is_llama)
        self.up = nn.Linear(shape.width, shape.hidden * (2 if is_llama else 1), bias=not is_llama)
        self.down = nn.Linear(shape.hidden, shape.width, bias=not is_llama)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.shape.heads, -1)
        query, key, value = (one.transpose(1, 2) for one in qkv.unbind(2))
        if turn is not None:
            query, key = _turned(query, turn), _turned(key, turn)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        up = self.up(self.after(x))
        if turn is None:
            return x + self.down(F.gelu(up))
        gate, linear = up.chunk(2, -1)
        return x + self.down(F.silu(gate) * linear)


class Decoder(nn.Module):
    """Tokens (batch, context) and their successors -> mean cross entropy, a scalar."""

    turn: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width) if shape.family == "gpt2" else None
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = (nn.LayerNorm if shape.family == "gpt2" else nn.RMSNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        half = shape.width // shape.heads // 2
        angle = torch.arange(shape.context)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("turn", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places.weight
        for block in self.blocks:
            x = block(x, None if self.places is not None else self.turn)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., "RoFormer", 2021)."""
    cos, sin = turn.to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
