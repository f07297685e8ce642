"""The life of one rank: started by `monoflow run`, joined to the others, shut down without an abort.

`python -m monoflow.runtime.launch script.py args...` is what each rank runs.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from ..config import Settings
from ..errors import PlacementError
from .clock import compare_clocks
from .observe import observing
from .signs import ASK, INTERRUPTED, LAUNCHER_VARIABLE, PULSE, STACKS, WATCH_VARIABLE


def ensure_process_group(device_type: str) -> None:
    """Join this rank to the others, if the environment says that there are others and it has not yet.

    Picks the back end of the device (gloo, nccl, xccl...), makes LOCAL_RANK the accelerator's current
    device, and destroys the group at exit (a rank that exits without that can abort). Where the ranks are on
    several hosts, their clocks are compared, for a trace.

    Args:
        device_type: a torch device type, e.g. "cpu" or "cuda".

    Raises:
        PlacementError: torch has no communication back end for the device, or there are too few devices.
    """
    settings = Settings.from_env(os.environ)
    if settings.world_size == 1 or dist.is_initialized():
        return
    if device_type != "cpu":
        torch.accelerator.set_device_index(_device_index(device_type, settings.local_rank))
    dist.init_process_group(_backend(device_type))
    atexit.register(destroy_process_group)
    if settings.num_hosts > 1:
        offset = compare_clocks(settings.local_rank, _collective_device())
        if (observer := observing()) is not None:
            observer.tell_offset(offset)


def _device_index(device_type: str, local_rank: int) -> int:
    """The accelerator of a local rank: its own, or the only one that its launcher shows it."""
    count = torch.accelerator.device_count()
    if local_rank >= count > 1:
        raise PlacementError(
            f"local rank {local_rank} has no {device_type} device, "
            f"this host has {count}: start at most {count}"
        )
    return 0 if count == 1 else local_rank


def _backend(device_type: str) -> str:
    backend = dist.get_default_backend_for_device(device_type)
    if not dist.is_backend_available(backend):
        raise PlacementError(
            f"{device_type} ranks talk through {backend}, which this build of torch lacks; "
            f"install one that has it, or place the step on cpu"
        )
    return backend


#: What is called before this process leaves its job.
_BEFORE_LEAVING: dict[Callable[[], None], None] = {}


def before_leaving(call: Callable[[], None]) -> None:
    """Has something called, once, before this process leaves its job; may raise, which fails the process."""
    _BEFORE_LEAVING[call] = None


def _call_before_leaving() -> None:
    while _BEFORE_LEAVING:
        call = next(iter(_BEFORE_LEAVING))
        del _BEFORE_LEAVING[call]
        call()


def destroy_process_group() -> None:
    """Leave the process group, if there is one.

    Not if what runs beside the program fails: its threads may wait for ranks that never answer.
    """
    _call_before_leaving()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into an answer, so that all ranks stop after the same step.

    Yields `stop()`, a collective that every rank calls once a step: true on all ranks once any of them
    was interrupted. A second Ctrl-C raises KeyboardInterrupt as usual.
    """
    interrupted = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted  # no tensor: the signal may arrive while a step is being traced
        interrupted = True
        signal.signal(signal.SIGINT, previous)

    def stop() -> bool:
        if not dist.is_initialized():
            return interrupted
        flag = torch.tensor(float(interrupted), device=_collective_device())
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


def _collective_device() -> torch.device:
    """A device that the default process group can reduce on."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or "gloo" in str(dist.get_backend()):
        return torch.device("cpu")
    return accelerator


class _RankErrors(ErrorHandler):
    """Leaves an exception where the launcher finds it, in the agent's own form plus host and exact time."""

    def record_exception(self, e: BaseException) -> None:
        path = self._get_error_file_path()
        if path is None:
            return
        now = time.time()
        extra = {
            "py_callstack": user_traceback(e),
            "timestamp": str(int(now)),
            "exact_time": now,
            "host": socket.gethostname(),
        }
        message = {"message": f"{type(e).__name__}: {e}", "extraInfo": extra}
        try:  # whole or not at all: the launcher could not read half of it
            with open(f"{path}.new", "w") as file:
                file.write(json.dumps({"message": message}))
            os.replace(f"{path}.new", path)
        except OSError:  # a full disk
            sys.stderr.write(user_traceback(e))


def user_traceback(error: BaseException) -> str:
    """The traceback from the user's script on, without the frames that started it."""
    cut = _first_user_frame(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, cut))


def _first_user_frame(frames: TracebackType | None) -> TracebackType | None:
    launchers = {__file__, runpy.__file__, record.__code__.co_filename, "<frozen runpy>"}
    while frames is not None and frames.tb_frame.f_code.co_filename in launchers:
        frames = frames.tb_next
    return frames


def run_script(script: str, args: list[str]) -> int:
    """Run a script as `__main__`; return the status this process should exit with.

    An exception is recorded for the launcher, or printed where there is none.
    """
    sys.argv = [script, *args]
    sys.path[:1] = [os.path.dirname(os.path.abspath(script)), *(path for path in sys.path[:1] if path)]

    def whole() -> None:
        runpy.run_path(script, run_name="__main__")
        _call_before_leaving()

    run = record(whole, _RankErrors())
    try:
        run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit:
        raise
    except BaseException as error:
        if LAUNCHER_VARIABLE not in os.environ:
            sys.stderr.write(user_traceback(error))
        atexit.unregister(destroy_process_group)  # others may wait for this rank, and threads of it for them
        return 1
    finally:
        _flush()  # now: a collection of the script's globals may close a file's buffer before the file
    destroy_process_group()
    return 0


def live_with_launcher() -> None:
    """Give the launcher signs of life, and end soon after it is gone, however it died."""
    launcher = int(os.environ[LAUNCHER_VARIABLE])
    folder = os.environ.get(WATCH_VARIABLE)
    pulse, stacks, before = -1, "", signal.getsignal(ASK)
    if folder is not None:
        own = os.path.join(folder, str(os.getpid()))
        pulse, stacks = os.open(f"{own}{PULSE}", os.O_CREAT | os.O_WRONLY), f"{own}{STACKS}"
        faulthandler.register(ASK, os.open(stacks, os.O_CREAT | os.O_WRONLY | os.O_APPEND), all_threads=True)

    def live() -> None:
        while os.getppid() == launcher:
            if pulse >= 0:
                _beat(pulse)
                _answer_if_asked(stacks, before)
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=live, name="live-with-launcher", daemon=True).start()


def _beat(pulse: int) -> None:
    observer = observing() if observing.cache_info().currsize else None
    with contextlib.suppress(OSError):  # a full disk must not end a job
        os.pwrite(pulse, f"{observer.num_over if observer else 0:012}".encode(), 0)


def _answer_if_asked(stacks: str, before: Any) -> None:
    """Takes away the file by which the launcher may ask where this rank stands if the script took the signal.

    Args:
        before: its handler when the rank began, as Python has it.
    """
    if signal.getsignal(ASK) != before:
        with contextlib.suppress(OSError):
            os.unlink(stacks)


def end_process(status: int) -> NoReturn:
    """End this process as the interpreter does, without its finalization.

    That aborts where Gloo's threads outlive their group (a device mesh keeps it alive). So: threads are
    waited for, exit functions run, and what was written to files that are still open is put out.
    """
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        _flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseException:  # a full disk, a closed pipe
        traceback.print_exc()
        status = status or 1
    finally:
        os._exit(status)


def _flush() -> None:
    """Put out what was written to any file, as closing it would."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    files = [one for one in gc.get_objects() if issubclass(type(one), (io.TextIOWrapper, io.BufferedWriter))]
    for file in files:
        with contextlib.suppress(ValueError):  # it is closed or detached
            file.flush()


def exit_status(stop: SystemExit) -> int:
    """The status that sys.exit(...) asks for; a message is printed."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    sys.stderr.write(f"{stop.code}\n")
    return 1


def main() -> NoReturn:
    """Run the script named on the command line as one rank."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if LAUNCHER_VARIABLE in os.environ:
        live_with_launcher()
    script, *args = sys.argv[1:]
    try:
        status = run_script(script, args)
    except SystemExit as stop:
        status = exit_status(stop)
    end_process(status)


if __name__ == "__main__":
    main()
