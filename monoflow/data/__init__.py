"""Where batches come from: each rank loads its part of the same global batches."""

from .stream import Stream, stream

__all__ = ["Stream", "stream"]
