"""The inputs of a run: its config and command line as JSON without secrets."""

import argparse
import contextlib
import dataclasses
import enum
import json
import math
import numbers
import os
import re
import sys
from typing import Any

from jstep.core.checks import array_type, describe_type
from jstep.core.jaxprs import hash_strings, without_addresses
from jstep.core.trees import is_plain_tuple
from jstep.hooks.card_differences import NOT_RECORDED

# The config and the command line.

_MAX_LENGTH, _MAX_ARGUMENTS = 1000, 100
_SECRET = re.compile(r"(secret|password|passwd|passphrase|pwd|credential)s?")
"""Words of a name whose value is always a secret."""
_SECRET_IF_LONG = re.compile(r"(key|token|auth|authorization|apikey)s?")
"""Words of a name whose value is a secret if it is a long word, unlike `num_tokens=1024` and `image_key="image"`."""
_LONG_WORD = re.compile(r"\S{16,}")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_LOGIN, _QUERY = re.compile(r"(\w://)[^/@\s]*@"), re.compile(r"(\w://[^?\s]*)\?\S*")


def as_config(config: object) -> dict[str, Any] | None:
    """Return a config as name → JSON value, nested names joined by `/`."""
    if config is None:
        return None
    if (entries := _entries(config)) is None:
        raise TypeError(
            "config: must be a mapping, a dataclass instance, a namedtuple or an argparse.Namespace, got "
            f"{describe_type(config)}; give the attributes of another object as vars(config)"
        )
    record: dict[str, Any] = {}
    for name, value in _flat("", config, ()) if entries else ():
        if name in record:
            raise ValueError(f"config: two of its values are called {name!r}; give one of them another name")
        record[name] = record_value(name, value)
    return record


def _entries(value: Any) -> dict[Any, Any] | None:
    """Return the entries of a mapping, dataclass instance, namedtuple or namespace; None for any other value."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace):
        return dict(vars(value))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if not (callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__")):
        return None
    entries = {}
    for key in value.keys():  # noqa: SIM118  (mappings need only `keys` and `[]`)
        try:
            entries[key] = value[key]
        except Exception as error:  # a value that is missing, or cannot be resolved
            entries[key] = f"({type(error).__name__})"
    return entries


def _flat(name: str, value: Any, above: tuple[int, ...]) -> list[tuple[str, Any]]:
    """Name all values; a sequence is one value, unless there are names inside, which may belong to secrets."""
    is_sequence = isinstance(value, list) or is_plain_tuple(value)
    entries = None if id(value) in above else dict(enumerate(value)) if is_sequence else _entries(value)
    if not entries:
        return [(name, value)]
    inside = (*above, id(value))
    named = [
        pair for key, item in entries.items() for pair in _flat(f"{name}/{key}" if above else str(key), item, inside)
    ]
    is_whole = is_sequence and [id(item) for _, item in named] == [id(item) for item in value]
    return [(name, value)] if is_whole else named


def record_value(name: str, value: object) -> Any:
    """Return a value as JSON, or NOT_RECORDED if its name suggests a secret."""
    try:
        value = as_json_value(value)
    except RecursionError:  # a list inside of itself
        value = _repr(value)
    words = [word.lower() for word in _WORD.findall(name)]
    is_secret = any(map(_SECRET.fullmatch, words)) and not isinstance(value, bool | None)
    if is_secret or (any(map(_SECRET_IF_LONG.fullmatch, words)) and _has_long_word(value)):
        return NOT_RECORDED
    text = value if isinstance(value, str) else json.dumps(value)
    return value if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}… (hash {hash_strings(text)[:16]})"


def _has_long_word(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_has_long_word, value))
    return isinstance(value, str) and _LONG_WORD.fullmatch(value) is not None


def as_json_value(value: Any) -> Any:
    """Convert a value to JSON, without NaN, logins and addresses; arrays become their dtype and shape."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum) and not isinstance(value, str | numbers.Real):
        return _repr(value)
    if isinstance(value, str):
        return without_login(str.__str__(value))
    if isinstance(value, os.PathLike):
        return without_login(os.fsdecode(value))
    if isinstance(value, list) or is_plain_tuple(value):
        return [as_json_value(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(as_json_value, value), key=lambda item: (str(type(item)), str(item)))
    with contextlib.suppress(Exception):  # of a key, or of an array that was donated
        if value.shape == () and hasattr(value, "dtype"):
            number = value.item()
            value = float(str(value)) if isinstance(number, float) else number  # a float32 0.1 is 0.1
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return array_type(value.shape, value.dtype)
    return _repr(value)


def _repr(value: object) -> str:
    try:
        return _PAIR.sub(_without_secret, without_addresses(without_login(repr(value))))
    except Exception:
        return type(value).__qualname__


_PAIR = re.compile(r"""([\w.-]+)(['"]?\s*[=:]\s*)('[^']*'|"[^"]*"|[^\s,()\[\]{}]+)""")
"""A name and its value in the representation of an object."""


def _without_secret(pair: re.Match[str]) -> str:
    name, between, value = pair.groups()
    return f"{name}{between}{NOT_RECORDED}" if record_value(name, value.strip("'\"")) == NOT_RECORDED else pair[0]


def without_login(text: str) -> str:
    """Strip the user name, password and query from all URLs in a string."""
    return _QUERY.sub(r"\1", _LOGIN.sub(r"\1", text))


def command_line() -> list[str]:
    argv, shown, before = [str(word) for word in getattr(sys, "argv", ())], list[str](), ""
    for word in argv[:_MAX_ARGUMENTS]:
        name, equals, value = word.partition("=")
        if equals and "://" not in name:
            shown.append(f"{name}={record_value(name, value)}")
        else:
            shown.append(word if word.startswith("--") else str(record_value(before, word)))
        before = word if word.startswith("-") and not equals else ""
    more = len(argv) - len(shown)
    return [*shown, f"… and {more} more"] if more else shown
