"""What ops give on fake tensors, remembered: an op that was seen on tensors that look the same is not run.

torch works a result out anew for every call, in Python. A model's layers repeat the same ops on the same
shapes; all that is new in a repeated result is its memory. What cannot be told from how the arguments look is
not remembered: results whose memory could be that of one argument or of another, custom ops (their fakes may
read anything), ops that change how their argument looks.

Private parts of torch used here: what a FakeTensor is made of. Whatever is made here was once compared with
what torch makes; tests/null/test_results.py fails when that moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import snapshot_fake

_OUR_OPS = frozenset({"aten", "prims", "monoflow"})
_CHANGING = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
#: What every fake has as attributes.
_PLAIN = ("fake_mode", "_fake_device")
_FAKE = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore[reportAttributeAccessIssue]


class _Made(NamedTuple):
    """A tensor to make. `of` is the argument whose memory it is, -1 for memory of its own."""

    of: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: dict[str, Any]


class _Given(NamedTuple):
    """An argument itself."""

    of: int


class Call:
    """One call of an op: how it looks, and the tensors among its arguments.

    Attributes:
        look: what the looks of the results depend on.
        tensors: the tensor arguments, in order.
    """

    __slots__ = ("look", "tensors")

    def __init__(self, op: Any) -> None:
        self.look: list[Any] = [op, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        self.tensors: list[FakeTensor] = []

    def tensor(self, value: FakeTensor) -> None:
        """Notes a tensor argument."""
        self.tensors.append(value)
        self.look.append(_look(value))

    def value(self, value: Any) -> None:
        """Notes an argument, or a part of one, that is no tensor. 1, 1.0 and True are not the same."""
        self.look += (type(value), value)

    def several(self, values: Sequence[Any]) -> None:
        """Notes that a list or tuple follows."""
        self.look += (list, len(values))


class Results:
    """The results of the ops of one capture."""

    def __init__(self) -> None:
        self._known: dict[tuple, Any] = {}

    def of(self, call: Call) -> Any:
        """(results, fakes of the same memory for the trace to keep) as the op would give; None if unknown."""
        found = self._known.get(tuple(call.look))
        return None if found is None or found is _UNLIKE else _made(found[0], call.tensors)

    def learn(self, call: Call, op: Any, result: Any) -> None:
        """Remembers what an op gave, if a second call could be known by the looks of the first."""
        key = tuple(call.look)
        if key not in self._known:
            self._known[key] = _UNLIKE
            form = _form(op, call, result)
            if form is not _UNLIKE:
                self._known[key] = (form,)


_UNLIKE = object()


def _look(value: FakeTensor) -> tuple:
    """All that an op's result may depend on; the keys tell layout, conjugation, inference and the like."""
    return (
        value.shape,
        value.stride(),
        value.storage_offset(),
        value.dtype,
        value.fake_device,
        value.requires_grad,
        torch._C._dispatch_keys(value).raw_repr(),  # pyright: ignore[reportAttributeAccessIssue]
        value.fake_mode,
    )


def _form(op: Any, call: Call, result: Any) -> Any:
    """How to make results like these from arguments like these; _UNLIKE if that cannot be said."""
    mode = torch._C._get_dispatch_mode(_FAKE)  # pyright: ignore[reportAttributeAccessIssue]
    if op.namespace not in _OUR_OPS or _CHANGING & set(op.tags):
        return _UNLIKE
    tensors = call.tensors
    if any(one.fake_mode is not mode or one.layout is not torch.strided for one in tensors):
        return _UNLIKE
    if op._schema.is_mutable and not all(_look(one) in call.look for one in tensors):
        return _UNLIKE
    form = _form_of(result, tensors)
    given = list(_leaves(result))
    own = [
        one.untyped_storage()._cdata for one, how in zip(given, _leaves(form), strict=True) if _is_new(how)
    ]
    if any(how is _UNLIKE for how in _leaves(form)) or len(set(own)) < len(own):
        return _UNLIKE
    again, kept = _made(form, tensors)
    for one, live, snapshot in zip(given, _leaves(again), _leaves(kept), strict=True):
        if one is not None and not (_is_like(one, live) and _is_like(snapshot, live)):
            return _UNLIKE
    return form


def _is_new(how: Any) -> bool:
    return isinstance(how, _Made) and how.of < 0


def _is_like(one: Any, other: Any) -> bool:
    """Whether two tensors look the same, to torch too."""
    return one is other or (
        _look(one) == _look(other) and one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    )


def _form_of(result: Any, tensors: Sequence[FakeTensor]) -> Any:
    if result is None:
        return None
    if type(result) in (list, tuple):
        return type(result)(_form_of(one, tensors) for one in result)
    if type(result) is not FakeTensor or result.layout is not torch.strided or result.requires_grad:
        return _UNLIKE
    same = [at for at, one in enumerate(tensors) if one is result]
    if same:
        return _Given(same[0]) if len(same) == 1 else _UNLIKE
    if any(value is not None and key not in _PLAIN for key, value in vars(result).items()):
        return _UNLIKE  # a known value, say
    storage = result.untyped_storage()._cdata
    sharing = [at for at, one in enumerate(tensors) if one.untyped_storage()._cdata == storage]
    if len(sharing) > 1:
        return _UNLIKE
    return _Made(
        sharing[0] if sharing else -1,
        tuple(result.shape),
        result.stride(),
        int(result.storage_offset()),
        result.dtype,
        result.fake_device,
        dict(vars(result)),
    )


def _leaves(tree: Any) -> Iterator[Any]:
    """What lists and tuples hold. Forms are named tuples, and leaves."""
    if type(tree) in (list, tuple):
        for one in tree:
            yield from _leaves(one)
    else:
        yield tree


def _made(form: Any, tensors: Sequence[FakeTensor]) -> tuple[Any, Any]:
    """Results of a form, and fakes of the same memory."""
    if form is None:
        return None, None
    if type(form) is _Given:
        given = tensors[form.of]
        return given, snapshot_fake(given)
    if type(form) is not _Made:
        pairs = [_made(one, tensors) for one in form]
        return type(form)(live for live, _ in pairs), type(form)(kept for _, kept in pairs)
    of, shape, strides, offset, dtype, device, attributes = form
    with torch._C._DisableTorchDispatch():
        if of < 0:
            meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        else:
            storage = tensors[of].untyped_storage()
            meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, strides)  # type: ignore[arg-type]
    return _fake(meta, device, attributes), _fake(meta, device, attributes)


def _fake(meta: torch.Tensor, device: torch.device, attributes: dict[str, Any]) -> FakeTensor:
    """A fake over a meta tensor, as its constructor makes it."""
    fake = torch.Tensor._make_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    if attributes["fake_mode"]._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)  # pyright: ignore[reportAttributeAccessIssue]
    vars(fake).update(attributes)
    return fake
