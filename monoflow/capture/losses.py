"""Which results of a step are its losses: a backward pass began there, or at a sum or multiple of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

#: What hands on the value that it is given.
_COPIES = frozenset({torch.Tensor.detach, torch.detach, torch.Tensor.clone, torch.clone, torch.Tensor.float})

#: What begins a backward pass at its first argument.
_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class Losses(TorchFunctionMode):
    """Within: notes the scalars that backward passes begin at, and what those are made of."""

    def __init__(self) -> None:
        super().__init__()
        self._made_of: dict[int, list[torch.Tensor]] = {}
        self._copy_of: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets the id of one of them
        self._losses: set[int] = set()

    def __torch_function__(
        self, func: Callable, types: Sequence, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _BACKWARD:
            for one in pytree.tree_leaves(args[0]):
                self._note(one)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.dim():
            scalars = [one for one in args if isinstance(one, torch.Tensor) and not one.dim()]
            if scalars and result is not scalars[0]:
                self._kept += [result, *scalars]
                self._made_of[id(result)] = scalars
                if func in _COPIES:
                    self._copy_of[id(result)] = id(scalars[0])
        return result

    def _note(self, loss: torch.Tensor) -> None:
        stack = [loss]
        while stack:
            one = stack.pop()
            if id(one) not in self._losses:
                self._kept.append(one)
                self._losses.add(id(one))
                stack += self._made_of.get(id(one), ())

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of them, or a copy of one."""
        one: int | None = id(tensor)
        while one is not None and one not in self._losses:
            one = self._copy_of.get(one)
        return one is not None and not tensor.dim() and tensor.is_floating_point()
