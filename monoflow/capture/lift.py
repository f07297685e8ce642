"""Lifting: every tensor that a step reads gets a name, a role and a fake."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..graph.step_graph import Role
from .optimizers import InitialState, hyper_values, initial_state
from .subject import Slot, Subject

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, slice)


@dataclass
class Lifted:
    """The fake tensors of one capture, by input name.

    Attributes:
        state_names: per optimizer, for the id of each of its parameters: state key -> input name.
        constants: the live tensors that the step closes over.
        initial: for states that do not exist yet: how they begin (optimizer, parameter index, key).
    """

    fakes: dict[str, torch.Tensor] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    state_names: list[dict[int, dict[str, str]]] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    initial: dict[str, tuple[InitialState, int, str]] = field(default_factory=dict)

    def add(self, name: str, role: Role, fake: torch.Tensor, of: str = "", slot: Slot | None = None) -> None:
        assert name not in self.fakes, name
        self.fakes[name], self.roles[name], self.of[name] = fake, role, of
        if slot is not None:
            self.slots[name] = slot


@dataclass(frozen=True)
class Arguments:
    """(args, kwargs) of the step as leaves; `names` has the input name of every tensor leaf by its index."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    names: Mapping[int, str]

    def with_tensors(self, values: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with other tensors in the place of the tensors."""
        leaves = list(self.leaves)
        for index, name in self.names.items():
            leaves[index] = values[name]
        return pytree.tree_unflatten(leaves, self.spec)


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments of a step as named leaves. Raises CaptureError for a value that a graph cannot hold."""
    leaves, spec = flatten((tuple(args), dict(kwargs)))
    names = {}
    for index, (path, leaf) in enumerate(leaves):
        name = ".".join(["batch", *(key_text(key) for key in path[1:])])
        if isinstance(leaf, torch.Tensor):
            names[index] = name if name not in names.values() else f"{name}#{index}"
        elif not isinstance(leaf, _PLAIN):
            raise CaptureError(f"argument {name} of the step is a {type(leaf).__name__}; {_advice(leaf)}")
    return Arguments(tuple(leaf for _, leaf in leaves), spec, names)


def key_text(key: Any) -> str:
    """One step of a path into a tree, as names have it: a dict's key, an index, an attribute."""
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def _advice(leaf: Any) -> str:
    if isinstance(leaf, Mapping) or hasattr(leaf, "keys"):
        return "pass dict(batch)"
    if hasattr(leaf, "__array__"):
        return "pass torch.as_tensor(it)"
    return (
        "pass tensors, numbers and strings in dicts, lists, tuples and dataclasses, or close over the object"
    )


def flatten(tree: Any) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec]:
    """Leaves with their paths; a dataclass is a node like a dict, known to torch's pytree from here on."""
    leaves, spec = pytree.tree_flatten_with_path(tree)
    unknown = {type(leaf) for _, leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
    if not unknown:
        return leaves, spec
    for kind in unknown:
        pytree.register_dataclass(kind)
    return flatten(tree)


def fake_of(mode: FakeTensorMode, real: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A fake tensor with the shape, strides and dtype of `real`, without touching its memory.

    Args:
        device: what a meta tensor becomes; every other keeps its device.
    """
    where = real.device if device is None or real.device.type != "meta" else device
    with mode:
        fake = torch.empty_strided(tuple(real.shape), real.stride(), dtype=real.dtype, device=where)
    return fake.requires_grad_(real.requires_grad)


def trace_device(subject: Subject) -> torch.device:
    """The device that the step is traced for: the models' own; meta models are traced as for the CPU."""
    for param in subject.params.values():
        if param.device.type != "meta":
            return torch.device(param.device.type)
    return torch.device("cpu")


def lift(mode: FakeTensorMode, subject: Subject, arguments: Arguments) -> Lifted:
    """Fakes for everything the step may read."""
    device = trace_device(subject)
    lifted = Lifted()
    with mode:
        lifted.add("random:key", Role.RANDOM, torch.empty((), dtype=torch.int64, device=device))
    for name, param in subject.params.items():
        fake = nn.Parameter(fake_of(mode, param.detach(), device), param.requires_grad)
        lifted.add(name, Role.PARAM, fake, name, subject.param_slot(name))
    for name, param in subject.params.items():
        if param.grad is not None:
            slot = subject.grad_slot(name)
            lifted.add(slot.name, Role.GRAD, fake_of(mode, param.grad, device), name, slot)
    for name, buffer in subject.buffers().items():
        lifted.add(name, Role.BUFFER, fake_of(mode, buffer, device), "", subject.buffer_slot(name))
    for number in range(len(subject.optimizers)):
        _lift_hypers(mode, subject, number, lifted)
        _lift_states(mode, subject, number, lifted, device)
    for index, name in arguments.names.items():
        lifted.add(name, Role.BATCH, fake_of(mode, arguments.leaves[index], device))
    return lifted


def _lift_hypers(mode: FakeTensorMode, subject: Subject, number: int, lifted: Lifted) -> None:
    for group, values in enumerate(hyper_values(subject.optimizers[number])):
        for key, value in values.items():
            dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float64
            with mode:
                fake = torch.empty((), dtype=dtype, device="cpu")
            lifted.add(subject.hyper_name(number, group, key), Role.HYPER, fake)


def _lift_states(
    mode: FakeTensorMode, subject: Subject, number: int, lifted: Lifted, device: torch.device
) -> None:
    optimizer = subject.optimizers[number]
    params = subject.optimizer_params(optimizer)
    names: dict[int, dict[str, str]] = {id(param): {} for param in params}
    lifted.state_names.append(names)

    def add(param: torch.Tensor, key: str, fake: torch.Tensor) -> str:
        slot = subject.state_slot(number, param, key)
        lifted.add(slot.name, Role.STATE, fake, slot.of, slot)
        names[id(param)][key] = slot.name
        return slot.name

    for param in params:
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                add(param, key, fake_of(mode, value, device))
    fakes = [lifted.fakes[subject.name_of_param[id(param)]] for param in params]
    begins = initial_state(optimizer, params, fakes)
    if begins is None:
        return
    for (index, key), meta in begins.metas.items():
        lifted.initial[add(params[index], key, fake_of(mode, meta))] = (begins, index, key)


def lift_constants(mode: FakeTensorMode, traced: fx.GraphModule, lifted: Lifted) -> None:
    """Makes inputs, behind all others, of the real tensors that a traced step holds, each of them once."""
    graph = traced.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    found: dict[int, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        value = getattr(traced, str(node.target))
        if isinstance(value, FakeTensor):  # a literal: its value travels along
            assert value.constant is not None, node.target
            value = value.constant
        if id(value) not in found:
            name = f"constant:{len(found)}"
            lifted.add(name, Role.CONSTANT, fake_of(mode, value))
            lifted.constants[name] = value
            with graph.inserting_after(last):
                last = found[id(value)] = graph.placeholder(name.replace(":", "_"))
            last.meta["val"] = lifted.fakes[name]
        node.replace_all_uses_with(found[id(value)])
        graph.erase_node(node)
