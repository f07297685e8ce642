"""The function that is traced: the user's step on fakes, with its effects as extra results."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import CaptureError
from ..graph.step_graph import Role
from ..log import stage_logger
from .lift import Arguments, Lifted, flatten, key_text
from .losses import Losses
from .modes import CaptureMode, logical_attention, without_mkldnn
from .optimizers import hyper_values, number_state_error, swapped
from .subject import Subject
from .swap import Snapshot, StandIns, holds_fake, put_stand_ins

State = defaultdict[torch.Tensor, dict[str, Any]]


def _copy_hooks(param: nn.Parameter, fake: torch.Tensor) -> None:
    for hook in (param._backward_hooks or {}).values():
        fake.register_hook(hook)
    for hook in (param._post_accumulate_grad_hooks or {}).values():  # pyright: ignore
        fake.register_post_accumulate_grad_hook(hook)


def _plain_states(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The states that are no tensors, by id of the parameter."""
    return {
        id(param): {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for param, state in optimizer.state.items()
    }


class Run:
    """Calls the step once on fakes and notes what it did.

    Attributes:
        outputs: (name, name of the input it replaces or "", whether only observed) per result.
        out_spec, result_names: how the user's result is built; a name is None for a None leaf.
        cleared: names of the gradients that were there before the step and are None after it.
        begun: names of the states that were not there before the step.
        reads_grads: a gradient from before the step matters: it is read before the step clears it.
        losses: names of the results that backward passes began at.
    """

    def __init__(
        self,
        function: Callable,
        subject: Subject,
        mode: FakeTensorMode,
        lifted: Lifted,
        arguments: Arguments,
        place: str,
    ) -> None:
        self.function, self.subject, self.mode = function, subject, mode
        self.lifted, self.arguments, self.place = lifted, arguments, place
        # Noted before anything is swapped: inside, the optimizers and modules hold fakes.
        self._params = [subject.optimizer_params(optimizer) for optimizer in subject.optimizers]
        self._buffers = subject.buffers()
        self._plain = [_plain_states(optimizer) for optimizer in subject.optimizers]
        self.outputs: list[tuple[str, str, bool]] = []
        self.out_spec = arguments.spec
        self.result_names: list[str | None] = []
        self.cleared: list[str] = []
        self.begun: list[str] = []
        self.reads_grads = False
        self.losses: list[str] = []
        self._losses = Losses()
        self._observed: dict[str, torch.Tensor] = {}
        self._cleared_first: set[str] = set()
        self._clearing = False

    def __call__(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(self.lifted.fakes, flat, strict=True))
        roles = self.lifted.roles
        watch = CaptureMode(
            values["random:key"],
            [value for name, value in values.items() if roles[name] is Role.HYPER],
            {name: value for name, value in values.items() if roles[name] is Role.BATCH},
            self.subject.module_names,
            getattr(self.function, "__code__", None),
        )
        before = Snapshot([*self.subject.modules, *self.subject.optimizers])
        try:
            with ExitStack() as stack:
                states = self._swap(stack, values, watch)
                swapped_in = Snapshot([*self.subject.modules, *self.subject.optimizers])
                with self._modes(values, watch):
                    result = self._call(values)
                self._refuse_leftovers(swapped_in, flat)
                results = self._results(result)
                return [*results, *self._effects(values, states)]
        finally:
            before.restore()
            for name in self.subject.params:
                values[name].grad = None

    @contextmanager
    def _modes(self, values: Mapping[str, torch.Tensor], watch: CaptureMode) -> Iterator[None]:
        """Within: torch does for the step what a capture needs, and tells what the step does."""
        names = {id(values[name]): name for name in self.subject.params}

        def on_grad(fake: torch.Tensor, read: bool) -> None:
            name = names.get(id(fake))
            if name is not None and not self._clearing and fake.requires_grad:
                self._note_read(name) if read else self._note_clear(name)

        stand_ins = StandIns(self._stand_ins(values), on_grad, watch.refuse_read)
        with (
            without_mkldnn(),
            self.mode,
            watch.module_stack(),
            logical_attention(),
            watch,
            stand_ins,
            self._losses,
            torch.enable_grad(),
        ):
            yield

    def _stand_ins(self, values: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The fakes by id of the real parameter or buffer."""
        stand_ins = {id(param): values[name] for name, param in self.subject.params.items()}
        stand_ins |= {id(param): values[name] for name, param in self.subject.originals.items()}
        return stand_ins | {id(buffer): values[name] for name, buffer in self._buffers.items()}

    def _call(self, values: Mapping[str, torch.Tensor]) -> Any:
        args, kwargs = self.arguments.with_tensors(values)
        try:
            return self.function(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            error.add_note(f"while monoflow captured the step at {self.place}, on tensors without values")
            raise

    # --- before the call ---------------------------------------------------------------------------

    def _swap(self, stack: ExitStack, values: Mapping[str, torch.Tensor], watch: CaptureMode) -> list[State]:
        subject, originals = self.subject, self.subject.originals
        for name, param in subject.params.items():
            fake = values[name]
            fake.grad = values.get(f"{name}:grad")
            if fake.requires_grad:
                _copy_hooks(originals.get(name, param), fake)
                fake.register_post_accumulate_grad_hook(lambda _, name=name: self._note_read(name))
        states = [
            self._swap_optimizer(stack, number, values, watch) for number in range(len(subject.optimizers))
        ]
        put_stand_ins(subject.modules, self._stand_ins(values))
        for owner in (*subject.models, *subject.optimizers):
            owner.zero_grad = self._noting_zero_grad(owner, values)
        return states

    def _swap_optimizer(
        self, stack: ExitStack, number: int, values: Mapping[str, torch.Tensor], watch: CaptureMode
    ) -> State:
        subject, optimizer = self.subject, self.subject.optimizers[number]
        replace = {param: values[subject.name_of_param[id(param)]] for param in self._params[number]}
        state: State = defaultdict(dict)
        for param, fake in replace.items():
            plain = self._plain[number].get(id(param), {})
            lifted = self.lifted.state_names[number][id(param)]
            if plain or lifted:
                state[fake] = plain | {key: values[name] for key, name in lifted.items()}

        @contextmanager
        def on_step() -> Iterator[None]:
            for param, fake in replace.items():
                if fake.grad is not None:
                    name = subject.name_of_param[id(param)]
                    _refuse_sparse(name, fake.grad)
                    self._observed[name] = fake.grad.clone()
            with watch.update():
                yield

        hypers = [
            {key: values[subject.hyper_name(number, group, key)] for key in group_values}
            for group, group_values in enumerate(hyper_values(optimizer))
        ]
        stack.enter_context(swapped(optimizer, replace, state, hypers, on_step))
        return state

    def _noting_zero_grad(self, owner: Any, values: Mapping[str, torch.Tensor]) -> Callable:
        """`owner.zero_grad`, which clears a gradient even where there was none in this capture."""
        clear = owner.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if isinstance(owner, nn.Module):
                held = list(owner.parameters())
            else:
                held = self.subject.optimizer_params(owner)
            names = {id(values[name]): name for name in self.subject.params}
            self._clearing = True
            try:
                clear(set_to_none)
            finally:
                self._clearing = False
            for param in held:
                if set_to_none:
                    self._note_clear(names[id(param)])
                elif param.requires_grad:
                    self._note_read(names[id(param)])

        return zero_grad

    def _note_read(self, name: str) -> None:
        if name not in self._cleared_first:
            self.reads_grads = True

    def _note_clear(self, name: str) -> None:
        self._cleared_first.add(name)

    # --- after it ----------------------------------------------------------------------------------

    def _results(self, result: Any) -> list[torch.Tensor]:
        leaves, self.out_spec = flatten(result)
        results = []
        for path, leaf in leaves:
            name = ".".join(["result", *map(key_text, path)])
            if isinstance(leaf, torch.Tensor):
                results.append(leaf.detach())
                self.outputs.append((name, "", False))
                if self._losses.hold(leaf):
                    self.losses.append(name)
            elif leaf is not None:
                raise CaptureError(
                    f"the step at {self.place} returns a {type(leaf).__name__} ({leaf!r:.60}) as {name}; a "
                    "captured step returns tensors (in any nesting of dicts, lists and dataclasses) or None. "
                    "Return the tensor and convert it outside, such as loss.item() after the call"
                )
            self.result_names.append(None if leaf is None else name)
        return results

    def _effects(self, values: Mapping[str, torch.Tensor], states: list[State]) -> list[torch.Tensor]:
        """Tensors that the step leaves behind beside in-place writes: gradients, states, buffers."""
        effects = []

        def leave(name: str, value: torch.Tensor, replaces: str = "") -> None:
            self.outputs.append((name, replaces, not replaces))
            effects.append(value.detach())

        for name, grad in self._observed.items():
            leave(f"{name}:observed_grad", grad)
        for name in self.subject.params:
            grad, slot = values[name].grad, self.subject.grad_slot(name)
            if grad is not None and grad is not values.get(slot.name):
                self.lifted.slots.setdefault(slot.name, slot)
                leave(f"{name}:next_grad", grad, slot.name)
            elif grad is None and slot.name in values:
                self.cleared.append(slot.name)
        for number, state in enumerate(states):
            for param in self._params[number]:
                fake = values[self.subject.name_of_param[id(param)]]
                for key, value in state.get(fake, {}).items():
                    slot = self.subject.state_slot(number, param, key)
                    if isinstance(value, torch.Tensor):
                        if slot.name not in values:
                            self.begun.append(slot.name)
                        if value is not values.get(slot.name):
                            self.lifted.slots.setdefault(slot.name, slot)
                            leave(f"{slot.name}:next", value, slot.name)
                    elif value is not None:
                        self._refuse_number(number, param, key, value)
        for name in self._buffers:
            value = self.subject.buffer_slot(name).get()
            if value is not None and value is not values[name]:
                leave(f"{name}:next", value, name)
        return effects

    def _refuse_number(self, number: int, param: torch.Tensor, key: str, value: Any) -> None:
        optimizer = self.subject.optimizers[number]
        before = self._plain[number].get(id(param), {}).get(key)
        if before != value:
            raise number_state_error(optimizer, key, before, value)

    def _refuse_leftovers(self, swapped_in: Snapshot, lifted: Sequence[torch.Tensor]) -> None:
        """A fake tensor stored on a module or optimizer would outlive the capture, a number stand still."""
        for one, key, value, before in swapped_in.changes():
            if isinstance(one, torch.optim.Optimizer):
                self._check_optimizer_attribute(one, key, value, before)
                continue
            name = f"module {self.subject.module_names[id(one)]!r} ({type(one).__name__})"
            where = assignment_line(type(one), key) or self.place
            if key == "_buffers":
                new = [k for k in value if k not in before]
                if new:
                    raise CaptureError(
                        f"the step registers buffer {new[0]!r} of {name}, {where}; register it in __init__"
                    )
            elif key == "_parameters":
                raise CaptureError(
                    f"the step puts other parameters into {name}, {where}; write to them in place "
                    "(with torch.no_grad(): param.copy_(value)), or build the module before the step"
                )
            elif holds_fake(value, lifted):
                raise CaptureError(
                    f"the step stores a tensor as attribute {key!r} of {name}, {where}; make it a buffer "
                    "(self.register_buffer in __init__), or return it from the step"
                )
            elif type(value) in (int, float) and type(before) in (int, float):
                stage_logger("capture").warning(
                    f"the step changes the Python number {key!r} of {name}, {where}, from {before!r} to "
                    f"{value!r}; a captured step keeps its first value. Make it a buffer if it should change "
                    "every step"
                )

    def _check_optimizer_attribute(self, optimizer: Any, key: str, value: Any, before: Any) -> None:
        if key.startswith("_") or key in ("state", "param_groups"):
            return
        if holds_fake(value, ()) or type(value) in (int, float):
            raise number_state_error(optimizer, key, before, value)


def _refuse_sparse(name: str, grad: torch.Tensor) -> None:
    if grad.layout is not torch.strided:
        raise CaptureError(
            f"parameter {name!r} gets a sparse gradient; one graph holds dense ones only. "
            "Build its embedding with sparse=False"
        )


def assignment_line(kind: type, attribute: str) -> str:
    """`at file:line` where a class's code stores into `self.attribute`, "" if that cannot be found."""
    stores = re.compile(
        rf"\bself\.{re.escape(attribute)}\b\s*(=(?!=)|[-+*/|]=|\[|\.append|\.extend|\.update|\.add)"
    )
    try:
        lines, first = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return ""
    found = [first + i for i, line in enumerate(lines) if stores.search(line)]
    return f"at {file}:{found[-1]}" if found else ""
