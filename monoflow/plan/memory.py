"""What one rank holds in memory while a schedule runs, item by item.

Tensors that share memory (views, updates in place, local moves that only cut) are one *storage*. A storage is
there from the item that makes it to the last item that reads any of its tensors, as the engine frees it; what
comes in or goes out of the step is held outside and stays. Beside its results an item may need workspace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..boxing.bundle import BESIDE
from ..boxing.route import Move
from ..graph.step_graph import Input, Output, Phase, Role
from ..sbp.layout import NdSbp, Split, local_shape
from ..sbp.signature import TensorMeta
from .donate import donations
from .facts import Facts, facts_of
from .order import IN_PLACE
from .plan import Plan
from .schedule import Box, LaidOut, Op, Schedule
from .slots import slots_of
from .strides import Strides
from .workspace import Metas, bundle_workspace, move_workspace, op_workspace, received_workspace

#: What bytes are held for, in the order of a timeline's columns.
CATEGORIES = (
    "parameters",
    "optimizer state",
    "gradients",
    "activations",
    "moved copies",
    "batch and other",
    "workspace",
)
_PARAMETERS, _STATE, _GRADIENTS, _ACTIVATIONS, _MOVED, _OTHER, _WORKSPACE = range(len(CATEGORIES))
_OF_ROLE: Mapping[Role, int] = {
    Role.PARAM: _PARAMETERS,
    Role.BUFFER: _PARAMETERS,
    Role.STATE: _STATE,
    Role.GRAD: _GRADIENTS,
}


class Pass(NamedTuple):
    """A micro-batch among the others."""

    is_first: bool
    is_last: bool


ALONE, FIRST, MIDDLE, LAST = Pass(True, True), Pass(True, False), Pass(False, False), Pass(False, True)

#: Allocators of accelerators hand out multiples of this many bytes.
_ACCELERATOR_BLOCK = 512


@dataclass(frozen=True)
class Timeline:
    """Bytes of one rank, a row per item of the schedule.

    Attributes:
        held: by CATEGORIES, while the item runs: its inputs and outputs, all else that is kept, workspace.
        after: in all, when the item is done and what nobody reads any more is free.
        before: in all, before the first item: what comes into the step.
    """

    held: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]
    before: int

    @property
    def peak(self) -> int:
        """The item at which most is held; -1 (before all of them) in a schedule without any."""
        return max(range(len(self.held)), key=lambda item: sum(self.held[item]), default=-1)

    @property
    def peak_bytes(self) -> int:
        """The most that is held at any time."""
        return sum(self.held[self.peak]) if self.held else self.before


class LocalShapes:
    """Local shape and dtype of values on one rank, remembered.

    Args:
        facts: of the plan's graph.
        coordinate: the rank's place in the placement; one with the largest shards when left out.
        time: the micro-batch, where there are several.
    """

    def __init__(
        self, plan: Plan, facts: Facts, coordinate: Sequence[int] | None = None, time: int = 0
    ) -> None:
        self.plan, self.mesh = plan, plan.mesh
        self.is_any = coordinate is None
        place = tuple(coordinate) if coordinate is not None else (0,) * plan.placement.num_axes
        self.coordinate = (*place, time) if plan.has_time else place
        self.facts = facts
        self._known: dict[tuple[TensorMeta, NdSbp], TensorMeta] = {}

    def at(self, time: int) -> LocalShapes:
        """Those of the same rank in another micro-batch."""
        place = None if self.is_any else self.coordinate[:-1]
        return LocalShapes(self.plan, self.facts, place, time)

    def of(self, value: LaidOut) -> TensorMeta | None:
        """What a rank holds of a value; None for an absent output."""
        meta = self.facts[value.node].metas[value.index]
        if meta is None:
            return None
        key = (meta, value.layout)
        found = self._known.get(key)
        if found is None:
            found = TensorMeta(local_shape(meta.shape, value.layout, self.mesh, self.coordinate), meta.dtype)
            self._known[key] = found
        return found


def timeline(plan: Plan, made: Schedule, shapes: LocalShapes | None = None) -> Timeline:
    """The memory of one rank over a schedule.

    Args:
        shapes: whose; a rank with the largest shards when left out.
    """
    return Walk(plan, made, shapes or LocalShapes(plan, facts_of(plan.graph))).swept()


class Walk:
    """One pass over a schedule: which storage every tensor is in, and from where to where it is read.

    Args:
        lanes: whether a move may still run beside the compute after it, see `runtime.pace`.

    Attributes:
        begins: per item, the storages that it makes.
        metas: per item, what the rank holds of its inputs and of its outputs.
        workspace: per item, bytes that it needs while it runs.
    """

    def __init__(self, plan: Plan, made: Schedule, shapes: LocalShapes, lanes: bool = False) -> None:
        self.plan, self.made, self.shapes, self.lanes = plan, made, shapes, lanes
        self.first_of, self.last_of = _bundles(made.items)
        self.on_cpu = plan.placement.device_type == "cpu"
        self.in_place = donations(plan, made, [[item] for item in made.items]).nodes
        self.gradients = _gradients(plan, made)
        self.strides = Strides()
        self.storage_of: dict[LaidOut, int] = {}
        self.sizes: list[int] = []
        self.categories: list[int] = []
        self.last: list[int] = []  # the last item that reads a storage
        self.begins: list[list[int]] = [[] for _ in made.items]  # storages that an item makes
        self.workspace = [0] * len(made.items)
        self.metas: list[tuple[Metas, Metas]] = []
        self.folded: set[int] = set()  # what micro-batches are put together in
        self.first_walked = next((at for at, item in enumerate(made.items) if item.walked), -1)
        self._come_in()
        for position, item in enumerate(made.items):
            self._pass(position, item)
        if lanes:
            self._linger()
        for value in (*made.inputs, *(value for _, value in made.outputs)):
            self.last[self.storage_of[value]] = len(made.items)
        self.sharing = Counter(self.storage_of.values())  # tensors in a storage

    def _come_in(self) -> None:
        names = {node: name for name, node in self.plan.graph.placeholders.items()}
        roles = self.plan.graph.input_of
        for value in self.made.inputs:
            meta = self.shapes.of(value)
            assert meta is not None, f"{value.name} is absent"
            self._store(value, meta, _OF_ROLE.get(roles[names[value.node]].role, _OTHER))

    def _pass(self, position: int, item: Op | Box) -> None:
        reads, writes = item.inputs, item.outputs
        metas = [self.shapes.of(value) for value in reads], [self.shapes.of(value) for value in writes]
        self.metas.append(metas)
        first, end = self.first_of[position], self.last_of[position]
        self.workspace[first] += self._workspace(item, *metas)
        shared = dict(self._shared(item))
        for number, (value, meta) in enumerate(zip(writes, metas[1], strict=True)):
            if value in shared:
                storage = self.storage_of[value] = self.storage_of[shared[value]]
                if self._category(item, value, number) == _GRADIENTS != self.categories[storage]:
                    self._regrade(storage)
            elif meta is not None:
                self.begins[first].append(self._store(value, meta, self._category(item, value, number)))
                self.last[-1] = end
                if isinstance(item, Box) and item.folds:
                    self.folded.add(len(self.sizes) - 1)
        for value in reads:
            self.last[self.storage_of[value]] = end
        self.strides.note(item, shared)

    def _linger(self) -> None:
        """Holds what a move reads and works with while the compute runs that it may run beside."""
        own = list(self.workspace)
        for position, item in enumerate(self.made.items):
            if not _meets(item):
                continue
            end = self._compute_after(position)
            for value in item.inputs:
                storage = self.storage_of[value]
                self.last[storage] = max(self.last[storage], end)
            for later in range(position + 1, end + 1):
                self.workspace[later] += own[position] if later > self.last_of[position] else 0

    def _compute_after(self, position: int) -> int:
        """The last item of the compute tasks that a move may run beside, of those that are done as often."""
        items = self.made.items
        walked, after = items[position].walked, position + 1
        for _ in range(BESIDE):
            while after < len(items) and items[after].walked is walked and _meets(items[after]):
                after += 1
            while after < len(items) and items[after].walked is walked and not _meets(items[after]):
                after += 1
        return after - 1

    def _regrade(self, storage: int) -> None:
        """A gradient may be a view of what was computed for it."""
        if self.categories[storage] in (_ACTIVATIONS, _MOVED):
            self.categories[storage] = _GRADIENTS

    def _store(self, value: LaidOut, meta: TensorMeta, category: int) -> int:
        size = meta.num_bytes
        self.sizes.append(size if self.on_cpu else -(-size // _ACCELERATOR_BLOCK) * _ACCELERATOR_BLOCK)
        self.categories.append(category)
        self.last.append(-1)
        self.storage_of[value] = len(self.sizes) - 1
        return len(self.sizes) - 1

    def _shared(self, item: Op | Box) -> Iterator[tuple[LaidOut, LaidOut]]:
        """(output, input whose memory it is) of an item."""
        if isinstance(item, Op) and item.node in self.in_place:
            yield from zip(item.outputs, item.inputs, strict=False)
        elif isinstance(item, Op):
            is_view = self.shapes.facts[item.node].is_view and bool(item.inputs)
            if is_view and not self.strides.is_copied(item):
                yield from ((value, item.inputs[0]) for value in item.outputs)
        elif item.is_local and item.gives and not self._is_copied(item):
            yield item.target, item.source

    def _is_copied(self, box: Box) -> bool:
        """Whether a local move makes a tensor of its own, as `boxing.collectives.run_local` does."""
        move = box.move
        if move.mesh[move.axis] == 1 or move.kind == "drop":
            return False
        if move.kind == "pad":
            return True
        if move.kind == "keep":
            partial = move.target[move.axis]
            is_first = not self.shapes.is_any and self.shapes.coordinate[move.axis] == 0
            return getattr(partial, "op", "") == "sum" and not is_first
        return _is_strided(move, self.shapes) or not self.strides.is_contiguous(box.source)

    def _category(self, item: Op | Box, value: LaidOut, number: int) -> int:
        if (value.node, value.index) in self.gradients and item.phase in (Phase.BACKWARD, Phase.UPDATE):
            return _GRADIENTS
        if isinstance(item, Box):
            return _MOVED
        if item.node.target in IN_PLACE:
            return _PARAMETERS if number == 0 else _STATE
        return _ACTIVATIONS

    def _workspace(self, item: Op | Box, inputs: Metas, outputs: Metas) -> int:
        if isinstance(item, Op):
            if item.node.target in IN_PLACE:  # runs on contiguous tensors: see lower.local.update
                pairs = zip(item.inputs, inputs, strict=True)
                return sum(
                    meta.num_bytes for value, meta in pairs if meta and not self.strides.is_contiguous(value)
                )
            return op_workspace(item, self.shapes.facts[item.node].kind, inputs, outputs, self.on_cpu)
        if item.folds:
            rows = inputs[0].shape[item.source.layout[-1].dim] if _is_join(item) and inputs[0] else 0  # pyright: ignore
            return 8 * rows  # indices of where they go
        if not item.gives:
            return received_workspace(item.move, outputs)
        source = inputs[0]
        target = outputs[0] if item.takes else source
        assert source is not None and target is not None
        plain = self.strides.is_contiguous(item.source)
        if item.bundle >= 0:
            return bundle_workspace(item.move, source, target)
        return move_workspace(item.move, source, target, self.shapes.coordinate, plain, self.on_cpu)

    def swept(self) -> Timeline:
        """Adds up what is held at every item; of an item that is walked, when it holds most."""
        if not self.plan.has_time:
            return self._pass_over(ALONE)
        last = Walk(self.plan, self.made, self.shapes.at(self.plan.micro_batches - 1), self.lanes)
        passes = [self._pass_over(FIRST), last._pass_over(LAST)]
        if self.plan.micro_batches > 2:
            passes.append(Walk(self.plan, self.made, self.shapes.at(1), self.lanes)._pass_over(MIDDLE))
        end = passes[1]
        waiting = self._waiting()
        rows = tuple(
            _with_waiting(max((one.held[position] for one in passes), key=sum), waiting)
            if item.walked
            else end.held[position]
            for position, item in enumerate(self.made.items)
        )
        return Timeline(rows, end.after, end.before)

    def _waiting(self) -> int:
        """Bytes of the other micro-batches that wait at a stage for their backward."""
        slots: dict[int, int] = {}
        for value, count in slots_of(self.made, self.shapes.coordinate).items():
            storage = self.storage_of[value]
            slots[storage] = max(slots.get(storage, 1), count)
        born = {storage for made in self.begins for storage in made}
        return sum((count - 1) * self.sizes[storage] for storage, count in slots.items() if storage in born)

    def _pass_over(self, micro_batch: Pass) -> Timeline:
        """What is held at every item while one micro-batch is walked, and before and after the walk."""
        ends: list[list[int]] = [[] for _ in range(len(self.made.items) + 1)]
        held = [0] * len(CATEGORIES)
        born = {storage for made in self.begins for storage in made}
        whole = set(self._once()) - self.folded
        for storage, last in enumerate(self.last):
            is_kept = storage in whole and last < len(self.made.items) and self.made.items[last].walked
            if not is_kept or micro_batch.is_last:
                ends[last].append(storage)
            if storage not in born:
                held[self.categories[storage]] += self.sizes[storage]
        before = sum(held)
        rows, after = [], []
        for position, made in enumerate(self.begins):
            if position == self.first_walked and not micro_batch.is_first:
                for storage in self.folded:
                    held[self.categories[storage]] += self.sizes[storage]
            for storage in made:
                if storage not in self.folded or (micro_batch.is_first and not self._is_taken(position)):
                    held[self.categories[storage]] += self.sizes[storage]
            held[_WORKSPACE] = self.workspace[position]
            rows.append(tuple(held))
            for storage in made if micro_batch.is_first and self._is_taken(position) else ():
                held[self.categories[storage]] += self.sizes[storage]
            for storage in ends[position]:
                held[self.categories[storage]] -= self.sizes[storage]
            after.append(sum(held) - held[_WORKSPACE])
        return Timeline(tuple(rows), tuple(after), before)

    def _once(self) -> Iterator[int]:
        """Storages that are made once a step: what comes in, and what items outside the walk make."""
        born = {storage for made in self.begins for storage in made}
        yield from (storage for storage in range(len(self.sizes)) if storage not in born)
        for item, made in zip(self.made.items, self.begins, strict=True):
            if not item.walked:
                yield from made

    def _is_taken(self, position: int) -> bool:
        """Whether an item makes nothing new of the first micro-batch: a sum begins with its memory."""
        item = self.made.items[position]
        if not isinstance(item, Box) or not item.folds or _is_join(item):
            return False
        storage = self.storage_of[item.source]
        is_sole = self.last[storage] == position and self.sharing[storage] == 1
        return is_sole and self.strides.is_contiguous(item.source)


def _meets(item: Op | Box) -> bool:
    """Whether other ranks take part."""
    return isinstance(item, Box) and not item.is_local and not item.folds


def _bundles(items: Sequence[Op | Box]) -> tuple[list[int], list[int]]:
    """For every item the first and the last of those that it goes with; itself if it goes alone."""
    first, last = list(range(len(items))), list(range(len(items)))
    for position in range(1, len(items)):
        before, item = items[position - 1], items[position]
        if isinstance(item, Box) and isinstance(before, Box) and before.bundle == item.bundle >= 0:
            first[position] = first[position - 1]
            for one in range(first[position], position + 1):
                last[one] = position
    return first, last


def _is_join(box: Box) -> bool:
    """Whether a move along time joins parts."""
    return box.folds and isinstance(box.source.layout[-1], Split)


def _with_waiting(row: tuple[int, ...], num_bytes: int) -> tuple[int, ...]:
    return (*row[:_ACTIVATIONS], row[_ACTIVATIONS] + num_bytes, *row[_ACTIVATIONS + 1 :])


def _is_strided(move: Move, shapes: LocalShapes) -> bool:
    """Whether what a slice cuts out does not lie in one piece, so that it is copied."""
    split = move.target[move.axis]
    assert isinstance(split, Split), move
    held = local_shape(move.shape, move.source, shapes.mesh, shapes.coordinate)
    cut = local_shape(move.shape, move.target, shapes.mesh, shapes.coordinate)
    return held != cut and (split.blocks > 1 or math.prod(held[: split.dim]) > 1)


def _gradients(plan: Plan, made: Schedule) -> set[tuple[torch.fx.Node, int]]:
    """The values that are gradients of parameters: what updates read and nothing of the step's state is."""
    names = {node: name for name, node in plan.graph.placeholders.items()}
    roles = plan.graph.input_of
    found = {
        (value.node, value.index)
        for item in made.items
        if isinstance(item, Op) and item.phase is Phase.UPDATE
        for value in item.inputs
        if value.node not in names
    }
    found |= {
        (value.node, value.index) for one, value in made.outputs if one.observed or _is_gradient(one, roles)
    }
    return found


def _is_gradient(one: Output, roles: Mapping[str, Input]) -> bool:
    """Whether an output is left as a parameter's gradient, be it there before the step or not."""
    return bool(one.replaces) and (one.replaces not in roles or roles[one.replaces].role is Role.GRAD)
