"""Public names: their `__module__`, and hints for names of other libraries."""

import functools
import importlib.resources
import sys
import tomllib
import types
from collections.abc import Mapping
from typing import Any, Self


class PublicModule(str):
    """The `__module__` of a public class: the package that shows it, by which `inspect` finds the file that defines it.

    Errors, reprs and pickles have the text, `jstep`. `inspect.getsource` looks the object up in `sys.modules`, where
    it equals the name of the defining module.
    """

    def __new__(cls, shown: str, defining: str) -> Self:
        module = super().__new__(cls, shown)
        module.defining = str(defining)
        return module

    defining: str

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == self.defining

    def __hash__(self) -> int:
        return hash(self.defining)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def show_in(package: str, value: object) -> None:
    """Set `__module__` of a class or function of jstep, so that errors, reprs and documentation show public names."""
    if isinstance(value, types.FunctionType) and value.__module__.startswith("jstep"):
        value.__module__ = package
    elif isinstance(value, type) and type(value.__module__) is str and value.__module__.startswith("jstep"):
        value.__module__ = PublicModule(package, value.__module__)


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
