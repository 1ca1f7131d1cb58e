"""The names that users type, said by what they name."""

import types
from typing import Any


def publish(namespace: dict[str, Any]) -> None:
    """Lets the functions and classes that a package exports say the package's name as their `__module__`.

    Errors, reprs and documentation then show a name that can be typed. The package exported from last, which is
    `jstep` for what is at the root, is the one that counts.

    Args:
        namespace: The `globals()` of the package, with `__all__`.
    """
    package = namespace["__name__"]
    for name in namespace["__all__"]:
        value = namespace.get(name)
        if isinstance(value, type | types.FunctionType) and value.__module__.startswith("jstep"):
            value.__module__ = package
