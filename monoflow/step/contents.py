"""What a checkpoint holds of a step: everything that its next step depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from ..checkpoint import Contents, encode
from ..compiler import Subject
from ..errors import CheckpointError

if TYPE_CHECKING:
    from .decorator import Step

PLAN, CONFIG = "plan.json", "config.json"


@runtime_checkable
class Stateful(Protocol):
    """What gives and takes its state: a stream, a scheduler, an average of weights."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Live(NamedTuple):
    """The live tensors of a subject by their names in a checkpoint.

    Attributes:
        model: parameters and persistent buffers.
        buffers: the others.
        state: of the optimizers.
        numbers: state of the optimizers that is no tensor.
    """

    model: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    numbers: dict[str, Any]


def live_tensors(subject: Subject) -> Live:
    """Everything that a subject's modules and optimizers hold now."""
    transient = set(_transient(subject))
    buffers = subject.buffers()
    model: dict[str, torch.Tensor] = dict(subject.params)
    model |= {name: value for name, value in buffers.items() if name not in transient}
    others = {f"buffer:{name}": value for name, value in buffers.items() if name in transient}
    state: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for number, optimizer in enumerate(subject.optimizers):
        for param in subject.optimizer_params(optimizer):
            for key, value in optimizer.state.get(param, {}).items():
                into = state if isinstance(value, torch.Tensor) else numbers
                into[f"optimizer:{subject.state_name(number, param, key)}"] = value
    return Live(model, others, state, numbers)


def _transient(subject: Subject) -> Iterator[str]:
    """The names of buffers that are no part of a state dict."""
    for index, model in enumerate(subject.models):
        for prefix, module in model.named_modules():
            for name in module._non_persistent_buffers_set:
                yield subject.prefix(index) + (f"{prefix}.{name}" if prefix else name)


def contents_of(step: Step, stream: Any, extra: Mapping[str, Any] | None) -> Contents:
    """What to save of a step, between two calls of it.

    Raises:
        CheckpointError: `extra` holds what a checkpoint cannot, or parameters have no values.
    """
    step.begin_loaded_state()
    subject = step.subject
    subject.refresh()
    live = live_tensors(subject)
    for name, value in live.model.items():
        if value.is_meta:
            raise CheckpointError(f"{name} is on the meta device: it has no values to save")
    tensors: dict[str, torch.Tensor] = {}
    meta = {
        "step": step.num_steps,
        "versions": {"monoflow": _version("monoflow"), "torch": torch.__version__},
        "types": optimizer_types(subject),
        "optimizers": encode(groups_of(subject), "groups", tensors),
        "numbers": encode(live.numbers, "numbers", tensors),
        "random": torch.get_rng_state().numpy().tobytes().hex(),
        "stream": None if stream is None else encode(_state_of(stream, "stream"), "stream", tensors),
        "extra": {
            key: {
                "stateful": isinstance(value, Stateful),
                "value": encode(_plain(value), f"extra.{key}", tensors),
            }
            for key, value in (extra or {}).items()
        },
    }
    state = dict(sorted(live.state.items()))  # whichever way it began, the file is the same
    others = live.buffers | state | {f"other:{name}": value for name, value in tensors.items()}
    return Contents(live.model, others, meta, _texts(step, subject))


def _plain(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _state_of(stream: Any, name: str) -> Any:
    if not isinstance(stream, Stateful):
        raise CheckpointError(
            f"{name}={stream!r} has no state_dict() and load_state_dict(), so its position cannot be kept; "
            f"flow.stream has them"
        )
    return stream.state_dict()


def groups_of(subject: Subject) -> list[list[dict[str, Any]]]:
    """Per optimizer and group: the hyper-parameters, and under "params" the names of its parameters."""
    names = subject.name_of_param
    return [
        [
            {**group, "params": [names[id(param)] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        for optimizer in subject.optimizers
    ]


def optimizer_types(subject: Subject) -> list[str]:
    """The class names of the optimizers."""
    return [type(optimizer).__name__ for optimizer in subject.optimizers]


def _texts(step: Step, subject: Subject) -> dict[str, str]:
    """The plan, if there is one, and a Hugging Face model's configuration."""
    texts = {}
    if step.last_plan is not None:
        texts[PLAN] = step.last_plan.dumps()
    config = getattr(subject.models[0], "config", None) if len(subject.models) == 1 else None
    if config is not None and hasattr(config, "to_json_string"):
        texts[CONFIG] = config.to_json_string()
    return texts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def model_aliases(subject: Subject) -> dict[str, str]:
    """Other names of tied parameters and buffers -> the name under which they are saved."""
    kept = {id(value): name for name, value in (*subject.params.items(), *subject.buffers().items())}
    found = {}
    for index, model in enumerate(subject.models):
        for name, value in _all_names(model):
            first = kept[id(value)]
            if subject.prefix(index) + name != first:
                found[subject.prefix(index) + name] = first
    return found


def _all_names(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
