"""Text files, a sample a line."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import FlowError
from .blocks import Block, BlockFiles, Opened, Paths

#: Bytes that are read at a time; a block ends with the last line that ends in them.
BLOCK_BYTES = 1 << 18


def text(paths: Paths, encoding: str = "utf-8") -> TextLines:
    r"""The lines of text files as samples: a str each, without its line end; empty lines count.

    Lines end with \n or \r\n. The files are read once to count their lines (each rank counts a part of the
    files), and then by the block of about 256 KiB.

    Args:
        paths: a file, a pattern such as "corpus/*.txt" (sorted), or several of them.
        encoding: of the text; bytes that it does not allow make a sample corrupt.

    Raises:
        FlowError: a path names no file, or the encoding does not write a line end as one byte.
    """
    try:
        ends_lines = "\n".encode(encoding) == b"\n"
    except LookupError:
        ends_lines = False
    if not ends_lines:
        raise FlowError(
            f"encoding={encoding!r} is unknown, or does not write a line end as one byte, as UTF-8 and "
            f"Latin-1 do: lines are told apart before they are decoded"
        )
    return TextLines(paths, encoding)


class TextLines(BlockFiles):
    """See `text`."""

    def __init__(self, paths: Paths, encoding: str) -> None:
        super().__init__(paths)
        self.encoding = encoding

    def count(self, path: str) -> list[Block]:
        blocks, start, stop, read = [], 0, 0, 0
        with open(path, "rb") as file:
            while piece := file.read(BLOCK_BYTES):
                start, stop = stop, read + piece.rfind(b"\n") + 1
                read += len(piece)
                num_lines = piece.count(b"\n")
                if num_lines:
                    blocks.append(Block(path, start, stop, num_lines))
                else:  # within a long line
                    stop = start
        if read > stop:
            blocks.append(Block(path, stop, read, 1))
        return blocks

    def open(self, block: Block) -> Lines:
        with open(block.path, "rb") as file:
            file.seek(block.start)
            return Lines(file.read(block.stop - block.start).split(b"\n"), self.encoding)

    def describe_row(self, block: Block, opened: Opened | None, row: int) -> str:
        return f"line {row + 1} after byte {block.start}"


class Lines(NamedTuple):
    """The lines of a block, as bytes."""

    lines: list[bytes]
    encoding: str

    def sample(self, row: int) -> str:
        return self.lines[row].removesuffix(b"\r").decode(self.encoding)
