"""Retention of checkpoints: the last few, and one every N hours permanently. Stores delete leftovers of saves."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jstep.checkpoint.attempts import Files
from jstep.checkpoint.listing import format_name
from jstep.checkpoint.manifest import CheckpointError, LeftOutLeaf, Manifest, RetainedSteps, known_values
from jstep.checkpoint.store import Store


def evictions(
    saved_at: Mapping[int, float],
    new: int,
    retained: RetainedSteps,
    max_to_keep: int | None,
    every_n_hours: float | None,
    newest_finite: int | None = None,
) -> tuple[list[int], RetainedSteps]:
    """Return the checkpoints to delete after `new` was saved, and the new retention state.

    As in TF, a checkpoint that falls out of the last `max_to_keep` is kept permanently if more than `every_n_hours`
    have passed since the previous permanent one. A long pause counts once. The new step, the highest one, and
    the highest finite one are never evicted.
    """
    permanent, since = (retained.steps & saved_at.keys()) - {new}, retained.since
    evictable = sorted(step for step in saved_at if step not in permanent)
    excess = 0 if max_to_keep is None else len(evictable) - max_to_keep
    spared = {new, max(saved_at), newest_finite}
    victims: list[int] = []
    for step in [step for step in evictable if step not in spared][: max(excess, 0)]:
        since = min(since, saved_at[step])  # the clock of a host may have been ahead when it was set
        hours = (saved_at[step] - since) / 3600
        if every_n_hours is not None and hours > every_n_hours:
            permanent |= {step}
            since += 3600 * every_n_hours * int(hours / every_n_hours)
        else:
            victims.append(step)
    return victims, RetainedSteps(frozenset(permanent), since)


def evict(store: Store, path: str) -> None:
    """Delete a checkpoint: hide it atomically, then remove its data. Failures are logged."""
    try:
        store.erase(store.hide(path))
    except (OSError, CheckpointError) as error:
        store.log_undeleted(path, error)


class Listener(Protocol):
    """A receiver of each saved checkpoint, which can delay its deletion."""

    def saved(self, step: int, path: str) -> None:
        """Receive a checkpoint that is acknowledged and kept; must return immediately."""

    def wait(self, path: str | None = None) -> None:
        """Wait until this checkpoint, or each one, may be deleted."""

    def is_calling(self) -> bool:
        """Return whether this thread reports a checkpoint, so that it must not wait for a save."""


@dataclasses.dataclass(frozen=True)
class EndOfSave:
    """What a save needs at its end, on the first process and in the background.

    Attributes:
        manifest: The manifest, which lacks what is known only at the end.
        left_out: Returns the records of leaves that are left out; may wait for devices.
        flushes: Called before the checkpoint exists.
        temporary_secs: As in `CheckpointExtra`.
        listener: Receives a permanent checkpoint, and is waited for before one is deleted.
    """

    manifest: Manifest
    left_out: Callable[[], tuple[LeftOutLeaf, ...]]
    flushes: Sequence[Callable[[], None]]
    temporary_secs: float | None
    listener: Listener | None
    began: float = dataclasses.field(default_factory=time.monotonic)


class Retention:
    """What each save records of the checkpoints that are kept, and which ones it deletes.

    The retention state is in the newest manifest. Others are read only if their checkpoints may have to be deleted.
    """

    def __init__(
        self, store: Store, prefix: str, max_to_keep: int | None, every_n_hours: float | None, since: float
    ) -> None:
        self._store, self._prefix = store, prefix
        self._max_to_keep, self._every_n_hours = max_to_keep, every_n_hours
        self._since = since
        self._retained: RetainedSteps | None = None
        self._known: dict[int, Manifest | None] = {}
        """Step → head of the manifest of a complete checkpoint; None if it cannot be read."""
        self._published_secs: float | None = None

    @property
    def write_secs(self) -> float | None:
        """The seconds of the latest save, and of the deletions after it; None before the end of these."""
        if self._published_secs is None or self._store.is_erasing():
            return None
        return self._published_secs + self._store.erase_secs

    def begin(self) -> None:
        self._published_secs = None

    def finish(self, end: EndOfSave, files: Files, publish: Callable[[Manifest], Sequence[str]]) -> None:
        """Publish a checkpoint with these files, and then delete what it supersedes."""
        for flush in end.flushes:
            flush()
        manifest = end.manifest
        victims, retained, is_temporary = self._decide(manifest, end.temporary_secs)
        sealed = dataclasses.replace(
            manifest,
            extra=known_values(manifest.extra),
            retention=retained,
            files=files,
            left_out=end.left_out(),
            temporary=is_temporary,
        )
        self._store.erase(publish(sealed))
        self._retained = retained
        self._known[manifest.step] = _head(sealed)
        seconds = time.monotonic() - end.began
        if end.listener is not None and not is_temporary:
            end.listener.saved(manifest.step, self._store.path(format_name(self._prefix, manifest.step)))
        for path in victims:
            if end.listener is not None:
                end.listener.wait(path)
            evict(self._store, path)
        self._published_secs = seconds

    def _decide(self, new: Manifest, temporary_secs: float | None) -> tuple[list[str], RetainedSteps, bool]:
        """Return the paths to delete, the retention state, and whether this checkpoint is temporary."""
        paths = self._store.names()
        retained = self._load(paths)
        if self._max_to_keep is None and temporary_secs is None and not retained.temporary:
            return [], retained, False
        self._known = {step: head for step, head in self._known.items() if step in paths}
        others = sorted(paths.keys() - {new.step}, reverse=True)
        is_temporary = False
        # A permanent checkpoint is replaced by a permanent one, such as one saved by hand before the run saves
        # this step by itself.
        if temporary_secs is not None and not (new.step in paths and self._is_permanent(new.step)):
            previous = next((self._known[step] for step in others if self._is_permanent(step)), None)
            is_temporary = previous is not None and 0 <= new.saved_at - previous.saved_at < temporary_secs
        finite = next((step for step in sorted({*others, new.step}, reverse=True) if self._is_finite(step, new)), None)
        temporary = {step for step in others if step in retained.temporary and not self._is_permanent(step)}
        replaced = temporary - {finite}
        left = {*others} - replaced
        marks = temporary - replaced | ({new.step} if is_temporary else set())
        victims: list[int] = []
        if self._max_to_keep is not None and not is_temporary:
            left = {step for step in left if step in retained.steps or self._is_there(step)}
            times = {step: self._saved_at(step, retained) for step in left} | {new.step: new.saved_at}
            victims, retained = evictions(times, new.step, retained, self._max_to_keep, self._every_n_hours, finite)
        retained = dataclasses.replace(retained, temporary=frozenset(marks))
        return [paths[step] for step in [*sorted(replaced), *victims]], retained, is_temporary

    def _is_there(self, step: int) -> bool:
        """Return whether a checkpoint is complete, by its manifest, which is read once."""
        if step not in self._known and (path := self._store.at(self._prefix, step)) is not None:
            self._known[step] = None
            with contextlib.suppress(CheckpointError, OSError):
                self._known[step] = _head(self._store.manifest(path))
        return step in self._known

    def _is_permanent(self, step: int) -> bool:
        return self._is_there(step) and ((head := self._known[step]) is None or not head.temporary)

    def _is_finite(self, step: int, new: Manifest) -> bool:
        head = new if step == new.step else self._known[step] if self._is_there(step) else None
        return head is not None and head.finite

    def _saved_at(self, step: int, retained: RetainedSteps) -> float:
        if self._every_n_hours is None or step in retained.steps:
            return 0.0
        head = self._known[step]
        return retained.since if head is None else head.saved_at  # too young to keep permanently

    def delete(self, step: int, path: str) -> None:
        self._known.pop(step, None)
        self._store.erase(self._store.hide(path))
        self._store.finish_erasing()

    def evictable(self) -> list[str]:
        """Return the checkpoints that are not permanent, lowest step first."""
        paths = dict(self._store.newest_first(self._prefix))
        permanent = self._load(paths).steps
        return [paths[step] for step in sorted(paths) if step not in permanent]

    def _load(self, paths: Mapping[int, str]) -> RetainedSteps:
        if self._retained is None:
            self._retained = RetainedSteps(frozenset(), self._since)
            for step in sorted(paths, reverse=True):
                with contextlib.suppress(CheckpointError, OSError):
                    self._retained = self._store.manifest(paths[step]).retention
                    break
        return self._retained


def _head(manifest: Manifest) -> Manifest:
    """Return a manifest without its large fields."""
    return dataclasses.replace(manifest, leaves=(), files={}, extra=None, left_out=())
