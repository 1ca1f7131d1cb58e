"""What a run was given, as JSON without secrets: its config, its arguments, its command line.

What JSON cannot say is recorded by the name of its type.
"""

import argparse
import contextlib
import dataclasses
import enum
import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jstep.core.secret_text import NOT_RECORDED, hide

MAX_OPTIONS, MAX_TEXT, _MAX_WORDS, _MAX_DEPTH, _MAX_CONFIG = 10_000, 1000, 100, 20, 2**19
"""The maximum numbers of options, of characters of a value, of words of a command line, of levels, of characters."""


def command_line() -> list[str]:
    """Return the first words of the command line; one without a dash belongs to the option before it."""
    argv, shown, option = [str(word) for word in getattr(sys, "argv", ())], list[str](), ""
    for word in argv[:_MAX_WORDS]:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        option = ("" if equals else name) if is_option else option
        text = hide("" if is_option else option, word)
        shown.append(cut(f"{hide('', name)}={hide(name, value)}" if equals and text != NOT_RECORDED else text))
    return shown if len(argv) <= _MAX_WORDS else [*shown, f"… and {len(argv) - _MAX_WORDS} more"]


# Values.


def cut(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text)} characters)"


def json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def plain(value: Any, name: str = "") -> Any:
    """Return a value as JSON; one that raises, or of another kind, is the name of its type."""
    with contextlib.suppress(Exception):
        if isinstance(value, enum.Enum):
            return value.name
        if value is None or (isinstance(value, int) and abs(value) < 2**1000):  # as a float, it is finite
            return value
        if isinstance(value, float):
            return json_number(float(value))
        if isinstance(value, str | os.PathLike):
            return cut(hide(name, str(os.fspath(value))))
        if isinstance(value, list | tuple):
            shown = [plain(item, name) for item in value[:MAX_TEXT]]
            return shown if len(str(shown)) <= MAX_TEXT else f"{type(value).__name__} ({len(value)} items)"
        if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
            if value.shape == () and isinstance(item := value.item(), bool | int | float):
                return plain(float(str(value)) if value.dtype.kind == "f" else item)  # a float32 0.1 is 0.1
            return f"{value.dtype}{list(value.shape)}"
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


# Configs.


def as_config(config: Any) -> dict[str, Any] | None:
    """Return the record of a config: name → JSON value, the names of nested options joined by `/`."""
    if config is None:
        return None
    entries = _entries(config)
    if entries is None:
        raise TypeError(
            "config: must be a mapping, a dataclass instance, a namedtuple or an argparse.Namespace, got "
            f"{type(config).__name__}; give the attributes of another object as vars(config)"
        )
    record: dict[str, Any] = {}
    size = 0
    for name, value in itertools.chain.from_iterable(_flat(str(key), item, 1) for key, item in entries):
        if name in record:
            raise ValueError(f"config: two of its values are called {name!r}; give one of them another name")
        size += len(name) + len(str(value))
        if len(record) == MAX_OPTIONS or size > _MAX_CONFIG:
            return {**record, "…": f"more than {len(record)} options"}
        record[cut(name)] = value
    return record


def _flat(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    entries = _entries(value) if depth < _MAX_DEPTH else None
    if not entries:
        yield name, plain(value, name) if entries is None else {}
    for key, item in entries or ():
        yield from _flat(f"{name}/{key}", item, depth + 1)


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the entries of a mapping or an object with named fields; else None."""
    with contextlib.suppress(Exception):
        if isinstance(value, type):
            return None
        if isinstance(value, Mapping):
            return list(value.items())
        if hasattr(value, "keys") and hasattr(value, "__getitem__") and not hasattr(value, "shape"):  # ml_collections
            return [(key, value[key]) for key in value.keys()]  # noqa: SIM118
        if isinstance(value, argparse.Namespace):
            return list(vars(value).items())
        fields: Any = dataclasses.fields(value) if dataclasses.is_dataclass(value) else None
        for kind in ("_fields", "__attrs_attrs__", "model_fields", "__struct_fields__"):  # attrs, pydantic, msgspec
            fields = getattr(type(value), kind, fields)
        if isinstance(fields, list | tuple | dict):
            names = [str(getattr(item, "name", item)) for item in fields]
            return [(name, getattr(value, name)) for name in names]
    return None
