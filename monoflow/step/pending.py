"""Tensors that a step still works on: whoever touches one waits for the step.

A call of a step returns before its results are there. Until then its results, and the parameters and states
that it writes, are of a class that waits at the first touch (any function, method or attribute of torch) and
then is what it was: the same objects, so nothing that a user holds is exchanged. The class is the only thing
that changes, and only while a step runs.

A step may be called again while it runs. Parameters and states then wait for the later call, which waits for
the one before; results wait for the call that they are of.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..compiler import before_leaving


class Flight:
    """One step that runs.

    Args:
        finish: waits for the step and puts what it made where it belongs; called once.
        called_at: the user's "file:line", for an error that comes out elsewhere.
        before: the step before, if that still runs; whoever waits for this one waits for it first.
    """

    def __init__(self, finish: Callable[[], None], called_at: str = "", before: Flight | None = None) -> None:
        self._called_at, self._before = called_at, before
        self._finish: Callable[[], None] | None = finish
        self._tensors: list[torch.Tensor] = []
        self._lock = threading.RLock()
        self._error: BaseException | None = None

    @property
    def before(self) -> Flight | None:
        """The step before, as long as nobody has waited for that."""
        return self._before

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Makes tensors wait for this step, also if they wait for the one before.

        Those of a class of the user's own are left as they are.
        """
        with _LOCK:
            for tensor in tensors:
                if isinstance(tensor, DTensor):  # its own methods read its part without asking torch
                    self._hold(tensor._local_tensor)
                self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, _Waits):
            waiting = _WAITING.get(type(tensor))
            if waiting is None:
                return
            tensor.__class__ = waiting
        tensor._flight = self  # type: ignore[attr-defined]
        self._tensors.append(tensor)

    def land(self) -> None:
        """Waits for the step, once; raises what it raised, every time."""
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    before, self._before = self._before, None
                    if before is not None:
                        before.land()
                    self._end(finish)
                except BaseException as error:
                    self._error = error
                finally:
                    self._release()
        newest = _over(self)
        if self._error is not None:
            if newest is not None and newest.before is self:  # it fails of the same, which is said once
                with contextlib.suppress(BaseException):
                    newest.land()
            raise self._error

    def _end(self, finish: Callable[[], None]) -> None:
        try:
            with untouched():  # what finishes a step may touch its tensors
                finish()
        except BaseException as error:
            if self._called_at:
                error.add_note(f"in the step that was called at {self._called_at}")
            raise

    def _release(self) -> None:
        with _LOCK:
            for tensor in self._tensors:
                if isinstance(tensor, _Waits) and tensor._flight is self:  # it may wait for the next step
                    tensor.__class__ = type(tensor).__mro__[2]
                    del tensor._flight  # type: ignore[attr-defined]
        self._tensors.clear()


_LOCK = threading.RLock()
_ON_ITS_WAY: Flight | None = None


def take_off(flight: Flight) -> None:
    """Notes the step that was called last; it is waited for before this process leaves the job."""
    global _ON_ITS_WAY
    with _LOCK:
        _ON_ITS_WAY = flight
    before_leaving(synchronize)


def on_its_way() -> Flight | None:
    """The step that was called last, unless it has been waited for."""
    return _ON_ITS_WAY


def _over(flight: Flight) -> Flight | None:
    """A step was waited for: what it raised comes out now. Returns the step that is still on its way."""
    global _ON_ITS_WAY
    with _LOCK:
        if _ON_ITS_WAY is flight:
            _ON_ITS_WAY = None
        return _ON_ITS_WAY


def synchronize() -> None:
    """Waits for the steps that run beside this program, if any do; raises what they raised.

    Nothing needs to call it for right numbers: what a step reads or writes waits when it is touched.
    """
    flight = _ON_ITS_WAY
    if flight is not None:
        flight.land()


def untouched() -> AbstractContextManager[None]:
    """Within, to touch a tensor that is waited for does not wait: for what reads no values."""
    return torch._C.DisableTorchFunctionSubclass()


def is_waiting(tensor: torch.Tensor) -> bool:
    """Whether a step still works on a tensor."""
    return isinstance(tensor, _Waits)


def caller() -> str:
    """The "file:line" of the innermost frame outside this package."""
    package = str(Path(__file__).parents[1])
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Waits:
    """Of a tensor that is waited for."""

    _flight: Flight

    @classmethod
    def __torch_function__(
        cls,
        func: Callable,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(leaf, _Waits):
                leaf._flight.land()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Any:
        self._flight.land()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._flight.land()
        return self.__reduce_ex__(protocol)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self._flight.land()
        return self.__dlpack__(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._flight.land()
        given = self.__array__() if dtype is None else self.__array__(dtype)
        return given.copy() if copy else given


class _WaitingTensor(_Waits, torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class _WaitingParameter(_Waits, torch.nn.Parameter):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class _WaitingDTensor(_Waits, DTensor):  # pyright: ignore[reportIncompatibleMethodOverride]
    __slots__ = ()


#: For every class that a step's tensors have, the one that waits; the class itself comes third in its order.
_WAITING: Mapping[type, type] = {
    torch.Tensor: _WaitingTensor,
    torch.nn.Parameter: _WaitingParameter,
    DTensor: _WaitingDTensor,
}
