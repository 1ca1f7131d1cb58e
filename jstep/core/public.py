"""The names that users type, said by what they name."""

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


def set_public_module(namespace: dict[str, Any]) -> None:
    """Lets the functions and classes that a package exports say as their `__module__` where users find them.

    That is `jstep` for what is at the root, and the package itself for the rest. Errors, reprs and documentation
    then show a name that can be typed.

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
    """The `__getattr__` and `__dir__` of a package that imports what it exports when it is first used.

    The command line reads checkpoints, weights and event files without JAX, whose import takes longer than they do.

    Args:
        namespace: The `globals()` of the package, with `__all__`.
        places: Name → the module that it comes from. A module of the package with the same name would hide it.
    """
    package = namespace["__name__"]

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        namespace[name] = getattr(importlib.import_module(places[name]), name)
        set_public_module(namespace)
        return namespace[name]

    return load, lambda: sorted({*namespace, *namespace["__all__"]})
