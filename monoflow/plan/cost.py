"""What an op costs on one device: a roofline over its arithmetic and its memory traffic, or as measured.

A device that was calibrated brings a curve per class of ops: seconds by amount of work, so that small calls,
caches and each class' efficiency are in it. One that was not brings rates of a datasheet.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..boxing.curve import Curve
from ..boxing.route import LinkCost
from ..graph.step_graph import is_getitem, metas_of, tensor_args
from ..sbp.layout import Split
from ..sbp.signature import Signature, TensorMeta
from .op_class import ARITHMETIC, OpClass, amount_of, class_of, num_flops, special_class

_LINK = LinkCost(alpha=1e-6, beta=1e-10, launch=1e-5)


@dataclass(frozen=True)
class Device:
    """One accelerator, or a CPU rank's share of its machine.

    Attributes:
        name: what it is called in tables and messages.
        flops: FLOP/s by dtype name ("float32", "bfloat16", ...), as achieved in large products.
        bandwidth: bytes/s of its memory, streaming.
        launch: seconds that a call costs whatever its size.
        capacity: bytes of memory.
        curves: what was measured, by class, or "class/dtype" for the classes that do arithmetic.
        hiding: the part of a move's seconds that compute beside it does not feel, from 0, where moves need
            what computes, to 1.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    capacity: int
    curves: Mapping[str, Curve] = field(default_factory=dict)
    hiding: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What a placement is made of: its device, and one link per mesh axis, outermost first.

    A machine of a single link has that one on every axis, however many there are (see `on`).
    """

    device: Device
    links: tuple[LinkCost, ...]

    def on(self, num_axes: int) -> Machine:
        """The machine with as many links as a placement has axes."""
        if len(self.links) == num_axes:
            return self
        assert len(self.links) == 1, f"{len(self.links)} links for {num_axes} axes"
        return replace(self, links=self.links * num_axes)


#: A machine whose links are fast against its latency, so that a template's choices follow bytes and work, not
#: the machine that they are planned on.
REFERENCE = Machine(Device("reference", {"float32": 1e12}, 1e11, 0.0, 1 << 62), (_LINK,))


def op_seconds(
    op: Callable,
    inputs: Sequence[TensorMeta | None],
    outputs: Sequence[TensorMeta | None],
    device: Device,
    args: Sequence[Any] = (),
) -> float:
    """Seconds of one call on one device. Views cost nothing, or where it was measured, the call.

    Args:
        inputs, outputs: local shapes and dtypes of the tensor arguments in flattened order, and of the
            results (None for an absent one).
        args: the call's own arguments; only plain values are looked at, which make convolutions exact.
    """
    kind = class_of(op)
    if kind is OpClass.FREE:  # no work, but as many calls as all else together
        curve = device.curves.get(kind)
        return curve.seconds(1.0) if curve is not None and op is not operator.getitem else 0.0
    amount = amount_of(op, kind, inputs, outputs, args)
    if kind in ARITHMETIC:
        first = next(meta for meta in inputs if meta is not None)
        special = special_class(kind, inputs, outputs, args)
        if curve_key(special, first.dtype) in device.curves:
            kind = special
        moved = OpClass.FACTORS if kind is OpClass.PRODUCT else OpClass.STREAM
        return max(
            _arithmetic(kind, amount, first, device), _streaming(_num_bytes(inputs, outputs), device, moved)
        )
    special = special_class(kind, inputs, outputs, args)
    if special is not kind and special in device.curves:
        kind, amount = special, amount_of(op, special, inputs, outputs, args)
    curve = device.curves.get(kind)
    if curve is not None:
        return curve.seconds(amount)
    return device.launch + max(
        sum(meta.numel for meta in outputs if meta is not None) / _rate(device, "float32"),
        _num_bytes(inputs, outputs) / device.bandwidth,
    )


def curve_key(kind: OpClass, dtype: torch.dtype) -> str:
    """The name of a class' curve: arithmetic has one per dtype."""
    return f"{kind}/{_name(dtype)}" if kind in ARITHMETIC else str(kind)


def _arithmetic(kind: OpClass, amount: float, meta: TensorMeta, device: Device) -> float:
    curve = device.curves.get(curve_key(kind, meta.dtype))
    rate = _rate(device, _name(meta.dtype))
    return curve.seconds(amount) if curve is not None else device.launch + amount / rate


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _streaming(num_bytes: float, device: Device, kind: OpClass = OpClass.STREAM) -> float:
    curve = device.curves.get(kind) or device.curves.get(OpClass.STREAM)
    return curve.seconds(num_bytes) if curve is not None else device.launch + num_bytes / device.bandwidth


def _rate(device: Device, dtype: str) -> float:
    """FLOP/s of a dtype; of one that the device has no rate for, its slowest."""
    return device.flops.get(dtype) or min(device.flops.values())


def _num_bytes(inputs: Sequence[TensorMeta | None], outputs: Sequence[TensorMeta | None]) -> float:
    return sum(meta.num_bytes for meta in (*inputs, *outputs) if meta is not None)


# --- what the planner of templates asks -------------------------------------------------------------


@dataclass(frozen=True)
class DeviceCost:
    """Rates of one device and its links: FLOP/s, bytes/s of memory, and each link's alpha and beta.

    The default is a reference device whose links are fast against its latency, so that a template's choices
    follow bytes and work, not the machine they are planned on.
    """

    flops: float = 1e12
    memory: float = 1e11
    link: LinkCost = _LINK


def work(node: fx.Node, device: DeviceCost) -> float:
    """Seconds the whole op takes on one device."""
    kind = class_of(node.target)  # pyright: ignore[reportArgumentType]
    if is_getitem(node) or kind is OpClass.FREE:
        return 0.0
    metas = [meta for source in tensor_args(node) for meta in metas_of(source)[:1] if meta is not None]
    results = metas_of(node)
    arithmetic = (
        num_flops(kind, metas, results, node.args)
        if kind in ARITHMETIC
        else float(sum(meta.numel for meta in results if meta is not None))
    )
    return max(arithmetic / device.flops, _num_bytes(metas, results) / device.memory)


def fraction(signature: Signature, axis_size: int) -> float:
    """The part of the op's work that one rank does: its share if anything is split, all of it otherwise."""
    split = any(isinstance(one, Split) for one in (*signature.inputs, *signature.outputs))
    return 1.0 / axis_size if split else 1.0
