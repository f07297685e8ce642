"""What a message costs: `python bench/runtime.py`.

An actor that does nothing hands its register to the next one: in one thread, and from thread to thread and
back, beside two bare threads that wake each other as often. Then a step of 50 ms in a hundred actors against
the same work in a loop, side by side.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import torch
from torch import fx

from monoflow.mesh import placement
from monoflow.runtime.actors import Engine
from monoflow.runtime.program import Kind, Port, Program, Register, Task, task_module, verify
from monoflow.runtime.transport import SimTransport

ONE = placement("cpu", [0], axes=("data",))


def chain(length: int, function: Callable, host_every: int = 0) -> Program:
    """Actors in a row; every n-th is the host's."""
    tasks = []
    for index in range(length):
        graph = fx.Graph()
        graph.output([graph.call_function(function, (graph.placeholder("x"),))])
        role = Kind.SINK if host_every and index % host_every == 0 else None
        tasks.append(
            Task(index, f"t{index}", "forward", (index,), (index + 1,), compute=task_module(graph), role=role)
        )
    registers = tuple(Register(index, f"r{index}", (1,), torch.float32) for index in range(length + 1))
    ports = (Port("x", 0),), (Port("y", length),)
    return verify(Program(0, ONE, tuple(tasks), registers, *ports))


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The time of a run."""
    start = clock()
    run()
    return clock() - start


def engine_of(program: Program, lanes: bool) -> Callable[[], object]:
    engine = Engine({0: program}, ONE, SimTransport(ONE), str, lanes=lanes)
    x = torch.zeros(1)
    return lambda: engine.run({0: [x]})


def bare(length: int) -> None:
    """Two threads that wake each other in turn."""
    gates = threading.Lock(), threading.Lock()
    for gate in gates:
        gate.acquire()

    def other() -> None:
        for _ in range(length // 2):
            gates[1].acquire()
            gates[0].release()

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(length // 2):
        gates[1].release()
        gates[0].acquire()
    thread.join()


def spin(x: torch.Tensor) -> torch.Tensor:
    """Half a millisecond of work, as the processor counts it: on a busy machine too."""
    end = time.thread_time() + 5e-4
    while time.thread_time() < end:
        pass
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=300, help="actors in a row")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()

    def nothing(x: torch.Tensor) -> torch.Tensor:
        return x

    one = engine_of(chain(options.length, nothing), lanes=False)
    alternating = engine_of(chain(options.length, nothing, host_every=2), lanes=True)
    runs = {"one thread": one, "thread to thread": alternating, "bare threads": lambda: bare(options.length)}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            found[name].append(seconds(run))
    for name, times in found.items():
        micros = [1e6 * one / options.length for one in times]
        print(f"{name}: {statistics.median(micros):.1f} us a message, at best {min(micros):.1f}")

    run, x = engine_of(chain(100, spin), lanes=False), torch.zeros(1)

    def loop() -> None:
        for _ in range(100):
            spin(x)

    cpu = time.thread_time
    pairs = [(seconds(run, cpu), seconds(loop, cpu)) for _ in range(options.repeats)]
    ratio = statistics.median(ours / theirs - 1 for ours, theirs in pairs)
    ours, theirs = (min(one) for one in zip(*pairs, strict=True))
    print(
        f"a step of 50 ms in 100 actors: {100 * ratio:.2f} % more than its work alone, "
        f"at best {100 * (ours / theirs - 1):.2f} %"
    )


if __name__ == "__main__":
    main()
