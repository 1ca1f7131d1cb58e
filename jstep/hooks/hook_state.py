"""Checkpointing of hook state, keyed by `key` or class, not by position.

A hook, or a callback of an evaluation, is identified by its `key` if it has one, else by its class and its attribute
`watches` (`EarlyStopping(loss)`). Hooks of one class that watch the same have the same key: they are matched by their
settings, and by order if these are equal too.
"""

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_logger = logging.getLogger("jstep")


class _Owner(NamedTuple):
    """The identity of a hook with state.

    Attributes:
        key: Its key, or its class and what it watches.
        made_by: The module and name of its class.
        is_given: Whether the key was given.
    """

    key: str
    made_by: str
    is_given: bool


def own_key(hook: Any) -> str | None:
    """The `key` of a hook, or None; an attribute `key` that is not a string is ignored."""
    key = getattr(hook, "key", None)
    return key if isinstance(key, str) and key else None


def key_of(hook: Any) -> str:
    """The name of a hook in logs and checkpoints: its key, or its class and what it watches."""
    return own_key(hook) or _class_names(hook)[0]


def _class_names(hook: Any) -> tuple[str, str]:
    """The class of a hook with what it watches, and the full name of the class; for a function, its own name."""
    named = hook if isinstance(getattr(hook, "__qualname__", None), str) else type(hook)
    # The public name, whichever module was imported: `__module__` changes when one is first looked up in jstep.
    is_public = getattr(sys.modules["jstep"], named.__qualname__, None) is named
    made_by = f"{'jstep' if is_public else named.__module__}.{named.__qualname__}"
    watches = getattr(hook, "watches", None)
    return f"{named.__qualname__}({watches})" if isinstance(watches, str) else str(named.__qualname__), made_by


def _owner(hook: Any) -> _Owner:
    key, (described, made_by) = own_key(hook), _class_names(hook)
    return _Owner(key or described, made_by, key is not None)


def _stateful(objects: Iterable[Any]) -> Iterator[tuple[_Owner, Any]]:
    for hook in objects:
        if callable(getattr(hook, "get_state", None)) and callable(getattr(hook, "set_state", None)):
            yield _owner(hook), hook


def check_keys(objects: Iterable[Any], where: str = "hooks") -> None:
    """Refuse duplicate keys.

    Raises:
        ValueError: Two objects with state were given the same `key`.
    """
    seen: dict[str, Any] = {}
    for owner, hook in _stateful(objects):
        if not owner.is_given:
            continue
        if owner.key in seen:
            both = " and ".join(_class_names(each)[0] for each in (seen[owner.key], hook))
            raise ValueError(
                f"{where}: key={owner.key!r}: must be the key of one, got it for {both}; give each a different key"
            )
        seen[owner.key] = hook


def get_states(objects: Iterable[Any], where: str = "hooks") -> Any:
    """Return the states of all objects as a JSON-serializable list, copied.

    Raises:
        TypeError: A state is not JSON-serializable; names the object.
        ValueError: Two objects have the same key.
    """
    objects = tuple(objects)
    check_keys(objects, where)
    return [_record(owner, hook, where) for owner, hook in _stateful(objects)]


def _record(owner: _Owner, hook: Any, where: str) -> dict[str, Any]:
    value = hook.get_state()
    try:
        state = json.loads(json.dumps(_checked(value, "get_state()", 0), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{where}: what {owner.key}.get_state() returned is not JSON, and cannot be kept with a checkpoint: {error}"
        ) from error
    record = {"key": owner.key, "class": owner.made_by, "is_given": owner.is_given, "state": state}
    settings = _settings(hook)
    return record | {"settings": settings} if settings else record


def _settings(hook: Any) -> dict[str, Any]:
    """The settings of a stock object, by which objects with the same key are matched."""
    settings = getattr(hook, "identifying_settings", None)
    return settings if isinstance(settings, dict) else {}


def _checked(value: Any, where: str, depth: int) -> Any:
    """Refuse values that JSON would change: keys that are not strings, and NumPy or JAX numbers."""
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
        raise TypeError(f"{where} is {type(value).__name__}, which is not a JSON value{hint}")
    return value


def set_states(objects: Iterable[Any], saved: Any, where: str = "hooks") -> bool:
    """Restore the state of each object; return whether one of them ends the run.

    A state that cannot be restored is logged: its hook is missing, has another class, or the run has another number of
    hooks with the same key.
    """
    if saved is None:
        return False
    if not (isinstance(saved, list) and all(map(_is_record, saved))):
        what = "an older version of jstep" if isinstance(saved, Mapping) else "something else"
        _logger.warning("%s: their states in the checkpoint were written by %s: all start fresh", where, what)
        return False
    here: dict[_Owner, list[Any]] = {}
    for owner, hook in _stateful(objects):
        here.setdefault(owner, []).append(hook)
    there: dict[_Owner, list[Any]] = {}
    for record in saved:
        owner = _Owner(record["key"], record["class"], bool(record["is_given"]))
        there.setdefault(owner, []).append(record)
    stop = False
    for owner, records in there.items():
        same_key = here.get(owner, [])
        if len(same_key) != len(records):
            _logger.warning("%s: %s", where, _mismatch_reason(owner, records, same_key, here))
            continue
        for hook, record in _matched(same_key, records, where):
            stop = bool(hook.set_state(record["state"])) or stop
    return stop


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or not {"key", "class", "is_given", "state"} <= record.keys():
        return False
    return isinstance(record["key"], str) and isinstance(record["class"], str)


def _mismatch_reason(owner: _Owner, records: Sequence[Any], same_key: Sequence[Any], here: Iterable[_Owner]) -> str:
    if same_key:
        return (
            f"the checkpoint has the states of {len(records)} {owner.key}, but the run has {len(same_key)}: they "
            "cannot be matched, and all of them start fresh; give each a different `key`"
        )
    other = next((each.made_by for each in here if owner.is_given and each.is_given and each.key == owner.key), None)
    if other is not None:
        return f"the checkpoint has the state of {owner.key!r}, a {owner.made_by}; it is a {other} now and starts fresh"
    return f"the checkpoint has the state of {owner.key}, which is not among them any more"


def _matched(same_key: Sequence[Any], records: Sequence[Any], where: str) -> Iterator[tuple[Any, Any]]:
    """Pair each object with its record: by settings, and by order if these are equal."""
    if len(same_key) == 1:
        yield same_key[0], records[0]
        return
    left = list(records)
    for hook in same_key:
        settings = _settings(hook)
        found = next((record for record in left if record.get("settings", {}) == settings), None)
        if found is None:
            _logger.warning(
                "%s: none of the %d %s in the checkpoint was made with %s: it starts fresh",
                where,
                len(records),
                key_of(hook),
                settings,
            )
            continue
        left.remove(found)
        yield hook, found
