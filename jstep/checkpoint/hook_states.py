"""The states of hooks and of evaluation callbacks in checkpoints, matched by key or class, and then by settings.

A hook is identified by its `key` if it has one, whatever its class, and otherwise by its class and its attribute
`watches` (`EarlyStopping(loss)`). Hooks of one class with equal `watches` share a key: they are matched by
their settings, and by order if these are equal too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.core.exceptions import note
from jstep.core.logs import logger
from jstep.core.public_names import public_name
from jstep.stores import tagged_json
from jstep.stores.tagged_arrays import UnsupportedError


class _HookIdentity(NamedTuple):
    """The identity of a hook with state; `made_by` is its class, or None if it has a `key`."""

    key: str
    made_by: str | None


def check_stateful(objects: Sequence[Any], argument: str = "hooks") -> None:
    """Reject hooks whose state could not be restored."""
    for hook in objects:
        if _has(hook, "get_state") and not _has(hook, "set_state"):
            raise TypeError(
                f"{argument}: {hook_key(hook)} has get_state() without set_state(value), so its state would be saved "
                "and never restored; add set_state, or rename get_state if no state has to be kept"
            )


def get_states(objects: Iterable[Any], argument: str = "hooks") -> Any:
    """Return copies of the states of all objects; `tagged_json.as_json` makes them JSON."""
    return [_record(identity, hook, argument) for identity, hook in _stateful(objects)]


def _record(identity: _HookIdentity, hook: Any, argument: str) -> dict[str, Any]:
    try:
        value = hook.get_state()
    except Exception as error:
        note(error, f"jstep: {argument}: in {identity.key}.get_state(), whose result is kept with each checkpoint")
        raise
    try:
        state = tagged_json.copy_encodable(value)
    except UnsupportedError as error:
        raise TypeError(
            f"{argument}: the state of {identity.key} cannot be kept with a checkpoint: get_state(){error.path} "
            f"{error.what}; convert it there, and back in set_state, see docs: help/errors#positions"
        ) from None
    record = {"key": identity.key, "class": identity.made_by, "state": state}
    settings = _settings(hook)
    return record | {"settings": settings} if settings else record


def set_states(objects: Iterable[Any], saved: object, argument: str = "hooks") -> bool:
    """Restore the state of each object; return whether one of them ends the run.

    States whose hooks are missing, or fewer or more than the states, are dropped, with a line in the log.
    """
    if saved is None:
        return False
    if not (isinstance(saved, list) and all(map(_is_record, saved))):
        logger.warning("%s: their states in the checkpoint cannot be read: all start fresh", argument)
        return False
    hooks: dict[_HookIdentity, list[Any]] = {}
    for identity, hook in _stateful(objects):
        hooks.setdefault(identity, []).append(hook)
    saved_records: dict[_HookIdentity, list[Any]] = {}
    for record in saved:
        saved_records.setdefault(_HookIdentity(record["key"], record["class"]), []).append(record)
    stop = False
    for identity, records in saved_records.items():
        same_key = hooks.get(identity, [])
        if len(same_key) != len(records):
            what = "they start fresh" if same_key else "their state is dropped"
            text = f"%s: the checkpoint has %d state(s) of %s, and the run has %d of them: {what}"
            logger.warning(text, argument, len(records), identity.key, len(same_key))
            continue
        for hook, record in _matched(same_key, records, argument):
            stop = bool(hook.set_state(_state_in(record, argument))) or stop
    return stop


def _is_record(record: object) -> bool:
    if not isinstance(record, dict) or not {"key", "class", "state"} <= record.keys():
        return False
    return isinstance(record["key"], str) and isinstance(record["class"], str | None)


def _state_in(record: Mapping[str, Any], argument: str) -> Any:
    try:
        return tagged_json.decode(record["state"])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{argument}: the checkpoint's state of {record['key']} cannot be decoded ({error}); it was not saved by "
            "jstep, or was changed"
        ) from None


def _matched(same_key: Sequence[Any], records: Sequence[Any], argument: str) -> Iterator[tuple[Any, Any]]:
    """Pair each object with its record: a single one as it is, several by settings, then by order."""
    left = list(records)
    for hook in same_key:
        alike = [record for record in left if len(records) == 1 or record.get("settings", {}) == _settings(hook)]
        if alike:
            left.remove(alike[0])
            yield hook, alike[0]
        else:
            logger.warning("%s: no %s in the checkpoint had these settings: it starts fresh", argument, hook_key(hook))


def _settings(hook: object) -> dict[str, Any]:
    settings = getattr(hook, "identifying_settings", None)
    return settings if isinstance(settings, dict) else {}


def hook_key(hook: object) -> str:
    return _identity(hook).key


def _identity(hook: object) -> _HookIdentity:
    key = getattr(hook, "key", None)
    if isinstance(key, str) and key:  # another attribute of this name is ignored
        return _HookIdentity(key, None)
    named: Any = hook if isinstance(getattr(hook, "__qualname__", None), str) else type(hook)  # a function has its name
    watches = getattr(hook, "watches", None)
    suffix = f"({watches})" if isinstance(watches, str) else ""
    return _HookIdentity(f"{named.__qualname__}{suffix}", public_name(named))


def _stateful(objects: Iterable[Any]) -> Iterator[tuple[_HookIdentity, Any]]:
    for hook in objects:
        if _has(hook, "get_state") and _has(hook, "set_state"):
            yield _identity(hook), hook


def _has(hook: object, method: str) -> bool:
    return callable(getattr(hook, method, None))
