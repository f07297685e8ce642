"""What a step works on: the models and optimizers it was decorated with, and every tensor they hold."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError
from ..graph.step_graph import Role
from .optimizers import static_values
from .swap import put_stand_ins


@dataclass(frozen=True)
class Slot:
    """One live tensor: how to read it, how to put its next value, in place where that fits, and how to put
    another tensor object in its place."""

    name: str
    role: Role
    of: str
    get: Callable[[], torch.Tensor | None]
    put: Callable[[torch.Tensor | None], None]
    replace: Callable[[torch.Tensor], None]


#: Where a parameter that took the place of a user's own keeps that.
_ORIGINAL = "_monoflow_original"


@dataclass(frozen=True, eq=False)
class Subject:
    """The models and optimizers of a step."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]

    def prefix(self, index: int) -> str:
        """What precedes the names of model `index`: nothing when there is only one."""
        return f"{index}." if len(self.models) > 1 else ""

    def optimizer_prefix(self, index: int) -> str:
        """What precedes the names of optimizer `index`: nothing when there is only one."""
        return f"{index}." if len(self.optimizers) > 1 else ""

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """Parameters by qualified name, each object once (a tied one under its first name)."""
        names: dict[int, str] = {}
        found = {}
        for index, model in enumerate(self.models):
            for name, param in model.named_parameters():
                if id(param) not in names:
                    names[id(param)] = self.prefix(index) + name
                    found[names[id(param)]] = param
        return found

    @cached_property
    def name_of_param(self) -> dict[int, str]:
        """Names of parameters by object identity."""
        return {id(param): name for name, param in self.params.items()}

    @property
    def originals(self) -> dict[str, nn.Parameter]:
        """By name: the user's own objects of replaced parameters; they hold no elements."""
        held = {name: vars(param).get(_ORIGINAL) for name, param in self.params.items()}
        return {name: param for name, param in held.items() if param is not None}

    def replace_param(self, name: str, value: torch.Tensor) -> None:
        """Puts another tensor in a parameter's place, wherever modules and optimizers hold that.

        References of the user's to the object it was go on to mean the parameter inside steps.
        """
        old = self.params[name]
        new = nn.Parameter(value, old.requires_grad)
        put_stand_ins(self.modules, {id(old): new})
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [new if param is old else param for param in group["params"]]
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
        original = vars(old).get(_ORIGINAL)
        if original is None:
            original = old
            old.data, old.grad = old.new_empty(0), None
        setattr(new, _ORIGINAL, original)  # on the parameter, because other steps may use it too
        self._forget()

    def refresh(self) -> bool:
        """Looks at the modules again; returns whether they are others, or hold parameters under other names.

        A parameter in the place of another is known from then on.
        """
        if self._held() == self._known:
            return False
        modules, names = self.modules, list(self.params)
        self._forget()
        self.check()
        same = len(modules) == len(self.modules) and all(map(operator.is_, modules, self.modules))
        return not same or names != list(self.params)

    def _forget(self) -> None:
        for key in ("params", "name_of_param", "modules", "module_names", "_known"):
            self.__dict__.pop(key, None)
        self.refresh()

    @cached_property
    def _known(self) -> list[int]:
        return self._held()

    def _held(self) -> list[int]:
        """The identities of all modules and parameters, as they hang together."""
        held: list[int] = []
        for module in self.modules:
            held += map(id, module._modules.values())
            held += map(id, module._parameters.values())
        return held

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers by qualified name, each object once."""
        seen: set[int] = set()
        found = {}
        for index, model in enumerate(self.models):
            for name, buffer in model.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[self.prefix(index) + name] = buffer
        return found

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """All modules of all models, each object once."""
        found = {id(module): module for model in self.models for module in model.modules()}
        return tuple(found.values())

    @cached_property
    def module_names(self) -> dict[int, str]:
        """Qualified names of all modules by identity; a shared module under its first name."""
        names: dict[int, str] = {}
        for index, model in enumerate(self.models):
            for name, module in model.named_modules():
                names.setdefault(id(module), (self.prefix(index) + name).rstrip("."))
        return names

    def check(self) -> None:
        """Raises CaptureError if an optimizer holds a parameter that no model has."""
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for position, param in enumerate(group["params"]):
                    if id(param) not in self.name_of_param:
                        raise CaptureError(
                            f"parameter {position} of group {number} of {type(optimizer).__name__}, shape "
                            f"{tuple(param.shape)}, belongs to none of the {len(self.models)} models given "
                            "to flow.graph; pass the module that owns it: @flow.graph(model, ..., optimizer)"
                        )

    def optimizer_params(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The optimizer's parameters, in the order of its groups."""
        return [param for group in optimizer.param_groups for param in group["params"]]

    def state_name(self, optimizer: int, param: torch.Tensor, key: str) -> str:
        """The name of one optimizer's state of one parameter."""
        return f"{self.optimizer_prefix(optimizer)}{self.name_of_param[id(param)]}:{key}"

    def hyper_name(self, optimizer: int, group: int, key: str) -> str:
        """The name of a hyper-parameter of one group."""
        return f"{self.optimizer_prefix(optimizer)}group{group}:{key}"

    def signature(self) -> tuple:
        """What a captured graph depends on beside the step's arguments, as a hashable value.

        Which gradients and states exist is left out: `Captured.fits` decides on them.
        """
        return (
            tuple((p.shape, p.dtype, p.device, p.requires_grad) for p in self.params.values()),
            tuple((b.shape, b.dtype) for b in self.buffers().values()),
            tuple(_settings(module) for module in self.modules),
            tuple(static_values(optimizer) for optimizer in self.optimizers),
        )

    def grads(self) -> frozenset[str]:
        """Names of the parameters that have a gradient now."""
        return frozenset(name for name, param in self.params.items() if param.grad is not None)

    # --- slots -------------------------------------------------------------------------------------

    def param_slot(self, name: str) -> Slot:
        def put(value: torch.Tensor | None) -> None:
            assert value is not None, name
            _copy_into(self.params[name], value)

        def replace(value: torch.Tensor) -> None:
            self.replace_param(name, value)

        return Slot(name, Role.PARAM, name, lambda: self.params[name], put, replace)

    def grad_slot(self, name: str) -> Slot:
        def put(value: torch.Tensor | None) -> None:
            self.params[name].grad = value

        return Slot(f"{name}:grad", Role.GRAD, name, lambda: self.params[name].grad, put, put)

    def buffer_slot(self, name: str) -> Slot:
        index, _, rest = name.partition(".") if len(self.models) > 1 else ("0", "", name)
        owner, _, leaf = rest.rpartition(".")
        module = self.models[int(index)].get_submodule(owner)

        def put(value: torch.Tensor | None) -> None:
            module._buffers[leaf] = _next_value(module._buffers[leaf], value)

        def replace(value: torch.Tensor) -> None:
            module._buffers[leaf] = value

        return Slot(name, Role.BUFFER, "", lambda: module._buffers[leaf], put, replace)

    def state_slot(self, optimizer: int, param: torch.Tensor, key: str) -> Slot:
        owner, name = self.optimizers[optimizer], self.name_of_param[id(param)]

        def get() -> torch.Tensor | None:
            held = self.params[name]
            return owner.state[held].get(key) if held in owner.state else None

        def put(value: torch.Tensor | None) -> None:
            owner.state[self.params[name]][key] = _next_value(get(), value)

        def replace(value: torch.Tensor) -> None:
            owner.state[self.params[name]][key] = value

        return Slot(self.state_name(optimizer, param, key), Role.STATE, name, get, put, replace)


_PLAIN = (bool, int, float, str)


def _settings(module: nn.Module) -> tuple:
    """What a forward may read of a module in Python: its mode, numbers and strings, and that it has hooks."""
    own = module.__dict__
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
    return (hooks, *[(key, value) for key, value in own.items() if type(value) in _PLAIN])


def _next_value(present: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor | None:
    """`value`, in the memory of `present` where it fits: others may hold a reference to it."""
    if not isinstance(present, torch.Tensor) or value is None:
        return value
    if present.shape != value.shape or present.dtype != value.dtype or present.device != value.device:
        return value
    return _copy_into(present, value)


def _copy_into(present: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if present is not value:
        with torch.no_grad():
            present.copy_(value)
    return present


def subject_of(things: Sequence[Any]) -> Subject:
    """Sorts the arguments of flow.graph into models and optimizers. Raises CaptureError for anything else."""
    models: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            models.append(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            optimizers.append(thing)
        else:
            raise CaptureError(
                f"flow.graph takes modules and optimizers, got {type(thing).__name__}; "
                "write @flow.graph(model, optimizer) above the step function"
            )
    subject = Subject(tuple(models), tuple(optimizers))
    subject.check()
    subject.refresh()
    return subject
