"""The adapter to torch.optim: what a step lifts from an optimizer, and how its state begins.

Private parts of torch used here: `torch.compiler._is_compiling_flag` (optimizers keep their step count a
tensor while torch believes it compiles; torch 2.11 has no context for it yet). tests/null/test_optimizers.py
fails when they move.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode

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
        tuple(
            (key, repr(value)) for key, value in group.items() if key not in (*LIFTED, "params", "initial_lr")
        )
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
                raise CaptureError(
                    f"{name} takes {key} as a number, but the learning rate is a tensor in a step"
                )
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
def _as_if_compiling() -> Iterator[None]:
    """Within: torch believes that it compiles."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


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
        replace: the tensor to use for each parameter; the others are left out.
        state: the state to use, by replaced tensor. It may be filled by the optimizer.
        hypers: per group, values for the lifted hyper-parameters.
        on_step: a context for every `optimizer.step()`.
    """
    before = dict(optimizer.__dict__)
    step = optimizer.step
    groups = []
    for group, values in zip(optimizer.param_groups, hypers, strict=True):
        changed = _group_for_capture(group) | dict(values)
        changed["params"] = [replace[p] for p in group["params"] if p in replace]
        groups.append(changed)

    @functools.wraps(step)
    def traced_step(*args: Any, **kwargs: Any) -> Any:
        with on_step(), _as_if_compiling(), ScalarTensors():
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
                        f"the step sets the optimizer's {key!r} (to {group[key]!r}); set it outside the "
                        "step: train_step(batch), then the scheduler"
                    )
    finally:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(before)


def number_state_error(optimizer: torch.optim.Optimizer, key: str, before: Any, value: Any) -> CaptureError:
    """The error for state that is kept as a Python number: a graph carries tensors only."""
    change = f"{before!r}, then {value!r}" if before is not None and before != value else f"{value!r}"
    return CaptureError(
        f"{type(optimizer).__name__} keeps {key!r} as a Python {type(value).__name__} ({change}); a captured "
        f"step carries tensors only. Keep it as a tensor, state[{key!r}] = torch.tensor({value!r}), and "
        "update it with tensor ops, or make it a setting of the parameter group if it never changes"
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
    """How an optimizer's state begins: for each (parameter index, key) a graph from the parameter alone.

    Parameters of one group, shape and dtype begin alike: one of them is traced for all.

    Args:
        traced: from (the traced parameters, as many gradients) to the values of `keys`.
        keys: (position among the traced parameters, state key) per result.
        position: by parameter index, its like among the traced parameters.
    """

    def __init__(
        self, traced: fx.Graph, keys: Sequence[tuple[int, str]], position: Mapping[int, int]
    ) -> None:
        self._placeholders = [node for node in traced.nodes if node.op == "placeholder"]
        self._position = dict(position)
        self._graph = traced
        results: Any = traced.output_node().args[0]
        self._results = dict(zip(keys, results, strict=True))
        self.metas = {
            (index, key): node.meta["val"]
            for index, at in position.items()
            for (traced_at, key), node in self._results.items()
            if traced_at == at
        }

    @property
    def depends_on_gradient(self) -> bool:
        """Whether a first value takes more than the shape of a gradient."""
        gradients = set(self._placeholders[len(self._placeholders) // 2 :])
        return any(_ancestors(result) & gradients for result in self._results.values())

    def value(self, index: int, key: str, param: torch.Tensor) -> torch.Tensor:
        """The initial value, computed for real from the real `param` (or from a shard of it)."""
        at = self._position[index]
        gradient = self._placeholders[len(self._placeholders) // 2 + at]
        env: dict[fx.Node, Any] = {self._placeholders[at]: param, gradient: param}
        return _evaluate(self._graph, self._results[at, key], env)


def _evaluate(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    if node not in env:
        if node.op == "get_attr":
            env[node] = getattr(graph.owning_module, str(node.target))
        else:
            take = lambda x: _evaluate(graph, x, env)  # noqa: E731
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
            f"{type(optimizer).__name__} evaluates the loss as often in a step as the values ask for; one "
            "graph cannot hold that. Run this step eagerly, without flow.graph, or use another optimizer"
        )
    position: dict[int, int] = {}
    alike: dict[tuple, int] = {}
    group_of = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    for i, param in enumerate(params):
        if not optimizer.state.get(param) and param.requires_grad:
            kind = (group_of[i], param.shape, param.stride(), param.dtype, param.device)
            position[i] = alike.setdefault(kind, len(alike))
    if not position:
        return None
    first = {at: i for i, at in reversed(position.items())}
    traced_params = [params[first[at]] for at in range(len(alike))]
    flat = [fakes[first[at]] for at in range(len(alike))]
    flat += [torch.empty_like(fake) for fake in flat]
    keys: list[tuple[int, str]] = []

    def first_values(*flat: torch.Tensor) -> list[torch.Tensor]:
        keys.clear()
        values = []
        for at, firsts in enumerate(_first_values(optimizer, traced_params, flat)):
            for key, value in firsts.items():
                if value is not None:
                    keys.append((at, key))
                    values.append(value)
        return values

    traced = functionalize(make_fx(first_values)(*flat), flat, copy_nodes=False)
    begins = InitialState(traced.graph, keys, position)
    return None if begins.depends_on_gradient else begins


def _first_values(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], flat: Sequence[torch.Tensor]
) -> list[dict[str, Any]]:
    """The first value of every state in one update; `flat` stands for the parameters and their gradients."""
    leaves = [fake.detach().requires_grad_() for fake in flat[: len(params)]]
    state = _FirstStates()
    for param, leaf, grad in zip(params, leaves, flat[len(params) :], strict=True):
        leaf.grad = grad
        _start_momentum(optimizer, param, leaf, state)
    # Numbers, as in an eager first step: some states start from the learning rate of that moment.
    hypers = [{k: float(v) for k, v in values.items()} for values in hyper_values(optimizer)]
    with swapped(optimizer, dict(zip(params, leaves, strict=True)), state, hypers, FusedUpdates):
        try:
            optimizer.step()
        except DataDependentOutputException:
            raise CaptureError(
                f"the update of {type(optimizer).__name__} takes a tensor's value to Python (.item()), which "
                "one graph cannot hold; use tensor arithmetic in it, or another optimizer"
            ) from None
    for leaf in leaves:
        for key, value in state[leaf].firsts.items():
            if value is not None and not isinstance(value, torch.Tensor):
                raise number_state_error(optimizer, key, value, state[leaf][key])
    return [state[leaf].firsts for leaf in leaves]


def _start_momentum(
    optimizer: torch.optim.Optimizer, param: torch.Tensor, leaf: torch.Tensor, state: _FirstStates
) -> None:
    """torch's SGD begins its momentum as the first gradient; zeros give the same when nothing is dampened."""
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        if any(p is param for p in group["params"]) and group["momentum"] and not group["dampening"]:
            state[leaf]["momentum_buffer"] = torch.zeros_like(leaf, requires_grad=False)


_SHAPE_ONLY = (
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.empty_like,
    aten.new_zeros,
    aten.new_full,
)


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


def _plain_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


def run_fused_update(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call: Callable[[Any, Sequence[Any], dict[str, Any]], Any] = _plain_call,
) -> None:
    """A fused in-place update as one functional call a parameter, its results copied back.

    One call a parameter, because every parameter may be laid out differently.

    Args:
        call: calls an op.
    """
    functional = _UPDATES[func]
    names = [argument.name for argument in functional._schema.arguments]
    returned = [one.name.removesuffix("_out") for one in functional._schema.returns]
    for position in range(len(args[0])):
        own = [value[position : position + 1] for value in args]
        results = call(functional, own, dict(kwargs))
        for name, result in zip(returned, results, strict=True):
            written = own[names.index(name)]
            if name != "grads" and written:
                call(torch.ops.aten.copy_.default, (written[0], result[0]), {})


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
