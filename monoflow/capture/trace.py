"""The capture itself: trace the step on fake tensors, functionalize it, give every input its role."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..graph.step_graph import Input, Output, Phase, Role, StepGraph, info_of, meta_of
from ..sbp.random_mode import op_numbers
from .attention import AttentionMode
from .modes import CaptureMode
from .optimizers import InitialState, hyper_values, initial_state, swapped
from .subject import Slot, Subject
from .sum_form import table

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Captured:
    """A StepGraph and how it is bound to the live objects.

    Attributes:
        graph: the captured step.
        slots: for every input that is not a batch argument: where its live tensor is.
        initial: for states that do not exist yet: how they begin (optimizer, parameter, key).
        out_spec: how the user's result is built from the results, with None leaves kept.
        result_names: names of the outputs that are the user's, one per leaf (None for a None leaf).
        clears_grads: the step clears every gradient before it reads one, so those it finds do not matter.
    """

    graph: StepGraph
    slots: Mapping[str, Slot]
    initial: Mapping[str, tuple[InitialState, int, str]]
    out_spec: pytree.TreeSpec
    result_names: tuple[str | None, ...]
    clears_grads: bool


@dataclass
class _Lifted:
    """The fake tensors of one capture, by input name."""

    fakes: dict[str, torch.Tensor]
    roles: dict[str, Role]
    of: dict[str, str]
    slots: dict[str, Slot]

    def add(self, name: str, role: Role, fake: torch.Tensor, of: str = "", slot: Slot | None = None) -> None:
        assert name not in self.fakes, name
        self.fakes[name], self.roles[name], self.of[name] = fake, role, of
        if slot is not None:
            self.slots[name] = slot


def trace_device(subject: Subject) -> torch.device:
    """The device that the step is traced for: the models' own; meta models are traced as for the CPU."""
    for param in subject.params.values():
        if param.device.type != "meta":
            return torch.device(param.device.type)
    return torch.device("cpu")


def fake_of(mode: FakeTensorMode, real: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A fake tensor with the global shape, strides and dtype of `real`, without touching its memory."""
    where = real.device if device is None or real.device.type != "meta" else device
    with mode:
        fake = torch.empty_strided(tuple(real.shape), real.stride(), dtype=real.dtype, device=where)
    return fake.requires_grad_(real.requires_grad) if real.requires_grad else fake


def capture(
    function: Callable, subject: Subject, args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str, source: str
) -> Captured:
    """Captures one call of a step function as a StepGraph.

    Runs `function` once on fake tensors. Real parameters, buffers and optimizer state are neither read nor
    written, and module and optimizer are left exactly as they were.

    Raises:
        CaptureError: the step does something that one graph cannot hold; the message names the line.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = trace_device(subject)
    lifted, initial = _lift(mode, subject, device)
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for i in positions:
        lifted.add(_argument_name(spec, i), Role.BATCH, fake_of(mode, leaves[i], device))

    run = _Run(function, subject, mode, lifted, leaves, spec, positions)
    threads = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        with op_numbers():
            traced = make_fx(run)(*lifted.fakes.values())
    finally:
        torch.autograd.set_multithreading_enabled(threads)
    assert isinstance(traced, fx.GraphModule)
    functional = _functionalize(traced, list(lifted.fakes.values()), mode)
    graph = _with_roles(functional, lifted, run, name, source)
    used = set(graph.input_of)
    return Captured(
        graph,
        {key: slot for key, slot in lifted.slots.items() if key in used or run.leaves_grad(key)},
        {key: value for key, value in initial.items() if key in used},
        run.out_spec,
        tuple(run.result_names),
        run.clears_grads,
    )


def _lift(
    mode: FakeTensorMode, subject: Subject, device: torch.device
) -> tuple[_Lifted, dict[str, tuple[InitialState, int, str]]]:
    lifted = _Lifted({}, {}, {}, {})
    initial: dict[str, tuple[InitialState, int, str]] = {}
    with mode:
        key = torch.empty((), dtype=torch.int64, device=device)
    lifted.add("random:key", Role.RANDOM, key)
    for name, param in subject.params.items():
        fake = nn.Parameter(fake_of(mode, param.detach(), device), param.requires_grad)
        lifted.add(name, Role.PARAM, fake, name, subject.param_slot(name))
    for name, param in subject.params.items():
        if param.grad is not None:
            slot = subject.grad_slot(name)
            lifted.add(slot.name, Role.GRAD, fake_of(mode, param.grad, device), name, slot)
    for name, buffer in subject.buffers().items():
        lifted.add(name, Role.BUFFER, fake_of(mode, buffer, device), "", subject.buffer_slot(name))
    for number, optimizer in enumerate(subject.optimizers):
        for group, values in enumerate(hyper_values(optimizer)):
            for key_name, value in values.items():
                with mode:
                    dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float64
                    fake = torch.empty((), dtype=dtype, device="cpu")
                prefix = f"{number}." if len(subject.optimizers) > 1 else ""
                lifted.add(f"{prefix}group{group}:{key_name}", Role.HYPER, fake)
        params = subject.optimizer_params(optimizer)
        fakes = [lifted.fakes[subject.name_of_param[id(p)]] for p in params]
        begins = initial_state(optimizer, params, fakes)
        for position, param in enumerate(params):
            of = subject.name_of_param[id(param)]
            for key_name, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    slot = subject.state_slot(number, param, key_name)
                    lifted.add(slot.name, Role.STATE, fake_of(mode, value, device), of, slot)
            for at, key_name in begins.metas if begins is not None else ():
                if at == position:
                    slot = subject.state_slot(number, param, key_name)
                    fake = fake_of(mode, begins.metas[at, key_name])
                    lifted.add(slot.name, Role.STATE, fake, of, slot)
                    initial[slot.name] = (begins, at, key_name)
    return lifted, initial


def _argument_name(spec: pytree.TreeSpec, index: int) -> str:
    """`batch.input_ids`-like name of one leaf of (args, kwargs)."""
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    path = paths[index][0]
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path[1:]]
    return ".".join(["batch", *parts])


class _Run:
    """The function that is traced: the user's step on swapped-in fakes, its effects as extra results."""

    def __init__(
        self,
        function: Callable,
        subject: Subject,
        mode: FakeTensorMode,
        lifted: _Lifted,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        positions: Sequence[int],
    ) -> None:
        self.function, self.subject, self.mode, self.lifted = function, subject, mode, lifted
        self.leaves, self.spec, self.positions = list(leaves), spec, positions
        # Noted before anything is swapped: inside, the optimizers and modules hold fakes.
        self.optimizer_params = [subject.optimizer_params(optimizer) for optimizer in subject.optimizers]
        self.buffers = subject.buffers()
        self.observed: dict[str, torch.Tensor] = {}
        self.cleared: set[str] = set()
        self.out_spec: pytree.TreeSpec = spec
        self.result_names: list[str | None] = []
        self.outputs: list[tuple[str, str, bool]] = []  # name, replaces, observed
        self.clears_grads = False

    def leaves_grad(self, name: str) -> bool:
        """Whether the step leaves a gradient under this name."""
        return any(replaces == name for _, replaces, _ in self.outputs)

    def __call__(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(self.lifted.fakes, flat, strict=True))
        code = getattr(self.function, "__code__", None)
        watch = CaptureMode(values["random:key"], self.subject.module_names, code)
        modules_before = {id(m): dict(m.__dict__) for model in self.subject.models for m in model.modules()}
        for name in self.subject.params:
            values[name].grad = values.get(f"{name}:grad")
        with ExitStack() as stack:
            states = self._swap(stack, values, watch)
            stack.enter_context(self.mode)
            stack.enter_context(watch.module_stack())
            stack.enter_context(AttentionMode())
            stack.enter_context(watch)
            stack.enter_context(torch.enable_grad())
            result = self.function(*self._arguments(values))
            effects = self._effects(values, states)
        self._refuse_attributes(modules_before)
        results = self._results(result)
        tensors = [*results, *effects]
        self.clears_grads = all(
            replaces.removesuffix(":grad") in self.cleared
            for _, replaces, _ in self.outputs
            if self.lifted.roles.get(replaces) is Role.GRAD or replaces.endswith(":grad")
        )
        for name in self.subject.params:
            values[name].grad = None
        return tensors

    def _arguments(self, values: Mapping[str, torch.Tensor]) -> Any:
        leaves = list(self.leaves)
        for i in self.positions:
            leaves[i] = values[_argument_name(self.spec, i)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        self.function = _with_kwargs(self.function, kwargs)
        return args

    def _swap(
        self, stack: ExitStack, values: Mapping[str, torch.Tensor], watch: CaptureMode
    ) -> list[defaultdict]:
        subject = self.subject
        buffer_names = {id(buffer): name for name, buffer in self.buffers.items()}
        for model in subject.models:
            own = {
                name: values[subject.name_of_param[id(param)]]
                for name, param in model.named_parameters(remove_duplicate=False)
            }
            own |= {
                name: values[buffer_names[id(buffer)]]
                for name, buffer in model.named_buffers(remove_duplicate=False)
            }
            stack.enter_context(_reparametrize_module(model, own))
        states = []
        for number, optimizer in enumerate(subject.optimizers):
            replace = {p: values[subject.name_of_param[id(p)]] for p in self.optimizer_params[number]}
            state: defaultdict = defaultdict(dict)
            for param, fake in replace.items():
                kept = {k: v for k, v in optimizer.state.get(param, {}).items() if not isinstance(v, torch.Tensor)}
                for name, of in self.lifted.of.items():
                    stem = subject.state_name(number, param, "")
                    if self.lifted.roles[name] is Role.STATE and of == subject.name_of_param[id(param)]:
                        if name.startswith(stem):
                            kept[name.removeprefix(stem)] = values[name]
                if kept:
                    state[fake] = kept
            hypers = self._hypers(number, optimizer, values)

            def on_step(optimizer: Any = optimizer, replace: Any = replace) -> Any:
                for param, fake in replace.items():
                    if fake.grad is not None:
                        self.observed[subject.name_of_param[id(param)]] = fake.grad.clone()
                return watch.update()

            stack.enter_context(swapped(optimizer, replace, state, hypers, on_step))
            self._note_clears(stack, optimizer, replace, watch)
            states.append(state)
        return states

    def _hypers(
        self, number: int, optimizer: torch.optim.Optimizer, values: Mapping[str, torch.Tensor]
    ) -> list[dict[str, Any]]:
        prefix = f"{number}." if len(self.subject.optimizers) > 1 else ""
        return [
            {key: values[f"{prefix}group{i}:{key}"] for key in group}
            for i, group in enumerate(hyper_values(optimizer))
        ]

    def _note_clears(
        self, stack: ExitStack, optimizer: torch.optim.Optimizer, replace: Mapping, watch: CaptureMode
    ) -> None:
        clear = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if set_to_none and not watch.backward_seen:
                self.cleared |= {self.subject.name_of_param[id(p)] for p in replace}
            clear(set_to_none)

        optimizer.zero_grad = zero_grad  # pyright: ignore[reportAttributeAccessIssue]
        stack.callback(optimizer.__dict__.pop, "zero_grad", None)

    def _effects(self, values: Mapping[str, torch.Tensor], states: Sequence[defaultdict]) -> list[torch.Tensor]:
        """Tensors that the step leaves behind beside in-place writes: new gradients, states, buffers."""
        subject, effects = self.subject, []
        for name, grad in self.observed.items():
            self.outputs.append((f"{name}:observed_grad", "", True))
            effects.append(grad)
        for name in subject.params:
            grad = values[name].grad
            if grad is not None and grad is not values.get(f"{name}:grad"):
                slot = subject.grad_slot(name)
                self.lifted.slots.setdefault(slot.name, slot)
                self.outputs.append((f"{name}:next_grad", slot.name, False))
                effects.append(grad)
        for number, (params, state) in enumerate(zip(self.optimizer_params, states, strict=True)):
            for param in params:
                fake = values[subject.name_of_param[id(param)]]
                for key, value in state.get(fake, {}).items():
                    slot = subject.state_slot(number, param, key)
                    if isinstance(value, torch.Tensor) and value is not values.get(slot.name):
                        self.lifted.slots.setdefault(slot.name, slot)
                        self.outputs.append((f"{slot.name}:next", slot.name, False))
                        effects.append(value)
        for name in self.buffers:
            slot = subject.buffer_slot(name)
            value = slot.get()
            if value is not None and value is not values[name]:
                self.outputs.append((f"{name}:next", name, False))
                effects.append(value)
        return effects

    def _refuse_attributes(self, before: Mapping[int, dict[str, Any]]) -> None:
        """A fake tensor stored on a module as a plain attribute would outlive the capture."""
        for model in self.subject.models:
            for module in model.modules():
                for key, value in module.__dict__.items():
                    if isinstance(value, torch.Tensor) and before.get(id(module), {}).get(key) is not value:
                        name = self.subject.module_names[id(module)]
                        module.__dict__[key] = before.get(id(module), {}).get(key)
                        raise CaptureError(
                            f"the step stores a tensor as attribute {key!r} of module {name!r} "
                            f"({type(module).__name__}); make it a buffer (register_buffer) or return it"
                        )

    def _results(self, result: Any) -> list[torch.Tensor]:
        leaves, self.out_spec = pytree.tree_flatten_with_path(result)
        results, outputs = [], []
        for path, leaf in leaves:
            name = "".join(pytree.keystr(path[i : i + 1]) for i in range(len(path))) or "result"
            if isinstance(leaf, torch.Tensor):
                results.append(leaf.detach())
                self.result_names.append(name)
                outputs.append((name, "", False))
            elif leaf is None:
                self.result_names.append(None)
            else:
                code = self.function.__code__ if hasattr(self.function, "__code__") else None
                where = f"{code.co_filename}:{code.co_firstlineno}" if code else "the step"
                raise CaptureError(
                    f"the step at {where} returns a {type(leaf).__name__} ({leaf!r:.60}) in {name}; a captured "
                    "step returns tensors (in any nesting of dicts, lists and dataclasses) or None. Return "
                    "the tensor and convert it outside, e.g. loss.item() after the call"
                )
        self.outputs = outputs + self.outputs
        return results


def _with_kwargs(function: Callable, kwargs: Mapping[str, Any]) -> Callable:
    if not kwargs:
        return function

    def bound(*args: Any) -> Any:
        return function(*args, **kwargs)

    bound.__code__ = bound.__code__
    return bound


class _KeepOrigin(fx.Interpreter):
    """Runs a traced graph under another trace and hands each node's origin to the nodes it becomes."""

    def run_node(self, n: fx.Node) -> Any:
        proxies = get_proxy_mode()
        assert proxies is not None
        graph = proxies.tracer.graph
        before = graph._root.prev
        result = super().run_node(n)
        node = graph._root.prev
        while node is not before and node is not graph._root:
            node.meta["info"] = info_of(n)
            node = node.prev
        return result


def _functionalize(traced: fx.GraphModule, fakes: list[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    traced.graph.eliminate_dead_code(_keep_writes)
    traced.recompile()
    interpreter = _KeepOrigin(traced)
    plain = [fake.detach() for fake in fakes]
    with torch.no_grad():
        functional = torch.func.functionalize(interpreter.run, remove="mutations")
        return make_fx(functional, decomposition_table=table())(*plain)


def _keep_writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op in ("placeholder", "output") or (schema is not None and schema.is_mutable)


def _with_roles(module: fx.GraphModule, lifted: _Lifted, run: _Run, name: str, source: str) -> StepGraph:
    graph = module.graph
    placeholders = {
        key: node
        for key, node in zip(lifted.fakes, (n for n in graph.nodes if n.op == "placeholder"), strict=True)
    }
    by_node = {node: key for key, node in placeholders.items()}
    output = graph.output_node()
    results: list[fx.Node] = list(output.args[0])  # pyright: ignore[reportArgumentType]
    outputs = list(run.outputs)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.copy_.default and node.args[0] in by_node:
            outputs.append((f"{by_node[node.args[0]]}:next", by_node[node.args[0]], False))
            results.append(node.args[1])
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    output.args = (tuple(results),)
    constants = _lift_constants(module, graph)
    graph.eliminate_dead_code()
    kept = []
    for key, node in placeholders.items():
        if node.users:
            kept.append(Input(key, lifted.roles[key], meta_of(node.meta["val"]), lifted.of[key]))
        else:
            graph.erase_node(node)
    for key, node in constants.items():
        kept.append(Input(key, Role.CONSTANT, meta_of(node[1]), ""))
    _order_placeholders(graph, [*(placeholders[i.name] for i in kept if i.name in placeholders)], constants)
    _mark_update(graph)
    made = tuple(
        Output(own, meta_of(node.meta["val"]), replaces, observed)
        for (own, replaces, observed), node in zip(outputs, results, strict=True)
    )
    return StepGraph(graph, tuple(kept), made, name, source, {key: node[1] for key, node in constants.items()})


def _lift_constants(module: fx.GraphModule, graph: fx.Graph) -> dict[str, tuple[fx.Node, torch.Tensor]]:
    """Turns get_attr nodes into placeholders; each distinct tensor becomes one constant input."""
    found: dict[str, tuple[fx.Node, torch.Tensor]] = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        value = getattr(module, str(node.target))
        key = f"constant:{len(found)}"
        with graph.inserting_before(next(iter(graph.nodes))):
            placeholder = graph.placeholder(key.replace(":", "_"))
        placeholder.meta.update(node.meta)
        placeholder.meta.setdefault("val", value)
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
        if placeholder.users:
            found[key] = (placeholder, value)
        else:
            graph.erase_node(placeholder)
    return found


def _order_placeholders(
    graph: fx.Graph, first: Sequence[fx.Node], constants: Mapping[str, tuple[fx.Node, torch.Tensor]]
) -> None:
    order = [*first, *(node for node, _ in constants.values())]
    for node in reversed(order):
        graph._root.append(node)


def _mark_update(graph: fx.Graph) -> None:
    """What depends on the backward pass, outside it, prepares the update (clipping, for one)."""
    after: set[fx.Node] = set()
    for node in graph.nodes:
        info = info_of(node)
        if info.phase is Phase.BACKWARD or any(a in after for a in node.all_input_nodes):
            after.add(node)
            if info.phase is Phase.FORWARD and node.op == "call_function":
                node.meta["info"] = type(info)(Phase.UPDATE, info.module, info.source, info.sequence)
