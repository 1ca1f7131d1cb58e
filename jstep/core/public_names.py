"""Public names: their `__module__`, and hints for names of other libraries."""

import functools
import importlib.resources
import sys
import tomllib
import types
from collections.abc import Mapping
from typing import Any


def set_public_module(namespace: dict[str, Any]) -> None:
    """Set `__module__` of a package's `__all__`, so that errors, reprs and documentation show public names.

    It is `jstep` for names exported at the root, and the package for others.
    """
    package = namespace["__name__"]
    root = sys.modules[package.partition(".")[0]]
    for name in namespace["__all__"]:
        value = namespace.get(name)
        if isinstance(value, type | types.FunctionType) and value.__module__.startswith("jstep"):
            value.__module__ = root.__name__ if name in root.__all__ else package
    namespace["__dir__"] = lambda: sorted(namespace["__all__"])


def explain(name: str) -> str:
    equivalents: dict[str, list[str]] = {}
    for page, names in pages().items():
        for ours, theirs in names.items():
            if name in theirs.split():
                equivalents.setdefault(ours, []).append(page)
    parts = [f"{ours} (see {' and '.join(about)})" for ours, about in equivalents.items()]
    return f"; use {', or '.join(parts)}" if parts else ""


@functools.cache
def pages() -> Mapping[str, Mapping[str, str]]:
    """Return page of the documentation → {jstep's equivalent: names in the library}."""
    table = importlib.resources.files("jstep.core").joinpath("names_of_others.toml")
    return tomllib.loads(table.read_text(encoding="utf-8"))
