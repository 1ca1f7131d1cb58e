"""Names of other libraries that jstep has by another name, or does otherwise, for the error of `jstep.X`."""

import functools
import importlib.resources
import tomllib
from collections.abc import Mapping


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
