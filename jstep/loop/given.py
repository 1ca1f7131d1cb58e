"""The inputs of a run: its config and command line as JSON without secrets."""

import contextlib
import functools
import itertools
import re
import sys
import time
from concurrent.futures import wait
from typing import Any

from jstep.core.checks import describe_type
from jstep.core.records import (
    MAX_OPTIONS,
    SCALARS,
    Fields,
    Recorder,
    is_mapping,
    kind_of,
    record_value,
    references,
    summary,
)
from jstep.core.secret_values import NOT_RECORDED
from jstep.core.threads import in_background
from jstep.hooks.cards import NOT_READY

# The config and the command line.

_COPY_SECS, _START_SECS = 0.04, 0.08
"""The seconds for which the caller copies a config, and for which it waits for its record, in all."""
_MAX_WEIGHT, _WEIGHT_OF_OTHERS, _MAX_ARGUMENTS = 1000, 10**9, 100
_ARGUMENT = re.compile(r"([-+~]*[\w./-]+)(\s*[=:]\s*)(?!//)(.*)", re.DOTALL)


class Config(dict[str, Any]):
    """The record of a config: name → JSON value, nested names joined by `/`.

    A thread makes it, whatever the config holds; what the caller does not wait for is NOT_READY until all is ready.
    """

    def __init__(self, config: Any, deadline: float) -> None:
        self._parts: list[list[tuple[str, Any]]] = []  # the options of each entry
        self._twice: str | None = None
        self._is_late = False
        self.ready = in_background(functools.partial(self._convert, config), name="jstep-config", daemon=True)
        if self.wait(deadline - time.monotonic()):
            self.ready.result()
        else:
            self._publish()
            self._is_late = False
        if self._twice is not None:
            raise ValueError(f"config: two of its values are called {self._twice!r}; give one of them another name")

    def wait(self, seconds: float) -> bool:
        """Wait until all is ready, but not again once it took longer; return whether it is."""
        wait([self.ready], timeout=0 if self._is_late else max(0.0, seconds))
        self._is_late = not self.ready.done()
        return not self._is_late

    def _convert(self, config: Any) -> None:
        recorder, of = Recorder(), _of(config)
        entries, rest = list[tuple[str, Any]](), list[tuple[Any, Any]]()
        with contextlib.suppress(BaseException):  # its keys cannot be read
            of_config = recorder.entries(config)
            entries, rest = (
                [(recorder.key(key), item) for key, item in of_config[:MAX_OPTIONS]],
                of_config[MAX_OPTIONS:],
            )
        self._parts = [
            [(name, recorder.record(name, item) if type(item) in SCALARS else NOT_READY)] for name, item in entries
        ]
        for i in sorted(range(len(entries)), key=lambda i: _weight(entries[i][1])):
            name, item = entries[i]
            if type(item) not in SCALARS:
                try:
                    self._parts[i] = recorder.entry(name, item, of)
                except BaseException:  # a user's code may raise even SystemExit, which is nothing in a thread
                    self._parts[i] = [(name, kind_of(_of(item)))]
        count = 0
        for i, (name, item) in enumerate(entries):
            options = self._parts[i]
            count += len(options)
            if count > MAX_OPTIONS and len(options) > 1:
                self._parts[i] = [(name, summary(_of(item), len(options), options))]
        if rest:
            others = (
                (recorder.key(key), item if type(item) in SCALARS else recorder.record("", _of(item)))
                for key, item in rest
            )
            self._parts.append([("…", summary(of, len(rest), others))])
        twice = self._publish()
        self._twice = None if recorder.has_edited_keys else twice

    def _publish(self) -> str | None:
        """Put what is ready into the record; return a name that two values have."""
        options: dict[str, Any] = {}
        twice = None
        for name, value in itertools.chain(*self._parts):
            twice = name if name in options else twice
            numbered = (f"{name} ({number})" for number in itertools.count(2))
            options[next(new for new in itertools.chain([name], numbered) if new not in options)] = value
        self.update(options)
        for name in self.keys() - options.keys():
            del self[name]
        return twice


def as_config(config: Any) -> Config | None:
    """Return the record of a config, which it reads once."""
    if config is None:
        return None
    if type(config).__name__ == "FlagValues" and hasattr(type(config), "flag_values_dict"):
        raise TypeError("config: must be a mapping, got the FLAGS of absl; give FLAGS.flag_values_dict()")
    began = time.monotonic()
    copied = references(config, began + _COPY_SECS)
    if not (type(copied) is Fields or is_mapping(config)):
        raise TypeError(
            "config: must be a mapping, a dataclass instance, a namedtuple or an argparse.Namespace, got "
            f"{describe_type(config)}; give the attributes of another object as vars(config)"
        )
    return Config(copied, began + _START_SECS)


def _of(value: Any) -> Any:
    return value.of if type(value) is Fields else value


def _weight(value: Any, depth: int = 0) -> int:
    """Estimate how long the conversion of a value takes: small ones are ready first."""
    if type(value) in SCALARS:
        return 0
    if type(value) not in (list, tuple, Fields):
        return _WEIGHT_OF_OTHERS
    items = value.entries if type(value) is Fields else value
    if len(items) > _MAX_WEIGHT or depth > 2:
        return _MAX_WEIGHT
    return len(items) + sum(_weight(item[1] if type(value) is Fields else item, depth + 1) for item in items)


def command_line() -> list[str]:
    """Return the first arguments without secrets; words without a dash belong to the option before them."""
    argv = [str(word) for word in getattr(sys, "argv", ())]
    shown, option = list[str](), ""
    for word in argv[:_MAX_ARGUMENTS]:
        pair = _ARGUMENT.fullmatch(word)
        name, between, value = pair.groups() if pair else (word, "", "")
        if not word.startswith("--") and record_value(option, word) == NOT_RECORDED:
            shown.append(NOT_RECORDED)
        elif pair and record_value(name, value) == NOT_RECORDED:
            shown.append(f"{name}{between}{NOT_RECORDED}")
        else:
            shown.append(record_value("", word))
        option = name if word.startswith("-") else option
    more = len(argv) - len(shown)
    return [*shown, f"… and {more} more"] if more else shown
