"""Small cases that users of other systems reported as wrong: each must give the one-device numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput

from .harness import LAYOUTS, SEVERAL, Layout, assert_exact, verified
from .models import KINDS, VOCABULARY, Batch, batch_of, training

# --- accumulation with token counts that differ ----------------------------------------------------


class Words(nn.Module):
    """A small model of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def accumulated(ranks: Layout | None, micro_batches: int, batch: Batch) -> dict[str, torch.Tensor]:
    """Gradients of the mean over all tokens that are not ignored, in so many backward passes by hand.

    Without ranks: by plain PyTorch.
    """
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def function(batch: Batch) -> torch.Tensor:
        count = (batch["labels"] != -100).sum()
        total = torch.zeros(())
        for i in range(micro_batches):
            ids, labels = (batch[key].chunk(micro_batches)[i] for key in ("input_ids", "labels"))
            logits = model(ids).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100) / count
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    if ranks is None:
        loss = function(batch)
    else:
        with ranks.ranks():
            loss = ranks.compiled(model, optimizer)(function)(batch)
    grads = {name: before[name] - value.detach() for name, value in model.named_parameters()}
    return {**grads, "loss": loss}


def counted(rows: list[int]) -> Batch:
    """Samples of which so many labels count."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (len(rows), 8), generator=generator)
    labels = torch.stack(
        [torch.where(torch.arange(8) < n, row, -100) for n, row in zip(rows, ids, strict=True)]
    )
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("layout", "micro_batches"), [("data-2", 1), ("data-2", 2), ("data-4", 1), ("zero-2", 2)]
)
def test_gradients_depend_on_the_samples_and_not_on_how_they_are_dealt(
    layout: str, micro_batches: int
) -> None:
    batch = counted([8, 1, 0, 5])
    expected = accumulated(None, 4, batch)
    got = accumulated(LAYOUTS[layout], micro_batches, batch)
    whole = accumulated(LAYOUTS["one"], 1, batch)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6)


def test_a_mean_loss_is_the_mean_over_the_tokens_of_all_ranks() -> None:
    """The mean that cross_entropy takes itself, with ranks that have 13 and 1 tokens."""
    batch = counted([8, 5, 0, 1])
    torch.manual_seed(0)
    model = Words()
    eager = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def function(batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    for layout in ("data-2", "data-4"):
        with LAYOUTS[layout].ranks():
            assert LAYOUTS[layout].compiled(model)(function)(batch).item() == pytest.approx(
                eager.item(), rel=1e-6
            )


# --- losses that look across the batch -------------------------------------------------------------


class Towers(nn.Module):
    """Two encoders whose outputs are compared, each pair of the batch with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(6, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scores = F.normalize(self.left(a), dim=-1) @ F.normalize(self.right(b), dim=-1).T * self.scale.exp()
        own = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


@pytest.mark.parametrize("layout", SEVERAL)
def test_in_batch_negatives_are_those_of_the_whole_batch(layout: str) -> None:
    torch.manual_seed(0)
    model = Towers()
    a, b = torch.randn(8, 8), torch.randn(8, 6)
    model(a, b).backward()
    eager = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        loss = model(a, b)
        loss.backward()
        return loss

    with LAYOUTS[layout].ranks():
        LAYOUTS[layout].compiled(model)(function)(a, b)
    assert eager.keys() == {"left.weight", "left.bias", "right.weight", "right.bias", "scale"}
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, eager[name], rtol=1e-5, atol=1e-6)


# --- look-ups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [40, -1])
def test_an_index_out_of_range_is_an_error_that_names_it(layout: str, bad: int) -> None:
    model, optimizer, function = training("dlrm", "sgd")
    batch = batch_of(KINDS["dlrm"])
    step = LAYOUTS[layout].compiled(model, optimizer)(function)
    with LAYOUTS[layout].ranks():
        step(batch)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(
            IndexError, match=rf"index {bad} is out of range for a vocabulary of 40 rows"
        ) as caught:
            step({**batch, "users": torch.tensor([1, 2, bad, 3])})
        notes = "".join(caught.value.__notes__)
        assert "module 'users'" in notes and "models.py:" in notes
        torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
        step(batch)  # it works on


class Again(nn.Module):
    """One embedding looked up twice, and one whose rows feed a module of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 8)
        self.embed = nn.Embedding(24, 8)
        self.inner = nn.ModuleDict({"embed": nn.Linear(8, 8), "table": nn.Embedding(8, 8)})
        self.head = nn.Linear(8, 24)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        both = self.table(a) + 2 * self.table(b)
        inner = self.inner["embed"](self.embed(a)) + self.inner["table"](b % 8)
        return self.head(both * inner)


@pytest.mark.parametrize("layout", ["one", "data-2", "zero-2", "tensor-2", "tensor-4", "zero-x-tensor"])
def test_an_embedding_used_twice_and_modules_of_one_name(layout: str) -> None:
    torch.manual_seed(0)
    model = Again()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(a, b), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    a, b = torch.randint(0, 24, (4,)), torch.randint(0, 24, (4,))
    step = verified(LAYOUTS[layout], [model, optimizer], function, a, b)
    names = [one.name for one in step.plan.graph.inputs if one.role.name == "PARAM"]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


# --- models whose output is no tensor --------------------------------------------------------------


@pytest.mark.parametrize("layout", ["one", "data-2", "tensor-2", "data-x-tensor"])
def test_model_outputs_come_back_as_they_are(layout: str) -> None:
    torch.manual_seed(0)
    model = KINDS["bert"].build(0.1)
    batch = batch_of(KINDS["bert"])

    def function(batch: Batch) -> Any:
        return model(**batch, output_hidden_states=True)

    with LAYOUTS[layout].ranks():
        step = LAYOUTS[layout].compiled(model)(function)
        out = step(batch)
        assert_exact(step.verify(batch, steps=1))
    assert isinstance(out, MaskedLMOutput)
    assert out.logits is not None and out.hidden_states is not None
    assert out.logits.shape == (4, 8, VOCABULARY) and out["logits"] is out.logits
    assert len(out.hidden_states) == 2 and out.hidden_states[1].shape == (4, 8, 32)


def test_dicts_and_tuples_with_none_come_back_as_they_are() -> None:
    model = nn.Linear(4, 2)

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        y = model(batch["x"])
        return {"out": y, "none": None, "more": (y.sum(), [y[0], batch["x"]])}

    x = torch.randn(4, 4)
    with LAYOUTS["data-2"].ranks():
        out = LAYOUTS["data-2"].compiled(model)(function)({"x": x})
    assert out["none"] is None and list(out) == ["out", "none", "more"]
    torch.testing.assert_close(out["out"], model(x))
    torch.testing.assert_close(out["more"][1][1], x)
    assert out["more"][0].shape == ()
