"""monoflow: a training step written for one device, run on any number of them, with the same numbers.

The public names are those of `face.py`. They come, with torch and all of the package, when the first of them
is asked for: `monoflow run` starts programs without.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import data  # noqa: F401
    from .face import *  # noqa: F403

__version__ = "0.1.0"
_BOTH = ("graph", "sbp")  # public names, and parts of the package, which take second place


class _Package(ModuleType):
    """This package: finds public names and parts when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name not in _BOTH and find_spec(f"{self.__name__}.{name}") is not None:
            return import_module(f"{self.__name__}.{name}")
        face = import_module(f"{self.__name__}.face")
        if name not in (*face.__all__, "__all__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        vars(self).update({public: getattr(face, public) for public in ("__all__", *face.__all__)})
        return vars(self)[name]

    def __setattr__(self, name: str, value: Any) -> None:
        is_part = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if not (is_part and name in _BOTH):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


sys.modules[__name__].__class__ = _Package
