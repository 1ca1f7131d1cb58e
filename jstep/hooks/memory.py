"""What hooks remember, kept with each checkpoint: found again by class, and by order among those of a class."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_logger = logging.getLogger("jstep")


def _named(objects: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """`Class` for the first of a class, then `Class#1`, and so on: only objects that remember something."""
    counts: Counter[str] = Counter()
    for one in objects:
        if not (callable(getattr(one, "get_state", None)) and callable(getattr(one, "set_state", None))):
            continue
        name = type(one).__qualname__
        number = counts[name]
        counts[name] += 1
        yield (f"{name}#{number}" if number else name), one


def states_of(objects: Iterable[Any], where: str = "hooks") -> dict[str, Any]:
    """Name → what each remembers, as JSON can hold it; a copy.

    Raises:
        TypeError: What one remembers is not JSON; names it.
    """
    found: dict[str, Any] = {}
    for name, one in _named(objects):
        value = one.get_state()
        try:
            found[name] = json.loads(json.dumps(_checked(value, "get_state()", 0), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"{where}: what {name}.get_state() returned is not JSON, and cannot be kept with a checkpoint: {error}"
            ) from error
    return found


def _checked(value: Any, where: str, depth: int) -> Any:
    """Refuses what JSON would change: keys that are no text, and numbers of NumPy or JAX."""
    if depth > 100:
        raise ValueError(f"{where[:60]}… is nested more than 100 deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: the key {key!r} is {type(key).__name__}; keys of JSON are strings")
            _checked(item, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _checked(item, f"{where}[{i}]", depth + 1)
    elif not isinstance(value, str | int | float | None):
        hint = "; convert it with .tolist()" if hasattr(value, "tolist") else ""
        raise TypeError(f"{where} is {type(value).__name__}, which is no JSON value{hint}")
    return value


def set_states(objects: Iterable[Any], kept: Any, where: str = "hooks") -> bool:
    """Gives each what it remembered; whether one of them wants no further step.

    What was remembered by one that is gone is a log line.
    """
    if not isinstance(kept, Mapping):
        return False
    here = dict(_named(objects))
    stop = False
    for name, value in kept.items():
        if name in here:
            stop = bool(here[name].set_state(value)) or stop
        else:
            _logger.warning("%s: the checkpoint has the state of %s, which is not among them any more", where, name)
    return stop
