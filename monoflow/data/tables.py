"""Parquet and Arrow files, read by pyarrow: a row group or record batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np
import torch

from ..errors import FlowError
from .blocks import Block, BlockFiles, Opened, Paths


class _Library:
    """A module of the extra monoflow[data], imported when it is used: programs that do not start sooner."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


pa, pq = _Library("pyarrow"), _Library("pyarrow.parquet")

_FILE_MAGIC = b"ARROW1"


def parquet(paths: Paths, columns: Sequence[str] | None = None) -> ParquetFiles:
    """Rows of Parquet files as samples: a dict of numbers, tensors (of lists of numbers), str and bytes.

    Counting reads the footers only. A rank reads the row groups that its part of a window lies in, and of
    them only `columns`.

    Args:
        paths: a file, a pattern such as "data/*.parquet" (sorted), or several of them.
        columns: the columns to read; all when left out.

    Raises:
        FlowError: pyarrow is missing, or a path names no file.
    """
    _check_pyarrow()
    return ParquetFiles(paths, columns)


def arrow(paths: Paths, columns: Sequence[str] | None = None) -> ArrowFiles:
    """Rows of Arrow IPC files, of the file or the stream format, memory-mapped; else as `parquet`."""
    _check_pyarrow()
    return ArrowFiles(paths, columns)


def _check_pyarrow() -> None:
    if find_spec("pyarrow") is None:
        raise FlowError("Parquet and Arrow files are read by pyarrow: pip install 'monoflow[data]'")


class _Tables(BlockFiles):
    def __init__(self, paths: Paths, columns: Sequence[str] | None) -> None:
        super().__init__(paths)
        self.columns = None if columns is None else list(columns)

    def describe_row(self, block: Block, opened: Opened | None, row: int) -> str:
        return f"row {row} of block {block.start}"


class ParquetFiles(_Tables):
    """See `parquet`."""

    def count(self, path: str) -> list[Block]:
        with pq.ParquetFile(path) as file:
            groups = file.metadata
            return [Block(path, i, i + 1, groups.row_group(i).num_rows) for i in range(groups.num_row_groups)]

    def open(self, block: Block) -> Rows:
        with pq.ParquetFile(block.path) as file:
            return Rows(file.read_row_group(block.start, columns=self.columns))


class ArrowFiles(_Tables):
    """See `arrow`."""

    def count(self, path: str) -> list[Block]:
        with pa.memory_map(path) as mapped:
            batches = _record_batches(mapped)
            return [Block(path, i, i + 1, batch.num_rows) for i, batch in enumerate(batches)]

    def open(self, block: Block) -> Rows:
        with pa.memory_map(block.path) as mapped:
            batch = next(_record_batches(mapped, block.start))
        return Rows(batch if self.columns is None else batch.select(self.columns))


def _record_batches(mapped: Any, first: int = 0) -> Iterator[Any]:
    """The record batches of a memory-mapped file, in the file or the stream format."""
    is_file = mapped.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    mapped.seek(0)
    if is_file:
        file = pa.ipc.open_file(mapped)
        return (file.get_batch(i) for i in range(first, file.num_record_batches))
    return islice(pa.ipc.open_stream(mapped), first, None)


class Rows:
    """A table or record batch as samples."""

    def __init__(self, table: Any) -> None:
        self.columns = {name: _by_row(table.column(name)) for name in table.schema.names}

    def sample(self, row: int) -> dict[str, Any]:
        return {name: column[row] for name, column in self.columns.items()}


def _by_row(column: Any) -> Any:
    """A column that [row] reads: numbers as NumPy scalars of their type, lists of numbers as tensors."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if _is_number(column.type) and not column.null_count:
        return column.to_numpy(zero_copy_only=False)
    inner = column.type
    while pa.types.is_list(inner) or pa.types.is_large_list(inner) or pa.types.is_fixed_size_list(inner):
        inner = inner.value_type
    if inner != column.type and _is_number(inner):
        return _Lists(column, np.dtype(inner.to_pandas_dtype()))
    return _Objects(column)


def _is_number(kind: Any) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


class _Objects:
    """Text, bytes and what else there is, as Python values; None where nothing is."""

    def __init__(self, column: Any) -> None:
        self.column = column

    def __getitem__(self, row: int) -> Any:
        return self.column[row].as_py()


class _Lists:
    """Lists of numbers, nested or not, as tensors; None where nothing is."""

    def __init__(self, column: Any, dtype: np.dtype) -> None:
        self.column, self.dtype = column, dtype

    def __getitem__(self, row: int) -> torch.Tensor | None:
        one = self.column[row]
        if not one.is_valid:
            return None
        flat = _is_number(one.values.type) and not one.values.null_count
        numbers = one.values.to_numpy(zero_copy_only=False) if flat else one.as_py()
        return torch.from_numpy(np.array(numbers, dtype=self.dtype))  # a copy: arrow's memory is read-only
