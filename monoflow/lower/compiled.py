"""Compiled tasks: what a task computes, as a few compiled functions in place of one Python call an op.

A task is cut into pieces (`pieces.py`), equal pieces are compiled once, and a piece that is not compiled, or
not yet, runs op by op. What a compiled piece gives is within rounding of what the ops give, and in memory it
lies the same way, so that one can stand for the other at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import fx

from ..log import stage_logger
from ..runtime.origin import failing_node
from ..runtime.program import TIME
from .aten_form import IndexCheck, IndexOutOfRange, aten_form, check_indices
from .inductor import Function, compile_graph, one_at_a_time
from .pieces import Look, Piece, cut, layer_of_module, prepared

Tensor = torch.Tensor


class Code:
    """What pieces of one structure run: op by op until `build` has compiled it.

    Attributes:
        problem: why it was not compiled; "" if it was, or nobody tried.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._looks = [Look.of(node.meta["val"]) for node in piece.inputs]
        self.name = next((node.name for node in piece.nodes), "")
        self._function: Function | None = None
        self._checks: tuple[IndexCheck, ...] = ()
        self.tried = False
        self.problem = ""

    @property
    def is_compiled(self) -> bool:
        return self._function is not None

    def build(self) -> None:
        """Compiles it; leaves it as it is, with a `problem`, where that fails."""
        self.tried = True
        fakes = [node.meta["val"] for node in self._piece.inputs]
        try:
            form = aten_form(self._piece.module, fakes)
            with one_at_a_time(form.module, fakes):
                function = compile_graph(form.module, fakes)
        except Exception as error:  # whatever the compiler meets: the ops themselves still run
            self.problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            return
        self._checks, self._function = form.checks, function

    def position(self, node: str) -> int:
        """The place of a node of the piece that was compiled; its like has the same place in others."""
        return next((at for at, one in enumerate(self._piece.nodes) if one.name == node), 0)

    def run(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """The outputs of the piece. Takes the tensors out of the list."""
        for at, (tensor, look) in enumerate(zip(tensors, self._looks, strict=True)):
            if tensor.stride() != look.stride or tensor.shape != look.shape:
                tensors[at] = _laid_out(tensor, look)
        tensor = None
        results = self._function(tensors)  # type: ignore[misc]
        if self._checks:
            *results, found = results
            check_indices(self._checks, found)
        return results


def _laid_out(tensor: Tensor, look: Look) -> Tensor:
    """The tensor with the strides that code was compiled for."""
    assert tensor.shape == look.shape, f"what is compiled for {look.shape} is given {tuple(tensor.shape)}"
    return look.empty().copy_(tensor)


class _Step(NamedTuple):
    """One piece in the run of a task, with what it reads and writes by slot.

    Attributes:
        dies: slots that nobody reads after it.
        code: None for what is always called op by op.
    """

    piece: Piece
    code: Code | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dies: tuple[int, ...]

    def run(self, given: list[Tensor], time: int) -> Sequence[Tensor]:
        """What the piece gives. Takes the tensors out of the list."""
        if self.code is not None and self.code.is_compiled:
            return self.code.run(given)
        return self.piece.module.forward(given, time)

    def failing_node(self, error: Exception) -> str:
        """The node of the task that an exception of `run` comes from."""
        if isinstance(error, IndexOutOfRange) and self.code is not None:
            return self.piece.nodes[self.code.position(error.node)].name
        return failing_node(self.piece.module, error.__traceback__) or self.piece.nodes[0].name


class CompiledTask:
    """A task's function, as `task_module` makes them, run piece by piece.

    Attributes:
        graph: of the module that it was made from.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        cut_graph: fx.Graph,
        pieces: Sequence[Piece],
        library: Library,
        describe: Callable[[str], str],
    ) -> None:
        self.graph, self._describe = module.graph, describe
        nodes = [node for node in cut_graph.nodes if node.op == "placeholder" and node.target != TIME]
        self._num_inputs = len(nodes)
        nodes += [node for piece in pieces for node in piece.outputs]
        slot = {node: number for number, node in enumerate(nodes)}
        results: Any = cut_graph.output_node().args[0]
        self._returns = [slot[node] for node in results]
        last = {node: at for at, piece in enumerate(pieces) for node in piece.inputs}
        unread = [node for node in nodes if node not in last and node not in results]
        self._unread = [slot[node] for node in unread]
        self._num_slots = len(nodes)
        self.steps: list[_Step] = []
        for at, piece in enumerate(pieces):
            inputs = [node for node in piece.inputs if node.target != TIME]
            dies = [node for node in inputs if last[node] == at and node not in results]
            self.steps.append(
                _Step(
                    piece,
                    None if piece.is_call else library.code(piece),
                    tuple(slot[node] for node in inputs),
                    tuple(slot[node] for node in piece.outputs),
                    tuple(slot[node] for node in dies),
                )
            )

    def build(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Compiles the code of its pieces, where nobody has tried yet.

        Args:
            is_wanted: asked before each.
        """
        log = stage_logger("lower")
        for step in self.steps:
            code = step.code
            if code is None or code.tried or not is_wanted():
                continue
            start = perf_counter()
            code.build()
            log.debug("compiled %s in %.2f s", code.name, perf_counter() - start)
            if code.problem:
                origin = self._describe(step.piece.nodes[0].name)
                log.warning("%s and what follows run op by op: %s", origin, code.problem)

    def forward(self, tensors: list[Tensor], time: int = 0) -> list[Tensor]:
        """From the task's inputs, which are taken out of the list, to its outputs."""
        slots: list[Any] = [*tensors, *[None] * (self._num_slots - len(tensors))]
        tensors.clear()
        for slot in self._unread:
            slots[slot] = None
        for step in self.steps:
            given = [slots[slot] for slot in step.reads]
            for slot in step.dies:
                slots[slot] = None
            try:
                results = step.run(given, time)
            except Exception as error:
                error.add_note(f"in {self._describe(step.failing_node(error))}")
                raise
            for slot, result in zip(step.writes, results, strict=True):
                slots[slot] = result
            result = results = None
        return [slots[slot] for slot in self._returns]


class Library:
    """The code of pieces by their structure."""

    def __init__(self) -> None:
        self.codes: dict[tuple, Code] = {}

    def code(self, piece: Piece) -> Code:
        """The code that pieces like this one share."""
        return self.codes.setdefault(piece.key, Code(piece))


def compiled(
    module: fx.GraphModule,
    inputs: Sequence[Look],
    library: Library,
    module_of: Callable[[str], str | None] = lambda name: None,
    describe: Callable[[str], str] = lambda name: f"op {name}",
) -> CompiledTask:
    """A task's function that runs the code of a library.

    Args:
        module: as `task_module` makes it.
        inputs: what the tensors that it will be given look like.
        library: gets the code of its pieces. They run op by op until `CompiledTask.build`.
        module_of: from the name of a node to the module of the user's model that it is of; None for a name
            that is not known.
        describe: names the origin of a node in error messages.
    """

    def layer_of(name: str) -> str | None:
        found = module_of(name)
        return None if found is None else layer_of_module(found)

    graph = prepared(module, inputs)
    return CompiledTask(module, graph, cut(graph, layer_of), library, describe)
