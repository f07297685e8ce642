"""Unmodified Hugging Face models, dropout on: captured steps give the losses and states of eager ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from .graph_run import GraphStep, Things, assert_close, compare

VOCABULARY = 50
Model = tuple[Callable[[], nn.Module], Callable[[torch.Generator], dict[str, torch.Tensor]]]


def tokens(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def causal(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = tokens(generator, 3, 8)
    return {"input_ids": ids, "labels": ids}


def masked(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = tokens(generator, 3, 8)
    labels = torch.where(torch.rand(3, 8, generator=generator) < 0.4, ids, -100)
    attention = torch.ones(3, 8, dtype=torch.int64)
    attention[1, 5:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": attention}


def translated(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(generator, 3, 8), "labels": tokens(generator, 3, 5)}


def images(generator: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.randn(3, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 1])}


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT = SMALL | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def model(
    kind: str, config: str, batch: Callable[[torch.Generator], dict[str, torch.Tensor]], **settings: Any
) -> Model:
    return lambda: getattr(hf, kind)(getattr(hf, config)(**settings)), batch


MODELS = {
    "gpt2": model(
        "GPT2LMHeadModel",
        "GPT2Config",
        causal,
        n_layer=2,
        n_embd=16,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=16,
        **ENDS,
    ),
    "llama": model(
        "LlamaForCausalLM",
        "LlamaConfig",
        causal,
        **TEXT,
        **ENDS,
        num_key_value_heads=2,
        attention_dropout=0.1,
    ),
    "bert": model("BertForMaskedLM", "BertConfig", masked, **TEXT),
    "vit": model(
        "ViTForImageClassification",
        "ViTConfig",
        images,
        **SMALL,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.1,
    ),
    "t5": model(
        "T5ForConditionalGeneration",
        "T5Config",
        translated,
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "mistral": model(
        "MistralForCausalLM", "MistralConfig", masked, **TEXT, **ENDS, num_key_value_heads=2, sliding_window=4
    ),
    "qwen2": model("Qwen2ForCausalLM", "Qwen2Config", causal, **TEXT, **ENDS, num_key_value_heads=2),
    "gpt-neox": model("GPTNeoXForCausalLM", "GPTNeoXConfig", causal, **TEXT, **ENDS, hidden_dropout=0.1),
    "roberta": model(
        "RobertaForMaskedLM", "RobertaConfig", masked, **TEXT | {"max_position_embeddings": 20}, **ENDS
    ),
    "resnet": model(
        "ResNetForImageClassification",
        "ResNetConfig",
        images,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
    "bart": model(
        "BartForConditionalGeneration",
        "BartConfig",
        translated,
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=16,
        pad_token_id=0,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        **ENDS,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_states_equal_eager_ones(name: str) -> None:
    build, batch = MODELS[name]

    def make() -> tuple[Callable, Things]:
        net = build().train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step(batch: dict[str, torch.Tensor]) -> Any:
            out = net(**batch)
            out.loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return out.loss, norm

        return step, (net, optimizer)

    batches = [(batch(torch.Generator().manual_seed(i)),) for i in range(2)]
    compare(make, batches, tolerance=2e-5)


def test_a_model_output_is_returned_as_it_is() -> None:
    build, batch = MODELS["bert"]
    net = build().eval()

    def step(**batch: torch.Tensor) -> Any:
        return net(**batch)

    arguments = batch(torch.Generator().manual_seed(0))
    found = GraphStep(step, (net,))(torch.tensor(0), **arguments)
    expected = step(**arguments)
    assert type(found) is type(expected) and list(found) == list(expected)
    assert_close(found.loss, expected.loss.detach(), 1e-6, "loss")
    assert_close(found.logits, expected.logits.detach(), 1e-5, "logits")
