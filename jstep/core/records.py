"""Records of a user's objects: any value as JSON, without secrets, and equal for equal values in every process."""

import argparse
import array
import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import itertools
import json
import math
import numbers
import os
import re
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core.checks import array_type
from jstep.core.jaxprs import hash_strings, without_addresses
from jstep.core.meshes import internal_transfers
from jstep.core.secret_values import MAX_SEARCHED, NOT_RECORDED, hide, hide_value, is_secret, may_hold_secrets
from jstep.core.trees import is_key

# A user's attributes may be slow, raise, or load a file: only those that are needed are read, and none
# that a `__getattr__` would make.

_MAX_LENGTH, _MAX_NAME = 1000, 200
"""The characters of a value and of a part of a name; of a longer one, a hash of all is recorded."""
_MAX_ENTRIES = 1000
"""The options of a mapping inside of a config; a larger one is one value."""
MAX_OPTIONS = 10_000
"""The options of a config; mappings that would be more are one value."""
_MAX_DEPTH = 50
_MAX_REPR = 1_000_000
_MAX_WORK, _WORK_OF_A_RECORD = 2_000_000, 10
"""The bound of a record, in values, which a list that has itself as an element many times would exceed."""
_PAUSE_EVERY, _PAUSE_SECS = 500, 1e-4
"""After how many values a thread that records lets others run."""
SCALARS = frozenset((bool, int, float, str, type(None)))
_SEQUENCES = list, tuple, set, frozenset
_FIELDS = (
    "__dataclass_fields__",
    "_fields",
    "__attrs_attrs__",
    "__struct_fields__",
    "__pydantic_fields__",
    "model_fields",
)
"""Attributes of the classes of dataclasses, namedtuples, attrs, msgspec and pydantic that have the fields."""
_MAX_KINDS, _MAX_COPIED = 256, 20_000
_LARGE_INT = 1 << 1024
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, types.MethodType
_NAMED = type, types.ModuleType, functools.partial, os.PathLike, enum.Enum, *_FUNCTIONS
"""Types whose text is a name or a path, and no secret for its length."""
_COLLECTIONS = dict, list, tuple, collections.deque, array.array, range, types.MappingProxyType


class Fields(NamedTuple):
    """The entries of a mapping, dataclass instance or the like, `of`, as they were."""

    of: Any
    entries: Collection[tuple[Any, Any]]


def json_float(value: float) -> float | str:
    """Return a float as JSON: NaN and infinities as strings."""
    return float(value) if math.isfinite(value) else str(float(value))


def fields_of(value: Any) -> Fields | None:
    """Return the entries of a dict, Namespace, namedtuple, or an object of dataclasses, attrs, msgspec or pydantic."""
    kind: Any = type(value)
    if kind in SCALARS or kind in _SEQUENCES:
        return None
    if issubclass(kind, dict):
        return Fields(value, list(dict.items(value)))
    if issubclass(kind, argparse.Namespace):
        return Fields(value, list(vars(value).items()))
    names: list[str] | None = _names_of_fields(kind)
    if names is None or issubclass(kind, tuple):
        return None if names is None else Fields(value, list(zip(names, tuple.__iter__(value), strict=False)))
    return Fields(value, [(name, _attribute(value, name)) for name in names])


@functools.lru_cache(_MAX_KINDS)
def _names_of_fields(kind: type) -> list[str] | None:
    if issubclass(kind, type):
        return None
    for name in _FIELDS:
        # A descriptor of the metaclass has those of msgspec.
        fields = None if inspect.getattr_static(kind, name, None) is None else getattr(kind, name)
        if name == "__dataclass_fields__" and fields is not None:
            return [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        if isinstance(fields, tuple | dict) and (name != "_fields" or issubclass(kind, tuple)):
            return [field if isinstance(field, str) else field.name for field in fields]
    return None


def _attribute(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)  # not `__getattr__`
    except Exception:  # it is half built
        return None


def is_mapping(value: Any) -> bool:
    """Whether a value has `keys` and `[]`, and is no table."""
    kind: Any = type(value)
    return bool(_is_mapping(kind)) and not _has(value, "shape")


@functools.lru_cache(_MAX_KINDS)
def _is_mapping(kind: type) -> bool:
    has_both = all(callable(inspect.getattr_static(kind, name, None)) for name in ("keys", "__getitem__"))
    return has_both and not issubclass(kind, type)


def references(value: Any, deadline: float, above: tuple[int, ...] = ()) -> Any:
    """Copy the dicts, lists, sets and dataclasses of a value, or as many as there is time for; read nothing else."""
    kind, inside = type(value), (*above, id(value))

    def copies(items: list[Any]) -> list[Any]:
        if SCALARS.issuperset(map(type, items)):
            return items
        for i in range(0, len(items), _PAUSE_EVERY):
            if time.monotonic() > deadline:
                break
            part = items[i : i + _PAUSE_EVERY]
            items[i : i + _PAUSE_EVERY] = [references(item, deadline, inside) for item in part]
        return items

    if kind in SCALARS or id(value) in above or len(above) > _MAX_DEPTH:
        return value
    with contextlib.suppress(Exception):
        if kind in _SEQUENCES:
            return kind(copies(list(value)) if kind in (list, tuple) else value)
        if issubclass(kind, dict) and len(value) > _MAX_COPIED:
            return Fields(value, dict.copy(value).items())
        if (fields := fields_of(value)) is not None:
            items = copies([item for _, item in fields.entries])
            return Fields(value, [(key, item) for (key, _), item in zip(fields.entries, items, strict=True)])
    return value


class Recorder:
    """The conversion of values to JSON, in bounded time. Nothing that a value does raises, or ends it."""

    def __init__(self) -> None:
        self._left = _MAX_WORK
        self.has_edited_keys = False
        self._is_shown = True  # otherwise so far behind in a list that only its hash is recorded

    # Names.

    def entries(self, config: Any) -> list[tuple[Any, Any]]:
        """Return the entries of a whole config, which is never too large for that."""
        if type(config) is Fields:
            return list(config.entries)
        return [(key, _item(config, key)) for key in itertools.islice(iter(config.keys()), MAX_OPTIONS)]

    def entry(self, name: str, value: Any, of: Any) -> list[tuple[str, Any]]:
        """Return the options of an entry of the config `of`, whatever was recorded before."""
        self._left = _MAX_WORK
        return list(self.options(name, value, (id(of),)))

    def options(self, name: str, value: Any, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
        """Return the named values of an entry of a config, the names joined by `/`, and each value as JSON."""
        of = value.of if type(value) is Fields else value
        inside: Any = None
        if type(value) not in SCALARS and id(of) not in above and len(above) <= _MAX_DEPTH:
            with contextlib.suppress(Exception):
                inside = self._inside(value)
        if isinstance(inside, str):
            yield name, NOT_RECORDED if is_secret(name, inside) else inside
        elif not inside:
            yield name, self.record(name, of)
        elif len(inside) > _MAX_ENTRIES:
            yield name, summary(of, len(inside), self._below(name, inside, (*above, id(of)), are_shown=False))
        else:
            pairs = self._below(name, inside, (*above, id(of)))
            first = list(itertools.islice(pairs, _MAX_ENTRIES + 1))
            if len(first) > _MAX_ENTRIES:
                first = [(name, summary(of, len(inside), itertools.chain(first, pairs)))]
            yield from first

    def _below(
        self, name: str, inside: Iterable[tuple[Any, Any]], above: tuple[int, ...], *, are_shown: bool = True
    ) -> Iterator[tuple[Any, Any]]:
        for key, item in inside:
            if not self._spend():
                return
            is_list = type(item) in (list, tuple)
            if not are_shown and type(key) in SCALARS and SCALARS.issuperset(map(type, item if is_list else [item])):
                yield key, list(item) if is_list else item
            else:
                yield from self.options(f"{name}/{self.key(key)}", item, above)

    def _inside(self, value: Any) -> Collection[tuple[Any, Any]] | str | None:
        """Return what has names of its own; the text of a mapping that is too large to be read; None for a value."""
        if (fields := value if type(value) is Fields else fields_of(value)) is not None:
            return fields.entries
        if issubclass(type(value), list | tuple):
            return list(enumerate(_items(value))) if self._has_names(value, 0) else None
        if not is_mapping(value):
            return None
        with contextlib.suppress(Exception):
            if (count := len(value)) > _MAX_ENTRIES:
                return f"{kind_of(value)} ({count} entries)"
        keys = list(itertools.islice(iter(value.keys()), _MAX_ENTRIES + 1))
        if len(keys) > _MAX_ENTRIES:
            return f"{kind_of(value)} (more than {_MAX_ENTRIES} entries)"
        return [(key, _item(value, key)) for key in keys]

    def _has_names(self, value: Any, depth: int) -> bool:
        if (fields := value if type(value) is Fields else fields_of(value)) is not None:
            return bool(fields.entries)
        if not issubclass(type(value), list | tuple):
            return is_mapping(value)
        if depth > _MAX_DEPTH or not self._spend() or SCALARS.issuperset(map(type, items := _items(value))):
            return False
        return any(type(item) not in SCALARS and self._has_names(item, depth + 1) for item in items)

    def key(self, key: Any) -> str:
        """Return a key as a part of a name."""
        text = key if type(key) is str else self._text(key, str)
        shown = _cut(hide(_encodable(text[:MAX_SEARCHED])), text, _MAX_NAME)
        self.has_edited_keys |= type(key) not in SCALARS or shown != str(key)
        return shown

    # Values.

    def record(self, name: str, value: Any) -> Any:
        """Return a value as JSON of at most some 1,000 characters, or NOT_RECORDED if it is or may be a secret."""
        kind = type(value)
        self._is_shown, self._left = True, self._left - _WORK_OF_A_RECORD
        try:
            found = self.json(value)
        except Exception:  # such as a list inside of itself
            found = self._text(value)
        is_name = issubclass(kind, _NAMED) or (
            isinstance(found, str) and found[:1] == "<" and not issubclass(kind, str)
        )
        if is_secret(name, "name" if is_name else found):
            return NOT_RECORDED
        text = found if isinstance(found, str) else _dumps(found)
        return found if len(text) <= _MAX_LENGTH else _cut(text, text, _MAX_LENGTH)

    def json(self, value: Any, depth: int = 0) -> Any:
        """Convert a value to JSON without NaN, secrets and addresses; arrays become their dtype and shape."""
        kind = type(value)
        if depth and not self._spend():
            return "…"
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_LARGE_INT < value < _LARGE_INT else hex(value)
        if kind is float:
            return json_float(value)
        if kind is str:
            return self._string(value)
        if kind is Fields:
            return self.json(value.of, depth)
        if kind in (list, tuple) or (issubclass(kind, list | tuple) and fields_of(value) is None):
            return self._list(_items(value), depth)
        try:
            return self._other(value, kind, depth)
        except RecursionError:
            raise
        except Exception:
            return kind_of(value)

    def _other(self, value: Any, kind: type, depth: int) -> Any:
        if issubclass(kind, str):
            return self._string(str.__str__(value))
        if issubclass(kind, int):
            return self.json(int.__int__(value))
        if issubclass(kind, float):
            return self.json(float.__float__(value))
        if issubclass(kind, enum.Enum):
            return self._text(value)
        if issubclass(kind, os.PathLike):
            return self._string(os.fsdecode(value))
        if issubclass(kind, set | frozenset):
            if len(value) > _MAX_COPIED:
                return summary(value, len(value), ((self.json(item, depth + 1), None) for item in value))
            items, is_shown = list[Any](), self._is_shown
            for item in value:
                self._is_shown = is_shown  # any of them may be the first one
                items.append(self.json(item, depth + 1))
            return sorted(items, key=lambda item: (str(type(item)), str(item)))
        if (shape := _shape_of(value)) is not None:
            return self._array(value, kind, shape, depth)
        if issubclass(kind, numbers.Integral):
            return self.json(int(value))
        return self._text(value)

    def _list(self, items: list[Any], depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise RecursionError
        found: list[Any] = []
        option = ""  # of a command line, to which the words until the next dash belong
        for i, item in enumerate(items):
            self._is_shown = self._is_shown and i <= _MAX_ENTRIES
            shown = self.json(item, depth + 1)
            if self._is_shown and type(item) is str:
                option = item.partition("=")[0] if item.startswith("-") else option
                shown = NOT_RECORDED if option and item[:1] != "-" and is_secret(option, item) else shown
            found.append(shown)
            if self._left <= 0:
                break
        return found

    def _string(self, text: str) -> str:
        self._left -= len(text) // 100
        if not self._is_shown:
            return text
        if len(text) <= MAX_SEARCHED:
            text = _encodable(text)
            return hide_value("", text) if may_hold_secrets(text) else text
        shown = hide_value("", _encodable(text[:MAX_SEARCHED]))
        return shown if shown == NOT_RECORDED else _cut(shown, text, _MAX_LENGTH)

    def _array(self, value: Any, kind: type, shape: tuple[Any, ...], depth: int) -> Any:
        dtype = value.dtype if _has(value, "dtype") else None
        is_array = issubclass(kind, np.ndarray | np.generic | jax.Array)
        if is_array and is_key(value) and value.is_fully_addressable and value.size <= _MAX_DEPTH:
            with internal_transfers():
                return f"{dtype} {np.asarray(jax.random.key_data(value)).tolist()}"
        with contextlib.suppress(Exception):  # of an array that was donated
            if dtype is not None and shape == ():
                number = value.item()
                # A float32 0.1 is 0.1.
                return self.json(float(str(value)) if isinstance(number, float | np.floating) else number, depth + 1)
        if is_array:
            return array_type(shape, dtype)
        dims = ", ".join(str(dim) if type(dim) is int else "?" for dim in shape)
        described = "" if dtype is None else f" {str(dtype)[:_MAX_NAME]}"
        return hide(f"{kind_of(value)}{described} ({dims}{',' * (len(shape) == 1)})")

    def _text(self, value: Any, form: Callable[[Any], str] = repr) -> str:
        """Return the representation of an object without addresses, with sorted sets; its class if there is none."""
        kind = type(value)
        with contextlib.suppress(Exception):
            if issubclass(kind, type):
                return _joined(type.__getattribute__(value, "__module__"), type.__getattribute__(value, "__qualname__"))
            if issubclass(kind, types.ModuleType):
                return str(value.__name__)
            if issubclass(kind, _FUNCTIONS):
                return _joined(value.__module__, value.__qualname__)
            if issubclass(kind, functools.partial):
                given = [*enumerate(value.args), *value.keywords.items()]
                options = [option for key, item in given for option in self.options(str(key), item, (id(value),))]
                words = [_dumps(item) if name.isdecimal() else f"{name}={_dumps(item)}" for name, item in options]
                return f"partial({', '.join([self._text(value.func), *words])})"
            if issubclass(kind, bytes | bytearray | memoryview) and len(value) > _MAX_LENGTH:
                return (
                    f"{kind_of(value)} ({len(value)} bytes, hash {hashlib.blake2b(value, digest_size=8).hexdigest()})"
                )
            if issubclass(kind, _COLLECTIONS):
                inside = dict.values(value) if issubclass(kind, dict) else value
                if len(value) > _MAX_ENTRIES or not all(type(item) in SCALARS or item is value for item in inside):
                    return f"{kind_of(value)} ({len(value)} entries)"
            text = without_addresses(form(value)[:_MAX_REPR])
            return self._string(sort_sets(text) if "{" in text else text)
        return kind_of(value)

    def _spend(self) -> bool:
        self._left -= 1
        if self._left % _PAUSE_EVERY == 0:
            time.sleep(_PAUSE_SECS)
        return self._left > 0


def record_value(name: str, value: object) -> Any:
    """Return any value as JSON, or NOT_RECORDED if it is a secret."""
    return Recorder().record(name, value)


def json_of(value: object) -> Any:
    """Return any value as JSON without secrets."""
    return record_value("", value)


def _dumps(value: Any) -> str:
    """Return JSON text; a long list is converted in parts, since other threads wait for `json` meanwhile."""
    if not isinstance(value, list) or len(value) <= _MAX_ENTRIES:
        return json.dumps(value)
    parts = (value[i : i + _MAX_ENTRIES] for i in range(0, len(value), _MAX_ENTRIES))
    return f"[{', '.join(json.dumps(part)[1:-1] for part in parts)}]"


def _encodable(text: str) -> str:
    """Escape halves of surrogate pairs, which the names of files have in place of what is not UTF-8."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _cut(shown: str, whole: str, length: int) -> str:
    return shown if len(whole) <= length else f"{shown[:length]}… (hash {hash_strings(whole)[:16]})"


def summary(value: Any, count: int, options: Iterable[tuple[Any, Any]]) -> str:
    """Return the type of a mapping, the number of its entries, and a hash of its options, in any order."""
    total = 0
    for option in options:
        text = repr(option).encode("utf-8", "surrogatepass")
        total += int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    return f"{kind_of(value)} ({count} entries, hash {total % 2**64:016x})"


def _items(value: Any) -> list[Any]:
    """Return the elements of a list or tuple, also of one that has an `__iter__` of its own."""
    return list(list.__iter__(value) if issubclass(type(value), list) else tuple.__iter__(value))


def _has(value: Any, name: str) -> bool:
    """Whether a value has a field or property of its own, not one that a `__getattr__` makes, or a method."""
    found = inspect.getattr_static(value, name, len)
    return not callable(found)


def _shape_of(value: Any) -> tuple[Any, ...] | None:
    """Return the shape of an array, a table or a dataset."""
    with contextlib.suppress(Exception):
        if not issubclass(type(value), type) and _has(value, "shape") and not isinstance(shape := value.shape, str):
            dims = [
                dim.__index__() if isinstance(dim, np.integer) else dim for dim in itertools.islice(shape, _MAX_DEPTH)
            ]
            is_shape = any(type(dim) is int for dim in dims) if dims else _has(value, "dtype")
            return tuple(dims) if is_shape else None
    return None


def _item(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except Exception as error:  # a value that is missing, or cannot be resolved
        return f"({type(error).__name__})"


def kind_of(value: Any) -> str:
    return str(type.__getattribute__(type(value), "__qualname__"))


def _joined(module: object, name: object) -> str:
    return str(name) if module in ("builtins", "__main__", None) else f"{module}.{name}"


_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|[^'"{}\[\](),:]++|.""", re.DOTALL)


def sort_sets(text: str) -> str:
    """Sort the elements of the sets in a representation, whose order differs between processes."""
    levels: list[tuple[str, list[str]]] = [("", [""])]  # the opening bracket, and what it encloses, parted by commas
    for token in _TOKEN.findall(text):
        if token in "{[(":
            levels.append((token, [""]))
        elif token in "}])" and len(levels) > 1:
            opening, items = levels.pop()
            is_set = opening == "{" and "\0" not in "".join(items)
            inner = ", ".join(sorted(map(str.strip, items))) if is_set else ",".join(items).replace("\0", ":")
            levels[-1][1][-1] += f"{opening}{inner}{token}"
        elif token == ",":
            levels[-1][1].append("")
        else:
            levels[-1][1][-1] += "\0" if token == ":" and levels[-1][0] == "{" else token
    return "".join(opening + ",".join(items).replace("\0", ":") for opening, items in levels)
