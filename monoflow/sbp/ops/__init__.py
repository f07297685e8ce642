"""Logical ops: device-neutral ops of our own that stay one node of a step graph until lowering."""

from .attention import attention, attention_backward
from .library import LIBRARY
from .random import bits, normal, pack_runs, uniform

__all__ = ["LIBRARY", "attention", "attention_backward", "bits", "normal", "pack_runs", "uniform"]
