"""Batches that the user's own loop makes: `from_loop`."""

import collections
import json
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import numpy as np

from jstep.core import processes
from jstep.core.checks import describe_type, format_list, format_value
from jstep.core.exceptions import note
from jstep.core.logs import log_once, logger
from jstep.core.tables import printable
from jstep.data.positions import position_methods
from jstep.stores import tagged_json
from jstep.stores.tagged_arrays import LARGE
from jstep.stores.tagged_json import RandomGenerator, set_generator

_NOT_KEPT = (
    "from_loop: {} has changed, and is not kept, as it is an attribute of a class: a restart "
    "begins with its first value. Set it on the object: self.{}"
)
_MAX_ITEMS = 100
"""The items of a class's attribute that are compared, at each of three levels."""


def from_loop(**kept: Any) -> "LoopBatches":
    """Return batches for `Run` that the body of the loop makes, and passes to `Run.train_step`.

    The objects that the batches depend on, besides the state, are saved with each checkpoint and
    restored when the run is entered, on every process.

    Args:
        kept: Objects by name. Each has `state_dict` and `load_state_dict`, or `get_state` and
            `set_state`; or it is a random generator of NumPy or Python, a dict, or an object whose
            attributes are its state. The states hold numbers, strings, bytes, None, lists, tuples,
            dicts, arrays and random generators. Attributes and items are replaced, generators are
            set in place. A warning names an attribute of a class that changes: it is not kept.

    Returns:
        Batches for `Run`. `batches=None` is the same as `from_loop()`.

    Raises:
        TypeError: An object has no state that can be set, such as a number. From `Run`, before the
            first step: its state cannot be saved.
        ValueError: From `Run`, before the first step: the state in the checkpoint does not fit.

    Example:
        >>> import jstep, numpy as np
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state, rng = jstep.TrainState.create({"w": 0.0}, optimizer), np.random.default_rng(0)
        >>> with jstep.Run(train_step, state, jstep.from_loop(rng=rng), last_step=3) as run:
        ...     for step in run:
        ...         metrics = run.train_step(np.float32(rng.normal()))
        >>> print(run.step)
        3
    """
    for name, value in kept.items():
        _accessors(name, value)
    return LoopBatches(kept)


class LoopBatches:
    """The batches of a loop.

    Attributes:
        kept: The objects that a checkpoint keeps, by name.
        passed: The arguments of a step, until it takes them.
    """

    def __init__(self, kept: Mapping[str, Any] = {}) -> None:
        self.kept = kept
        self.passed: list[tuple[Any, ...]] = []
        # The marks of class attributes when the run began; None before.
        self._first_marks: Mapping[str, Any] | None = None

    def begin(self) -> None:
        """Log the objects that are kept, and from now on watch class attributes, which are not."""
        self._first_marks = self._class_marks()
        if self.kept and processes.is_process_0():
            descriptions = [_described(name, value) for name, value in self.kept.items()]
            logger.info("from_loop keeps %s", ", ".join(descriptions))

    def _class_marks(self) -> dict[str, Any]:
        """Return the marks of the objects' class attributes, which are not kept with them."""
        marks: dict[str, Any] = {}
        for value in self.kept.values():
            if not _keeps_attributes(value):
                continue
            for cls in type(value).__mro__[:-1]:
                for name, item in _data_of(cls):
                    marks[f"{cls.__name__}.{name}"] = _mark(item)
        return marks

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        while True:
            yield self.passed.pop()

    def get_state(self) -> dict[str, Any]:
        if self._first_marks is not None:
            for name, mark in self._class_marks().items():
                if mark != self._first_marks.get(name):
                    _, _, attribute = name.rpartition(".")
                    log_once(logging.WARNING, _NOT_KEPT.format(name, attribute))
        return {name: _accessors(name, value).get() for name, value in self.kept.items()}

    def set_state(self, state: object) -> None:
        if not isinstance(state, dict) or set(state) != set(self.kept):
            saved = [describe_type(state)]
            if isinstance(state, dict):
                saved = sorted(map(printable, state))
            raise ValueError(
                "from_loop: the checkpoint has the states of "
                f"{format_list(saved, 8) or 'no objects'}, and this loop keeps "
                f"{format_list(sorted(self.kept), 8) or 'none'}; give the same names"
            )
        for name, value in self.kept.items():
            try:
                _accessors(name, value).set(state[name])
            except Exception as error:
                note(error, f"jstep: from_loop: {name} did not accept its state in the checkpoint")
                raise

    def __repr__(self) -> str:
        return f"<jstep.from_loop({', '.join(self.kept)})>"


class _Accessors(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _accessors(name: str, value: Any) -> _Accessors:
    """Return how the state of an object is read and set, by its kind.

    Raises:
        TypeError: It has no state that can be set.
    """
    # A class, too, has the methods of its objects.
    methods = None if isinstance(value, type) else position_methods(value)
    if methods is not None:
        return _Accessors(methods.read, methods.restore)
    if isinstance(value, RandomGenerator):
        return _Accessors(lambda: value, lambda state: _set_generator(name, value, state))
    if isinstance(value, dict):
        return _Accessors(lambda: value, lambda state: _fill(name, value, state))
    if _has_only_attributes(value):
        return _Accessors(lambda: vars(value), lambda state: _fill_attributes(name, value, state))
    raise TypeError(
        f"from_loop: {name}={format_value(value)}: must be an object whose state can be set, got "
        f"{describe_type(value)}; put numbers, lists and arrays into a dict or "
        "types.SimpleNamespace, or give it get_state and set_state; what the program opens again, "
        "such as a file, need not be kept"
    )


def _keeps_attributes(value: object) -> bool:
    """Return whether the state of an object is its attributes."""
    return not isinstance(value, dict | RandomGenerator) and position_methods(value) is None


def _described(name: str, value: Any) -> str:
    """Describe an object by its name, and the names of its attributes or items."""
    parts: Any = ()
    if _keeps_attributes(value):
        parts = vars(value)
    elif isinstance(value, dict):
        parts = value
    if not parts:
        return name
    return f"{name} ({format_list(list(map(str, parts)), 8)})"


def _data_of(cls: type) -> list[tuple[str, Any]]:
    """Return the attributes of a class that are data."""
    items: list[tuple[str, Any]] = []
    for name, item in vars(cls).items():
        is_method = callable(item) or hasattr(item, "__get__")  # properties, too
        if not name.startswith("__") and not is_method:
            items.append((name, item))
    return items


def _mark(value: Any, depth: int = 0) -> Any:
    """Return a mark of a value, which differs once the value has changed.

    Large values are not copied: in these, and deep inside of others, only a replacement and a
    change of length are noticed.
    """
    if isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)  # NaN is equal to itself
    if isinstance(value, RandomGenerator):
        return json.dumps(tagged_json.as_json(tagged_json.copy_encodable(value)))
    if isinstance(value, np.ndarray) and value.nbytes <= LARGE:
        return value.tobytes()
    if (
        isinstance(value, dict | list | tuple | set | collections.deque)
        and len(value) <= _MAX_ITEMS
        and depth < 3
    ):
        items = value.items() if isinstance(value, dict) else value
        return [len(value), *(_mark(item, depth + 1) for item in items)]
    return id(value), len(value) if isinstance(value, Sized) else None


def _has_only_attributes(value: object) -> bool:
    """Return whether an object can be set back by setting its attributes: it has no other state."""
    if (
        isinstance(value, type | types.ModuleType)
        or callable(value)
        or not hasattr(value, "__dict__")
    ):
        return False
    if isinstance(value, types.SimpleNamespace):
        return True
    kind = type(value)
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False  # it has a state of its own for pickle
    if any(vars(cls).get("__slots__") for cls in kind.__mro__):
        return False
    try:
        items = value.__reduce_ex__(2)[3:]  # the items of a list or a dict
    except TypeError:  # it cannot be pickled, such as a file
        return False
    return not any(item is not None for item in items)


def _set_generator(path: str, generator: RandomGenerator, saved: Any) -> None:
    if not isinstance(saved, RandomGenerator):
        raise ValueError(
            f"{path}: the checkpoint has {describe_type(saved)} for it, not a random generator"
        )
    try:
        set_generator(generator, saved)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _fill(name: str, values: dict[Any, Any], saved: Any) -> None:
    """Give a dict the saved items, in place."""
    if not isinstance(saved, dict):
        raise ValueError(f"{name}: the checkpoint has {describe_type(saved)} for it, not a dict")
    items = _keep_generators(name, values, saved)
    for key in values.keys() - items.keys():
        del values[key]
    for key, value in items.items():
        values.pop(key, None)  # in the order of the checkpoint
        values[key] = value


def _keep_generators(path: str, current: Any, saved: Any) -> Any:
    """Return a saved value with the current random generators in it, set to the saved states.

    The program may hold a generator in other places, too, so it must stay the same object.
    """
    if isinstance(current, RandomGenerator) and isinstance(saved, RandomGenerator):
        _set_generator(path, current, saved)
        return current
    if isinstance(current, dict) and isinstance(saved, dict):
        pairs = [(key, item) for key, item in current.items() if key in saved]
    elif isinstance(current, list | tuple) and isinstance(saved, list | tuple):
        pairs = list(enumerate(current[: len(saved)]))
    else:
        return saved
    items: Any = list(saved) if isinstance(saved, tuple) else saved
    for key, item in pairs:
        if isinstance(item, dict | list | tuple | RandomGenerator):
            items[key] = _keep_generators(f"{path}/{key}", item, items[key])
    return tuple(items) if isinstance(saved, tuple) else items


def _fill_attributes(name: str, value: object, saved: Any) -> None:
    lacking = sorted(vars(value).keys() - saved.keys()) if isinstance(saved, dict) else []
    if lacking:
        raise ValueError(
            f"{name}: the checkpoint has no value for its {format_list(lacking, 8)}: it was saved "
            f"by another version of {type(value).__name__}"
        )
    _fill(name, vars(value), saved)
