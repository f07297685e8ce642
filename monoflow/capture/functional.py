"""A traced function without writes: every in-place op becomes its functional form, in sum form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from ..graph.step_graph import info_of
from .sum_form import table


class _KeepOrigin(fx.Interpreter):
    """Runs a traced graph under another trace and hands each node's origin to the nodes it becomes."""

    def __init__(self, traced: fx.GraphModule, forms: Mapping[Any, Callable]) -> None:
        super().__init__(traced)
        self.forms = forms

    def run_node(self, n: fx.Node) -> Any:
        proxies = get_proxy_mode()
        assert proxies is not None
        root = proxies.tracer.graph._root
        before = root.prev
        result = NotImplemented
        if n.target in self.forms:
            # Here, above functionalization: torch's decompositions write in place.
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            result = self.forms[n.target](*args, **kwargs)
        if result is NotImplemented:
            result = super().run_node(n)
        node = root.prev
        while node is not before and node is not root:
            node.meta["info"] = info_of(n)
            node = node.prev
        return result


def functionalize(
    traced: fx.GraphModule, fakes: Sequence[torch.Tensor], batch_stats: str = "global"
) -> fx.GraphModule:
    """The same computation without writes, in sum form; a write to an input is one copy_ at the end."""
    traced.graph.eliminate_dead_code(_is_kept)
    forms = table(batch_stats)
    with torch.no_grad():
        functional = torch.func.functionalize(_KeepOrigin(traced, forms).run, remove="mutations")
        made = make_fx(functional, decomposition_table=forms)(*(fake.detach() for fake in fakes))
    for node in made.graph.nodes:
        # Views of what was written are taken anew after the last node has run.
        if node.op == "call_function" and "info" not in node.meta:
            node.meta["info"] = info_of(node.all_input_nodes[0])
    return made


def _is_kept(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op in ("placeholder", "output") or (schema is not None and schema.is_mutable)
