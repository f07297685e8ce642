"""Write text with a model that train.py saved.

python examples/gpt/sample.py runs/gpt/model.safetensors --prompt "def "
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from model import Shape, build
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


def save(path: Path, shape: Shape, state: dict[str, Tensor]) -> None:
    """Write the weights, with the shape in the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {name: value.detach().clone().contiguous() for name, value in state.items()}  # tied ones apart
    save_file(own, path, metadata={"shape": json.dumps(asdict(shape))})


def load(path: Path) -> tuple[Shape, nn.Module]:
    """The model of a file that `save` wrote."""
    with safe_open(path, framework="pt") as file:
        shape = Shape(**json.loads(file.metadata()["shape"]))
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    model = build(shape)
    model.load_state_dict(state)
    return shape, model


@torch.no_grad()
def sample(
    model: nn.Module, context: int, prompt: bytes, num_bytes: int, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """The prompt and `num_bytes` more, drawn one at a time."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor(list(prompt or b"\n")).unsqueeze(0)
    for _ in range(num_bytes):
        logits = model(input_ids=text[:, -context:]).logits[0, -1]
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        text = torch.cat([text, drawn.unsqueeze(0)], dim=1)
    return bytes(text[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a model.safetensors of train.py")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--bytes", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.file.is_file():
        sys.exit(f"no file {args.file}; train.py writes one")
    shape, model = load(args.file)
    text = sample(model, shape.context, args.prompt.encode(), args.bytes, args.temperature, args.seed)
    print(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
