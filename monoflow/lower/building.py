"""When tasks are compiled: ahead of their first run, or beside the first steps, which run op by op."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..errors import FlowError
from ..graph.step_graph import StepGraph, info_of
from ..log import stage_logger
from ..runtime.origin import failing_node
from ..runtime.program import Task
from .compiled import CompiledTask, Library, compiled
from .inductor import NoCompiler, Submit
from .lower import Lowered
from .pieces import Look
from .touched_rows import touched_rows

Tensor = torch.Tensor

#: "background": the first steps run op by op while code is compiled beside them; "ahead": a task is compiled
#: before it first runs; "off": ops one by one.
MODES = ("background", "ahead", "off")

#: Seconds that tasks run op by op before a thread compiles beside them. To compile takes tens of seconds of a
#: core: who runs for a moment, or has steps of a millisecond, pays nothing.
PAYS_AFTER = 2.0
#: Seconds that the end of the process waits for the thread to put down what it has in hand.
_LEAVE_WITHIN = 5.0


def check_mode(mode: object) -> str:
    """A mode that `compile=` names. Raises FlowError if there is none such."""
    if mode not in MODES:
        raise FlowError(f"compile={mode!r} is none of {', '.join(map(repr, MODES))}")
    return str(mode)


def use_compiled(
    lowered: Lowered,
    mode: str,
    library: Library | None = None,
) -> Lowered:
    """The same programs with tasks that are compiled, and tables of which only touched rows are updated.

    Args:
        mode: one of MODES.
        library: code that is there already, of other plans for example.

    Raises:
        FlowError: there is no such mode.
    """
    check_mode(mode)
    modules = {node.name: info_of(node).module for node in lowered.plan.graph.calls()}
    library = Library() if library is None else library
    builder = Builder(library, modules.get, describer(lowered.plan.graph), mode == "background")
    programs = {
        rank: replace(program, tasks=tuple(_with_function(task, builder, mode) for task in program.tasks))
        for rank, program in lowered.programs.items()
    }
    return replace(lowered, programs=MappingProxyType(programs))


def describer(graph: StepGraph) -> Callable[[str], str]:
    """Names the origin of a node, by the node's name, for messages: its module and the user's line."""
    origins = {node.name: info_of(node) for node in graph.calls()}

    def describe(name: str) -> str:
        info = origins.get(name)
        if info is None:
            return f"op {name}"
        return (
            f"op {name}"
            + f", module {info.module!r}" * bool(info.module)
            + f", {info.source}" * bool(info.source)
        )

    return describe


def _with_function(task: Task, builder: Builder, mode: str) -> Task:
    def function(module: fx.GraphModule) -> Any:
        module = touched_rows(module)
        return module if mode == "off" else TaskFunction(module, builder)

    if task.compute is None:
        return task
    others = {time: function(module) for time, module in task.others.items()}
    return replace(task, compute=function(task.compute), others=others)


class Builder:
    """Compiles tasks that have shown what they are given.

    Args:
        module_of, describe: see `compiled`.
        beside: whether a thread does it, once the ops took `PAYS_AFTER` seconds, or the caller at once.
    """

    def __init__(
        self,
        library: Library,
        module_of: Callable[[str], str | None],
        describe: Callable[[str], str],
        beside: bool,
    ) -> None:
        self.library, self.module_of, self.describe, self.beside = library, module_of, describe, beside
        self._waiting: list[TaskFunction] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._left = threading.Event()
        self._seconds = 0.0
        self.submit = _on_threads(_num_cores(), beside)

    def add(self, function: TaskFunction) -> None:
        """Takes in a task that is to be compiled."""
        if self._left.is_set():
            return
        if not self.beside:
            function.compile()
            return
        with self._lock:
            self._waiting.append(function)

    def ran(self, seconds: float) -> None:
        """A task ran op by op, for so long. Lets the thread begin if that went on for long enough."""
        self._seconds += seconds
        if self.beside and self._seconds >= PAYS_AFTER and not self._left.is_set():
            self.start()

    def start(self) -> None:
        """Lets the thread work on what waits, if none does."""
        with self._lock:
            if not self._waiting or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._work, name="monoflow compiler", daemon=True)
            self._thread.start()
            atexit.register(_leave, self._left, self._thread)

    def _work(self) -> None:
        while not self._left.is_set():
            with self._lock:
                if not self._waiting:
                    return
                function = self._waiting.pop(0)
            function.compile()

    def join(self) -> None:
        """Waits until nothing waits to be compiled."""
        self.start()
        thread = self._thread
        while thread is not None and thread.is_alive():
            thread.join()

    def give_up(self) -> None:
        """Nothing can be compiled here."""
        self._left.set()

    def is_wanted(self) -> bool:
        """Whether code is still of use: not when the process ends, or none can be made."""
        return not self._left.is_set()


def _leave(left: threading.Event, thread: threading.Thread) -> None:
    """Ends a thread before the interpreter does, which would stop it within the compiler's own code."""
    left.set()
    thread.join(_LEAVE_WITHIN)


@cache
def _tell_once(problem: str) -> None:
    stage_logger("lower").warning("steps run op by op: %s", problem)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_threads(num: int, behind: bool) -> Submit:
    """What calls functions on threads, so many at a time, that end with the process.

    Args:
        behind: whether the machine does everything else first.
    """
    turn = threading.Semaphore(num)

    def submit(function: Callable[[], None]) -> Future:
        future: Future = Future()

        def work() -> None:
            with turn:
                try:
                    if behind:
                        _go_behind()
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=work, name="monoflow C++", daemon=True).start()
        return future

    return submit


def _go_behind() -> None:
    """Lets the machine do everything else before this thread and the processes that it starts."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class TaskFunction:
    """A task's function that is its ops until they are compiled."""

    def __init__(self, module: fx.GraphModule, builder: Builder) -> None:
        self.graph = module.graph
        self._module, self._builder = module, builder
        self._looks: list[Look] | None = None
        self._compiled: CompiledTask | None = None

    def forward(self, tensors: list[Tensor], time: int = 0) -> Sequence[Tensor]:
        """From the task's inputs, which are taken out of the list, to its outputs."""
        if self._looks is None:
            self._looks = [Look.of(tensor) for tensor in tensors]
            self._builder.add(self)
        if self._compiled is not None:
            return self._compiled.forward(tensors, time)
        start = perf_counter()
        try:
            return self._module.forward(tensors, time)
        except Exception as error:
            node = failing_node(self._module, error.__traceback__)
            error.add_note(f"in {self._builder.describe(node)}")
            raise
        finally:
            self._builder.ran(perf_counter() - start)

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def compile(self) -> None:
        """Compiles it; it runs op by op where that fails."""
        assert self._looks is not None, "a task is compiled once it has seen tensors"
        builder = self._builder
        try:
            made = compiled(self._module, self._looks, builder.library, builder.module_of, builder.describe)
            made.build(builder.submit, builder.is_wanted)
        except NoCompiler as error:
            builder.give_up()
            _tell_once(str(error))
            return
        except Exception as error:  # whatever the compiler meets: the ops themselves still run
            if not builder.is_wanted():  # the process ends, and much fails then
                return
            first = next((node.name for node in self.graph.nodes if node.op == "call_function"), "")
            what = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            stage_logger("lower").warning(
                "%s and what follows run op by op: %s", builder.describe(first), what
            )
            return
        if builder.is_wanted():
            self._compiled = made
