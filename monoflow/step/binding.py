"""How one compiled step is bound to live objects: where every input is read and every result goes.

What does not change between steps is worked out once, so that a step is two loops and the engine's run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..compiler import Compiled, Homes, Input, Output, Role, Slot, Subject, Ticket, World, share_key
from ..sbp.layout import NdSbp
from ..sbp.random_mode import draw_key
from .pending import Flight, caller, is_waiting, on_its_way, part_of, take_off, untouched
from .refusal import Refusals
from .store import Locals, Store, is_whole

#: By hosted rank and input: the batch and random key of a step that is under way.
Kept = Mapping[int, Sequence[torch.Tensor | None]]


class Call(NamedTuple):
    """The tensors among one call's arguments, in order, and the hosted ranks' random key."""

    tensors: Sequence[torch.Tensor]
    key: torch.Tensor


@dataclass(frozen=True)
class _Target:
    """Where one output of the programs goes: into a live tensor, or out by name."""

    output: Output
    layout: NdSbp
    slot: Slot | None


class Binding:
    """Reads the inputs of one compiled step from live objects, and puts its results.

    Args:
        world: the ranks of this job.
        device: where this process' tensors live.
        refusals: is told of steps that may not change state.
    """

    def __init__(
        self,
        compiled: Compiled,
        subject: Subject,
        world: World,
        device: torch.device,
        refusals: Refusals,
    ) -> None:
        self.refusals = refusals
        self.compiled, self.subject, self.world, self.device = compiled, subject, world, device
        self.store = Store(compiled.plan.placement, tuple(compiled.lowered.programs), world.simulated)
        planned, slots = compiled.plan, compiled.captured.slots
        programs, made = compiled.lowered.programs, compiled.lowered.schedule
        names = {node: name for name, node in planned.graph.placeholders.items()}
        read = [planned.graph.input_of[names[value.node]] for value in made.inputs]
        donated = {port.name for one in programs.values() for port in one.inputs if port.donated}
        self._roles = {one.role for one in read}
        # Every rank reads every input, for which ranks may have to meet, and keeps what its program takes.
        self._takes = {rank: {port.name for port in one.inputs} for rank, one in programs.items()}
        self._readers = [
            (one.name, self._reader(one, planned.inputs[one.name], one.name in donated)) for one in read
        ]
        self._targets = [
            _Target(one, planned.outputs[one.name], slots.get(one.replaces)) for one, _ in made.outputs
        ]
        self._gives = {
            rank: {port.name: position for position, port in enumerate(one.outputs)}
            for rank, one in programs.items()
        }
        self._given_anew = {
            one.name for one in read if one.role in (Role.BATCH, Role.RANDOM, Role.HYPER, Role.CONSTANT)
        }
        self._flight: Flight | None = None  # the last step that runs beside its caller, if it can be followed
        self._ticket: Ticket | None = None
        self._memory: frozenset[int] = frozenset()  # of the state that it leaves
        written = {target.output.replaces for target in self._targets}
        self._stepped: list[Any] = [
            optimizer
            for optimizer in subject.optimizers
            if any(
                subject.name_of_param[id(param)] in written for param in subject.optimizer_params(optimizer)
            )
        ]

    # --- inputs ------------------------------------------------------------------------------------

    def read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], key: torch.Tensor | None = None
    ) -> dict[int, list[torch.Tensor]]:
        """The tensors of every hosted rank's input ports.

        Args:
            key: what this step's random numbers derive from; drawn from torch's generator when left out.
        """
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        drawn = draw_key() if key is None else key  # drawn even if unused: every step moves the generator on
        if Role.RANDOM in self._roles:
            drawn = share_key(drawn, self.world, self.device)
        call = Call([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], drawn)
        inputs: dict[int, list[torch.Tensor]] = {rank: [] for rank in self.store.ranks}
        for name, reader in self._readers:
            for rank, value in reader(call).items():
                if name in self._takes[rank]:
                    inputs[rank].append(value)
        return inputs

    def kept(self, inputs: Mapping[int, Sequence[torch.Tensor]]) -> Kept | None:
        """What of a step's inputs is not found again afterwards, if somebody may ask for it."""
        if not self.refusals.explains:
            return None
        return {
            rank: [
                value if port.name in self._given_anew else None
                for port, value in zip(self.compiled.lowered.programs[rank].inputs, values, strict=True)
            ]
            for rank, values in inputs.items()
        }

    def again(self, kept: Kept) -> dict[int, list[torch.Tensor]]:
        """A step's inputs once more; state is as it was then."""
        call = Call((), torch.empty(0))
        inputs: dict[int, list[torch.Tensor]] = {rank: [] for rank in self.store.ranks}
        for name, reader in self._readers:
            state = {} if name in self._given_anew else reader(call)
            for rank in self.store.ranks:
                if name in self._takes[rank]:
                    value = kept[rank][len(inputs[rank])]
                    inputs[rank].append(state[rank].detach() if value is None else value)
        return inputs

    def _reader(self, one: Input, layout: NdSbp, donated: bool) -> Callable[[Call], Locals]:
        """How one input is read in every step."""
        store, captured, device = self.store, self.compiled.captured, self.device
        if one.role is Role.BATCH:
            index, beside = captured.batch_names.index(one.name), self.compiled.engine.runs_beside

            def batch(call: Call) -> Locals:
                cut = store.cut(call.tensors[index].detach(), layout)
                # A step that runs beside its caller has its own copy: who called may fill the batch anew.
                return {rank: value.to(device, copy=beside) for rank, value in cut.items()}

            return batch
        if one.role is Role.RANDOM:
            return lambda call: dict.fromkeys(store.ranks, call.key)
        if one.role is Role.HYPER:
            return self._hyper_reader(one)
        if one.role is Role.CONSTANT:
            constant = self.compiled.plan.graph.constants[one.name]
            return lambda call: store.cut(constant.detach().to(device), layout)
        slot = captured.slots[one.name]
        if not store.simulated and (store.is_whole or is_whole(layout)):
            return self._whole_reader(slot, layout)
        if donated and store.simulated:  # the ranks share the whole tensor that the modules hold
            return lambda call: {rank: value.clone() for rank, value in store.read(slot, layout).items()}
        return lambda call: store.read(slot, layout)

    def _whole_reader(self, slot: Slot, layout: NdSbp) -> Callable[[Call], Locals]:
        """How a live tensor is read that this process stores whole, unless another step has split it."""
        get, rank, cut = slot.get, self.store.ranks[0], self.store.cut

        def whole(call: Call) -> Locals:
            value = get()
            assert value is not None, f"{slot.name} is gone; the step was captured when it existed"
            return cut(value.detach(), layout) if isinstance(value, DTensor) else {rank: value}

        return whole

    def _hyper_reader(self, one: Input) -> Callable[[Call], Locals]:
        """How a hyper-parameter is read; groups are looked up each time, `load_state_dict` makes new ones."""
        ranks, dtype, beside = self.store.ranks, one.meta.dtype, self.compiled.engine.runs_beside
        for number, optimizer in enumerate(self.subject.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for key in group:
                    if self.subject.hyper_name(number, index, key) == one.name:

                        def hyper(
                            call: Call, optimizer: Any = optimizer, index: int = index, key: str = key
                        ) -> Locals:
                            value = optimizer.param_groups[index][key]
                            if isinstance(value, torch.Tensor):
                                given = value.detach()  # a step that runs beside its caller has its own
                                return dict.fromkeys(ranks, given.clone() if beside else given)
                            return dict.fromkeys(ranks, torch.tensor(value, dtype=dtype))

                        return hyper
        raise AssertionError(f"no hyper-parameter {one.name}")

    # --- results -----------------------------------------------------------------------------------

    def is_followed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Waits until a call may begin while this step still runs; returns whether it may.

        It may not if it reads what the step leaves, parameters and state aside: the engine reads those when
        they are there; or if the step before has failed, or was refused.
        """
        if self._flight is None or self._flight is not on_its_way():
            return False
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(map(is_waiting, tensors)):
            return False
        if any(part_of(one).untyped_storage().data_ptr() in self._memory for one in tensors):
            return False
        if (before := self._flight.before) is not None:
            before.land()
        self.compiled.engine.admit(True)
        return self._ticket is not None and (self._ticket.went_well or not self.refusals.explains)

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Starts a step on its lanes; returns the user's result, whose tensors wait for it when touched.

        So do parameters and all else that the step reads or writes, until it is done. A call of the same step
        may still be on its way, the one before that is over then.
        """
        engine, before = self.compiled.engine, on_its_way()
        with untouched():
            inputs = self.read(args, kwargs)
            # Lanes work on the memory; the objects that the user sees wait.
            inputs = {rank: [one.detach() for one in tensors] for rank, tensors in inputs.items()}
            homes = self._homes(inputs) if engine.follows and self.refusals.lets_follow else None
            live = list(self._live())
        if before is not None and homes is None:
            before.land()  # it left other memory than the step is to write to
        try:
            ticket = engine.start(inputs, homes)
        except BaseException:
            if before is not None:
                before.land()  # raises what that failed of
            raise
        assert isinstance(ticket, Ticket), "a step without lanes is over when it has started"
        ticket.keep(self.kept(inputs))
        del inputs
        promised = {
            target.output.name: self._promised(target)
            for target in self._targets
            if target.slot is None and not target.output.observed
        }

        def finish() -> None:
            with torch.no_grad():
                own, _, bad = self._taken(ticket.result(), is_settled=homes is not None)
                for name, promise in promised.items():
                    part_of(promise).set_(part_of(own[name]))  # pyright: ignore[reportArgumentType]
                if self._ticket is ticket:  # it holds what the step gave out
                    self._flight = self._ticket = None
                if bad:
                    self.refusals.met(self, bad, cast("Kept | None", ticket.kept))

        flight = Flight(finish, caller(), on_its_way())
        flight.hold([*promised.values(), *live])
        take_off(flight)
        self._flight, self._ticket = (flight, ticket) if homes is not None else (None, None)
        self._note_stepped()
        return self._result(promised)

    def _homes(self, inputs: Mapping[int, Sequence[torch.Tensor]]) -> Homes | None:
        """Where the state lives that the step leaves; None if it does more than to write it there."""
        if self.store.simulated or any(
            self.compiled.captured.slots[name].get() is not None
            for name in self.compiled.captured.cleared_grads
        ):
            return None
        (rank,) = self.store.ranks
        program = self.compiled.lowered.programs[rank]
        read = {port.name: tensor for port, tensor in zip(program.inputs, inputs[rank], strict=True)}
        homes: list[torch.Tensor | None] = [None] * len(program.outputs)
        for target in self._targets:
            position = self._gives[rank].get(target.output.name)
            if target.slot is None or position is None:
                continue
            home = self._home(target, read.get(target.output.replaces))
            if home is None or home.shape != program.registers[program.outputs[position].register].shape:
                return None
            homes[position] = home
        self._memory = frozenset(one.untyped_storage().data_ptr() for one in homes if one is not None)
        return {rank: homes}

    def _home(self, target: _Target, read: torch.Tensor | None) -> torch.Tensor | None:
        """The memory of a live tensor, if its next value is written to it.

        Args:
            read: what the step reads of it, if it does.
        """
        assert target.slot is not None
        value = target.slot.get()
        if value is None or target.slot.role is Role.GRAD:
            return None
        if read is None:
            return self.store.held(target.slot, target.layout)
        part = part_of(value)
        return read if read.data_ptr() == part.data_ptr() and read.shape == part.shape else None

    def _live(self) -> Iterator[torch.Tensor]:
        """The user's tensors that a step reads or writes after it was called, once each."""
        live = (slot.get() for slot in self.compiled.captured.slots.values())
        tensors = [one for one in live if one is not None] + list(self.compiled.plan.graph.constants.values())
        yield from {id(one): one for one in tensors}.values()

    def _promised(self, target: _Target) -> torch.Tensor:
        """What stands for a result until it is there; floats are NaN if it never is."""
        rank, output = self.store.ranks[0], target.output
        program, position = self.compiled.lowered.programs[rank], self._gives[rank].get(output.name)
        shape = (0,) if position is None else program.registers[program.outputs[position].register].shape
        dtype = output.meta.dtype
        fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        one = torch.full((), fill, dtype=dtype, device=self.device)
        return self._as_seen(target, one.expand(shape))  # which needs no memory yet

    def take(
        self, results: Mapping[int, Sequence[torch.Tensor]], kept: Kept | None
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Puts the next values of live tensors; returns the user's result and whole observed outputs."""
        own, observed, bad = self._taken(results)
        self._note_stepped()
        if bad:
            self.refusals.met(self, bad, kept)
        return self._result(own), observed

    def _result(self, own: Mapping[str, torch.Tensor]) -> Any:
        captured = self.compiled.captured
        leaves = [None if name is None else own[name] for name in captured.result_names]
        return pytree.tree_unflatten(leaves, captured.out_spec)

    def _note_stepped(self) -> None:
        for optimizer in self._stepped:
            optimizer._opt_called = True  # torch's learning rate schedulers look for a step before theirs

    def _taken(
        self, results: Mapping[int, Sequence[torch.Tensor]], is_settled: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, float]]:
        """Puts the next values of live tensors, unless a checked scalar is not finite.

        Args:
            is_settled: whether next values are where they belong, and may have changed again.

        Returns:
            by name, the user's results, whole observed outputs, and the checked scalars that are not finite.
        """
        captured = self.compiled.captured
        own: dict[str, torch.Tensor] = {}
        observed: dict[str, torch.Tensor] = {}
        written: list[tuple[_Target, Locals]] = []
        for target in self._targets:
            if is_settled and target.slot is not None:
                continue
            values = self._given(target.output, results)
            if target.slot is not None:
                written.append((target, values))
            else:
                into = observed if target.output.observed else own
                into[target.output.name] = self._handed_out(target, values)
        bad = self._bad(results)
        if not bad:
            self._write(written)
        if not is_settled and (not bad or not self.refusals.explains):
            for name in captured.cleared_grads:
                captured.slots[name].put(None)
        return own, observed, bad

    def _bad(self, results: Mapping[int, Sequence[torch.Tensor]]) -> dict[str, float]:
        """The checked scalars that are not finite; the same on every rank."""
        rank = self.store.ranks[0]
        values = {
            target.output.name: results[rank][self._gives[rank][target.output.name]].item()
            for target in self._targets
            if target.output.checked
        }
        return {name: value for name, value in values.items() if not math.isfinite(value)}

    def _given(self, output: Output, results: Mapping[int, Sequence[torch.Tensor]]) -> Locals:
        """What the hosted ranks' programs give of an output: nothing where it lies at another stage."""
        found = {
            rank: tensors[self._gives[rank][output.name]]
            for rank, tensors in results.items()
            if output.name in self._gives[rank]
        }
        if found or self.store.simulated:
            return found
        return {self.store.ranks[0]: torch.empty(0, dtype=output.meta.dtype, device=self.device)}

    def _handed_out(self, target: _Target, values: Locals) -> torch.Tensor:
        """A result as the user gets it: never memory that the next step will write."""
        if self.store.simulated:
            return self.store.joined(values, target.layout, target.output.name).clone()
        return self._as_seen(target, next(iter(values.values())).clone())

    def _as_seen(self, target: _Target, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of a result as the user sees it."""
        shape = target.output.meta.shape
        if self.store.placement.size == 1 or (not shape and is_whole(target.layout)):
            return local
        return self.store.wrapped(local, target.layout, shape)

    def _write(self, written: Sequence[tuple[_Target, Locals]]) -> None:
        """Puts next values, none of which changes under the others' writes."""
        store = self.store
        moved = [
            (target, values)
            for target, values in written
            if target.slot is not None and not store.is_in_place(target.slot, target.layout, values)
        ]
        # What is not there already is copied into live memory or becomes it, so it must not be live memory
        # of another tensor: "previous" next to "current" parameters, or one gradient for two parameters.
        taken = {pointer for target, _ in moved for pointer in store.pointers(target.slot)}
        for target, values in moved:
            assert target.slot is not None
            for rank, value in values.items():
                pointer = value.untyped_storage().data_ptr()
                if pointer in taken:
                    values[rank] = value.clone()
                taken.add(pointer)
        for target, values in moved:
            assert target.slot is not None
            store.write(target.slot, target.layout, values, target.output.meta.shape)
