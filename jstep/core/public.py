"""Public names of packages: `__module__` of exported objects, and lazy imports."""

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


def set_public_module(namespace: dict[str, Any]) -> None:
    """Set `__module__` of the functions and classes that a package exports to their public location.

    This is `jstep` for names exported at the root, and the package for the rest. Errors, reprs and documentation then
    show the public name.

    Args:
        namespace: The `globals()` of the package, with `__all__`.
    """
    package = namespace["__name__"]
    root = sys.modules[package.partition(".")[0]]
    for name in namespace["__all__"]:
        value = namespace.get(name)
        if isinstance(value, type | types.FunctionType) and value.__module__.startswith("jstep"):
            value.__module__ = root.__name__ if name in root.__all__ else package


def load_when_used(
    namespace: dict[str, Any], places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that imports its exports lazily.

    The command line reads checkpoints, weights and event files without importing JAX, which would take longer.

    Args:
        namespace: The `globals()` of the package, with `__all__`.
        places: Name → the module that defines it. A module of the package with the same name would shadow it.
    """
    package = namespace["__name__"]

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        namespace[name] = getattr(importlib.import_module(places[name]), name)
        set_public_module(namespace)
        return namespace[name]

    return load, lambda: sorted({*namespace, *namespace["__all__"]})
