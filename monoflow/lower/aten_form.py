"""A piece of a task in terms that a compiler takes: ATen ops alone, no writes, every index in range.

Ops of our own become the ops that their kernels are made of. Compiled code does not say whose index was out
of range (on a CPU it ends the process), so indices that come from outside are clamped, and the piece also
gives the least and the greatest of each, for `IndexChecks` to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from ..sbp.ops.attention import (
    attention,
    attention_backward,
    attention_backward_kernels,
    attention_kernels,
)
from ..sbp.ops.batch_norm import (
    local_batch_norm,
    local_batch_norm_backward,
    local_batch_norm_backward_kernels,
    local_batch_norm_kernels,
)
from ..sbp.rules import embedding  # noqa: F401 - defines the op below
from .inductor import decompositions, without_repeats

aten = torch.ops.aten
check_index = torch.ops.monoflow.check_index.default
Tensor = torch.Tensor


class IndexCheck(NamedTuple):
    """What an index may be: in [low, size), for the node of the task that uses it."""

    low: int
    size: int
    node: str


class AtenForm(NamedTuple):
    """A graph of ATen ops. With checks, its last output is the (2 * checks,) least and greatest indices."""

    module: fx.GraphModule
    checks: tuple[IndexCheck, ...]


class IndexOutOfRange(IndexError):
    """An index is out of range in `node` of a task."""

    def __init__(self, index: int, check: IndexCheck) -> None:
        super().__init__(f"index {index} is out of range for {check.size} rows")
        self.node = check.node


def check_indices(checks: Sequence[IndexCheck], found: Tensor) -> None:
    """Raises IndexOutOfRange if one of the indices that a piece met was."""
    values = found.tolist()
    for check, least, greatest in zip(checks, values[::2], values[1::2], strict=True):
        if least < check.low or greatest >= check.size:
            raise IndexOutOfRange(least if least < check.low else greatest, check)


def aten_form(piece: fx.GraphModule, inputs: Sequence[Tensor]) -> AtenForm:
    """The ATen form of a graph for inputs like the given fake ones."""
    with torch.no_grad():
        module = make_fx(_Interpreter(piece).run, decomposition_table=_table())(*inputs)
        if any(_writes(node) for node in module.graph.nodes):
            pure = torch.func.functionalize(_Interpreter(module).run, remove="mutations")
            module = make_fx(pure, decomposition_table=_table())(*inputs)
    module.graph = without_repeats(module.graph)
    return AtenForm(module, _guard(module))


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Interpreter(fx.Interpreter):
    """Marks every traced op with the node that it comes from."""

    def run_node(self, n: fx.Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        graph = mode.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        result = super().run_node(n)
        for made in reversed(graph.nodes):
            if made is last:
                break
            made.meta.setdefault("origin", n.name)
        return result


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    return {
        **decompositions(),
        attention: attention_kernels,
        attention_backward: attention_backward_kernels,
        local_batch_norm: local_batch_norm_kernels,
        local_batch_norm_backward: local_batch_norm_backward_kernels,
    }


# --- indices ---------------------------------------------------------------------------------------

_ALONG_DIM = ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy")
_BY_LIST = ("index", "index_put", "_unsafe_index", "_unsafe_index_put")


def _guard(module: fx.GraphModule) -> tuple[IndexCheck, ...]:
    """Clamps what indexes, and gives out what it was; returns what it may be."""
    graph = module.graph
    outside = _from_outside(graph)
    guards = _Guards(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = node.target.overloadpacket.__name__ if hasattr(node.target, "overloadpacket") else ""
        if node.target is check_index:
            node.replace_all_uses_with(guards.held(node, node.args[0], 0, node.args[1]))
            graph.erase_node(node)
        elif name == "embedding" and node.args[1] in outside:
            table, index, *rest = node.args
            node.args = (table, guards.held(node, index, 0, _shape(table)[0]), *rest)
        elif name in _ALONG_DIM and node.args[2] in outside:
            source, dim, index, *rest = node.args
            shape = _shape(source) or (1,)
            node.args = (source, dim, guards.held(node, index, 0, shape[dim]), *rest)
        elif name in _BY_LIST:
            source, indices, *rest = node.args
            held = [
                guards.held(node, one, -size, size) if one in outside and _is_integer(one) else one
                for one, size in zip(indices, _shape(source), strict=False)
            ]
            node.args = (source, held, *rest)
    return guards.finished(module)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _is_integer(node: fx.Node) -> bool:
    return node.meta["val"].dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _from_outside(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values depend on inputs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


class _Guards:
    """The clamped form of every index, made once."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.made: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.checks: list[IndexCheck] = []
        self.found: list[fx.Node] = []

    def held(self, user: fx.Node, index: Any, low: int, size: int) -> fx.Node:
        """The index within [low, size); what lies outside is noted."""
        if index.meta["val"].numel() == 0 or size == 0:
            return index
        key = index, low, size
        if key not in self.made:
            with self.graph.inserting_before(user):
                self.made[key] = self._call(torch.clamp, index, low, size - 1)
                self.found += [
                    self._call(lambda x: x.amin().long().reshape(1), index),
                    self._call(lambda x: x.amax().long().reshape(1), index),
                ]
            self.checks.append(IndexCheck(low, size, user.meta.get("origin", user.name)))
        return self.made[key]

    def _call(self, function: Callable[..., Tensor], node: fx.Node, *rest: Any) -> fx.Node:
        """Inserts the ops of a function of one tensor."""
        with torch.no_grad():
            called = make_fx(lambda x: function(x, *rest), decomposition_table=_table())
            traced = called(node.meta["val"]).graph
        env: dict[fx.Node, fx.Node] = {}
        for one in traced.nodes:
            if one.op == "placeholder":
                env[one] = node
            elif one.op == "call_function":
                env[one] = self.graph.node_copy(one, env.__getitem__)
        return env[traced.output_node().args[0]]  # type: ignore[index]

    def finished(self, module: fx.GraphModule) -> tuple[IndexCheck, ...]:
        if self.checks:
            output = self.graph.output_node()
            with self.graph.inserting_before(output):
                values = [one.meta["val"] for one in self.found]
                joined = self.graph.call_function(aten.cat.default, (self.found,))
                joined.meta["val"] = torch.cat(values)
            output.args = ([*output.args[0], joined],)  # type: ignore[misc]
        self.graph.eliminate_dead_code()
        module.recompile()
        return tuple(self.checks)
