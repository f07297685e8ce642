"""Where batches come from: each rank loads its part of the same global batches."""

from .lines import text
from .progress import Progress, progress
from .shards import webdataset
from .stream import Stream, StreamStats, stream
from .tables import arrow, parquet
from .token_windows import tokens

__all__ = [
    "Progress",
    "Stream",
    "StreamStats",
    "arrow",
    "parquet",
    "progress",
    "stream",
    "text",
    "tokens",
    "webdataset",
]
