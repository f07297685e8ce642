"""The models of bench/step.py, and everybody's way to train them on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import transformers as hf
from cases import load_example
from torch import nn
from torch.nn import functional as F

import monoflow as flow
from monoflow.step import Step

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]
Train = Callable[[Batch], torch.Tensor]


class Work(NamedTuple):
    """A model to train.

    Attributes:
        flops: of the matrix products of one step; 0 where nobody asks.
    """

    model: nn.Module
    loss: Loss
    batch: Batch
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    flops: float = 0.0


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


# --- models ----------------------------------------------------------------------------------------


def gpt(batch_size: int = 8, layers: int = 4) -> Work:
    """A byte-level GPT of width 256 on windows of 256 bytes."""
    code = load_example("gpt/model.py")
    model = code.build(code.Shape("own", layers, 256, 4, 256, 0.0))
    ids = torch.randint(0, 256, (batch_size, 256))
    weights = sum(one.numel() for name, one in model.named_parameters() if "position" not in name)
    flops = ids.numel() * (6.0 * weights + 12.0 * layers * 256 * 256)
    return Work(model, own_loss, {"input_ids": ids, "labels": ids}, adamw, flops)


def gpt12(batch_size: int = 2) -> Work:
    """Twelve equal layers: what a compiler must not do twelve times."""
    return gpt(batch_size, 12)


def bert(batch_size: int = 8) -> Work:
    """BERT of Hugging Face, 4 layers of width 256, on 128 tokens."""
    config = hf.BertConfig(
        vocab_size=8192, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(0, 8192, (batch_size, 128))
    return Work(hf.BertForMaskedLM(config), own_loss, {"input_ids": ids, "labels": ids}, adamw)


def vit(batch_size: int = 8) -> Work:
    """ViT of Hugging Face, 4 layers of width 256, on images of 112 x 112 in patches of 8."""
    config = hf.ViTConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, image_size=112,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(batch_size, 3, 112, 112)}
    batch["labels"] = torch.randint(0, 2, (batch_size,))
    return Work(hf.ViTForImageClassification(config), own_loss, batch, adamw)


class _Block(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(given, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.short = nn.Identity()
        if stride > 1 or given != width:
            self.short = nn.Sequential(nn.Conv2d(given, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


class ResNet18(nn.Module):
    """He et al., 2016."""

    def __init__(self, num_classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.layers = nn.ModuleList(
            nn.Sequential(_Block(given, width, stride), _Block(width, width, 1))
            for given, width, stride in widths
        )
        self.head = nn.Linear(512, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


def resnet18(batch_size: int = 8) -> Work:
    """ResNet-18 on images of 112 x 112, SGD with momentum."""
    batch = {"x": torch.randn(batch_size, 3, 112, 112), "y": torch.randint(0, 100, (batch_size,))}
    return Work(
        ResNet18(),
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batch,
        adamw if batch_size == 1 else lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9),
    )


class DLRM(nn.Module):
    """Naumov et al., 2019: tables, products of their rows, two MLPs."""

    def __init__(self, rows: int, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 32, sparse=sparse) for _ in range(8))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 + 36, 256), nn.ReLU(), nn.Linear(256, 1))
        self.pairs: torch.Tensor
        self.register_buffer("pairs", torch.tril_indices(9, 9, -1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


def dlrm(batch_size: int = 512, sparse: bool = False) -> Work:
    """8 tables of 200,000 rows of 32, SGD."""
    batch = {
        "dense": torch.randn(batch_size, 13),
        "sparse": torch.randint(0, 200_000, (batch_size, 8)),
        "clicked": torch.randint(0, 2, (batch_size,)).float(),
    }

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["sparse"]), batch["clicked"])

    return Work(DLRM(200_000, sparse), loss, batch, sgd)


WORKS: Mapping[str, Callable[..., Work]] = {
    "gpt": gpt, "bert": bert, "vit": vit, "resnet18": resnet18, "dlrm": dlrm, "gpt12": gpt12,
}  # fmt: skip

# --- peers -----------------------------------------------------------------------------------------


def _step(loss: Callable[[Batch], torch.Tensor], optimizer: Any, update: Callable[[], Any]) -> Train:
    def step(batch: Batch) -> torch.Tensor:
        value = loss(batch)
        value.backward()
        update()
        optimizer.zero_grad()
        return value.detach()

    return step


def eager(work: Work) -> Train:
    optimizer = work.optimizer(work.model)
    return _step(lambda batch: work.loss(work.model, batch), optimizer, optimizer.step)


def compiled_model(work: Work) -> Train:
    optimizer = work.optimizer(work.model)
    model = torch.compile(work.model)
    return _step(lambda batch: work.loss(model, batch), optimizer, optimizer.step)  # type: ignore[arg-type]


def compiled_all(work: Work) -> Train:
    optimizer = work.optimizer(work.model)
    model = torch.compile(work.model)
    return _step(
        lambda batch: work.loss(model, batch),  # type: ignore[arg-type]
        optimizer,
        torch.compile(optimizer.step),
    )


def _ours(mode: Literal["background", "ahead", "off"]) -> Callable[[Work], Step]:
    def train(work: Work) -> Step:
        optimizer = work.optimizer(work.model)
        one = flow.placement("cpu", [0])

        @flow.graph(work.model, optimizer, placement=one, plan="data", compile=mode)
        def step(batch: Batch) -> torch.Tensor:
            loss = work.loss(work.model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return train


PEERS: Mapping[str, Callable[[Work], Train]] = {
    "eager": eager,
    "torch.compile model": compiled_model,
    "torch.compile all": compiled_all,
    "monoflow op by op": _ours("off"),
    "monoflow": _ours("ahead"),
}
OURS = "monoflow"
