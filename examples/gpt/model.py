"""A small GPT in plain PyTorch, and its Hugging Face cousins from a config. Nothing here knows monoflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """What decides a model; saved beside its weights. `family` is "own", "gpt2" or "llama"."""

    family: str = "own"
    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256
    dropout: float = 0.1


class Output(NamedTuple):
    """As Hugging Face's models return it."""

    loss: Tensor | None
    logits: Tensor


class Attention(nn.Module):
    """Causal self-attention; query, key and value in one matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """A byte-level GPT; the output matrix is the embedding's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        blocks = [Block(shape) for _ in range(shape.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_initialize)
        for block in blocks:  # so that the residual stream does not grow with depth
            nn.init.normal_(block.attention.out.weight, std=0.02 / (2 * shape.layers) ** 0.5)
            nn.init.normal_(block.down.weight, std=0.02 / (2 * shape.layers) ** 0.5)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Logits of every next byte, and the mean loss if `labels` (usually the input itself) are given."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embedding(input_ids) + self.position(positions)
        logits = self.head(self.norm(self.blocks(x)))
        if labels is None:
            return Output(None, logits)
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(shape: Shape) -> nn.Module:
    """A fresh model of this shape; torch's seed decides its weights."""
    return GPT(shape) if shape.family == "own" else _hugging_face(shape)


def _hugging_face(shape: Shape) -> nn.Module:
    import transformers  # noqa: PLC0415 - only this choice needs it

    if shape.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=shape.context,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            embd_pdrop=shape.dropout,
            resid_pdrop=shape.dropout,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.width,
        intermediate_size=shape.width * 8 // 3 // 16 * 16,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2 if shape.heads % 2 == 0 else shape.heads,
        max_position_embeddings=shape.context,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)
