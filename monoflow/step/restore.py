"""Loading: a checkpoint of any layout into a live step of any other, in place.

Everything is compared and verified before the first live tensor is written. State of an optimizer that has
not begun is read when it begins, when its layout is known; so is a model of `flow.lazy` without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint import Group, Source, Wanted, check, decode, fill, misfits, tensor_names, together, whole
from ..compiler import Subject
from ..errors import CheckpointError
from .contents import PLAN, Live, Stateful, groups_of, live_tensors, model_aliases, optimizer_types

if TYPE_CHECKING:
    from .decorator import Step

#: Settings of a group that say how the update is computed, not what it is: those of this machine stay.
_HOW = ("foreach", "fused", "capturable")


@dataclass(frozen=True)
class Restored:
    """What `flow.load` found.

    Attributes:
        step: how many steps were taken when it was saved.
        extra: what was saved as `extra`, without objects that have a state.
        plan: the JSON of the plan it was saved under; None if it had none.
    """

    step: int
    extra: Mapping[str, Any]
    plan: str | None


def restore(
    step: Step, source: Source, group: Group, stream: Any, extra: Mapping[str, Any] | None, verify: bool
) -> Restored:
    """Loads a source into a step; see `flow.load`."""
    step.begin_loaded_state()
    subject = step.subject
    subject.refresh()
    live = live_tensors(subject)
    names = _names_in(source, subject, live)
    _compare(step, source, subject, live, names, stream, extra)
    meta: Mapping[str, Any] = source.meta
    others = [f"other:{name}" for name in tensor_names(dict(meta))]
    if verify:
        wanted = {*names.values(), *_state_names(source), *others, *(_own(live.buffers, source))}
        check(source, [name for name in source.tensors if name in wanted], group)
    tensor = lambda name: whole(source, f"other:{name}")  # noqa: E731
    found = decode(meta.get("extra", {}), tensor)
    together(group, lambda: _put_objects(decode(meta.get("stream"), tensor), found, stream, extra or {}))
    _put_tensors(step, source, live, names, group)
    _put_rest(step, subject, meta, tensor)
    step.load_later(_waiting(step, source, subject, live, names, group))
    kept = {key: one["value"] for key, one in found.items() if not one["stateful"]}
    return Restored(step.num_steps, kept, source.text(PLAN))


# --- comparing -------------------------------------------------------------------------------------


def _names_in(source: Source, subject: Subject, live: Live) -> dict[str, str]:
    """Name here -> name in the source, of parameters and persistent buffers."""
    names = {name: name for name in live.model}
    for alias, name in model_aliases(subject).items():
        if name in names and names[name] not in source.tensors and alias in source.tensors:
            names[name] = alias
    return names


def _own(names: Iterable[str], source: Source) -> list[str]:
    return [name for name in names if name in source.tensors]


def _state_names(source: Source) -> list[str]:
    return [name for name in source.tensors if name.startswith("optimizer:")]


def _compare(
    step: Step,
    source: Source,
    subject: Subject,
    live: Live,
    names: Mapping[str, str],
    stream: Any,
    extra: Mapping[str, Any] | None,
) -> None:
    """Raises CheckpointError with every difference between a source and a step."""
    model = {names[name]: _wanted(value) for name, value in live.model.items()}
    found = misfits(source, model, may_cast=source.is_foreign)
    accepted = set(names.values()) | set(model_aliases(subject)) | set(subject.buffers())
    for name in source.tensors:
        if ":" not in name and name not in accepted:
            found.append(f"{name} is in it, not in the model")
    found += misfits(source, {name: _wanted(live.buffers[name]) for name in _own(live.buffers, source)})
    found += _state_misfits(source, subject, live)
    found += _group_misfits(source.meta, subject)
    if stream is not None and not source.is_foreign and source.meta.get("stream") is None:
        found.append("it was saved without stream=, so it does not know where the data was")
    saved = source.meta.get("extra", {})
    for key, value in (extra or {}).items():
        if isinstance(value, Stateful) and not saved.get(key, {}).get("stateful"):
            found.append(f"extra has no state of {key!r}; it has {sorted(saved)}")
    if found:
        listed = "\n".join(f"- {line}" for line in found[:_MOST])
        more = f"\n- and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise CheckpointError(f"{source.path} does not fit {step.name}; nothing was loaded:\n{listed}{more}")


_MOST = 40


def _wanted(value: torch.Tensor) -> Wanted:
    return Wanted(tuple(value.shape), value.dtype)


def _state_misfits(source: Source, subject: Subject, live: Live) -> list[str]:
    """Of optimizers whose state has begun here; that of the others is compared when it begins."""
    saved = _state_names(source)
    if source.is_foreign and not saved:
        return []
    begun = {name.rpartition(":")[0] for name in live.state}
    saved_of = {name.rpartition(":")[0] for name in saved}
    here = {
        f"optimizer:{subject.state_name(number, param, '')}".removesuffix(":")
        for number, optimizer in enumerate(subject.optimizers)
        for param in subject.optimizer_params(optimizer)
    }
    found = [f"{name} is in it, but no optimizer has this parameter" for name in sorted(saved_of - here)]
    common = {name: _wanted(x) for name, x in live.state.items() if name.rpartition(":")[0] in saved_of}
    found += misfits(source, common)
    found += [
        f"{name} is in it, not in the optimizer"
        for name in saved
        if name.rpartition(":")[0] in begun and name not in live.state
    ]
    return found


def _group_misfits(meta: Mapping[str, Any], subject: Subject) -> list[str]:
    if "optimizers" not in meta:
        return []
    ours, theirs = groups_of(subject), meta["optimizers"]
    if len(ours) != len(theirs):
        return [f"it has {len(theirs)} optimizers, the step has {len(ours)}"]
    types = meta.get("types") or optimizer_types(subject)
    found = [
        f"optimizer {number} is {saved} in it, {mine} here"
        for number, (mine, saved) in enumerate(zip(optimizer_types(subject), types, strict=True))
        if mine != saved
    ]
    for number, (mine, saved) in enumerate(zip(ours, theirs, strict=True)):
        if len(mine) != len(saved):
            found.append(f"optimizer {number} has {len(saved)} parameter groups in it, {len(mine)} here")
            continue
        for index, (a, b) in enumerate(zip(mine, saved, strict=True)):
            if a["params"] != b["params"]:
                other = sorted(set(a["params"]) ^ set(b["params"])) or ["their order"]
                found.append(
                    f"group {index} of optimizer {number} holds other parameters: {', '.join(other[:5])}"
                )
    return found


# --- putting ---------------------------------------------------------------------------------------


def _put_objects(position: Any, saved: Mapping[str, Any], stream: Any, extra: Mapping[str, Any]) -> None:
    """What may refuse: the stream, and objects of the user's."""
    if stream is not None and position is not None:
        if not isinstance(stream, Stateful):
            raise CheckpointError(f"stream={stream!r} has no load_state_dict()")
        stream.load_state_dict(position)
    for key, value in extra.items():
        if isinstance(value, Stateful):
            value.load_state_dict(saved[key]["value"])


def _put_tensors(step: Step, source: Source, live: Live, names: Mapping[str, str], group: Group) -> None:
    subject = step.subject
    with torch.no_grad():
        fill(
            source,
            _of_model(source, live, names, [name for name in names if not live.model[name].is_meta]),
            group,
        )
        fill(source, {name: live.state[name] for name in _own(live.state, source)}, group)
    if source.is_foreign and not _state_names(source):
        return
    saved_of = {name.rpartition(":")[0] for name in _state_names(source)}
    for number, optimizer in enumerate(subject.optimizers):  # what had not begun has not begun now
        for param in subject.optimizer_params(optimizer):
            name = f"optimizer:{subject.state_name(number, param, '')}".removesuffix(":")
            if name not in saved_of and optimizer.state.pop(param, None):
                step.forget_compiled()


def _of_model(
    source: Source, live: Live, names: Mapping[str, str], some: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Some parameters and persistent buffers by their names in the source, and the other buffers there."""
    others = {name: live.buffers[name] for name in _own(live.buffers, source)}
    return {names[name]: live.model[name] for name in some} | {
        name: value for name, value in others.items() if not value.is_meta
    }


def _put_rest(step: Step, subject: Subject, meta: Mapping[str, Any], tensor: Any) -> None:
    step.num_steps = int(meta.get("step", step.num_steps))
    for optimizer, groups in zip(
        subject.optimizers, decode(meta.get("optimizers", []), tensor), strict=False
    ):
        for live, saved in zip(optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                if key == "params" or key in _HOW:
                    continue
                present = live.get(key)
                if isinstance(present, torch.Tensor):  # groups may share it
                    live[key] = torch.as_tensor(value).to(present)
                else:
                    live[key] = (
                        value.item() if isinstance(value, torch.Tensor) and present is not None else value
                    )
    numbers = decode(meta.get("numbers", {}), tensor)
    for number, optimizer in enumerate(subject.optimizers):
        for param in subject.optimizer_params(optimizer) if numbers else ():
            prefix = f"optimizer:{subject.state_name(number, param, '')}"
            own = {name.removeprefix(prefix): one for name, one in numbers.items() if name.startswith(prefix)}
            optimizer.state[param].update(own)
    if "random" in meta:
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(meta["random"])), dtype=torch.uint8))


def _waiting(
    step: Step, source: Source, subject: Subject, live: Live, stored: Mapping[str, str], group: Group
) -> Callable[[], bool] | None:
    """Loads the state that has not begun yet, once it has; None if there is none to wait for.

    Args:
        stored: name here -> name in the source, of the model's. What has no memory waits too.
    """
    names = [name for name in _state_names(source) if name not in live.state]
    unborn = [name for name in stored if live.model[name].is_meta]
    if not names and not unborn:
        return None

    def begin() -> bool:
        """Returns whether some of it had not begun: that was put as whole tensors."""
        now = live_tensors(subject)
        born = [name for name in unborn if not now.model[name].is_meta]
        if born:
            with torch.no_grad():
                fill(source, _of_model(source, now, stored, born), group)
        begun = now.state
        ready = {name: begun[name] for name in names if name in begun}
        of_saved = {name.rpartition(":")[0] for name in names}
        wanted = {name: _wanted(x) for name, x in begun.items() if name.rpartition(":")[0] in of_saved}
        if found := misfits(source, wanted):
            raise CheckpointError(f"{source.path} does not fit {step.name}:\n" + "\n".join(found))
        with torch.no_grad():
            fill(source, ready, group)
        left = [name for name in names if name not in ready]
        for number, optimizer in enumerate(subject.optimizers):
            for param in subject.optimizer_params(optimizer):
                prefix = f"optimizer:{subject.state_name(number, param, '')}"
                for name in [name for name in left if name.startswith(prefix)]:
                    value = whole(source, name)
                    optimizer.state[param][name.removeprefix(prefix)] = value.to(_state_device(value, param))
        return bool(left)

    return begin


def _state_device(value: torch.Tensor, param: torch.Tensor) -> torch.device:
    """torch keeps step counts, the 0-dim states, on the CPU."""
    return torch.device("cpu") if value.dim() == 0 else param.device
