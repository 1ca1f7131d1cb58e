"""The names of jstep: the module that public ones show, and what there is for names of other libraries."""

import functools
import importlib.resources
import sys
import tomllib
import types
from collections.abc import Mapping
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
    namespace["__dir__"] = lambda: sorted(namespace["__all__"])


def explain(name: str) -> str:
    """Explain what jstep has for a name of other libraries; the empty string if nothing is known."""
    found: dict[str, list[str]] = {}
    for page, names in pages().items():
        for ours, theirs in names.items():
            if name in theirs.split():
                found.setdefault(ours, []).append(page)
    parts = [f"{ours} (see {' and '.join(about)})" for ours, about in found.items()]
    return f"; use {', or '.join(parts)}" if parts else ""


@functools.cache
def pages() -> Mapping[str, Mapping[str, str]]:
    """Page of the documentation → {what to use in jstep: the names of the library that the page is about}."""
    table = importlib.resources.files("jstep.core").joinpath("names_of_others.toml")
    return tomllib.loads(table.read_text(encoding="utf-8"))
