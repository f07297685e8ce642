"""Models built without memory on one device: steps, Hugging Face's architectures, files, huge models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel

import monoflow as flow
from monoflow.compiler import plan as make_plan
from monoflow.compiler import subject_of, trace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]), persistent=False)
        self.weights = torch.arange(3) / 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))) * self.scale * self.weights


def built(weights: str | Path | None = None, seed: int = 0, **kwargs) -> Net:
    torch.manual_seed(seed)
    with flow.lazy(weights, **kwargs):
        return Net()


def step_of(model: nn.Module, **kwargs) -> flow.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @flow.graph(model, optimizer, **kwargs)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def batch() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def losses_of(step: flow.Step) -> list[float]:
    return [step(batch()).item() for _ in range(3)]


def test_a_step_gives_the_model_its_memory_and_is_compiled_once() -> None:
    materialized = built()
    flow.materialize(materialized)
    expected = losses_of(step_of(materialized))
    model = built()
    objects = [*map(id, model.parameters())]
    step = step_of(model)
    assert len(step.capture(batch()).inputs) > 8 and all(param.is_meta for param in model.parameters())
    assert losses_of(step) == expected
    assert [*map(id, model.parameters())] == objects
    assert len(step._versions._of) == 1, "the memory made it another kind of call"
    eager = step_of(built())
    assert eager.eager(batch()).item() == pytest.approx(expected[0], rel=1e-5)
    for plan in ("zero", "tensor"):
        with flow.simulate(2):
            assert losses_of(step_of(built(), plan=plan)) == pytest.approx(expected, rel=1e-4), plan


def test_verify_holds_from_the_first_step_on() -> None:
    step = step_of(built())
    with flow.simulate(2):
        assert step.verify(batch(), steps=2)["result"].largest < 1e-5


HIDDEN: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TEXT: dict[str, Any] = {**HIDDEN, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PAIRED: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99,
    "max_position_embeddings": 16,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 99,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5: dict[str, Any] = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 99}
IMAGE: dict[str, Any] = {**HIDDEN, "image_size": 16, "patch_size": 4}
SWIN: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
}
SOUND: dict[str, Any] = {
    **TEXT, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
IDS = {"input_ids": torch.arange(3, 15).reshape(2, 6)}
PAIR = {**IDS, "decoder_input_ids": torch.arange(5, 13).reshape(2, 4)}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)}
WAVES = {"input_values": torch.linspace(-1, 1, 800).reshape(2, 400)}
ARCHITECTURES: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "gpt2": (transformers.GPT2Config(**GPT2), IDS),
    "llama": (transformers.LlamaConfig(**TEXT, num_key_value_heads=2), IDS),
    "bert": (transformers.BertConfig(**TEXT), IDS),
    "t5": (transformers.T5Config(**T5), PAIR),
    "vit": (transformers.ViTConfig(**IMAGE), PIXELS),
    "mixtral": (transformers.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4), IDS),
    "gemma2": (transformers.Gemma2Config(**TEXT, num_key_value_heads=2, head_dim=8), IDS),
    "bart": (transformers.BartConfig(**PAIRED), PAIR),
    "marian": (transformers.MarianConfig(**PAIRED, pad_token_id=98, decoder_start_token_id=98), PAIR),
    "swin": (transformers.SwinConfig(**SWIN, window_size=4), PIXELS),
    "convnext": (transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2), PIXELS),
    "mamba": (transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=99), IDS),
    "wav2vec2": (transformers.Wav2Vec2Config(**SOUND), WAVES),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hugging_face_models_begin_as_those_built_with_memory(name: str) -> None:
    config, inputs = ARCHITECTURES[name]
    torch.manual_seed(0)
    expected = AutoModel.from_config(config)
    with flow.lazy():
        model = AutoModel.from_config(config)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    flow.materialize(model)
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in expected.named_parameters()]
    for (key, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, other) and buffer.stride() == other.stride(), key
    for (key, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, key
        if torch.equal(ours, theirs) or ours.numel() < 2:
            continue
        assert theirs.std() > 0, f"{key} is constant with torch and random here"
        count = ours.numel()
        assert abs(ours.mean() - theirs.mean()) < 8 * theirs.std() / count**0.5, key
        assert abs(ours.std() - theirs.std()) < 8 * theirs.std() / count**0.5, key
    with torch.no_grad():
        out = model.eval()(**inputs)[0]
    assert torch.isfinite(out).all() and out.std() > 0


# --- files -----------------------------------------------------------------------------------------


def test_a_hugging_face_directory_in_shards_is_read(tmp_path: Path) -> None:
    config, inputs = ARCHITECTURES["t5"]  # with tied weights, which the files hold once
    saved = AutoModel.from_config(config)
    saved.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with flow.lazy(tmp_path):
        model = AutoModel.from_config(config)
    flow.materialize(model)
    for (key, ours), theirs in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs), key
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs)[0], saved.eval()(**inputs)[0])


def test_a_checkpoint_of_a_step_is_read_and_loaded(tmp_path: Path) -> None:
    step = step_of(built())
    losses_of(step)
    flow.save(tmp_path / "saved", step)
    expected = losses_of(step)
    with_state = step_of(built(seed=5))
    flow.load(tmp_path / "saved", with_state)
    assert losses_of(with_state) == expected
    model = built(tmp_path / "saved", seed=5)
    flow.materialize(model)
    weights_only = losses_of(step_of(model))
    assert weights_only[0] == expected[0] and weights_only[1] != expected[1]


def test_files_of_another_dtype_and_other_names_are_read(tmp_path: Path) -> None:
    saved = {f"net.{name}": value.to(torch.float64) for name, value in Net().state_dict().items()}
    save_file(saved, tmp_path / "one.safetensors")
    model = built(tmp_path / "one.safetensors", rename=lambda name: f"net.{name}")
    flow.materialize(model)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32 or name.endswith("tracked")
        assert torch.equal(value, saved[f"net.{name}"].to(value.dtype)), name


def test_names_and_shapes_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    saved = Net().state_dict()
    saved["last.weight"] = torch.zeros(3, 9)
    saved["other"] = saved.pop("first.bias")
    save_file(saved, tmp_path / "model.safetensors")
    model = built(tmp_path)
    with pytest.raises(flow.CheckpointError) as error:
        step_of(model)(batch())
    text = str(error.value)
    assert "last.weight is (3, 9) in the files and (3, 8) in the model" in text
    assert "missing in the files: first.bias" in text and "not in the model: other" in text
    assert str(tmp_path) in text and all(param.is_meta for param in model.parameters())
    saved["last.weight"] = torch.ones(3, 8)
    save_file(saved, tmp_path / "model.safetensors")
    lenient = built(tmp_path, strict=False)
    flow.materialize(lenient)
    assert lenient.last.weight.eq(1).all() and lenient.first.bias.abs().max() > 0


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-8])
    with pytest.raises(flow.CheckpointError, match=r"model\.safetensors cannot be read"):
        flow.materialize(built(tmp_path))
    with pytest.raises(flow.CheckpointError, match="no file or directory"):
        flow.materialize(built(tmp_path / "nowhere"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(flow.CheckpointError, match=r"holds neither model\.safetensors nor"):
        flow.materialize(built(tmp_path))


# --- what does not fit, and what does --------------------------------------------------------------


def test_meta_tensors_of_others_and_wrong_layouts_are_refused() -> None:
    with pytest.raises(flow.PlacementError, match=r"first\.weight.* are meta tensors that flow\.lazy"):
        flow.materialize(Net().to("meta"))
    with pytest.raises(flow.PlacementError, match=r"build the model in flow\.lazy\(\)"):
        step_of(Net().to("meta"))(batch())
    placement = flow.placement("cpu", [0])
    with pytest.raises(flow.LayoutError, match=r"'\*\.wrong' matches no parameter or buffer"):
        flow.materialize(built(), placement, {"*.wrong": "S(0)"})
    with pytest.raises(flow.LayoutError, match=r"S\(2\) splits dim 2"):
        flow.materialize(built(), placement, {"first.weight": "S(2)"})


def test_a_model_larger_than_this_machine_is_planned() -> None:
    with flow.lazy():
        model = nn.Sequential(*[nn.Linear(1 << 16, 1 << 16, bias=False) for _ in range(12)])
    assert sum(param.nbytes for param in model.parameters()) > 200e9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    captured = trace(step, subject_of([model, optimizer]), [torch.empty(8, 1 << 16)], {})
    made = make_plan(captured, [flow.placement("cpu", range(8))], "zero", {})
    assert str(made.inputs["0.weight"][0]) == "S(0)"
    assert all(param.is_meta for param in model.parameters())
