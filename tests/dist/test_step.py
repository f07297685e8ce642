"""The compiled step on real ranks: the curve of one device, and state that lives in the user's modules."""

from __future__ import annotations

import copy
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import monoflow as flow
from monoflow.mesh import Placement
from monoflow.step import Step
from tests.conftest import RunCli, RunRanks

NUM_STEPS = 4
VOCABULARY = 13


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class TinyGPT(nn.Module):
    """A tied embedding, one block, dropout, an uneven vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.norm = nn.LayerNorm(12)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.dropout(self.attention(self.norm(x)))
        return (x + self.dropout(self.mlp(x))) @ self.embedding.weight.T


def build(placement: Placement | None = None, plan: str | None = None) -> tuple[nn.Module, Any, Step]:
    torch.manual_seed(0)
    model = TinyGPT()
    params = list(model.parameters())  # references from before parameters are split
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)  # small gradients: small steps

    @flow.graph(model, optimizer, placement=placement, plan=plan)
    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (NUM_STEPS * 6, 5), generator=generator)
    labels = torch.where(ids % 4 == 0, -100, ids.roll(-1, 1))  # ranks have unequal numbers of targets
    return {"ids": ids, "labels": labels}


def whole_batches(size: int = 6) -> list[dict[str, Tensor]]:
    return [{key: x[i : i + size] for key, x in data().items()} for i in range(0, NUM_STEPS * size, size)]


def curve(step: Callable) -> list[float]:
    return [step(batch).item() for batch in whole_batches()]


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    """The losses of the function itself, run eagerly on one device."""
    return curve(build()[2].eager)


def close(found: list[float], expected: list[float]) -> bool:
    return found == pytest.approx(expected, abs=1e-5)


def parts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes that this rank holds of the parameters that are split."""
    return {n: tuple(p.to_local().shape) for n, p in model.named_parameters() if isinstance(p, DTensor)}


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """AdamW's first moments, in the order of the parameters."""
    state = optimizer.state_dict()["state"]
    return [state[number]["exp_avg"] for number in sorted(state)]


def train(axes: tuple[int, ...], plan: str) -> dict[str, Any]:
    """One rank of a run, and what a user can see of it."""
    ranks = torch.arange(torch.Size(axes).numel()).view(axes).tolist()
    model, optimizer, step = build(flow.placement("cpu", ranks), plan)
    pointers = []
    losses = []
    for batch in whole_batches():
        loss = step(batch)
        assert loss.dim() == 0 and type(loss) is Tensor  # once it was looked at
        losses.append(loss.item())
        pointers.append([flow.to_local(p.detach()).data_ptr() for p in model.parameters()])
    states = moments(optimizer)
    return {
        "losses": losses,
        "parts": parts(model),
        "in place": all(one == pointers[0] for one in pointers),
        "split states": sum(isinstance(one, DTensor) for one in states),
        "full": {name: x.numpy() for name, x in flow.full_state_dict(model).items()},
        "full states": [(x.full_tensor() if isinstance(x, DTensor) else x.clone()).numpy() for x in states],
        "counts": {(key.axis, key.kind): value[0] for key, value in step.stats().counts.items()},
        "verified": step.verify(whole_batches()[0]).largest,
        "after": step.eager(whole_batches()[0]).item(),
    }


def reference_state() -> tuple[dict[str, Tensor], list[Tensor]]:
    model, optimizer, step = build()
    for batch in whole_batches():
        step.eager(batch)
    return model.state_dict(), moments(optimizer)


@pytest.mark.parametrize(
    ("axes", "plan"),
    [((2,), "data"), ((2,), "zero"), ((2,), "tensor"), ((2, 2), "data x tensor")],
    ids=["data 2", "zero 2", "tensor 2", "data x tensor 2x2"],
)
def test_curve_and_state(run_ranks: RunRanks, one_device: list[float], axes, plan: str) -> None:
    found = run_ranks(torch.Size(axes).numel(), train, axes, plan)
    state, expected_moments = reference_state()
    for one in found:
        assert close(one["losses"], one_device)
        assert one["losses"] == found[0]["losses"] and one["after"] == found[0]["after"]
        assert one["verified"] <= 1e-5
        for name, value in state.items():
            torch.testing.assert_close(torch.from_numpy(one["full"][name]), value, atol=1e-5, rtol=1e-5)
        for value, expected in zip(one["full states"], expected_moments, strict=True):
            torch.testing.assert_close(torch.from_numpy(value), expected, atol=1e-5, rtol=1e-4)
    if plan == "data":
        assert found[0]["parts"] == {} and found[0]["split states"] == 0
        assert {kind for _, kind in found[0]["counts"]} == {"all_reduce"}
    elif plan == "zero":
        assert found[0]["parts"]["embedding.weight"] in {(7, 12), (13, 6)}
        assert found[0]["split states"] == len(found[0]["parts"])
        assert ("axis0", "all_gather") in found[0]["counts"] or ("data", "all_gather") in found[0]["counts"]
    else:
        assert found[0]["parts"]["mlp.0.weight"] == (12, 12)
        assert found[0]["parts"]["mlp.2.weight"] == (12, 12)


# --- forms of a batch, and results -------------------------------------------------------------------


def feed(plan: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    losses: dict[str, list[float]] = {}
    step = build(plan=plan)[2]
    stream = flow.stream(data(), 6, shuffle=False)
    losses["stream"] = [step(batch).item() for batch in stream]
    step = build(plan=plan)[2]
    mine = [{key: x[:4] if rank == 0 else x[4:] for key, x in batch.items()} for batch in whole_batches()]
    losses["from_local"] = [step(flow.from_local(batch)).item() for batch in mine]
    step = build(plan=plan)[2]
    turns = [step, step.eager, step.eager, step]
    losses["turns"] = [one(batch).item() for one, batch in zip(turns, stream, strict=True)]
    return losses


def test_forms_of_a_batch_and_eager_in_between(run_ranks: RunRanks, one_device: list[float]) -> None:
    for losses in run_ranks(2, feed, "zero"):
        for how, found in losses.items():
            assert close(found, one_device), how


def outputs() -> dict[str, Any]:
    model, optimizer, step = build(plan="zero")
    other = flow.graph(model, optimizer, plan="zero")(step._function)  # finds the model split already
    losses = [step(whole_batches()[0]).item(), other(whole_batches()[1]).item()]
    random = torch.get_rng_state()
    held = {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}

    @flow.graph(model, plan="data")
    def evaluate(ids: Tensor) -> dict[str, Any]:
        logits = model(ids)
        return {"logits": logits, "means": [logits.mean(), logits.mean((0, 1))], "none": None}

    model.eval()
    ids = whole_batches()[0]["ids"]
    found = evaluate(ids)
    assert found["means"][0].dim() == 0 and type(found["means"][0]) is Tensor and found["none"] is None
    expected = evaluate.eager(ids)
    for one, other in [(found["logits"], expected["logits"]), (found["means"][1], expected["means"][1])]:
        assert isinstance(one, DTensor) and one.shape == other.shape
        torch.testing.assert_close(one.full_tensor(), other.detach())
    torch.testing.assert_close(found["means"][0], expected["means"][0].detach())
    assert {n: p.placements for n, p in model.named_parameters() if isinstance(p, DTensor)} == held
    model.train()
    torch.set_rng_state(random)
    one_more = step(whole_batches()[2]).item()
    model.eval()
    torch.testing.assert_close(evaluate(ids)["logits"].full_tensor(), evaluate.eager(ids)["logits"].detach())
    losses.append(one_more)
    return {"placements": str(found["logits"].placements), "losses": losses}


def test_steps_share_a_split_model(run_ranks: RunRanks, one_device: list[float]) -> None:
    for one in run_ranks(2, outputs):
        assert one["placements"] == "(Shard(dim=0),)"
        assert close(one["losses"], one_device[:3])


# --- saving and verifying in the middle --------------------------------------------------------------


def interrupted(plan: str) -> list[float]:
    """Two steps, then all is saved and loaded into fresh objects; verify in between changes nothing."""
    model, optimizer, step = build(plan=plan)
    batches = whole_batches()
    losses = [step(batch).item() for batch in batches[:2]]
    random = torch.get_rng_state()
    step.verify(batches[3], steps=2)
    assert torch.equal(torch.get_rng_state(), random)
    weights, state = flow.full_state_dict(model), copy.deepcopy(optimizer.state_dict())
    model, optimizer, step = build(plan=plan)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    torch.set_rng_state(random)
    return losses + [step(batch).item() for batch in batches[2:]]


def test_saved_and_loaded_between_steps(run_ranks: RunRanks, one_device: list[float]) -> None:
    for losses in run_ranks(2, interrupted, "zero"):
        assert close(losses, one_device)


# --- failures ----------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
import torch, monoflow as flow
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.graph(model, optimizer, plan=sys.argv[1])
def step(ids):
    loss = model(ids).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

ids = torch.arange(8)
step(ids)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(body: str) -> Path:
        path = tmp_path / "user_script.py"
        path.write_text(SCRIPT + body)
        return path

    return write


@pytest.mark.parametrize("plan", ["data", "tensor"])
def test_an_index_out_of_range_on_one_ranks_shard(script, run_cli: RunCli, plan: str) -> None:
    done = run_cli("run", "-n", "2", script("ids[6] = 10\nstep(ids)"), plan)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "IndexError: index 10 is out of range for a vocabulary of 10 rows\n" in done.stderr
    assert re.search(
        r"in task \w+ \(forward\) of rank \d: op embedding, module '0', \S*user_script\.py:11\n", done.stderr
    )
    assert re.search(r"in the step that was called at \S*user_script\.py:20\n", done.stderr)


def test_an_exception_between_steps(script, run_cli: RunCli) -> None:
    body = "if rank == 1: raise ValueError('its own fault')\nwhile True: step(ids)"
    done = run_cli("run", "-n", "2", script(body), "data")
    assert done.returncode == 1
    assert re.match(r"\nrank 1 on \S+ failed first:\n\nTraceback", done.stderr)
    assert done.stderr.count("Traceback") == 1 and done.stderr.endswith("ValueError: its own fault\n")


def test_a_rank_killed_in_the_middle_of_steps(script, run_cli: RunCli) -> None:
    body = """
import threading
def die():
    time.sleep(0.2)
    print(time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    threading.Thread(target=die).start()
while True:
    step(ids)
"""
    done = run_cli("run", "-n", "2", script(body), "zero")
    assert time.time() - float(done.stdout) < 30
    assert done.returncode == 128 + signal.SIGKILL
    assert re.fullmatch(r"\nrank 1 on \S+ died of signal 9 \(SIGKILL\); .*memory\n", done.stderr)


def test_ranks_that_end_at_different_times(script, run_cli: RunCli) -> None:
    done = run_cli("run", "-n", "2", script("if rank == 0: time.sleep(1)\nprint('done')"), "zero")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\ndone\n", "")
