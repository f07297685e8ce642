"""The one-device reference: the user's function, run eagerly on whole tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from ..compiler import Subject
from ..sbp.random_mode import RandomMode, op_numbers
from .store import whole


def live_state(subject: Subject) -> dict[str, torch.Tensor]:
    """The parameters, buffers and optimizer states that modules and optimizers hold now, by name."""
    names: dict[int, str] = {}
    found: dict[str, torch.Tensor] = {}
    for index, model in enumerate(subject.models):
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if id(value) not in names:
                names[id(value)] = subject.prefix(index) + name
                found[names[id(value)]] = value
    for number, optimizer in enumerate(subject.optimizers):
        for group in optimizer.param_groups:
            for param in group["params"]:
                for key, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[f"{subject.optimizer_prefix(number)}{names[id(param)]}:{key}"] = value
    return found


class Reference:
    """Runs a step function eagerly on whole copies of its state."""

    def __init__(self, subject: Subject, function: Callable) -> None:
        self.subject, self.function = subject, function
        self.grads: dict[str, torch.Tensor] = {}

    def run(self, key: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`call`, which also keeps the gradients that the optimizers see in `grads`."""
        with ExitStack() as stack:
            for optimizer in self.subject.optimizers:
                stack.callback(optimizer.register_step_pre_hook(self._note_grads).remove)
            return self.call(key, args, kwargs)

    def call(self, key: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One eager step on the whole batch with the random numbers of `key`."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, whole, (tuple(args), dict(kwargs)))
        with op_numbers(), RandomMode(key):
            return self.function(*args, **kwargs)

    def _note_grads(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        names = self._names
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.grads[names[id(param)]] = param.grad.detach().clone()

    @property
    def _names(self) -> dict[int, str]:
        return {
            id(param): self.subject.prefix(index) + name
            for index, model in enumerate(self.subject.models)
            for name, param in reversed(list(model.named_parameters(remove_duplicate=False)))
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Whole clones of every parameter, buffer and optimizer state, by name."""
        return {name: whole(value).detach().clone() for name, value in live_state(self.subject).items()}

    @contextmanager
    def on_whole_state(self, write_back: bool = False) -> Iterator[None]:
        """Within: modules and optimizers hold whole plain tensors, copies where their own are split.

        Afterwards they hold their own again, as they were; with `write_back`, with the values of then.
        """
        subject = self.subject
        copies: dict[int, torch.Tensor] = {}
        owners: list[tuple[torch.Tensor, torch.Tensor]] = []

        originals = {id(subject.params[name]): param for name, param in subject.originals.items()}

        def copy(value: Any) -> Any:
            if not isinstance(value, DTensor):  # itself: the user may hold a reference to it
                if not write_back and id(value) not in copies:
                    copies[id(value)] = value
                    after.callback(_restorer(value))
                return value
            if id(value) not in copies:
                made: torch.Tensor = whole(value).detach().clone()
                if id(value) in originals:  # to which the user may hold a reference
                    original = originals[id(value)]
                    original.data = made
                    made = original
                elif isinstance(value, nn.Parameter):
                    made = nn.Parameter(made, value.requires_grad)
                if isinstance(value, nn.Parameter) and value.grad is not None:
                    made.grad = whole(value.grad).detach().clone()
                copies[id(value)] = made
                owners.append((value, made))
            return copies[id(value)]

        with ExitStack() as after, ExitStack() as stack:
            after.callback(_empty, list(subject.originals.values()))
            for module in subject.modules:
                holders: list[Any] = [module._parameters, module._buffers]
                for held in holders:
                    for key, value in held.items():
                        if value is not None:
                            stack.callback(held.__setitem__, key, value)
                            held[key] = copy(value)
            for optimizer in subject.optimizers:
                self._swap_optimizer(stack, optimizer, copy, write_back)
            yield
            if write_back:
                for value, made in owners:
                    _assign(value, made)

    def _swap_optimizer(
        self, stack: ExitStack, optimizer: torch.optim.Optimizer, copy: Callable, write_back: bool
    ) -> None:
        state, groups = optimizer.state, optimizer.param_groups
        copied: defaultdict = defaultdict(dict)
        for param, own in state.items():
            copied[copy(param)] = {k: copy(v) if isinstance(v, torch.Tensor) else v for k, v in own.items()}
        optimizer.state = copied
        optimizer.param_groups = [{**group, "params": [copy(p) for p in group["params"]]} for group in groups]

        def restore() -> None:
            if write_back:
                for group, now in zip(groups, optimizer.param_groups, strict=True):
                    for param, made in zip(group["params"], now["params"], strict=True):
                        for key, value in optimizer.state.get(made, {}).items():
                            if key not in state[param] or not isinstance(value, torch.Tensor):
                                state[param][key] = value
            optimizer.state, optimizer.param_groups = state, groups

        stack.callback(restore)


def _cut_as(value: DTensor, made: torch.Tensor) -> DTensor:
    """A whole tensor, the same on every rank, cut as another one lies."""
    return distribute_tensor(made.detach(), value.device_mesh, value.placements, src_data_rank=None)


@torch.no_grad()
def _assign(value: torch.Tensor, made: torch.Tensor) -> None:
    """Copies a whole tensor and its gradient into a live one, cut as that lies."""
    if isinstance(value, DTensor):
        value.to_local().copy_(_cut_as(value, made).to_local())
    else:
        value.copy_(made)
    if isinstance(value, nn.Parameter):
        grad = made.grad
        value.grad = _cut_as(value, grad) if isinstance(value, DTensor) and grad is not None else grad


def _restorer(value: torch.Tensor) -> Callable[[], None]:
    """What gives a tensor the value and gradient that it has now."""
    before, grad = value.detach().clone(), value.grad
    grad_before = None if grad is None else grad.detach().clone()

    @torch.no_grad()
    def restore() -> None:
        value.copy_(before)
        if isinstance(value, nn.Parameter):
            value.grad = grad
        if grad is not None and grad_before is not None:
            grad.copy_(grad_before)

    return restore


def _empty(params: Sequence[nn.Parameter]) -> None:
    """Frees the memory of parameters whose values are kept elsewhere."""
    for param in params:
        param.data, param.grad = param.new_empty(0), None
