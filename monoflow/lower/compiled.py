"""Compiled tasks: what a task computes, as a few compiled functions in place of one Python call an op.

A task is cut into pieces (`pieces.py`), equal pieces are compiled once, and a piece that is not compiled, or
not yet, runs op by op. What a compiled piece gives is within rounding of what the ops give, and in memory it
lies the same way, so that one can stand for the other at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import fx

from ..log import stage_logger
from ..runtime.origin import failing_node
from ..runtime.program import TIME
from .aten_form import IndexCheck, IndexOutOfRange, aten_form, check_indices
from .inductor import (
    Compiling,
    Function,
    NoCompiler,
    Submit,
    compile_graph,
    missing_compiler,
    one_at_a_time,
)
from .kept import digest, find, keep
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
        self.device = next((look.device for look in self._looks), torch.device("cpu"))
        self._function: Function | None = None
        self._checks: tuple[IndexCheck, ...] = ()
        self._name: str | None = None
        self._compiling: tuple[tuple[IndexCheck, ...], Compiling] | None = None
        self.tried = False
        self.problem = ""

    @property
    def is_compiled(self) -> bool:
        return self._function is not None

    def begin(self, submit: Submit) -> None:
        """Takes the code that is kept of such pieces, or begins to compile it; `finish` ends that.

        Where it fails, all is left as it is, with a `problem`.

        Raises:
            NoCompiler: nothing is kept, and there is no compiler.
        """
        self.tried = True
        self._name = digest(self._piece.key) if self.device.type == "cpu" else None
        kept = find(self._name) if self._name is not None else None
        if kept is not None:
            self._use(
                kept.function, [IndexCheck(a, b, self._piece.nodes[at].name) for a, b, at in kept.checks]
            )
            return
        missing = missing_compiler(self.device)
        if missing:
            raise NoCompiler(missing)
        fakes = [node.meta["val"] for node in self._piece.inputs]
        with self._noting_problems():
            form = aten_form(self._piece.module, fakes)
            with one_at_a_time(form.module, fakes):
                self._compiling = form.checks, compile_graph(form.module, fakes, submit)

    def finish(self) -> None:
        """Waits for what was begun, and keeps it for later runs."""
        if self._compiling is None:
            return
        (checks, compiling), self._compiling = self._compiling, None
        with self._noting_problems():
            function, library = compiling()
            if self._name is not None and library is not None:
                keep(self._name, library, [(one.low, one.size, self.position(one.node)) for one in checks])
            self._use(function, checks)

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the compiler meets: the ops themselves still run
            self.problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"

    def _use(self, function: Function, checks: Sequence[IndexCheck]) -> None:
        self._checks, self._function = tuple(checks), function

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

    def build(self, submit: Submit, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Compiles the code of its pieces, where nobody has tried yet.

        Args:
            submit: has a part of the work done on other threads, beside the rest.
            is_wanted: asked before each.

        Raises:
            NoCompiler: some code is needed, and there is no compiler.
        """
        log = stage_logger("lower")
        start = perf_counter()
        begun: dict[Code, _Step] = {}
        for step in self.steps:
            if step.code is not None and not step.code.tried and is_wanted():
                begun[step.code] = step
                step.code.begin(submit)
        for code, step in begun.items():
            if is_wanted():
                code.finish()
            log.debug("%s is ready after %.2f s", code.name, perf_counter() - start)
            if code.problem and is_wanted():
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
