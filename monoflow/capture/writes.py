"""Which tensors of a traced graph share memory with one that an op writes to, and which writes are names.

A write is but a name, "from here on x means y", where nothing else that is the same memory is read after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
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


@cache
def functional_form(op: Any) -> Any:
    """The op that gives what an in-place op writes to its first argument; None if there is none like it."""
    if not isinstance(op, torch._ops.OpOverload) or writes(op) != (0,):
        return None
    if {torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded} & set(op.tags):
        return None
    name = op.overloadpacket.__name__
    packet = getattr(getattr(torch.ops, op.namespace), name[:-1], None) if name.endswith("_") else None
    form = getattr(packet, op._overloadname, None)
    if form is None or form._schema.is_mutable or len(form._schema.returns) != 1:
        return None
    alike = [[(one.name, str(one.type)) for one in each._schema.arguments] for each in (op, form)]
    return form if alike[0] == alike[1] and len(op._schema.returns) < 2 else None


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
        self._order: dict[fx.Node, int] = {}
        self._writers: dict[fx.Node, list[int]] = {}  # the storages that each writes to
        given = iter(values)
        for number, node in enumerate(graph.nodes):
            self._order[node] = number
            self.values[node] = next(given) if node.op == "placeholder" else node.meta.get("val")
            if isinstance(node.target, torch._ops.OpOverload):
                self._join_views(node, node.target._schema)
                storages = list(self._storages_written(node))
                if storages:
                    self._writers[node] = storages
        self._written: dict[int, list[fx.Node]] = {}  # by whom, in order
        for node, storages in self._writers.items():
            for root in dict.fromkeys(map(self._root, storages)):
                self._written.setdefault(root, []).append(node)
        self._roots = {node: self._roots_written(node) for node in graph.nodes}
        self._mixed = self._not_renamed()
        self._renamed = {node: self._target(node) for node in self._writers if self.renames(node)}
        self._late: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if self._is_read_late(node):
                self._late.add(node)

    def touches(self, node: fx.Node) -> bool:
        """Whether a tensor that the node gives may be memory that some op of the graph writes to."""
        return bool(self._roots[node])

    def renames(self, node: fx.Node) -> bool:
        """Whether the node writes, and all it does is that its argument means another tensor from here on."""
        return node in self._writers and self.is_renamed(node, self._writers[node])

    def is_renamed(self, node: fx.Node, storages: Sequence[int] | None = None) -> bool:
        """Whether all writes to what the node gives do no more than that."""
        roots = self._roots[node] if storages is None else set(map(self._root, storages))
        return self._mixed.isdisjoint(roots)

    def matters(self, node: fx.Node) -> bool:
        """Whether a write to what the node gives, more than a name, can be seen in it or in a view of it.

        What is read for the last time before the first write to its memory is as if nothing were written.
        """
        return node in self._late

    def itself(self, node: fx.Node) -> fx.Node:
        """The tensor that a node is: what only renames its argument gives that."""
        return self._renamed.get(node, node)

    def _target(self, node: fx.Node) -> fx.Node:
        """The tensor that a node is: an op that writes to one gives it."""
        while node in self._writers and functional_form(node.target) is not None:
            first: Any = node.args[0]
            if not isinstance(first, fx.Node):
                break
            node = first
        return node

    def _roots_written(self, node: fx.Node) -> set[int]:
        """The memory of what a node gives, as far as it is written to."""
        return {root for root in map(self._root, _storages(self.values[node])) if root in self._written}

    def _not_renamed(self) -> set[int]:
        """The memory that is written to in ways that no change of names is."""
        members: dict[int, list[fx.Node]] = {root: [] for root in self._written}
        for node, roots in self._roots.items():
            for root in roots:
                members[root].append(node)
        mixed = {root for root, nodes in members.items() if not self._only_names(root, nodes)}
        before = -1
        while len(mixed) > before:  # an op that writes to several tensors renames all of them or none
            before = len(mixed)
            for storages in self._writers.values():
                roots = set(map(self._root, storages))
                if not mixed.isdisjoint(roots):
                    mixed |= roots
        return mixed

    def _only_names(self, root: int, members: Sequence[fx.Node]) -> bool:
        """Whether all that write to some memory write to one tensor, and no other is read after they do."""
        order, writers = self._order, self._written[root]
        targets: set[fx.Node] = set()
        for writer in writers:
            if functional_form(writer.target) is None:
                return False
            written = [one for one in _nodes(writer.args[0]) if root in self._roots[one]]
            if len(written) != 1:
                return False
            targets.add(self._target(written[0]))
        if len(targets) != 1:
            return False
        (target,) = targets
        if not isinstance(self.values[target], torch.Tensor):
            return False
        times = [order[writer] for writer in writers]
        for node in members:
            if self._target(node) is target:
                continue
            if node.op == "placeholder":
                return False
            then = bisect_right(times, order[node])
            if then < len(times) and any(order[user] > times[then] for user in node.users):
                return False
        return True

    def _is_read_late(self, node: fx.Node) -> bool:
        roots = self._roots[node] & self._mixed
        if not roots:
            return False
        first = min(self._order[self._written[root][0]] for root in roots)
        return not node.users or any(
            self._order[user] >= first or (user in self._late and not roots.isdisjoint(self._roots[user]))
            for user in node.users
        )

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
