"""JSON that is checked against types, such as those of the record of a run: `checked`.

A schema is a TypedDict whose fields are JSON's types, lists, dicts, tuples, other TypedDicts,
`T | None`, or `Annotated[T, is_valid]`. None means unknown or not applicable. Optional fields,
lists and dicts may be absent.
"""

import contextlib
import functools
import itertools
import os
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NoReturn, TypeAlias

from jstep.core.checks import format_value
from jstep.stores.untrusted import is_seconds, is_step
from jstep.stores.urls import is_url


def _is_path(value: str) -> bool:
    # A relative path would mean another file in each directory from which it is read.
    is_absolute = os.path.isabs(value) or is_url(value)
    return is_absolute and len(value) < 2**15 and "\0" not in value


Seconds: TypeAlias = Annotated[float, is_seconds]
Step: TypeAlias = Annotated[int, is_step]
Path: TypeAlias = Annotated[str, _is_path]


def checked(value: Any, kind: Any) -> Any:
    """Return JSON as a value of a type, or raise a ValueError that says what is not valid.

    Invalid entries of a `dict[str, T]` are left out. A float may be given as an int, a bool, "nan",
    "inf" or "-inf".

    Example:
        >>> checked({"loss": True, "accuracy": "nan", "x": [1]}, dict[str, float])
        {'loss': 1.0, 'accuracy': nan}
    """
    origin, kinds = _origin_and_args(kind)
    if origin in (typing.Union, types.UnionType):  # `T | None`
        if value is None:
            return None
        return checked(value, kinds[0])
    if origin is Annotated:
        value = checked(value, kinds[0])
        is_valid = kinds[1]
        if not is_valid(value):
            _reject(value)
        return value
    if typing.is_typeddict(kind):
        if type(value) is not dict:
            _reject(value)
        return value | _fields_of(value, kind)
    if origin is dict:
        return _entries_of({} if value is None else value, kinds[1])
    if origin is list:
        return _items_of([] if value is None else value, itertools.repeat(kinds[0]))
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            _reject(value)
        return _items_of(value, kinds)
    if kind is float:
        return _as_float(value)
    if kind is not Any and type(value) is not kind:
        _reject(value)
    return value


def valid_fields(fields: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return those fields that a kind has, without invalid ones."""
    found = {}
    for name, hint in _hints(kind).items():
        with contextlib.suppress(ValueError, TypeError):
            found[name] = checked(fields.get(name), hint)
    return found


@functools.cache
def _origin_and_args(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _reject(value: object) -> NoReturn:
    raise ValueError(f"holds {format_value(value)}, which is not valid")


def _as_float(value: Any) -> Any:
    if type(value) in (bool, float) or value in ("nan", "inf", "-inf"):
        return float(value)
    # Of a larger int, `float` would raise an OverflowError.
    if type(value) is int and abs(value) < 2**1000:
        return float(value)
    _reject(value)


def _fields_of(value: dict[str, Any], kind: Any) -> dict[str, Any]:
    found = {}
    for name, hint in _hints(kind).items():
        try:
            found[name] = checked(value.get(name), hint)
        except (ValueError, TypeError):
            raise ValueError(
                f"has {name}={format_value(value.get(name))}, which is not valid"
            ) from None
    return found


def _entries_of(value: Any, kind: Any) -> dict[str, Any]:
    if type(value) is not dict:
        _reject(value)
    found = {}
    for name, entry in value.items():
        with contextlib.suppress(ValueError, TypeError):
            found[name] = checked(entry, kind)
    return found


def _items_of(value: Any, kinds: Iterable[Any]) -> list[Any]:
    if not isinstance(value, list | tuple):
        _reject(value)
    return [checked(item, kind) for item, kind in zip(value, kinds, strict=False)]
