"""fx graphs as JSON and back: every value is tagged data, every target the name of a registered op.

A plain JSON null, bool, number, string or list is itself; everything else is an object of one key that says
what it is: `{"node": name}`, `{"float": "inf"}`, `{"dtype": "bfloat16"}`, `{"tensor": [shape, strides, dtype,
device]}` (without values) and so on. Reading looks names up in tables, and evaluates nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import FlowError

#: What a graph's owner writes beside each node, and reads back into its metadata.
Extra = dict[str, Any]


def _named(kind: type) -> dict[str, Any]:
    """torch's constants of one kind by name."""
    return {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, kind)}


_CONSTANTS: Mapping[str, tuple[type, Mapping[str, Any]]] = {
    "dtype": (torch.dtype, _named(torch.dtype)),
    "layout": (torch.layout, _named(torch.layout)),
    "memory_format": (torch.memory_format, _named(torch.memory_format)),
}


def target_name(target: Any) -> str:
    """What a node's target is called: "aten.mm.default", or "getitem"."""
    if target is operator.getitem:
        return "getitem"
    if not isinstance(target, torch._ops.OpOverload):
        raise FlowError(f"{target} is no registered op and cannot be saved")
    return str(target)


def target_of(name: str) -> Callable:
    """The op of a name. Raises FlowError for one that is not registered here."""
    if name == "getitem":
        return operator.getitem
    parts = name.split(".")
    found: Any = torch.ops if len(parts) == 3 else None
    for part in parts:
        found = getattr(found, part, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise FlowError(
            f"the saved graph calls {name!r}, which torch {torch.__version__} has not; import what defines "
            "it, or capture the step again"
        )
    return found


def encode(value: Any) -> Any:
    """A node's argument, or what it gives, as JSON. Raises FlowError for a value that has no form."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [encode(one) for one in value]}
    if isinstance(value, list):
        return [encode(one) for one in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(one)] for key, one in value.items()]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Tensor):
        return {
            "tensor": [list(value.shape), list(value.stride()), encode(value.dtype), encode(value.device)]
        }
    for tag, (kind, _) in _CONSTANTS.items():
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    raise FlowError(f"a {type(value).__name__} in the graph cannot be saved: {value}")


def decode(data: Any, nodes: Mapping[str, fx.Node], mode: FakeTensorMode) -> Any:
    """The value that `encode` wrote.

    Args:
        nodes: by name, those that come before.
        mode: whose fakes stand for tensors.
    """
    if isinstance(data, list):
        return [decode(one, nodes, mode) for one in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    if tag == "node":
        if content not in nodes:
            raise FlowError(f"the saved graph reads node {content!r} before it is made")
        return nodes[content]
    if tag == "tensor":
        shape, stride, dtype, device = decode(content, nodes, mode)
        _check_device(device)
        with mode:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if tag == "tuple":
        return tuple(decode(content, nodes, mode))
    if tag == "dict":
        return dict(decode(content, nodes, mode))
    if tag == "complex":
        return complex(*decode(content, nodes, mode))
    if tag == "float":
        return float(content)
    if tag == "device":
        return torch.device(content)
    if tag in _CONSTANTS and content in _CONSTANTS[tag][1]:
        return _CONSTANTS[tag][1][content]
    raise FlowError(f"the saved graph holds {tag} {content!r}, which torch {torch.__version__} does not know")


def _check_device(device: torch.device) -> None:
    """A fake on a device that this torch was not built for would abort the process."""
    accelerator = torch.accelerator.current_accelerator()
    known = {"cpu", "meta"} | ({accelerator.type} if accelerator is not None else set())
    if device.type not in known:
        raise FlowError(
            f"the saved graph was captured for {device}, this torch works on {', '.join(sorted(known))}; "
            "capture the step from a model on one of these"
        )


def encode_graph(graph: fx.Graph, extra: Callable[[fx.Node], Extra]) -> list[dict[str, Any]]:
    """One record a node, in order, the output node excepted. `extra` adds to every record."""
    return [_encode_node(node) | extra(node) for node in graph.nodes if node.op != "output"]


def _encode_node(node: fx.Node) -> dict[str, Any]:
    record: dict[str, Any] = {"name": node.name, "value": encode(node.meta["val"])}
    if node.op == "call_function":
        record |= {"op": target_name(node.target), "args": encode(list(node.args))}
        if node.kwargs:
            record["kwargs"] = encode(dict(node.kwargs))
    return record


def decode_graph(records: Iterable[Extra], extra: Callable[[Extra], Extra]) -> fx.Graph:
    """The graph of `encode_graph`, without an output node; `extra` makes metadata of a record."""
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes: dict[str, fx.Node] = {}
    for record in records:
        name = record["name"]
        if "op" in record:
            args = decode(record["args"], nodes, mode)
            kwargs = decode(record.get("kwargs", {"dict": []}), nodes, mode)
            node = graph.create_node("call_function", target_of(record["op"]), tuple(args), kwargs, name)
        else:
            node = graph.create_node("placeholder", name, name=name)
        if node.name != name:
            raise FlowError(f"the saved graph has a node called {name!r}, which no node can be called here")
        node.meta |= {"val": decode(record["value"], nodes, mode), **extra(record)}
        nodes[name] = node
    return graph
