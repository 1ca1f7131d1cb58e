"""Public names: their `__module__`, and hints for names of other libraries."""

import functools
import importlib.resources
import sys
import tomllib
import types
from collections.abc import Mapping
from typing import Any


def show_in(package: str, value: object) -> None:
    """Let a public function or exception of jstep show the package that it is imported from, in errors and pickles.

    Other classes keep the module that defines them, by which `inspect.getsource` and type hints find it.
    """
    is_shown = isinstance(value, types.FunctionType) or (isinstance(value, type) and issubclass(value, BaseException))
    if is_shown and value.__module__.startswith("jstep"):
        value.__module__ = package
        if "__firstlineno__" in vars(value):  # Python 3.13: a line of another file
            del value.__firstlineno__  # type: ignore[attr-defined]


def is_public(named: Any) -> bool:
    return getattr(sys.modules["jstep"], named.__qualname__, None) is named


def public_name(named: Any) -> str:
    """Return the full name of a class or function, as users import it: `jstep.Saver`."""
    return f"{'jstep' if is_public(named) else named.__module__}.{named.__qualname__}"


def set_public_module(namespace: dict[str, Any]) -> None:
    """Show a package's `__all__` in `jstep` for names exported at the root, and in the package for others."""
    package = namespace["__name__"]
    root = sys.modules[package.partition(".")[0]]
    for name in namespace["__all__"]:
        show_in(root.__name__ if name in root.__all__ else package, namespace.get(name))
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
