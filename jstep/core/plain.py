"""What a run records of values of its program, as JSON without secrets: its config, its arguments, its command line."""

import argparse
import contextlib
import dataclasses
import enum
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

NOT_RECORDED = "(not recorded)"
"""The placeholder for a secret."""
MAX_OPTIONS, _MAX_TEXT, _MAX_ARGUMENTS, _MAX_DEPTH = 10_000, 1000, 100, 20

# Secrets: one rule for values, command lines, environment variables and texts.

_NAME = re.compile(r"secret|passw|passphrase|pwd|credential|private_?key|authori[sz]ation|token|(api|auth|access)_?key")
_IN_TEXT = re.compile(
    r"-----BEGIN[\s\S]*|\b(?:sk-|hf_|gh[pos]_|github_pat_|AKIA|xox[bp]-|glpat-)[\w-]{12,}|(?i:\b(?:bearer|basic)\s+)\S{8,}"
)
_LOGIN = re.compile(r"(\w://)[^\s/?#]*@")
_QUERY = re.compile(r"(\w://[^\s?#]*)[?#]\S*")
_PAIR = re.compile(r"(-{0,2}[\w.-]+)([\"']?\s*[=:]\s*[\"']?|(?<=\w)\s+(?=[^-\s]))([^\s,;'\"]+)")


def is_secret(name: str, value: object) -> bool:
    """Whether a text must not be recorded, by its name and those of its parents; numbers are no secrets."""
    return isinstance(value, str) and bool(_NAME.search(name.lower().replace("-", "_")))


def hide(text: str) -> str:
    """Remove logins and queries of URLs, what looks like a token, and the values of pairs with such a name."""
    text = _QUERY.sub(r"\1", _LOGIN.sub(r"\1", text))

    def shown(pair: re.Match[str]) -> str:
        is_pair = pair[2].strip() or pair[1].startswith("--")
        return f"{pair[1]}{pair[2]}{NOT_RECORDED}" if is_pair and is_secret(pair[1], pair[3]) else pair[0]

    return _IN_TEXT.sub(NOT_RECORDED, _PAIR.sub(shown, text) if _NAME.search(text.lower().replace("-", "_")) else text)


def error_text(error: BaseException | None) -> str:
    """Return the text of an exception without secrets; it may be user-defined and raise."""
    with contextlib.suppress(Exception):
        return hide(str(error)[:20_000])
    return ""


def command_line() -> list[str]:
    """Return the first arguments without secrets."""
    argv, shown, before = [str(word) for word in getattr(sys, "argv", ())], list[str](), ""
    for word in argv[:_MAX_ARGUMENTS]:
        is_value = before.startswith("-") and "=" not in before and not word.startswith("-")
        shown.append(NOT_RECORDED if is_value and is_secret(before, word) else text_of(hide(word)))
        before = word
    more = len(argv) - len(shown)
    return [*shown, f"… and {more} more"] if more else shown


# Values.


def text_of(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text)} characters)"


def number(value: float) -> float | str:
    """A float as JSON has it: one that is not finite as text."""
    return value if math.isfinite(value) else str(value)


def plain(value: object, name: str = "") -> Any:
    """Return a value as JSON; one that raises, or of an unknown type, is the name of its type."""
    try:
        return _plain(value, name, 0)
    except Exception:
        return _type_name(type(value))


def _plain(value: Any, name: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or (kind is int and abs(value) < 2**63):
        return value
    if kind is float:
        return number(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, str | os.PathLike):
        return NOT_RECORDED if is_secret(name, text := os.fspath(value)) else text_of(hide(str(text)))
    if isinstance(value, list | tuple | set | frozenset) and depth < _MAX_DEPTH:
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        shown, length = list[Any](), 0
        for item in items:
            shown.append(_plain(item, name, depth + 1))
            length += len(str(shown[-1])) + 2
            if length > _MAX_TEXT:
                return [*shown, f"… ({len(value)} items)"]
        return shown
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        return {str(key): _plain(item, f"{name}/{key}", depth + 1) for key, item in list(value.items())[:_MAX_TEXT]}
    if hasattr(kind, "__array__") or hasattr(kind, "shape"):
        if value.shape == () and hasattr(value, "item") and isinstance(item := value.item(), bool | int | float):
            return _plain(item, name, depth)
        return f"{value.dtype}{list(value.shape)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return _type_name(kind)


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def fields_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The names and values of an object that is a set of options, or None."""
    kind = type(value)
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, type) or kind.__module__ == "builtins":
        return None
    if isinstance(value, argparse.Namespace):
        return list(vars(value).items())
    names = (
        [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value)
        else getattr(kind, "_fields", None) or getattr(kind, "__struct_fields__", None)
        or getattr(kind, "model_fields", None) or [item.name for item in getattr(kind, "__attrs_attrs__", ())]
    )  # fmt: skip
    return [(name, getattr(value, name)) for name in names] if names else None


def flat(options: Any, above: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the options of a config with their names, those of nested ones joined by `/`."""
    for key, value in options:
        name = f"{above}{key}"
        try:
            below = fields_of(value) if depth < _MAX_DEPTH else None
        except Exception:
            below = None
        if below:
            yield from flat(below, f"{name}/", depth + 1)
        else:
            yield name, {} if below is not None and not below else plain(value, name)


def as_config(config: Any) -> dict[str, Any] | None:
    """Return the record of a config: name → JSON value."""
    if config is None:
        return None
    if type(config).__name__ == "FlagValues" and hasattr(type(config), "flag_values_dict"):
        raise TypeError("config: must be a mapping, got the FLAGS of absl; give FLAGS.flag_values_dict()")
    options = fields_of(config)
    if options is None:
        raise TypeError(
            "config: must be a mapping, a dataclass instance, a namedtuple or an argparse.Namespace, got "
            f"{type(config).__name__}; give the attributes of another object as vars(config)"
        )
    record: dict[str, Any] = {}
    more = 0
    for name, value in flat(options):
        if len(record) >= MAX_OPTIONS:
            more += 1
        elif name in record:
            raise ValueError(f"config: two of its values are called {name!r}; give one of them another name")
        else:
            record[text_of(name)] = value
    return record | ({"…": f"and {more} more"} if more else {})
