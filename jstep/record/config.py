"""A run's config, arguments and command line as JSON without secrets."""

import argparse
import contextlib
import dataclasses
import enum
import functools
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jstep.core.public_names import public_name
from jstep.core.secret_text import NOT_RECORDED, hide
from jstep.stores.files import json_number

MAX_OPTIONS = 10_000
"""The maximum number of options of a config that are recorded."""
MAX_TEXT = 1000
"""The maximum number of characters of a value."""
_MAX_DEPTH = 20
"""The maximum number of levels of a config; a deeper value is one option."""
_MAX_CONFIG = 2**19
"""The maximum number of bytes of a config."""
_MAX_WORDS = 100
"""The maximum number of words of a command line."""
_MAX_ARGV = 2**12
"""The maximum number of its bytes."""


def command_line() -> list[str]:
    """Return the words of the command line, in which each secret is replaced."""
    argv = [str(word) for word in getattr(sys, "argv", ())]
    shown = list[str]()
    # The option whose value the next word may be, as in `--password hunter2`.
    option = ""
    size = 0
    for word in argv[:_MAX_WORDS]:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        if is_option:
            option = "" if equals else name
        text = as_text(word, "" if is_option else option)
        if equals and text != NOT_RECORDED:
            text = f"{as_text(name)}={as_text(value, name)}"
        size += len(encoded(text))
        if size > _MAX_ARGV:
            break
        shown.append(text)
    if len(shown) < len(argv):
        shown.append(f"… and {len(argv) - len(shown)} more")
    return shown


# Values.


def encoded(value: Any) -> bytes:
    """Return a value as JSON; numbers that are not finite are strings."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return json_number(value)
    return value


def _digest(text: str) -> str:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4)
    return f"hash {digest.hexdigest()}"


def as_text(text: str, name: str = "") -> str:
    """Return a string without secrets, which its name may indicate, and shortened if it is long."""
    shown = hide(name, text[: 2 * MAX_TEXT])
    if len(text) > MAX_TEXT and shown != NOT_RECORDED:
        whole = _digest(shown + text[2 * MAX_TEXT :])
        shown = f"{shown[:MAX_TEXT]}… ({len(text)} characters), {whole}"
    return shown.encode("utf-8", "replace").decode()


def plain(value: Any, name: str = "") -> Any:
    """Return a value as JSON without secrets; of another object, the name of its class."""
    with contextlib.suppress(Exception):
        if isinstance(value, enum.Enum):
            return value.name
        if value is None:
            return value
        if isinstance(value, int) and abs(value) < 2**1000:
            # A larger one may have no finite float.
            return value
        if isinstance(value, float):
            return json_number(float(value))
        if isinstance(value, str | os.PathLike):
            return as_text(str(os.fspath(value)), name)
        if _is_list(value):
            shown = []
            for _, item in _items(value):
                shown.append(item if type(item) is int else plain(item, name))
            text = str(shown)
            if len(text) <= MAX_TEXT:
                return shown
            return f"{type(value).__name__} ({len(value)} items), {_digest(text)}"
        if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
            return _plain_array(value)
        if callable(value) and hasattr(value, "__qualname__"):
            return public_name(value)
    return public_name(type(value))


def _plain_array(array: Any) -> Any:
    """Return a scalar's number; of other arrays, whose values are not options, dtype and shape."""
    number = array.item() if array.shape == () else None
    if not isinstance(number, bool | int | float):
        return f"{array.dtype}{list(array.shape)}"
    if array.dtype.kind == "f":
        number = float(str(array))  # a float32 0.1 is 0.1
    return plain(number)


# Configs.


def as_config(config: Any) -> dict[str, Any] | None:
    """Return a config's options by their path, as JSON without secrets, up to a number and size."""
    if config is None:
        return None
    # A list has no names for its options, unless it is a namedtuple.
    is_list = _is_list(config) and not hasattr(config, "_fields")
    entries = None if is_list else _entries(config)
    if entries is None:
        raise TypeError(
            "config: must be a mapping, a dataclass instance, a namedtuple or an "
            f"argparse.Namespace, got {type(config).__name__}; give the attributes of another "
            "object as vars(config)"
        )
    record = dict[str, Any]()
    left_out = list[str]()
    size = 0
    options = (_flat(str(key), item, 1) for key, item in entries)
    for name, value in itertools.chain.from_iterable(options):
        if name in record:
            raise ValueError(
                f"config: two of its values are called {name!r}; give one of them another name"
            )
        if len(record) == MAX_OPTIONS:
            return {**record, "…": f"more than {len(record)} options"}
        text = as_text(name)
        option = encoded({text: value})
        if size + len(option) > _MAX_CONFIG:
            left_out.append(option.decode())
            continue
        record[text] = value
        size += len(option)
    if not left_out:
        return record
    summary = f"{len(left_out)} options are left out, {_digest(str(left_out))}"
    return {**record, "…": summary}


def _flat(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the options in a value, with their paths."""
    entries = _entries(value, depth) if depth < _MAX_DEPTH else None
    if entries is None:
        yield name, plain(value, name)
    elif not entries:
        yield name, {}
    else:
        for key, item in entries:
            yield from _flat(f"{name}/{key}", item, depth + 1)


def _entries(value: Any, depth: int = 0) -> list[tuple[Any, Any]] | None:
    """Return the names and values of a mapping, a record or a list of these, otherwise None."""
    with contextlib.suppress(Exception):
        if isinstance(value, type | str):
            return None
        if callable(getattr(value, "flag_values_dict", None)):  # the FLAGS of absl
            value = value.flag_values_dict()
        # A ConfigDict of ml_collections counts as a mapping, but not a DataFrame, which has `keys`
        # and a shape.
        has_keys = hasattr(value, "keys") and hasattr(value, "__getitem__")
        is_mapping = isinstance(value, Mapping) or (has_keys and not hasattr(value, "shape"))
        if is_mapping:
            return [(key, _read(value.__getitem__, key)) for key in value.keys()]  # noqa: SIM118
        if isinstance(value, argparse.Namespace):
            return list(vars(value).items())
        names = _field_names(value)
        if names is not None:
            return [(name, _read(functools.partial(getattr, value), name)) for name in names]
        if _is_list(value) and depth < _MAX_DEPTH and _has_entries(value, depth + 1):
            return list(itertools.islice(_items(value), MAX_OPTIONS + 1))
    return None


def _field_names(value: Any) -> list[str] | None:
    """Return a record's field names: of a dataclass, namedtuple, attrs, pydantic or msgspec."""
    fields: Any = dataclasses.fields(value) if dataclasses.is_dataclass(value) else None
    for kind in ("_fields", "__attrs_attrs__", "model_fields", "__struct_fields__"):
        fields = getattr(type(value), kind, fields)
    if not isinstance(fields, list | tuple | dict):
        return None
    return [str(getattr(item, "name", item)) for item in fields]


def _has_entries(values: Sequence[Any], depth: int) -> bool:
    """Return whether an item of a list has names of its own, among those that are recorded."""
    for _, item in itertools.islice(_items(values), MAX_OPTIONS):
        # First a quick check: most lists are of numbers, and `_entries` takes long.
        if type(item) not in _PLAIN and _entries(item, depth) is not None:
            return True
    return False


_PLAIN = (bool, int, float, str, type(None))


def _is_list(value: Any) -> bool:
    is_data = isinstance(value, str | bytes | bytearray | memoryview)
    return isinstance(value, Sequence) and not is_data


def _items(value: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, list | tuple):
        yield from enumerate(value)
        return
    for i in range(len(value)):
        yield i, _read(value.__getitem__, i)


def _read(get: Callable[[Any], Any], key: Any) -> Any:
    """Return an entry of an object, or the type of its error, as for a missing OmegaConf value."""
    try:
        return get(key)
    except Exception as error:
        return type(error)
