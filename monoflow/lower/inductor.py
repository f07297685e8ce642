"""The adapter to torch's compiler: from a graph of ATen ops on tensors of known shapes to a function.

Private parts of torch used here: `torch._inductor.compile_fx.compile_fx_inner` and its joint-graph passes,
`torch._inductor.decomposition.select_decomp_table`, `torch._inductor.cpp_builder.get_cpp_compiler`,
`torch._inductor.runtime.cache_dir_utils.cache_dir`, `torch._functorch.compile_utils.fx_graph_cse`.
tests/null/test_compiled.py fails when they move. Compiled functions are kept in torch's own cache folder
(TORCHINDUCTOR_CACHE_DIR), where other ranks of the host and later runs find them.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse

Tensor = torch.Tensor

#: A compiled graph: takes the only references to its inputs out of the list.
Function = Callable[[list[Tensor]], Sequence[Tensor]]


def _inductor(name: str) -> Any:
    """A module of torch's compiler. It takes seconds to import: only who compiles pays."""
    return importlib.import_module(f"torch._inductor.{name}")


def missing_compiler(device: torch.device) -> str:
    """Why nothing can be compiled for a device here; "" where it can."""
    if device.type != "cpu":
        return "" if torch.cuda.is_available() else f"there is no compiler for {device.type}"
    try:
        _inductor("cpp_builder").get_cpp_compiler()
    except _inductor("exc").InvalidCxxCompiler as error:
        return f"there is no C++ compiler ({error})"
    return ""


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The ops that the compiler wants in terms of others."""
    return _inductor("decomposition").select_decomp_table()


def without_repeats(graph: fx.Graph) -> fx.Graph:
    """A copy of a functional graph of ATen ops in which no op is done twice on the same arguments."""
    return fx_graph_cse(graph)


def compile_graph(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Function:
    """Compiles a functional graph of ATen ops.

    Its outputs have the strides that the graph's own fake outputs have.

    Args:
        inputs: fake tensors of the shapes, strides, dtypes and devices of the placeholders.
    """
    compile_fx = _inductor("compile_fx")
    # With the C++ wrapper the whole graph is one call, during which other Python threads run.
    with torch.no_grad(), _inductor("config").patch(cpp_wrapper=True):
        compile_fx._recursive_joint_graph_passes(module)
        output = module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
        return compile_fx.compile_fx_inner(module, list(inputs), cpp_wrapper=True)  # type: ignore[return-value]


@contextmanager
def one_at_a_time(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Within: no other process of this host compiles such a graph. Who comes second finds it in the cache."""
    looks = [(x.shape, x.stride(), x.dtype, x.device) for x in inputs]
    digest = hashlib.sha256(f"{module.code}{looks}".encode()).hexdigest()
    folder = Path(_inductor("runtime.cache_dir_utils").cache_dir(), "monoflow")
    folder.mkdir(parents=True, exist_ok=True)
    with importlib.import_module("filelock").FileLock(folder / f"{digest[:32]}.lock"):
        yield
