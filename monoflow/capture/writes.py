"""Which tensors of a traced graph share memory with one that an op writes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

#: arguments that an op writes to though its schema does not say so: running statistics
_SILENT: Mapping[Any, tuple[int, ...]] = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}


def writes(op: Any) -> tuple[int, ...]:
    """The positions in its schema of the arguments that an op writes to."""
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    declared = (argument.alias_info for argument in op._schema.arguments)
    said = [index for index, info in enumerate(declared) if info is not None and info.is_write]
    return (*said, *_SILENT.get(op, ()))


class Written:
    """The storages of a traced graph that are written to, with all that may be the same memory.

    Two tensors may be the same memory if their fakes have one storage, or if an op's schema says that it
    returns a view of an argument, or the argument itself.

    Args:
        values: what stands for each placeholder, in order.
    """

    def __init__(self, graph: fx.Graph, values: Sequence[torch.Tensor]) -> None:
        self._parent: dict[int, int] = {}
        self.values: dict[fx.Node, Any] = {}
        written: list[tuple[int, int]] = []
        given = iter(values)
        order: dict[fx.Node, int] = {}
        for number, node in enumerate(graph.nodes):
            order[node] = number
            self.values[node] = next(given) if node.op == "placeholder" else node.meta.get("val")
            if isinstance(node.target, torch._ops.OpOverload):
                self._join_views(node, node.target._schema)
                written += ((storage, number) for storage in self._storages_written(node))
        self._written: dict[int, int] = {}  # when first
        for storage, number in reversed(written):
            self._written[self._root(storage)] = number
        self._late: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if self._is_read_late(node, order):
                self._late.add(node)

    def touches(self, node: fx.Node) -> bool:
        """Whether a tensor that the node gives may be memory that some op of the graph writes to."""
        return any(self._root(storage) in self._written for storage in _storages(self.values[node]))

    def matters(self, node: fx.Node) -> bool:
        """Whether a write to what the node gives can be seen in it, or in a view of it.

        What is read for the last time before the first write to its memory is as if nothing were written.
        """
        return node in self._late

    def _is_read_late(self, node: fx.Node, order: Mapping[fx.Node, int]) -> bool:
        roots = {self._root(storage) for storage in _storages(self.values[node])} & self._written.keys()
        if not roots:
            return False
        first = min(self._written[root] for root in roots)
        return not node.users or any(
            order[user] >= first or (user in self._late and self._shares(user, roots)) for user in node.users
        )

    def _shares(self, node: fx.Node, roots: set[int]) -> bool:
        return any(self._root(storage) in roots for storage in _storages(self.values[node]))

    def _join_views(self, node: fx.Node, schema: torch.FunctionSchema) -> None:
        """Joins what the op's schema says is one memory."""
        results = self.values[node] if len(schema.returns) > 1 else (self.values[node],)
        views = [
            storage
            for result, declared in zip(results or (), schema.returns, strict=False)
            if declared.alias_info is not None
            for storage in _storages(result)
        ]
        for index, argument in enumerate(schema.arguments):
            value = _argument(node, index, argument.name) if argument.alias_info is not None else None
            if isinstance(value, fx.Node):  # of a list, which result shares memory with which is not said
                for storage in _storages(self.values[value]):
                    self._join(storage, views)

    def _storages_written(self, node: fx.Node) -> Iterator[int]:
        op: Any = node.target
        for index in writes(op):
            for source in _nodes(_argument(node, index, op._schema.arguments[index].name)):
                yield from _storages(self.values[source])

    def _join(self, storage: int, others: Sequence[int]) -> None:
        for other in others:
            self._parent[self._root(other)] = self._root(storage)

    def _root(self, storage: int) -> int:
        parent = self._parent
        while (above := parent.get(storage, storage)) != storage:
            parent[storage] = parent.get(above, above)
            storage = above
        return storage


def _argument(node: fx.Node, index: int, name: str) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name)


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _nodes(one)


def _storages(value: Any) -> Iterator[int]:
    """The identities of the memory of all dense tensors in a value."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value.untyped_storage()._cdata
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _storages(one)
