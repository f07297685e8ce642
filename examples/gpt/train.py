"""Train a byte-level GPT on real text, on any number of ranks.

python examples/gpt/train.py
monoflow run -n 2 examples/gpt/train.py --plan tensor --hf llama
monoflow run -n 2 --elastic 1:2 examples/gpt/train.py --save runs/gpt/checkpoints
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import torch
from model import Shape, build
from rich.console import Console
from sample import sample, save
from text import read, standard_library, unigram_entropy, windows

import monoflow as flow


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_argument_group("model")
    model.add_argument("--hf", choices=["gpt2", "llama"], help="an unmodified Hugging Face model instead")
    model.add_argument("--layers", type=int, default=6)
    model.add_argument("--width", type=int, default=384)
    model.add_argument("--heads", type=int, default=6)
    model.add_argument("--context", type=int, default=256, help="bytes")
    model.add_argument("--dropout", type=float, default=0.1)
    training = parser.add_argument_group("training")
    training.add_argument("--text", type=Path, nargs="+", help="files; else Python's standard library")
    training.add_argument("--max-bytes", type=int, default=4_000_000)
    training.add_argument("--steps", type=int, default=1000)
    training.add_argument("--stop-after", type=int, help="stop early, on the schedule of --steps")
    training.add_argument("--batch", type=int, default=32, help="windows of a global batch")
    training.add_argument("--lr", type=float, default=1e-3, help="at its peak")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--plan", help="auto (the default), data, zero, tensor")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, help="folder for model.safetensors (default runs/gpt)")
    output.add_argument("--save", type=Path, help="folder for checkpoints; goes on from the newest in it")
    output.add_argument("--save-every", default="1min", help="steps, or a time such as 10min")
    output.add_argument("--losses", type=Path, help="write the loss curve, a line `step loss` each")
    output.add_argument("--compare", type=Path, help="end with the deviation from another --losses file")
    output.add_argument("--no-sample", action="store_true", help="train only: no sample, nothing saved")
    return parser.parse_args()


def learning_rate(step: int, steps: int, warm_up: int = 20) -> float:
    """A short warm-up, then a cosine down to a tenth, as a fraction of the peak."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def main() -> int:
    args = parse()
    console = Console(quiet=int(os.environ.get("RANK", 0)) != 0, highlight=False)
    text = read(args.text or standard_library(), args.max_bytes)
    train_text, held_out_text = text[: len(text) * 19 // 20], text[len(text) * 19 // 20 :]

    torch.manual_seed(args.seed)
    shape = Shape(args.hf or "own", args.layers, args.width, args.heads, args.context, args.dropout)
    model = build(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{shape.family} model of {num_parameters:,} parameters, {len(text):,} bytes of text")

    @flow.graph(model, optimizer, plan=args.plan)
    def train_step(batch):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @flow.graph(model, plan=args.plan)
    def held_out_step(batch):
        with torch.no_grad():
            return model(**batch).loss

    num_steps = args.stop_after or args.steps
    stream = flow.stream(windows(train_text, args.context), args.batch, seed=args.seed, drop_last=True)
    curve = Curve()
    losses = curve.losses
    model.train()
    with ExitStack() as stack:
        saves = None
        if args.save:
            every = int(args.save_every) if args.save_every.isdigit() else args.save_every
            state = {"schedule": schedule, "curve": curve}
            saves = stack.enter_context(
                flow.checkpointer(args.save, train_step, stream=stream, extra=state, every=every)
            )
            if losses:
                console.print(f"going on after step {len(losses)}")
        stop = stack.enter_context(flow.stop_on_interrupt())
        batches = islice(forever(stream), max(0, num_steps - len(losses)))
        for batch in (steps := flow.progress(batches, num_steps, start=len(losses))):
            losses.append(train_step(batch).item())
            schedule.step()
            steps.show(loss=losses[-1])
            if len(losses) % max(1, num_steps // 10) == 0:
                steps.print(f"step {len(losses):5}  loss {losses[-1]:.4f}")
            saved = saves is not None and saves.after_step()
            if interrupted := stop():
                if saves is not None and not saved:
                    saves.save()
                break
        else:
            interrupted = False

    if args.losses:
        write_losses(args.losses, losses)
    if args.compare:
        console.print(compare(losses, read_losses(args.compare)))
    if args.no_sample:
        return 0
    if interrupted:
        console.print(f"interrupted after {len(losses)} steps")
    else:
        model.eval()
        held_out = flow.stream(
            windows(held_out_text, args.context), args.batch, shuffle=False, drop_last=True
        )
        values = [held_out_step(batch).item() for batch in islice(held_out, 8)]
        console.print(
            f"held-out loss {sum(values) / len(values):.3f} nats a byte; "
            f"unigram entropy of the text {unigram_entropy(text):.3f}"
        )

    state = flow.full_state_dict(model)  # every rank helps to gather it, one writes it
    if not console.quiet:
        path = (args.out or Path("runs/gpt")) / "model.safetensors"
        save(path, shape, state)
        console.print(f"saved {path}")
        if not interrupted:
            fresh = build(shape)
            fresh.load_state_dict(state)
            written = sample(fresh, args.context, b"def ", 200).decode(errors="replace")
            console.out(f"a sample:\n{written}")
    return 130 if interrupted else 0


class Curve:
    """The losses of all steps. A checkpoint keeps them, so that what goes on writes the whole curve."""

    def __init__(self):
        self.losses: list[float] = []

    def state_dict(self):
        return {"losses": torch.tensor(self.losses, dtype=torch.float64)}

    def load_state_dict(self, state):
        self.losses[:] = state["losses"].tolist()


def forever(stream):
    """Epoch after epoch."""
    while True:
        yield from stream


def write_losses(path: Path, losses: list[float]) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{step} {loss:.6f}\n" for step, loss in enumerate(losses, 1)))


def read_losses(path: Path) -> list[float]:
    return [float(line.split()[1]) for line in path.read_text().splitlines()]


def compare(losses: list[float], others: list[float]) -> str:
    """The largest difference of two loss curves, over the steps that both have."""
    gaps = [abs(one - other) for one, other in zip(losses, others, strict=False)]
    return f"largest deviation of the first {len(gaps)} losses: {max(gaps, default=0.0):.2e}"


if __name__ == "__main__":
    sys.exit(main())
