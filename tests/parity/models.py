"""Small models of every kind that a step must be right for, each with its batch and its forward to a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

Batch = dict[str, torch.Tensor]
VOCABULARY = 96


@dataclass(frozen=True)
class Kind:
    """A model to train.

    Attributes:
        build: the model, given its dropout probability.
        batch: a global batch of so many samples.
        loss: from model and batch to the loss.
        lr: the learning rate per optimizer.
    """

    build: Callable[[float], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    lr: Mapping[str, float] = field(default_factory=lambda: {"sgd": 0.05, "adamw": 1e-3})


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that a model computes itself, as those of transformers do."""
    return model(**batch).loss


# --- batches ---------------------------------------------------------------------------------------


def tokens(generator: torch.Generator, *shape: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, vocabulary, shape, generator=generator)


def causal(generator: torch.Generator, size: int) -> Batch:
    ids = tokens(generator, size, 8)
    return {"input_ids": ids, "labels": ids}


def masked(generator: torch.Generator, size: int) -> Batch:
    """Some labels are ignored, more in some samples than in others; some samples are shorter."""
    ids = tokens(generator, size, 8)
    share = torch.linspace(0.15, 0.8, size)[:, None]
    labels = torch.where(torch.rand(size, 8, generator=generator) < share, ids, -100)
    labels[0, 0] = ids[0, 0]
    attention = torch.ones(size, 8, dtype=torch.int64)
    attention[-1, 5:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": attention}


def translated(generator: torch.Generator, size: int) -> Batch:
    labels = tokens(generator, size, 6)
    labels[0, 3:] = -100
    return {"input_ids": tokens(generator, size, 8), "labels": labels}


def images(generator: torch.Generator, size: int) -> Batch:
    pixels = torch.randn(size, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (size,), generator=generator)}


def clicks(generator: torch.Generator, size: int) -> Batch:
    return {
        "dense": torch.randn(size, 6, generator=generator),
        "users": torch.randint(0, 40, (size,), generator=generator),
        "items": torch.randint(0, 24, (size, 3), generator=generator),
        "clicked": torch.randint(0, 2, (size,), generator=generator).float(),
    }


# --- models of transformers ------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_TEXT: dict[str, Any] = _SMALL | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0}
_CLASSES: dict[str, Any] = {"num_labels": 10}
_START: dict[str, Any] = {"decoder_start_token_id": 0}
_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}


def gpt2(dropout: float, vocabulary: int = VOCABULARY, heads: int = 4, width: int = 32) -> nn.Module:
    config = hf.GPT2Config(
        n_layer=2, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=16,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **_ENDS,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama(dropout: float) -> nn.Module:
    config = hf.LlamaConfig(**_TEXT, **_ENDS, num_key_value_heads=2, attention_dropout=dropout)
    return hf.LlamaForCausalLM(config)


def bert(dropout: float) -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(**_TEXT, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )


def vit(dropout: float) -> nn.Module:
    config = hf.ViTConfig(
        **_SMALL, **_CLASSES, image_size=8, patch_size=4,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def t5(dropout: float) -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
        dropout_rate=dropout, **_START,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


# --- models of our own -----------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with batch norms and a short cut."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(made) for _ in range(3))
        self.short = nn.Conv2d(given, made, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.norms[2](self.short(x)))


class ResNet(nn.Module):
    """A small residual network with batch norms."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.blocks(self.stem(pixels)).mean((2, 3))))


class Recommender(nn.Module):
    """Embedding tables and products of their rows, as in DLRM (Naumov et al., 2019)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40, 16), nn.Embedding(24, 16)
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)
        self.top = nn.Sequential(nn.Linear(19, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        rows = torch.stack([bottom, self.users(users), self.items(items).sum(1)], 1)
        products = rows @ rows.transpose(1, 2)
        pairs = torch.stack([products[:, 0, 1], products[:, 0, 2], products[:, 1, 2]], 1)
        return self.top(torch.cat([bottom, pairs], 1)).squeeze(1)


class Tied(nn.Module):
    """A language model whose output layer is its embedding, and one layer used twice."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.shared = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(2):
            x = x + self.drop(F.gelu(self.shared(self.norm(x))))
        return self.head(x)


class Frozen(nn.Module):
    """A frozen embedding and a frozen layer below layers that learn; a frozen bias in one of them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.below = nn.Linear(32, 32)
        self.learns = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Dropout(dropout), nn.Linear(64, 32))
        self.head = nn.Linear(32, VOCABULARY)
        for parameter in (*self.embed.parameters(), *self.below.parameters(), self.head.bias):
            parameter.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.below(self.embed(ids))
        return self.head(x + self.learns(x))


def image_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def click_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["dense"], batch["users"], batch["items"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


def token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def _masked_labels(generator: torch.Generator, size: int) -> Batch:
    batch = masked(generator, size)
    del batch["attention_mask"]
    return batch


KINDS: Mapping[str, Kind] = {
    "gpt2": Kind(gpt2, causal, own_loss),
    "llama": Kind(llama, causal, own_loss),
    "bert": Kind(bert, masked, own_loss),
    "vit": Kind(vit, images, own_loss),
    "t5": Kind(t5, translated, own_loss, {"sgd": 0.01, "adamw": 1e-3}),
    "resnet": Kind(ResNet, images, image_loss),
    "dlrm": Kind(Recommender, clicks, click_loss),
    "tied": Kind(Tied, _masked_labels, token_loss, {"sgd": 0.01, "adamw": 1e-3}),
    "frozen": Kind(Frozen, _masked_labels, token_loss),
}


def optimizer_of(name: str, kind: Kind, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW, over the parameters that learn."""
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(learns, lr=kind.lr["sgd"], momentum=0.9)
    # The default eps, 1e-8, lies below the gradients' rounding: that would move parameters by full steps.
    return torch.optim.AdamW(learns, lr=kind.lr["adamw"], eps=1e-6)


def batch_of(kind: Kind, size: int = 4, seed: int = 1) -> Batch:
    return kind.batch(torch.Generator().manual_seed(seed), size)


Parts = tuple[nn.Module, torch.optim.Optimizer, Callable[[Batch], Any]]


def training(name: str, optimizer: str, dropout: float = 0.1, autocast: bool = False) -> Parts:
    """A model with seeded weights, its optimizer, and a plain function that does one training step."""
    kind = KINDS[name]
    torch.manual_seed(0)
    model = kind.build(dropout).train()
    steps = optimizer_of(optimizer, kind, model)

    def step(batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = kind.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        steps.zero_grad()
        return loss

    return model, steps, step
