"""`batch_stats`: batch norm over the whole batch, or over each rank's rows as in data-parallel training."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import monoflow as flow
from monoflow.errors import FlowError, LayoutError
from monoflow.sbp.ops.batch_norm import local_batch_norm, local_batch_norm_backward
from monoflow.sbp.oracle import describe
from monoflow.sbp.registry import Forms, OpRule
from monoflow.sbp.rules.batch_norm import RULES
from monoflow.sbp.signature import OpCall, Signature
from monoflow.step import Step

from .rule_trial import proven, values

LR = 0.1


def network() -> nn.Sequential:
    """Batch norms in two and four dims, with and without weights and running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.BatchNorm1d(6, affine=False, momentum=0.3),
        nn.Linear(6, 2),
    ).double()


def rows(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (count,), generator=generator)


def step_of(
    model: nn.Module, batch_stats: str, plan: str | None = None, devices: flow.Placement | None = None
) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), LR)

    @flow.graph(model, optimizer, placement=devices, plan=plan, batch_stats=batch_stats)
    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_hand(model: nn.Module, num_ranks: int, x: Tensor, labels: Tensor) -> Tensor:
    """One step of data-parallel training: a replica a chunk, gradients added, running statistics averaged."""
    parts = list(zip(x.chunk(num_ranks), labels.chunk(num_ranks), strict=True))
    replicas = [copy.deepcopy(model) for _ in parts]
    total = x.new_zeros(())
    for replica, (part, own) in zip(replicas, parts, strict=True):
        loss = F.cross_entropy(replica(part), own, reduction="sum") / len(x)
        loss.backward()
        total += loss.detach()
    with torch.no_grad():
        for name, param in model.named_parameters():
            grads = [replica.get_parameter(name).grad for replica in replicas]
            param -= LR * sum(grad for grad in grads if grad is not None)
        for name, buffer in model.named_buffers():
            shares = [len(part) / len(x) for part, _ in parts]
            new = sum(s * replica.get_buffer(name) for s, replica in zip(shares, replicas, strict=True))
            buffer.copy_(torch.as_tensor(new))
    return total


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("plan", "num_ranks", "num_rows"), [("data", 2, 8), ("zero", 4, 8), ("zero", 2, 7), ("data", 4, 14)]
)
def test_local_statistics_are_those_of_data_parallel_training(
    plan: str, num_ranks: int, num_rows: int
) -> None:
    model, reference = network(), network()
    step = step_of(model, "local", plan)
    x, labels = rows(num_rows)
    with flow.simulate(num_ranks):
        for number in range(3):
            batch = x + number, labels
            loss = step(*batch)
            torch.testing.assert_close(loss, by_hand(reference, num_ranks, *batch), rtol=1e-9, atol=1e-12)
        assert_same_state(flow.full_state_dict(model), reference.state_dict())


@pytest.mark.parametrize(
    ("plan", "ranks", "num_parts"),
    [
        ("tensor", [0, 1], 1),
        ("data x tensor", [[0, 1], [2, 3]], 2),
        ("zero x tensor", [[0, 1], [2, 3]], 2),
        ("data x data", [[0, 1], [2, 3]], 4),
    ],
)
def test_only_axes_that_split_the_batch_have_statistics_of_their_own(
    plan: str, ranks: list, num_parts: int
) -> None:
    model, reference = network(), network()
    devices = flow.placement("cpu", ranks)
    x, labels = rows(8)
    with flow.simulate(devices.size):
        loss = step_of(model, "local", plan, devices)(x, labels)
        torch.testing.assert_close(loss, by_hand(reference, num_parts, x, labels), rtol=1e-9, atol=1e-12)
        assert_same_state(flow.full_state_dict(model), reference.state_dict())


def test_a_rank_without_rows_counts_for_nothing() -> None:
    model, reference = network(), network()
    x, labels = rows(6)  # chunks of 2 for three of four ranks
    with flow.simulate(4):
        loss = step_of(model, "local")(x, labels)
        torch.testing.assert_close(loss, by_hand(reference, 3, x, labels), rtol=1e-9, atol=1e-12)
        assert_same_state(flow.full_state_dict(model), reference.state_dict())


@pytest.mark.parametrize("batch_stats", ["global", "local"])
def test_on_one_device_both_are_eager(batch_stats: str) -> None:
    model, reference = network(), network()
    loss = step_of(model, batch_stats)(*rows(5))
    torch.testing.assert_close(loss, by_hand(reference, 1, *rows(5)), rtol=1e-9, atol=1e-12)
    assert_same_state(dict(model.state_dict()), reference.state_dict())


def test_global_statistics_do_not_depend_on_the_ranks_and_local_ones_do() -> None:
    def losses(batch_stats: str) -> list[float]:
        found = []
        for num_ranks in (1, 2):
            with flow.simulate(num_ranks):
                step = step_of(network(), batch_stats)
                found.append([step(*rows(8)).item() for _ in range(2)][-1])
        return found

    one, two = losses("global")
    assert one == pytest.approx(two, rel=1e-9)
    one, two = losses("local")
    assert one != pytest.approx(two, rel=1e-4)


def test_local_statistics_cost_no_message_in_the_activations() -> None:
    with flow.simulate(2):
        step = step_of(network(), "local")
        step(*rows(8))
        targets = {str(node.target) for node in step.plan.graph.calls()}
        layouts = {
            node.name: step.plan.layouts(node)[0]
            for node in step.plan.graph.calls()
            if "local_batch_norm" in str(node.target)
        }
    assert {"monoflow.local_batch_norm.default", "monoflow.local_batch_norm_backward.default"} <= targets
    assert len(layouts) == 6 and set(map(str, layouts.values())) == {str((flow.sbp.split(0),))}


def test_evaluation_uses_the_running_statistics() -> None:
    model = network().eval()
    model[3] = nn.Identity()
    want = model(rows(6)[0]).detach()

    @flow.graph(model, batch_stats="local")
    def predict(x: Tensor) -> Tensor:
        return model(x)

    with flow.simulate(2), torch.no_grad():
        found = predict(rows(6)[0])
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)
        assert not any("local_batch_norm" in str(node.target) for node in predict.plan.graph.calls())


def test_bfloat16_autocast_trains_with_local_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    reference = copy.deepcopy(model)
    x, labels = rows(8)

    def loss_of(model: nn.Module, x: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x).float(), labels, reduction=reduction)

    @flow.graph(model, batch_stats="local")
    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(model, x, labels)
        loss.backward()
        return loss

    with flow.simulate(2):
        loss = step(x.float(), labels)
    parts = zip(x.float().chunk(2), labels.chunk(2), strict=True)
    total = sum(loss_of(copy.deepcopy(reference), part, own, "sum").item() / 8 for part, own in parts)
    assert loss.item() == pytest.approx(total, rel=2e-2)
    assert model[1].running_mean.dtype == torch.float32


def test_one_value_per_channel_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    @flow.graph(model, batch_stats="local")
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with (
        flow.simulate(2),
        pytest.raises(LayoutError, match=r"a rank holds 1 of 2 rows, a single value per channel"),
    ):
        step(torch.randn(2, 3))


def test_another_word_is_refused() -> None:
    with pytest.raises(FlowError, match=r"batch_stats='rank' is neither \"global\" nor \"local\""):
        flow.graph(nn.BatchNorm1d(2), batch_stats="rank")


# --- the ops and their rules -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 2), (2, 4, 3, 2)])
@pytest.mark.parametrize("affine", [False, True])
def test_ops_are_batch_norm_and_its_gradient(shape: tuple[int, ...], affine: bool) -> None:
    x, grad = values(*shape), values(*shape, seed=1)
    weight, bias = (values(4, seed=2), values(4, seed=3)) if affine else (None, None)
    mean, var = torch.zeros(4, dtype=x.dtype), torch.zeros(4, dtype=x.dtype)
    leaves = [one.requires_grad_() for one in (x, weight, bias) if one is not None]
    want = F.batch_norm(x, mean, var, weight, bias, True, 1.0, 1e-5)
    wanted = torch.autograd.grad(want, leaves, grad)
    with torch.no_grad():
        found = local_batch_norm(x, weight, bias, 1e-5, 0.5)
        grads = local_batch_norm_backward(grad, x, weight, 1e-5)
    for have, expected in zip(found, (want, mean / 2, var / 2), strict=True):
        torch.testing.assert_close(have, expected)
    for have, expected in zip(grads, wanted, strict=False):
        torch.testing.assert_close(have, expected)
    torch.library.opcheck(local_batch_norm, (x.detach(), weight, bias, 1e-5, 0.5), test_utils=CHECKS)
    torch.library.opcheck(local_batch_norm_backward, (grad, x.detach(), weight, 1e-5), test_utils=CHECKS)


CHECKS = ("test_schema", "test_faketensor")


X, WEIGHT = values(5, 4, 2), values(4, seed=2)
GRAD, BIAS = values(5, 4, 2, seed=1), values(4, seed=3)
CALLS = [
    (local_batch_norm, (X, WEIGHT, BIAS, 1e-5, 1.0), "S(0), B, B -> S(0), P(sum), P(sum)"),
    (local_batch_norm_backward, (GRAD, X, WEIGHT, 1e-5), "S(0), S(0), B -> S(0), P(sum), P(sum)"),
]


@pytest.mark.parametrize(("op", "args", "by_rows"), CALLS)
def test_all_but_the_split_of_rows_is_exact(op: Callable, args: tuple, by_rows: str) -> None:
    def exact(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
        return [one for one in RULES[op].signatures(call, axis_size, forms) if str(one) != by_rows]

    call = describe(op, args, {})
    listed = {str(one) for one in RULES[op].signatures(call, 2, [()] * len(call.inputs))}
    assert listed - proven(OpRule(exact, RULES[op].local), op, *args) == {by_rows}
    assert len(listed) >= 2
