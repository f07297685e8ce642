"""Sees what one rank's program holds while it runs, op by op, by looking at the tensors that are alive."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from monoflow.runtime import firing
from monoflow.runtime.actors import Engine


class Watch:
    """What rank 0 holds after every op and move, or bundle of moves.

    Attributes:
        after: bytes, each memory counted once, before the first of them and after every one.
        contiguous: whether the result is; None of an op that has several.
    """

    def __init__(self) -> None:
        self.after: list[int] = []
        self.contiguous: list[bool | None] = []
        self._seen: list[weakref.ref] = []

    def see(self, values: Any) -> None:
        """From now on these tensors are looked at."""
        self._seen += [weakref.ref(one) for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]

    def note(self) -> None:
        """Notes what is held now."""
        alive = [tensor for one in self._seen if (tensor := one()) is not None]
        self._seen = [weakref.ref(tensor) for tensor in alive]
        stores = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in alive}
        self.after.append(sum(stores.values()))


class _Body:
    """A task's function that lets the watch look after every op."""

    def __init__(self, graph: fx.Graph, watch: Watch) -> None:
        self.graph, self.watch = graph, watch
        self.dies_at: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            last = max([node, *node.users], key=list(graph.nodes).index)
            self.dies_at.setdefault(last, []).append(node)

    def forward(self, tensors: list[Tensor], time: int = 0) -> list[Tensor]:
        names = [node for node in self.graph.nodes if node.op == "placeholder"]
        env: dict[fx.Node, Any] = dict(zip(names, tensors, strict=True))
        tensors.clear()
        results: list[Tensor] = []
        for node in self.graph.nodes:
            if node.op == "call_function":
                if node.target is not operator.getitem:  # what picks a result belongs to the op before
                    self.watch.note()
                env[node] = _called(node, env)
                self.watch.see(env[node])
                if node.target is not operator.getitem:
                    is_one = isinstance(env[node], Tensor)
                    self.watch.contiguous.append(env[node].is_contiguous() if is_one else None)
            elif node.op == "output":
                results = [env[one] for one in node.args[0]]
            for dead in self.dies_at.get(node, ()):
                env.pop(dead, None)
        return results


def _called(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    assert callable(node.target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: env[one])  # type: ignore[misc]
    return node.target(*args, **kwargs)


def watched_step(
    engine: Engine, inputs: Mapping[int, Sequence[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> Watch:
    """Runs one step and looks on. The inputs are kept alive, as a step's live objects are."""
    watch = Watch()
    watch.see(inputs[0])
    real = firing.apply_move

    def watched(move: Any, tensors: Any, *others: Any) -> dict[int, Tensor]:
        watch.note()
        results = real(move, tensors, *others)
        watch.see(results[0])
        watch.contiguous.append(results[0].is_contiguous())
        return results

    bundled = firing.apply_bundle

    def watched_bundle(moves: Any, tensors: Any, *others: Any) -> dict[int, list[Tensor]]:
        watch.note()
        results = bundled(moves, tensors, *others)
        watch.see(results[0])
        watch.contiguous += [one.is_contiguous() for one in results[0]]
        return results

    for actor in engine.network.actors:
        if actor.task.compute is not None and actor.members[0].rank == 0:
            body = _Body(actor.task.compute.graph, watch)
            object.__setattr__(actor.task, "compute", body)
            actor.function = body.forward
    with monkeypatch.context() as patch:
        patch.setattr(firing, "apply_move", watched)
        patch.setattr(firing, "apply_bundle", watched_bundle)
        results = engine.run(inputs)
    watch.note()
    del results
    return watch
