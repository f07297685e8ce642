"""Where along the step every node belongs: the forward op that it computes, differentiates or updates.

The positions of a pipeline's cut. Forward ops are numbered in the order in which they run. Backward work has
the position of its forward op, an update that of its parameter, a parameter that of its first reader. What
only prepares parameters comes with its reader. What depends on the batch and on constants alone has no
position: it can be computed wherever it is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..graph.step_graph import (
    NodeInfo,
    Phase,
    Role,
    StepGraph,
    info_of,
    is_getitem,
    metas_of,
    source_of,
    tensor_args,
)

#: Inputs that every rank has, whole.
_EVERYWHERE = (Role.BATCH, Role.HYPER, Role.CONSTANT, Role.RANDOM)


@dataclass(frozen=True)
class Positions:
    """Nodes along the forward pass.

    Attributes:
        of: position by node, placeholders that hold state included.
        anywhere: nodes that depend on no state, in the graph's order, placeholders included.
        forward: the forward ops in order: the node at position i is `forward[i]`.
    """

    of: Mapping[fx.Node, int]
    anywhere: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]


def positions(graph: StepGraph) -> Positions:
    """The positions of a graph's placeholders and ops."""
    return _Finder(graph).found()


class _Finder:
    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.inputs = dict(zip(graph.placeholders.values(), graph.inputs, strict=True))
        self.calls = [node for node in graph.calls() if not is_getitem(node)]
        self.sources = {
            node: tuple(dict.fromkeys(source_of(one)[0] for one in tensor_args(node))) for node in self.calls
        }
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        for node in self.calls:
            for source in self.sources[node]:
                self.readers.setdefault(source, []).append(node)
        self.phases = {node: info_of(node).phase for node in self.calls}
        self.of: dict[fx.Node, int] = {}

    def found(self) -> Positions:
        anywhere = self._anywhere()
        preparing = self._preparing()
        forward = [
            node
            for node in self.calls
            if self.phases[node] in (Phase.PROLOGUE, Phase.FORWARD)
            and node not in anywhere
            and node not in preparing
        ]
        self.of |= {node: number for number, node in enumerate(forward)}
        self._with_readers(preparing, (Phase.PROLOGUE, Phase.FORWARD))
        self._backward(anywhere, preparing)
        self._with_readers(preparing, (Phase.BACKWARD, Phase.RECOMPUTE))
        self._state()
        self._updates(anywhere)
        return Positions(self.of, tuple(anywhere), tuple(forward))

    def _anywhere(self) -> dict[fx.Node, None]:
        written = {one.replaces for one in self.graph.outputs}
        found: dict[fx.Node, None] = {}
        for node, one in self.inputs.items():
            if one.role in _EVERYWHERE or (one.role is Role.BUFFER and one.name not in written):
                found[node] = None
        for node in self.calls:
            if all(source in found for source in self.sources[node]):
                found[node] = None
        return found

    def _preparing(self) -> dict[fx.Node, None]:
        """Ops before the update that read parameters and nothing else, through any number of such ops."""
        found = {node: None for node, one in self.inputs.items() if one.role is Role.PARAM}
        for node in self.calls:
            sources = self.sources[node]
            if sources and self.phases[node] is not Phase.UPDATE and all(one in found for one in sources):
                found[node] = None
        return {node: None for node in found if node not in self.inputs}

    def _with_readers(self, nodes: Mapping[fx.Node, None], phases: Sequence[Phase]) -> None:
        """Puts nodes where they are first read in some phases, unless they have a place already."""
        for node in reversed(list(nodes)):
            own = [
                self.of[one]
                for one in self.readers.get(node, ())
                if one in self.of and self.phases[one] in phases
            ]
            if own and node not in self.of:
                self.of[node] = min(own)

    def _backward(self, anywhere: Mapping[fx.Node, None], preparing: Mapping[fx.Node, None]) -> None:
        """Backward and recomputed ops: with their forward op, and never after a gradient that they read."""
        known = _Origins({node: at for node, at in self.of.items() if node not in self.inputs})
        last = max(self.of.values(), default=0)
        for node in self.calls:
            phase = self.phases[node]
            if phase not in (Phase.BACKWARD, Phase.RECOMPUTE) or node in anywhere or node in preparing:
                continue
            at = known.position(info_of(node), last)
            if phase is Phase.BACKWARD:
                grads = [
                    self.of[one]
                    for one in self.sources[node]
                    if self.phases.get(one) is Phase.BACKWARD and one in self.of and one not in preparing
                ]
                at = min([at, *grads])
            self.of[node] = at

    def _state(self) -> None:
        """Parameters and written buffers: with their first reader, in forward if there is one."""
        before = 0
        for node, one in self.inputs.items():
            if one.role not in (Role.PARAM, Role.BUFFER):
                continue
            readers = [reader for reader in self.readers.get(node, ()) if reader in self.of]
            forward = [self.of[r] for r in readers if self.phases[r] in (Phase.PROLOGUE, Phase.FORWARD)]
            found = forward or [self.of[r] for r in readers]
            before = self.of[node] = min(found, default=before)  # one that nothing reads: with its neighbour
        names = {one.name: node for node, one in self.inputs.items()}
        for node, one in self.inputs.items():
            if one.role in (Role.STATE, Role.GRAD):
                self.of[node] = self.of[names[one.of]] if one.of in names else 0

    def _updates(self, anywhere: Mapping[fx.Node, None]) -> None:
        """What is left: with the state that an op reads, else with the largest of what it reads."""
        for node in self.calls:
            if node in self.of or node in anywhere:
                continue
            sources = [source for source in self.sources[node] if source in self.of]
            state = [source for source in sources if source in self.inputs]
            assert sources, f"{node} reads state that has no place"
            sizes = {source: _num_bytes(source) for source in state or sources}
            most = max(sizes.values())
            self.of[node] = min(self.of[source] for source, size in sizes.items() if size == most)


class _Origins:
    """Finds the forward op of a backward one: by autograd's number, or the nearest of its module."""

    def __init__(self, forward: Mapping[fx.Node, int]) -> None:
        self.by_sequence: dict[int, int] = {}
        self.modules: dict[str, list[int]] = {}
        for node, at in sorted(forward.items(), key=lambda pair: pair[1]):
            info = info_of(node)
            if info.sequence >= 0:
                self.by_sequence[info.sequence] = at
            self.modules.setdefault(info.module, []).append(at)
        self.known = sorted(self.by_sequence)

    def position(self, info: NodeInfo, last: int) -> int:
        if info.sequence in self.by_sequence:
            return self.by_sequence[info.sequence]
        near = last
        if info.sequence >= 0:
            before = bisect_right(self.known, info.sequence)
            near = self.by_sequence[self.known[before - 1]] if before else 0
        return min(self.modules.get(info.module, [near]), key=lambda at: abs(at - near))


def _num_bytes(node: fx.Node) -> int:
    return sum(meta.num_bytes for meta in metas_of(node) if meta is not None)
