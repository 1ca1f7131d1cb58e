"""Batches that the user's own loop makes, and the objects that they depend on: `from_loop`."""

import random
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jstep.core.checks import describe_type, format_list, format_value
from jstep.core.exceptions import note
from jstep.data.positions import position_methods


def from_loop(**kept: Any) -> "LoopBatches":
    """Return batches for `Run` that the body of the loop makes, and passes to `Run.train_step`.

    The objects that the batches depend on, besides the state, are saved with each checkpoint and restored when the run
    is entered, on every process. They are asked for their state only then, between two iterations of the loop, so a
    large replay buffer costs nothing at other steps. Batches that are a function of the step need no object.

    Args:
        kept: Objects by name: environments, buffers, random generators. Each has `state_dict` and `load_state_dict`, or
            `get_state` and `set_state`; or it is a random generator of NumPy or Python, a dict, or an object whose
            attributes are its state. The states hold what a loader's position may hold: numbers, strings, bytes, None,
            lists, tuples, dicts, arrays, and random generators, each in one place. Attributes and items are replaced,
            generators are set in place.

    Returns:
        Batches for `Run`. `batches=None` is the same as `from_loop()`.

    Raises:
        TypeError: An object has no state that can be set, such as a number. From `Run`, before the first step: its
            state cannot be saved.
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
    """The batches of a loop: the arguments of each step, in `passed` until the step takes them."""

    def __init__(self, kept: Mapping[str, Any] = {}) -> None:
        self.kept, self.passed = kept, list[tuple[Any, ...]]()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        while True:
            yield self.passed.pop()

    def get_state(self) -> dict[str, Any]:
        return {name: _accessors(name, value).get() for name, value in self.kept.items()}

    def set_state(self, state: object) -> None:
        if not isinstance(state, dict) or set(state) != set(self.kept):
            saved = sorted(state) if isinstance(state, dict) else [describe_type(state)]
            raise ValueError(
                f"from_loop: the checkpoint has the states of {format_list(saved, 8) or 'no objects'}, and this "
                f"loop keeps {format_list(sorted(self.kept), 8) or 'none'}; give the same names"
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
    """Return the functions that get and set the state of an object."""
    if not isinstance(value, type) and (methods := position_methods(value)) is not None:
        return _Accessors(*methods)
    if isinstance(value, np.random.Generator | random.Random):
        return _Accessors(lambda: value, lambda state: _set_generator(name, value, state))
    if isinstance(value, dict):
        return _Accessors(lambda: value, lambda state: _fill(name, value, state))
    if _has_only_attributes(value):
        return _Accessors(lambda: vars(value), lambda state: _fill_attributes(name, value, state))
    raise TypeError(
        f"from_loop: {name}={format_value(value)}: must be an object whose state can be set, got "
        f"{describe_type(value)}; put numbers, lists and arrays into a dict or types.SimpleNamespace, or give it "
        "get_state and set_state; what the program opens again, such as a file, need not be kept"
    )


def _has_only_attributes(value: object) -> bool:
    """Whether attributes are the whole state of an object: a file, or a subclass of list or deque, has another one."""
    kind = type(value)
    if isinstance(value, type | types.ModuleType) or callable(value) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, types.SimpleNamespace):
        return True
    has_own_state = kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__
    if has_own_state or any(vars(cls).get("__slots__") for cls in kind.__mro__):
        return False
    try:
        items = value.__reduce_ex__(2)[3:]  # the items of a list or a dict
    except TypeError:  # it holds something of the system
        return False
    return not any(item is not None for item in items)


def _set_generator(name: str, generator: Any, saved: Any) -> None:
    """Set a random generator to the state of another one of its kind."""
    if isinstance(generator, random.Random) and type(saved) is type(generator):
        generator.setstate(saved.getstate())
    elif isinstance(generator, np.random.Generator) and isinstance(saved, np.random.Generator):
        generator.bit_generator.state = saved.bit_generator.state
    else:
        raise ValueError(
            f"{name}: must be a {type(saved).__name__}, as in the checkpoint, got {describe_type(generator)}"
        )


def _fill(name: str, values: dict[Any, Any], saved: Any) -> None:
    """Replace the items of a dict; a generator that others may hold, too, is set in place."""
    if not isinstance(saved, dict):
        raise ValueError(f"{name}: the checkpoint has {describe_type(saved)} for it, not a dict")
    for key in values.keys() - saved.keys():
        del values[key]
    for key, value in saved.items():
        if isinstance(value, np.random.Generator | random.Random) and type(values.get(key)) is type(value):
            _set_generator(f"{name}/{key}", values[key], value)
        else:
            values[key] = value


def _fill_attributes(name: str, value: object, saved: Any) -> None:
    if isinstance(saved, dict) and (lacking := sorted(vars(value).keys() - saved.keys())):
        raise ValueError(
            f"{name}: the checkpoint has no value for its {format_list(lacking, 8)}: it was saved by another version "
            f"of {type(value).__name__}"
        )
    _fill(name, vars(value), saved)
