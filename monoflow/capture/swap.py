"""Fakes in place of what modules hold, for the time of one capture, and everything put back afterwards."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
#: What takes a tensor's values to Python past torch's dispatcher, and how errors call it.
_READS = {
    "numpy": ".numpy()",
    "tolist": ".tolist()",
    "__array__": ".__array__()",
    "__format__": "formatting, as f'{x:.3f}'",
}
_GRAD = vars(torch._C.TensorBase)["grad"]


class Snapshot:
    """What objects' attributes are now, and what the lists and dicts among them hold."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._saved = [
            (
                one,
                dict(one.__dict__),
                {k: _copy(v) for k, v in one.__dict__.items() if type(v) in _CONTAINERS},
            )
            for one in objects
        ]

    def restore(self) -> None:
        """Makes every object what it was."""
        for one, attributes, contents in self._saved:
            one.__dict__.clear()
            one.__dict__.update(attributes)
            for key, content in contents.items():
                held = attributes[key]
                held.clear()
                held.extend(content) if isinstance(held, list) else held.update(content)

    def changes(self) -> Iterator[tuple[Any, str, Any, Any]]:
        """(object, attribute, value, value before) of every attribute that is or holds something else now."""
        for one, attributes, contents in self._saved:
            for key, value in one.__dict__.items():
                if key not in attributes or attributes[key] is not value:
                    yield one, key, value, attributes.get(key)
                elif key in contents and not _same(value, contents[key]):
                    yield one, key, value, contents[key]


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else type(value)(value)


def _same(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(key in before and before[key] is value for key, value in now.items())
    return all(a is b for a, b in zip(now, before, strict=True))


def put_stand_ins(modules: Sequence[nn.Module], stand_ins: Mapping[int, torch.Tensor]) -> None:
    """Replaces every tensor that a module holds and that has a stand-in (by the tensor's id).

    Not only parameters and buffers: recurrent layers keep a list of their weights beside.
    """
    for module in modules:
        for held in (module._parameters, module._buffers):
            held |= {key: stand_ins[id(x)] for key, x in held.items() if id(x) in stand_ins}
        for key, value in module.__dict__.items():
            if type(value) in (list, tuple) and any(id(x) in stand_ins for x in value):
                module.__dict__[key] = type(value)(stand_ins.get(id(x), x) for x in value)


def holds_fake(value: Any, but: Sequence[torch.Tensor]) -> bool:
    """Whether a value is or contains a tensor of the capture other than `but`."""
    known = {id(x) for x in but}
    return any(isinstance(leaf, FakeTensor) and id(leaf) not in known for leaf in pytree.tree_leaves(value))


class StandIns(TorchFunctionMode):
    """Lets a reference that the step holds to a real parameter or buffer mean its stand-in.

    `params = list(model.parameters())` before the step and `clip_grad_norm_(params, 1.0)` inside is common.

    Args:
        stand_ins: by id of the real tensor.
        on_grad: called with a stand-in whose .grad is read (True) or set to None (False).
        refused: called with what reads a value where torch's dispatcher does not see it.
    """

    def __init__(
        self,
        stand_ins: Mapping[int, torch.Tensor],
        on_grad: Callable[[torch.Tensor, bool], None],
        refused: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.stand_ins, self.on_grad, self.refused = stand_ins, on_grad, refused

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args = [self._stand_in(x) for x in args]
        kwargs = {key: self._stand_in(x) for key, x in kwargs.items()} if kwargs else {}
        name = getattr(func, "__name__", "")
        if getattr(func, "__self__", None) is _GRAD:
            if name == "__get__":
                self.on_grad(args[0], True)
            elif name == "__delete__" or args[1] is None:
                self.on_grad(args[0], False)
        elif name in _READS and isinstance(args[0], FakeTensor) and (name != "__format__" or args[1]):
            self.refused(_READS[name])  # formatting without a format is the tensor's repr
        return func(*args, **kwargs)

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.stand_ins.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(self._stand_in(x) for x in value)
        return value
