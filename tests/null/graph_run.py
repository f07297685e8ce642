"""Runs captured steps on one device from live models and optimizers, beside eager runs of the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from monoflow.capture.optimizers import hyper_values
from monoflow.capture.subject import Subject, subject_of
from monoflow.capture.trace import Captured, capture
from monoflow.graph.step_graph import Role
from monoflow.sbp.random_mode import RandomMode, op_numbers

Things = Sequence[Any]


def trace(function: Callable, things: Things, *args: Any, **kwargs: Any) -> Captured:
    """The capture of one call."""
    code = function.__code__
    source = f"{code.co_filename}:{code.co_firstlineno}"
    return capture(function, subject_of(things), args, kwargs, name="step", source=source)


class GraphStep:
    """A step function that runs as its captured graph; captures again when what it depends on changes."""

    def __init__(self, function: Callable, things: Things) -> None:
        self.function, self.things = function, things
        self.subject = subject_of(things)
        self.captures: list[tuple[Any, Captured]] = []

    def __call__(self, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)
        signature = (self.subject.signature(), shapes, str(spec))
        for known, captured in self.captures:
            if known == signature and captured.fits(self.subject):
                break
        else:
            captured = trace(self.function, self.things, *args, **kwargs)
            assert captured.fits(self.subject)
            self.captures.append((signature, captured))
        return run(captured, self.subject, key, args, kwargs)


def run(
    captured: Captured, subject: Subject, key: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """One call of a captured step: reads the live tensors, evaluates the graph, puts the next values."""
    values = _inputs(captured, subject, key, args, kwargs)
    with torch.no_grad():
        module = fx.GraphModule(nn.Module(), captured.graph.graph)
        results = fx.Interpreter(module).run(*(values[one.name] for one in captured.graph.inputs))
    named = {}
    for output, value in zip(captured.graph.outputs, results, strict=True):
        assert value.shape == output.meta.shape and value.dtype == output.meta.dtype, output
        if output.replaces:
            captured.slots[output.replaces].put(value.clone())
        else:
            named[output.name] = value
    for name in captured.cleared_grads:
        captured.slots[name].put(None)
    leaves = [None if name is None else named[name] for name in captured.result_names]
    return pytree.tree_unflatten(leaves, captured.out_spec)


def _inputs(
    captured: Captured, subject: Subject, key: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = {"random:key": key} | dict(captured.graph.constants)
    tensors = [x for x in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, torch.Tensor)]
    values |= dict(zip(captured.batch_names, tensors, strict=True))
    for number, optimizer in enumerate(subject.optimizers):
        for group, hypers in enumerate(hyper_values(optimizer)):
            for name, value in hypers.items():
                values[subject.hyper_name(number, group, name)] = torch.as_tensor(value, dtype=torch.float64)
    for one in captured.graph.inputs:
        if one.name in captured.slots:
            value = captured.slots[one.name].get()
            if value is None:
                begins, index, state = captured.initial[one.name]
                value = begins.value(index, state, subject.params[one.of].detach())
            values[one.name] = value.detach()
    for one in captured.graph.inputs:
        value = values[one.name]
        if one.role is Role.HYPER:
            values[one.name] = value.to(one.meta.dtype)
        assert values[one.name].shape == one.meta.shape and values[one.name].dtype == one.meta.dtype, one
    return values


def eager(function: Callable, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """One eager call that draws the random numbers of a captured one."""
    with op_numbers(), RandomMode(key):
        return function(*args, **kwargs)


def compare(
    make: Callable[[], tuple[Callable, Things]],
    batches: Sequence[tuple[Any, ...]],
    *,
    tolerance: float = 1e-6,
    between: Callable[[Things], None] | None = None,
    num_captures: int | None = 1,
) -> GraphStep:
    """Runs a step eagerly and as graphs over the same batches; results and all state must agree.

    Args:
        make: builds (step function, its models and optimizers); called twice, from the same seed.
        tolerance: of every tensor, relative to its largest element.
        between: called with the models and optimizers after each step.
        num_captures: how many graphs the run may take (None: any).
    """
    torch.manual_seed(0)
    eager_function, eager_things = make()
    torch.manual_seed(0)
    graph_function, graph_things = make()
    step = GraphStep(graph_function, graph_things)
    for number, batch in enumerate(batches):
        key = torch.tensor(1000 + number)
        expected = eager(eager_function, key, *batch)
        found = step(key, *batch)
        assert_close(found, detach(expected), tolerance, f"result of step {number}")
        assert_close(state_of(graph_things), state_of(eager_things), tolerance, f"state after step {number}")
        if between is not None:
            between(eager_things)
            between(graph_things)
    assert num_captures is None or len(step.captures) == num_captures, len(step.captures)
    return step


def detach(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


def state_of(things: Things) -> dict[str, torch.Tensor]:
    """Every tensor that the models and optimizers hold, by name."""
    return dict(_state_of(things))


def _state_of(things: Things) -> Iterator[tuple[str, torch.Tensor]]:
    for number, thing in enumerate(things):
        if isinstance(thing, nn.Module):
            for name, param in thing.named_parameters():
                yield f"{number}.{name}", param.detach()
                if param.grad is not None:
                    yield f"{number}.{name}.grad", param.grad
            for name, buffer in thing.named_buffers():
                yield f"{number}.{name}", buffer
        else:
            for position, param in enumerate(p for group in thing.param_groups for p in group["params"]):
                for name, value in thing.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"{number}.{position}:{name}", value


def assert_close(found: Any, expected: Any, tolerance: float, what: str) -> None:
    """Both trees have the same structure, dtypes and shapes, and agree within the tolerance."""
    found_leaves, found_spec = pytree.tree_flatten_with_path(found)
    expected_leaves, expected_spec = pytree.tree_flatten_with_path(expected)
    assert found_spec == expected_spec, f"{what}: {found_spec} is not {expected_spec}"
    for (path, a), (_, b) in zip(found_leaves, expected_leaves, strict=True):
        name = f"{what} {pytree.keystr(path)}"
        if not isinstance(b, torch.Tensor):
            assert a == b, name
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, f"{name}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        if b.numel():
            scale = max(1e-3, b.abs().max().item())
            worst = (a.double() - b.double()).abs().max().item() / scale
            assert worst <= tolerance, f"{name}: off by {worst:.2e} of its largest element"
