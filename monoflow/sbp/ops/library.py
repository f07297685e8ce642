"""The `monoflow` namespace of torch.ops. torch allows one "DEF" library per namespace: this one."""

from torch.library import Library

LIBRARY = Library("monoflow", "DEF")
