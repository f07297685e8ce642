"""The adapter to torch's compiler: from a graph of ATen ops on tensors of known shapes to a function.

Private parts of torch used here: `torch._inductor.compile_fx.compile_fx_inner` and its joint-graph passes,
`torch._inductor.decomposition.select_decomp_table`, `torch._inductor.cpp_builder.get_cpp_compiler`,
`torch._inductor.runtime.cache_dir_utils.cache_dir`, `torch._functorch.compile_utils.fx_graph_cse`,
`torch._inductor.codecache.CppWrapperCodeCache` and how its libraries are called (`loaded`), what
`torch._inductor.config` holds. tests/null/test_compiled.py and tests/local/test_compiled.py fail when they
move. Compiled functions are kept in torch's own cache folder (TORCHINDUCTOR_CACHE_DIR), where other ranks of
the host and later runs find them.
"""

from __future__ import annotations

import getpass
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch.utils._config_module import _UNSET_SENTINEL

Tensor = torch.Tensor

#: A compiled graph: takes the only references to its inputs out of the list.
Function = Callable[[list[Tensor]], Sequence[Tensor]]

#: Waits for a compiled graph, and for the library that it is, if it is one and nothing else.
Compiling = Callable[[], tuple[Function, Path | None]]

#: Has a function called on another thread.
Submit = Callable[[Callable[[], None]], Future]


def _inductor(name: str) -> Any:
    """A module of torch's compiler. It takes seconds to import: only who compiles pays."""
    return importlib.import_module(f"torch._inductor.{name}")


class NoCompiler(Exception):
    """There is nothing to compile with; the text says why."""


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


def compile_graph(module: fx.GraphModule, inputs: Sequence[Tensor], submit: Submit) -> Compiling:
    """Begins to compile a functional graph of ATen ops.

    Its outputs have the strides that the graph's own fake outputs have.

    Args:
        inputs: fake tensors of the shapes, strides, dtypes and devices of the placeholders.
        submit: has a function called that takes long, mostly in the C++ compiler.

    Returns:
        What waits for the compiled function, and for its library where that is all there is to it.
    """
    compile_fx = _inductor("compile_fx")
    # With the C++ wrapper the whole graph is one call, during which other Python threads run.
    with torch.no_grad(), _inductor("config").patch(cpp_wrapper=True), _built_beside(submit) as begun:
        compile_fx._recursive_joint_graph_passes(module)
        output = module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
        made: Any = compile_fx.compile_fx_inner(module, list(inputs), cpp_wrapper=True)

    def finish() -> tuple[Function, Path | None]:
        libraries = [Path(str(wait().__file__)) for wait in begun]
        is_all = len(libraries) == 1 and not made.constants and all(x.device.type == "cpu" for x in inputs)
        return made, libraries[0] if is_all else None

    return finish


@contextmanager
def _built_beside(submit: Submit) -> Iterator[list[Callable[[], ModuleType]]]:
    """Within: generated C++ is compiled by what is submitted. Gives what waits for each library."""
    codes = _inductor("codecache").CppWrapperCodeCache
    at_once, thread = codes.load_pybinding, threading.get_ident()
    begun: list[Callable[[], ModuleType]] = []

    def load_pybinding(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        if threading.get_ident() != thread:  # another thread's, who knows nothing of this
            return at_once(*args, **kwargs)
        entry = codes.load_pybinding_async(*args, **kwargs, submit_fn=submit)
        begun.append(lambda: entry().__self__)
        return lambda handles: entry()(handles)

    codes.load_pybinding = load_pybinding
    try:
        yield begun
    finally:
        codes.load_pybinding = at_once


def loaded(library: Path) -> Function:
    """The function of a compiled library of tensors on a CPU.

    Raises:
        ImportError: it is none.
    """
    data_ptr = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(data_ptr)
    spec = importlib.util.spec_from_file_location(f"{library.stem}.inductor_entry_cpp", library)
    assert spec is not None and spec.loader is not None, library
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entry, aoti = module.inductor_entry_cpp, torch._C._aoti  # type: ignore[attr-defined]

    def function(tensors: list[Tensor]) -> Sequence[Tensor]:
        handles = aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
        tensors.clear()
        return aoti.alloc_tensors_by_stealing_from_void_ptrs(entry(handles))

    return function


def settings() -> str:
    """What was set that changes what the compiler does: by the environment, and in its configuration."""
    names = ("TORCHINDUCTOR_", "TORCH_COMPILE", "ATEN_", "CXX", "CPLUS_INCLUDE_PATH")
    found = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(names)]
    found = [one for one in found if not one.startswith("TORCHINDUCTOR_CACHE_DIR=")]
    config: Any = sys.modules.get("torch._inductor.config")  # not imported: nobody changed it
    entries = config._config.items() if config is not None else ()
    values = [(name, one.user_override.get(), one.default) for name, one in entries]
    # torch sets its number of compiling processes by itself, once it compiles.
    changed = [
        f"{name}={own!r}"
        for name, own, default in values
        if own is not _UNSET_SENTINEL and own != default and name != "compile_threads"
    ]
    return repr((sorted(found), sorted(changed)))


def cache_folder() -> Path:
    """Where compiled code of this package is kept."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # to ask torch for it is to import its compiler
    return Path(given or _default_cache_folder(), "monoflow")


def _default_cache_folder() -> str:
    """Torch's own rule: its compiler's `cache_dir`, which a test compares."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return str(Path(tempfile.gettempdir(), f"torchinductor_{user}"))


@contextmanager
def one_at_a_time(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Within: no other process of this host compiles such a graph. Who comes second finds it in the cache."""
    looks = [(x.shape, x.stride(), x.dtype, x.device) for x in inputs]
    digest = hashlib.sha256(f"{module.code}{looks}".encode()).hexdigest()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with importlib.import_module("filelock").FileLock(folder / f"{digest[:32]}.lock"):
        yield
