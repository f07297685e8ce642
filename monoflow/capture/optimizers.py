"""The adapter to torch.optim: what a step lifts from an optimizer, and how its state begins.

Private parts of torch used here: `torch.compiler._compile_session_context` (optimizers keep their step count
a tensor while torch believes it compiles). tests/null/test_optimizers.py fails when they move.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from ..errors import CaptureError
from .functional import functionalize

aten = torch.ops.aten

#: Hyper-parameters that are inputs of the step. Every other one is part of what the graph was captured for.
LIFTED = ("lr",)


def hyper_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Per group, the lifted hyper-parameters at their present values (Python numbers or tensors)."""
    return [{key: group[key] for key in LIFTED if key in group} for group in optimizer.param_groups]


def static_values(optimizer: torch.optim.Optimizer) -> tuple:
    """The hyper-parameters that are constants of a captured graph, as a hashable value."""
    return tuple(
        tuple((key, repr(value)) for key, value in group.items() if key not in (*LIFTED, "params", "initial_lr"))
        for group in optimizer.param_groups
    )


class ScalarTensors(TorchFunctionMode):
    """Lets a tensor learning rate stand where torch's API wants a number (`add_(x, alpha=-lr)`)."""

    def __torch_function__(
        self, func: Callable, types: Sequence, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        for key in ("alpha", "value"):
            scale = kwargs.get(key)
            if isinstance(scale, torch.Tensor):
                del kwargs[key]
                target, first, *rest = args
                scaled = first * scale.to(first.dtype)
                if name in ("sub", "sub_", "add", "add_", "addcmul", "addcmul_", "addcdiv", "addcdiv_"):
                    return func(target, scaled, *rest, **kwargs)
                raise CaptureError(f"{name} takes {key} as a number, but the learning rate is a tensor in a step")
        return func(*args, **kwargs)


def _group_for_capture(group: dict[str, Any]) -> dict[str, Any]:
    """The group with the settings under which torch can trace its update: fused where it can be."""
    changed = dict(group)
    if "capturable" in group:
        changed["capturable"] = True
    if "foreach" in group:
        changed["foreach"] = False
    if "fused" in group:
        fusable = _get_fused_kernels_supported_devices()
        types = {"cpu" if p.device.type == "meta" else p.device.type for p in group["params"]}
        floating = all(p.is_floating_point() for p in group["params"])
        changed["fused"] = types <= set(fusable) and floating and not group.get("differentiable")
    return changed


@contextmanager
def swapped(
    optimizer: torch.optim.Optimizer,
    replace: Mapping[torch.Tensor, torch.Tensor],
    state: defaultdict[torch.Tensor, dict[str, Any]],
    hypers: Sequence[Mapping[str, Any]],
    on_step: Callable[[], AbstractContextManager] = nullcontext,
) -> Iterator[None]:
    """Within: the optimizer works on other parameters, state and lifted hyper-parameters.

    Args:
        replace: the tensor to use for each of the optimizer's parameters.
        state: the state to use, by replaced tensor. It may be filled by the optimizer.
        hypers: per group, values for the lifted hyper-parameters.
        on_step: a context for every `optimizer.step()`.
    """
    before = dict(optimizer.__dict__)
    step = optimizer.step
    groups = []
    for group, values in zip(optimizer.param_groups, hypers, strict=True):
        changed = _group_for_capture(group) | dict(values)
        changed["params"] = [replace[p] for p in group["params"]]
        groups.append(changed)

    def traced_step(*args: Any, **kwargs: Any) -> Any:
        with on_step(), torch.compiler._compile_session_context(), ScalarTensors():
            return step(*args, **kwargs)

    optimizer.state = state
    optimizer.param_groups = groups
    optimizer.step = traced_step  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
        for group, values in zip(groups, hypers, strict=True):
            for key, value in values.items():
                if group[key] is not value:
                    raise CaptureError(
                        f"the step sets the optimizer's {key!r} (to {group[key]!r}); set it outside the step: "
                        "train_step(batch), then the scheduler"
                    )
    finally:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(before)


def number_state_error(optimizer: torch.optim.Optimizer, key: str, before: Any, value: Any) -> CaptureError:
    """The error for state that is kept as a Python number: a graph carries tensors only."""
    change = f"{before!r}, then {value!r}" if before is not None and before != value else f"{value!r}"
    return CaptureError(
        f"{type(optimizer).__name__} keeps {key!r} as a Python {type(value).__name__} ({change}); a captured "
        f"step carries tensors only. Keep it as a tensor, state[{key!r}] = torch.tensor({value!r}), and update "
        "it with tensor ops, or make it a setting of the parameter group if it never changes"
    )


class _Firsts(dict):
    """One parameter's state that notes the first value of every key, before the update changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.firsts: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.firsts:
            self.firsts[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class _FirstStates(defaultdict):
    """An optimizer's state that notes the first values, also of a dict that is put in whole."""

    def __init__(self) -> None:
        super().__init__(_Firsts)

    def __setitem__(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        if not isinstance(state, _Firsts):
            noting = self[param]
            noting.update(state)
            state = noting
        super().__setitem__(param, state)


class InitialState:
    """How an optimizer's state begins: for each (parameter index, key) a graph from the parameter alone."""

    def __init__(self, traced: fx.GraphModule, keys: Sequence[tuple[int, str]], values: Sequence[Any]) -> None:
        self._traced, self._keys = traced, dict(zip(keys, range(len(keys)), strict=True))
        self.metas = dict(zip(keys, values, strict=True))

    def value(self, index: int, key: str, param: torch.Tensor) -> torch.Tensor:
        """The initial value, computed for real from the real `param` (or from a shard of it)."""
        nodes = [node for node in self._traced.graph.nodes if node.op == "placeholder"]
        # Every first value depends on its own parameter only; of a gradient it can only take the shape.
        env: dict[fx.Node, Any] = {nodes[index]: param, nodes[len(nodes) // 2 + index]: param}
        results = self._traced.graph.output_node().args[0]
        result = results[self._keys[index, key]]  # type: ignore[index]
        return _evaluate(self._traced, result, env)


def _evaluate(traced: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    if node not in env:
        if node.op == "get_attr":
            env[node] = getattr(traced, str(node.target))
        else:
            take = lambda x: _evaluate(traced, x, env)  # noqa: E731
            args, kwargs = fx.map_arg((node.args, node.kwargs), take)  # type: ignore[misc]
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return env[node]


def initial_state(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], fakes: Sequence[torch.Tensor]
) -> InitialState | None:
    """Finds how the state of parameters that have none yet begins, by tracing one update on fake tensors.

    Returns None where there is none to begin, or where a first value depends on the gradient (SGD with
    dampening): such an optimizer's first step differs from the later ones, and is captured as it is.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CaptureError(
            f"{type(optimizer).__name__} evaluates the loss several times a step, as often as the values ask for; "
            "one graph cannot hold that. Run this step eagerly, without flow.graph, or use another optimizer"
        )
    fresh = [i for i, p in enumerate(params) if not optimizer.state.get(p) and p.requires_grad]
    if not fresh:
        return None
    keys: list[tuple[int, str]] = []

    def first_values(*flat: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(p.requires_grad) for x, p in zip(flat, params, strict=False)]
        state = _FirstStates()
        for i in fresh:
            leaves[i].grad = flat[len(params) + i]
            _start_momentum(optimizer, params[i], leaves[i], state)
        # Numbers, as in an eager first step: some states start from the learning rate of that moment.
        hypers = [{k: float(v) for k, v in values.items()} for values in hyper_values(optimizer)]
        with swapped(optimizer, dict(zip(params, leaves, strict=True)), state, hypers, FusedUpdates):
            optimizer.step()
        keys.clear()
        values = []
        for i in fresh:
            for key, value in state[leaves[i]].firsts.items():
                if isinstance(value, torch.Tensor):
                    keys.append((i, key))
                    values.append(value)
                elif value is not None:
                    raise number_state_error(optimizer, key, value, state[leaves[i]][key])
        return values

    flat = [*fakes, *(torch.empty_like(fake) for fake in fakes)]
    traced = functionalize(make_fx(first_values)(*flat), flat)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    results: Any = traced.graph.output_node().args[0]
    gradients = set(placeholders[len(params) :])
    if any(_ancestors(result) & gradients for result in results):
        return None
    return InitialState(traced, keys, [result.meta["val"] for result in results])


def _start_momentum(
    optimizer: torch.optim.Optimizer, param: torch.Tensor, leaf: torch.Tensor, state: _FirstStates
) -> None:
    """torch's SGD begins its momentum as the first gradient; zeros give the same when nothing is dampened."""
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        if any(p is param for p in group["params"]) and group["momentum"] and not group["dampening"]:
            state[leaf]["momentum_buffer"] = torch.zeros_like(leaf, requires_grad=False)


_SHAPE_ONLY = (aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros, aten.new_full)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """The nodes whose values a node depends on."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one not in seen:
            seen.add(one)
            if getattr(one.target, "overloadpacket", None) not in _SHAPE_ONLY:
                stack.extend(one.all_input_nodes)
    return seen


_FUSED = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")


def _functional_updates() -> dict[Any, Any]:
    """The functional form of every in-place fused update that this torch has."""
    found = {}
    for name in _FUSED:
        in_place = getattr(torch.ops.aten, f"{name}_", None)
        functional = getattr(torch.ops.aten, name, None)
        for overload in in_place.overloads() if in_place is not None and functional is not None else ():
            found[getattr(in_place, overload)] = getattr(functional, overload)
    return found


_UPDATES = _functional_updates()


def is_fused_update(func: Callable) -> bool:
    """Whether `func` is an in-place fused optimizer update over lists of tensors."""
    return func in _UPDATES


def run_fused_update(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A fused in-place update as one functional call a parameter, its results copied back.

    One call a parameter, because every parameter may be laid out differently.
    """
    functional = _UPDATES[func]
    names = [argument.name for argument in functional._schema.arguments]
    returned = [one.name.removesuffix("_out") for one in functional._schema.returns]
    for position in range(len(args[0])):
        own = [value[position : position + 1] for value in args]
        results = functional(*own, **kwargs)
        for name, result in zip(returned, results, strict=True):
            written = own[names.index(name)]
            if name != "grads" and written:
                written[0].copy_(result[0])


class FusedUpdates(TorchDispatchMode):
    """Fused updates as functional calls: the in-place ones return nothing that a trace could follow."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_fused_update(func):
            return run_fused_update(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _meta_kernels() -> torch.library.Library:
    """Fake forms of the fused updates with a tensor learning rate, where torch has none."""
    library = torch.library.Library("aten", "IMPL", "Meta")

    def functional(*lists: Any, **kwargs: Any) -> tuple[list[torch.Tensor], ...]:
        return tuple([torch.empty_like(x) for x in one] for one in lists if isinstance(one, (list, tuple)))

    for op in _UPDATES.values():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"):
            num_returns = len(op._schema.returns)
            kernel = lambda *lists, n=num_returns, **kwargs: functional(*lists[:n], **kwargs)  # noqa: E731
            library.impl(op.name().removeprefix("aten::"), kernel)
    return library


_LIBRARY = _meta_kernels()
