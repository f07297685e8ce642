"""What a step works on: the models and optimizers it was decorated with, and every tensor they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError
from ..graph.step_graph import Role


@dataclass(frozen=True)
class Slot:
    """One live tensor: how to read it and how to put its next value."""

    name: str
    role: Role
    of: str
    get: Callable[[], torch.Tensor | None]
    put: Callable[[torch.Tensor | None], None]


@dataclass(frozen=True, eq=False)
class Subject:
    """The models and optimizers of a step."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]

    def prefix(self, index: int) -> str:
        """What precedes a name of model (or optimizer) `index`: nothing when there is only one."""
        return f"{index}." if len(self.models) > 1 else ""

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """Parameters by qualified name, each object once (a tied one under its first name)."""
        seen: dict[int, str] = {}
        found = {}
        for index, model in enumerate(self.models):
            for name, param in model.named_parameters():
                if id(param) not in seen:
                    seen[id(param)] = self.prefix(index) + name
                    found[seen[id(param)]] = param
        return found

    @cached_property
    def name_of_param(self) -> dict[int, str]:
        """Names of parameters by object identity."""
        return {id(param): name for name, param in self.params.items()}

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
                            f"{tuple(param.shape)}, belongs to none of the {len(self.models)} models given to "
                            "flow.graph; pass the module that owns it: @flow.graph(model, ..., optimizer)"
                        )

    def optimizer_params(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The optimizer's parameters, in the order of its groups."""
        return [param for group in optimizer.param_groups for param in group["params"]]

    def state_name(self, optimizer: int, param: torch.Tensor, key: str) -> str:
        """The name of one optimizer's state of one parameter."""
        prefix = f"{optimizer}." if len(self.optimizers) > 1 else ""
        return f"{prefix}{self.name_of_param[id(param)]}:{key}"

    # --- slots -------------------------------------------------------------------------------------

    def param_slot(self, name: str) -> Slot:
        param = self.params[name]

        def put(value: torch.Tensor | None) -> None:
            assert value is not None
            with torch.no_grad():
                param.copy_(value)

        return Slot(name, Role.PARAM, name, lambda: param, put)

    def grad_slot(self, name: str) -> Slot:
        param = self.params[name]

        def put(value: torch.Tensor | None) -> None:
            param.grad = value

        return Slot(f"{name}:grad", Role.GRAD, name, lambda: param.grad, put)

    def buffer_slot(self, name: str) -> Slot:
        index, _, rest = name.partition(".") if len(self.models) > 1 else ("0", "", name)
        owner, _, leaf = rest.rpartition(".")
        module = self.models[int(index)].get_submodule(owner)

        def put(value: torch.Tensor | None) -> None:
            present = module._buffers[leaf]
            if present is not None and value is not None and present.shape == value.shape:
                present.copy_(value)
            else:
                module._buffers[leaf] = value

        return Slot(name, Role.BUFFER, "", lambda: module._buffers[leaf], put)

    def state_slot(self, optimizer: int, param: torch.Tensor, key: str) -> Slot:
        state = self.optimizers[optimizer].state

        def put(value: torch.Tensor | None) -> None:
            present = self.optimizers[optimizer].state[param].get(key)
            if isinstance(present, torch.Tensor) and value is not None and present.shape == value.shape:
                present.copy_(value)
            else:
                self.optimizers[optimizer].state[param][key] = value

        del state
        name = self.state_name(optimizer, param, key)
        of = self.name_of_param[id(param)]
        return Slot(name, Role.STATE, of, lambda: self.optimizers[optimizer].state[param].get(key), put)


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
    return subject


def walk_modules(models: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """All modules of all models."""
    for model in models:
        yield from model.modules()
