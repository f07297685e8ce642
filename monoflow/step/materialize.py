"""Models that `flow.lazy` built get their memory: on every rank its parts, in the layouts of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..compiler import Subject, current_world, subject_of
from ..errors import CheckpointError, LayoutError, PlacementError
from ..mesh import Placement
from ..mesh import placement as make_placement
from ..sbp.layout import B, NdSbp, dim_runs, local_shape
from ..tensor.global_tensor import SbpLike, as_nd_sbp, check_fits
from ..tensor.lazy import filled
from ..tensor.record import Memory, Recording, View, memory_of, view_of
from ..tensor.replay import plainly, value_of, values_of
from ..tensor.replay_part import Part, part_of
from ..tensor.weights import Weights
from .agree_lazy import make_records_alike
from .store import Store, is_whole

_SHOWN = 10  # names that an error lists


def materialize(
    model: nn.Module,
    placement: Placement | None = None,
    layouts: Mapping[str, SbpLike] | None = None,
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> None:
    """Gives a model that was built in `flow.lazy` its memory and values, in place. All ranks must call it.

    Where a tensor is whole, the objects that optimizers and others hold stay. A parameter that is split
    becomes another object, a DTensor.

    Args:
        placement: the devices; this process alone, and the devices that the model asked for, when left out.
        layouts: name or pattern with `*` -> layout, such as {"*.weight": "S(0)"}. What matches none is whole.
        optimizers: those that hold parameters that will be split.

    Raises:
        LayoutError: a pattern matches nothing, or a layout does not fit.
        CheckpointError: the weights that `flow.lazy` was given do not fit the model.
    """
    subject = subject_of([model, *optimizers])
    alone = placement is None
    device = None if alone else _device_of(placement)
    where = make_placement("cpu", [0]) if placement is None else placement
    world = current_world(where.device_type)
    ranks = (0,) if alone else world.hosted(where)
    fill(
        subject,
        Store(where, ranks, world.simulated and not alone),
        _matched(subject, where, layouts or {}),
        device,
    )


def _device_of(placement: Placement) -> torch.device:
    if placement.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(placement.device_type, torch.accelerator.current_device_index())


def _matched(subject: Subject, placement: Placement, layouts: Mapping[str, SbpLike]) -> dict[str, NdSbp]:
    """The layout of every tensor that a pattern matches; the last one counts."""
    tensors = {**subject.params, **subject.buffers()}
    found: dict[str, NdSbp] = {}
    for pattern, sbp in layouts.items():
        names = [name for name in tensors if fnmatchcase(name, pattern)]
        if not names:
            raise LayoutError(
                f"{pattern!r} matches no parameter or buffer; there are {_listed(list(tensors))}"
            )
        nd_sbp = as_nd_sbp(sbp, placement)
        for name in names:
            check_fits(tensors[name].shape, nd_sbp, placement)
            found[name] = nd_sbp
    return found


def meant_device(tensor: torch.Tensor) -> torch.device:
    """Where a tensor is, or will be when it was built lazily."""
    memory = memory_of(tensor)
    return tensor.device if memory is None else memory.device


def unfilled(subject: Subject) -> dict[str, torch.Tensor]:
    """Parameters and buffers that have no memory yet, by name.

    Raises:
        PlacementError: one has none and was not built by `flow.lazy`.
    """
    tensors = {**subject.params, **subject.buffers()}
    found = {name: value for name, value in tensors.items() if value.device.type == "meta"}
    strange = [name for name, value in found.items() if memory_of(value) is None]
    if strange:
        raise PlacementError(
            f"{_listed(strange)} are meta tensors that flow.lazy() did not build, so that nothing says what "
            "they hold; build the model inside flow.lazy(), or give it memory with model.to_empty(device=...)"
        )
    return found


def fill_attributes(subject: Subject) -> None:
    """Gives values to the tensors that modules hold as plain attributes."""
    known = {id(value) for value in (*subject.params.values(), *subject.buffers().values())}
    for module in subject.modules:
        own = {key: value for key, value in vars(module).items() if key not in _TORCHS_OWN}
        for value in pytree.tree_leaves(own):
            if isinstance(value, torch.Tensor) and id(value) not in known and memory_of(value) is not None:
                view = view_of(value)
                _give(value, value_of(view).to(view.memory.device))


_TORCHS_OWN = {"_parameters", "_buffers", "_modules"}


def fill(
    subject: Subject, store: Store, layouts: Mapping[str, NdSbp], device: torch.device | None = None
) -> bool:
    """Gives parameters and buffers their memory, this rank's parts, and their values.

    Args:
        layouts: by name; what is not named is whole.
        device: where; None for where the code that built the model asked for it.

    Returns:
        Whether there was anything to do.
    """
    fill_attributes(subject)
    lazies = unfilled(subject)
    if not lazies:
        return False
    whole: NdSbp = (B,) * store.placement.num_axes
    chosen = {name: whole if store.is_whole else layouts.get(name, whole) for name in lazies}
    if not store.is_whole:
        make_records_alike(
            [view_of(value).memory for value in lazies.values()], store.placement, store.ranks[0]
        )
    filling = _Filling(subject, store, lazies, chosen)
    for name, tensor in lazies.items():
        value = filling.value(name)
        filling.put(name, value.to(device or view_of(tensor).memory.device))
    return True


class _Filling:
    """The tensors of a subject on their way into memory, one at a time."""

    def __init__(
        self,
        subject: Subject,
        store: Store,
        lazies: Mapping[str, torch.Tensor],
        layouts: Mapping[str, NdSbp],
    ) -> None:
        self.subject, self.store, self.lazies, self.layouts = subject, store, lazies, layouts
        self.files = _found_in_files(subject, lazies)
        self._shared = _shared_memories(lazies, layouts)
        self._buffers: dict[Memory, torch.UntypedStorage] = {}

    def value(self, name: str) -> torch.Tensor:
        """This rank's part of one tensor, on the CPU."""
        view, part = view_of(self.lazies[name]), self._part(name)
        if name in self.files:
            weights, stored = self.files[name]
            shape = local_shape(view.size, *part)
            if torch.Size(shape).numel() == 0:
                return torch.empty(shape, dtype=view.dtype)
            runs = [dim_runs(size, dim, *part) for dim, size in enumerate(view.size)]
            return weights.read(stored, runs, view.dtype)
        if view.memory in self._shared:
            if view.memory not in self._buffers:
                self._buffers |= values_of([view.memory])
            with plainly():
                return view.of(self._buffers[view.memory])
        return part_of(view, part)

    def _part(self, name: str) -> Part:
        placement = self.store.placement
        coordinate = placement.coordinate(self.store.ranks[0])
        return Part(self.layouts[name], placement.shape, coordinate)

    def put(self, name: str, value: torch.Tensor) -> None:
        """Puts a part in a tensor's place: in the object itself where it is whole."""
        layout, tensor = self.layouts[name], self.lazies[name]
        if is_whole(layout):
            _give(tensor, value)
            return
        made = self.store.wrapped(value, layout, tuple(tensor.shape))
        if name in self.subject.params:
            _give(tensor, value.new_empty(0))
            self.subject.replace_param(name, made)
        else:
            self.subject.buffer_slot(name).replace(made)


def _give(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes a tensor object hold another's memory; it stays of its class, with its attributes."""
    with plainly():
        made = torch.Tensor._make_subclass(type(filled(tensor)), value.detach(), tensor.requires_grad)
        # torch.utils.swap_tensors, but that refuses objects with weak references (an RNN has some to its
        # weights), which stay right.
        torch._C._swap_tensor_impl(tensor, made)


def _shared_memories(lazies: Mapping[str, torch.Tensor], layouts: Mapping[str, NdSbp]) -> set[Memory]:
    """Memories that several tensors are to share.

    Raises:
        LayoutError: two tensors are the same memory, and one is to be split.
    """
    views: dict[Memory, list[str]] = {}
    for name, tensor in lazies.items():
        views.setdefault(view_of(tensor).memory, []).append(name)
    shared = set()
    for memory, names in views.items():
        if all(is_whole(layouts[name]) for name in names):
            shared |= {memory} if len(names) > 1 else set()
            continue
        first: dict[View, str] = {}
        for name in names:
            other = first.setdefault(view_of(lazies[name]), name)
            if other != name:
                raise LayoutError(
                    f"{other} and {name} are two tensors in the same memory, which cannot be split; use one "
                    "object in both places, or pin both to B"
                )
    return shared


def _found_in_files(subject: Subject, lazies: Mapping[str, torch.Tensor]) -> dict[str, tuple[Weights, str]]:
    """For the tensors whose values are in files: the files, and the name there.

    Raises:
        CheckpointError: names are missing or left over, or shapes differ.
    """
    keys: dict[int, list[str]] = {}
    for model in subject.models:
        for key, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                keys.setdefault(id(value), []).append(key)
    found: dict[str, tuple[Weights, str]] = {}
    by_recording: dict[Recording, list[str]] = {}
    for name, tensor in lazies.items():
        by_recording.setdefault(view_of(tensor).memory.recording, []).append(name)
    for recording, names in by_recording.items():
        if recording.weights is not None:
            saved = {name: keys[id(lazies[name])] for name in names if id(lazies[name]) in keys}
            others = {key for known in keys.values() for key in known}
            found |= _matched_names(recording, saved, others, lazies)
    return found


def _matched_names(
    recording: Recording,
    saved: Mapping[str, Sequence[str]],
    others: set[str],
    lazies: Mapping[str, torch.Tensor],
) -> dict[str, tuple[Weights, str]]:
    assert recording.weights is not None
    weights = Weights.open(recording.weights)
    rename = recording.rename or (lambda key: key)
    found = {}
    missing, shapes = [], []
    for name, keys in saved.items():
        stored = next((key for key in map(rename, keys) if key in weights.tensors), None)
        if stored is None:
            missing.append(rename(keys[0]))
        elif weights.tensors[stored].shape != tuple(lazies[name].shape):
            has, wants = weights.tensors[stored].shape, tuple(lazies[name].shape)
            shapes.append(f"{stored} is {has} in the files and {wants} in the model")
        else:
            found[name] = weights, stored
    left = sorted(set(weights.tensors) - set(map(rename, others)))
    wrong = [f"shapes differ: {_listed(shapes)}"] * bool(shapes)
    if recording.strict:
        wrong += [f"missing in the files: {_listed(missing)}"] * bool(missing)
        wrong += [f"not in the model: {_listed(left)}"] * bool(left)
    if wrong:
        advice = "; flow.lazy(weights, strict=False) initializes what is missing and leaves out the rest"
        raise CheckpointError(
            f"{weights.path} does not fit the model. {'. '.join(wrong)}{advice if recording.strict else ''}"
        )
    return found


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
