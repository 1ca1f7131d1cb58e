"""The states of hooks and of evaluation callbacks in checkpoints.

They are matched by key or class, and then by settings. A hook is identified by its `key` if it has
one, whatever its class, and otherwise by its class and its attribute `watches`
(`EarlyStopping(loss)`). Hooks of one class with equal `watches` share a key: they are matched by
their settings, and by order if these are equal too.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jstep.array_store.manifest import UnsupportedFormatError, jstep_version
from jstep.core.checks import describe_type, format_list, format_value
from jstep.core.exceptions import note
from jstep.core.logs import logger
from jstep.core.public_names import public_name
from jstep.core.tables import printable
from jstep.stores import tagged_json
from jstep.stores.tagged_arrays import UnknownPartError, UnsupportedError

RECORD_FORMAT = 1
"""The number of the format of a record of states. See docs/how/compatibility.md."""
_RECORD_KEYS = frozenset({"format", "jstep", "states", "notes"})
_STATE_KEYS = frozenset({"key", "class", "state", "settings", "format", "notes"})


class StateFormat(NamedTuple):
    """The format of the state of a built-in hook, which is a dict.

    Attributes:
        number: Raised if an earlier version of jstep would misread a state.
        defaults: Field → its value in a state that has none, because an earlier version saved it.
        settings: Returns what tells hooks of one key apart; None if nothing does.
    """

    number: int
    defaults: Mapping[str, Any]
    settings: Callable[[Any], dict[str, Any]] | None = None


_FORMATS: dict[type, StateFormat] = {}
"""Class → the format of the state that its `get_state` returns. Not an attribute, which users would
be shown."""


def register_format(cls: type, state_format: StateFormat) -> None:
    """Declare what `get_state` of a built-in hook returns, and `set_state` reads."""
    _FORMATS[cls] = state_format


class _HookIdentity(NamedTuple):
    """The identity of a hook with state; `made_by` is its class, or None if it has a `key`."""

    key: str
    made_by: str | None


def check_stateful(objects: Sequence[Any], argument: str = "hooks") -> None:
    """Reject hooks whose state could not be restored."""
    for hook in objects:
        if _has(hook, "get_state") and not _has(hook, "set_state"):
            raise TypeError(
                f"{argument}: {hook_key(hook)} has get_state() without set_state(value), "
                "so its state would be saved and never restored; add set_state, or "
                "rename get_state if no state has to be kept"
            )


def get_states(objects: Iterable[Any], argument: str = "hooks") -> Any:
    """Return copies of the states of all objects, None if none has one.

    `tagged_json.as_json` makes them JSON.
    """
    states = [_record(identity, hook, argument) for identity, hook in _stateful(objects)]
    return {"format": RECORD_FORMAT, "jstep": jstep_version(), "states": states} if states else None


def _record(identity: _HookIdentity, hook: Any, argument: str) -> dict[str, Any]:
    try:
        value = hook.get_state()
    except Exception as error:
        note(
            error,
            f"jstep: {argument}: in {identity.key}.get_state(), whose result is kept with "
            "each checkpoint",
        )
        raise
    try:
        state = tagged_json.copy_encodable(value)
    except UnsupportedError as error:
        raise TypeError(
            f"{argument}: the state of {identity.key} cannot be kept with a checkpoint: "
            f"get_state(){error.path} {error.what}; convert it there, and back in set_state, see "
            "docs: help/errors#positions"
        ) from None
    record = {"key": identity.key, "class": identity.made_by, "state": state}
    settings = _settings(hook)
    if settings:
        record["settings"] = settings
    built_in = _format_of(hook)
    if built_in is not None:
        record["format"] = built_in.number
    return record


def set_states(objects: Iterable[Any], saved: Any, argument: str = "hooks") -> bool:
    """Restore the state of each object; return whether one of them ends the run.

    States whose hooks are missing, or fewer or more than the states, are dropped, with a line in
    the log.

    Raises:
        UnsupportedFormatError: A later version of jstep saved something that this one does not
            know.
    """
    if saved is None:
        return False
    if isinstance(saved, list):
        raise UnsupportedFormatError(
            f"{argument}: their states in the checkpoint have a format from before the first "
            "release of jstep. The checkpoint is intact: restore it with the version that wrote it"
        )
    if not _is_valid(saved):
        logger.warning(
            "%s: their states in the checkpoint cannot be read: all start fresh", argument
        )
        return False
    hooks: dict[_HookIdentity, list[Any]] = {}
    for identity, hook in _stateful(objects):
        hooks.setdefault(identity, []).append(hook)
    reader = _Reader(argument, saved["jstep"])
    reader.check("their record in the checkpoint", saved, _RECORD_KEYS, RECORD_FORMAT)
    stops = False
    for identity, records in _records_by_identity(saved["states"], hooks, reader).items():
        same_key = hooks.get(identity, [])
        if len(same_key) != len(records):
            what = "they start fresh" if same_key else "their state is dropped"
            text = f"%s: the checkpoint has %d state(s) of %s, and the run has %d of them: {what}"
            logger.warning(text, argument, len(records), printable(identity.key), len(same_key))
            continue
        for hook, record in _matched(same_key, records, argument):
            state = reader.state(hook, record)
            try:
                # Each is set, also after one that ends the run.
                if hook.set_state(state):
                    stops = True
            except Exception as error:
                note(
                    error,
                    f"jstep: {argument}: in {identity.key}.set_state(), with its state in "
                    "the checkpoint",
                )
                raise
    return stops


def _records_by_identity(
    states: Sequence[Any], hooks: Mapping[_HookIdentity, Sequence[Any]], reader: "_Reader"
) -> dict[_HookIdentity, list[Any]]:
    """Return the saved records by the identity of this run's hooks that may have saved them."""
    own_keys = {record["key"] for record in states if record["class"] is None}
    records: dict[_HookIdentity, list[Any]] = {}
    for record in states:
        reader.check(_state_of(record), record, _STATE_KEYS)
        identity = _HookIdentity(record["key"], record["class"])
        # The hook may have had no `key` when this was saved, and its name may be its `key` now. Not
        # if another hook was saved with that key. The class must match, too: otherwise another
        # hook that is given this key would get the state of one that is gone.
        with_key = _HookIdentity(record["key"], None)
        heirs: Sequence[Any] = ()
        if identity not in hooks and record["key"] not in own_keys:
            heirs = hooks.get(with_key, ())
        if heirs and all(_identity_without_key(hook) == identity for hook in heirs):
            identity = with_key
        records.setdefault(identity, []).append(record)
    return records


def _is_valid(saved: Any) -> bool:
    if not isinstance(saved, dict) or not {"format", "jstep", "states"} <= saved.keys():
        return False
    if not isinstance(saved["jstep"], str):
        return False
    if saved["format"] != RECORD_FORMAT:  # of a later version, whose states may be anything
        return type(saved["format"]) is int
    return isinstance(saved["states"], list) and all(map(_is_record, saved["states"]))


def _is_record(record: object) -> bool:
    if not isinstance(record, dict) or not {"key", "class", "state"} <= record.keys():
        return False
    return isinstance(record["key"], str) and isinstance(record["class"], str | None)


def _state_of(record: Mapping[str, Any]) -> str:
    return f"the checkpoint's state of {printable(record['key']):.100}"


class _Reader(NamedTuple):
    """A reader of the states that a version of jstep saved; it rejects what it does not know."""

    argument: str
    written_by: str

    def check(
        self,
        what: str,
        record: Mapping[str, Any],
        known: Collection[str],
        number: int | None = None,
    ) -> None:
        if number is not None and record.get("format", number) != number:
            self._refuse(what, f"has format {format_value(record['format'], 50)}")
        unknown = sorted(record.keys() - known)
        if unknown:
            self._refuse(what, f"has {format_list([format_value(key, 50) for key in unknown], 3)}")

    def state(self, hook: Any, record: Mapping[str, Any]) -> Any:
        """Return the state for `set_state`: a built-in hook's has all its fields, and no others."""
        what = _state_of(record)
        built_in = _format_of(hook)
        if built_in is not None:
            self.check(what, record, _STATE_KEYS, built_in.number)
        try:
            state = tagged_json.decode(record["state"])
        except UnknownPartError as error:
            self._refuse(what, f"has {error.part}")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.argument}: {what} cannot be decoded ({error}); it was not saved by jstep, "
                "or was changed"
            ) from None
        if built_in is None:
            return state
        if not isinstance(state, dict):
            raise ValueError(
                f"{self.argument}: {what} is {describe_type(state)}; it was not saved by jstep"
            )
        self.check(what, state, built_in.defaults.keys())
        return {**built_in.defaults, **state}

    def _refuse(self, what: str, has: str) -> NoReturn:
        raise UnsupportedFormatError(
            f"{self.argument}: {what} {has}, which this version of jstep ({jstep_version()}) does "
            "not know. The checkpoint is intact, and was written by jstep "
            f"{printable(self.written_by):.50}: install that or a later one, or leave the hook "
            "out, or give it another key, with which it starts fresh"
        )


def _format_of(hook: object) -> StateFormat | None:
    """Return the format of a built-in hook's state.

    It is None if a subclass of the user's has its own `get_state`.
    """
    for cls in type(hook).__mro__:
        if cls in _FORMATS:
            return _FORMATS[cls]
        if "get_state" in vars(cls):
            return None
    return None


def _matched(
    same_key: Sequence[Any], records: Sequence[Any], argument: str
) -> Iterator[tuple[Any, Any]]:
    """Pair each object with its record: a single one as is, several by settings, then by order."""
    if len(records) == 1:
        yield same_key[0], records[0]
        return
    left = list(records)
    for hook in same_key:
        settings = _settings(hook)
        alike = [record for record in left if record.get("settings", {}) == settings]
        if alike:
            left.remove(alike[0])
            yield hook, alike[0]
        else:
            logger.warning(
                "%s: no %s in the checkpoint had these settings: it starts fresh",
                argument,
                hook_key(hook),
            )


def _settings(hook: object) -> dict[str, Any]:
    # Unlike `_format_of`, this includes subclasses with their own `get_state`: two of them are told
    # apart like two of the built-in class.
    for cls in type(hook).__mro__:
        if cls in _FORMATS:
            settings = _FORMATS[cls].settings
            return {} if settings is None else settings(hook)
    return {}


def hook_key(hook: object) -> str:
    return _identity(hook).key


def _identity(hook: object) -> _HookIdentity:
    key = getattr(hook, "key", None)
    if isinstance(key, str) and key:  # another attribute of this name is ignored
        return _HookIdentity(key, None)
    return _identity_without_key(hook)


def _identity_without_key(hook: object) -> _HookIdentity:
    has_name = isinstance(getattr(hook, "__qualname__", None), str)  # as a function has
    named: Any = hook if has_name else type(hook)
    watches = getattr(hook, "watches", None)
    suffix = f"({watches})" if isinstance(watches, str) else ""
    return _HookIdentity(f"{named.__qualname__}{suffix}", public_name(named))


def _stateful(objects: Iterable[Any]) -> Iterator[tuple[_HookIdentity, Any]]:
    for hook in objects:
        if _has(hook, "get_state") and _has(hook, "set_state"):
            yield _identity(hook), hook


def _has(hook: object, method: str) -> bool:
    return callable(getattr(hook, method, None))
