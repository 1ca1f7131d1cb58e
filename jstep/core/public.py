"""The names that users type, said by what they name."""

import sys
import types
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
