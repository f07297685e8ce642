"""What whole steps take, beside what their calls were measured to take alone.

In a step a call finds the caches and the memory as the calls before it left them, and moves find ranks that
are not ready. So two small models are trained for some steps: one on every rank for itself, which says what
factor its computing takes more, and one on all ranks under data parallelism, which says that of its moves.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..mesh import Placement, placement
from ..plan.calibration import Calibration
from ..plan.predict import predict
from ..plan.schedule import schedule
from ..step.decorator import Step, graph
from ..step.pending import synchronize
from .timing import meet, slowest

_WARM_UP = 3
_BOUNDS = 0.25, 4.0  # of a factor: beyond, something else was measured
_HALVINGS = 12  # to a tenth of a percent
_WIDTH, _HEADS, _VOCABULARY, _TOKENS, _ROWS = 128, 4, 1024, 64, 8


def with_whole_steps(measured: Calibration, budget: float) -> Calibration:
    """A calibration whose seconds are those of calls within steps. All ranks call it, and get the same.

    Args:
        measured: of calls alone.
        budget: seconds for the steps of each model.
    """
    rank = torch.distributed.get_rank() if measured.setting.num_ranks > 1 else 0
    measured = _fitted(measured, [rank], budget, lambda factor: (factor, 1.0))
    if measured.setting.num_ranks == 1:
        return measured
    return _fitted(measured, range(measured.setting.num_ranks), budget, lambda factor: (1.0, factor))


def _fitted(
    measured: Calibration,
    ranks: Sequence[int],
    budget: float,
    factors: Callable[[float], tuple[float, float]],
) -> Calibration:
    """A calibration scaled so that the step of some ranks is predicted to take what it does.

    Args:
        factors: of computing and of moves, by the one that is sought.
    """
    where = placement(measured.setting.device_type, list(ranks))
    step, batch = _step(where)
    seconds = slowest([_timed(step, batch, budget)], batch.device)[0]

    made = schedule(step.plan)

    def predicted(factor: float) -> float:
        return predict(step.plan, measured.scaled(*factors(factor)).machine(where.shape), made=made).seconds

    low, high = _BOUNDS
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predicted(middle) < seconds else (low, middle)
    return measured.scaled(*factors(math.sqrt(low * high)))


def _timed(step: Step, batch: Tensor, budget: float) -> float:
    """Seconds of steps that all ranks begin together: the lower quartile, as other programs only add."""
    samples: list[float] = []
    for _ in range(_WARM_UP):
        step(batch)
    once = _once(step, batch)
    for _ in range(max(_WARM_UP, int(budget / slowest([once], batch.device)[0]))):
        samples.append(_once(step, batch))
    return statistics.quantiles(samples, n=4, method="inclusive")[0]


def _once(step: Step, batch: Tensor) -> float:
    synchronize()
    meet()
    start = time.perf_counter()
    step(batch)
    synchronize()
    return time.perf_counter() - start


class _Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.mixed, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mixed(self.norms[0](x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def _step(where: Placement) -> tuple[Step, Tensor]:
    """A small language model's training step on a placement, and a batch for it."""
    torch.manual_seed(0)
    device = torch.device(where.device_type)
    model = nn.Sequential(
        nn.Embedding(_VOCABULARY, _WIDTH), _Block(), _Block(), nn.Linear(_WIDTH, _VOCABULARY)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @graph(model, optimizer, placement=where, plan="data", compile="off")
    def step(ids: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, torch.randint(0, _VOCABULARY, (_ROWS * where.size, _TOKENS), device=device)
