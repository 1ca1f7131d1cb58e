"""Retention of checkpoints: the last few, and one every N hours permanently. Stores delete leftovers of saves."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from jstep.checkpoint.listing import format_name
from jstep.checkpoint.manifest import CheckpointError, LeftOutLeaf, Manifest, RetainedSteps, known_values
from jstep.checkpoint.store import Commit, Files, Store


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


class Retention:
    """The end of each save: completes the manifest, and deletes superseded checkpoints.

    The retention state is in the manifest of the newest checkpoint, whichever Saver wrote it.
    """

    def __init__(
        self, store: Store, prefix: str, max_to_keep: int | None, every_n_hours: float | None, since: float
    ) -> None:
        self._store, self._prefix = store, prefix
        self._max_to_keep, self._every_n_hours = max_to_keep, every_n_hours
        self._since = since
        self._retained: RetainedSteps | None = None
        self._complete: set[int] = set()
        """Steps of checkpoints that are known to be complete."""
        self._known: dict[int, Manifest] = {}
        """Step → head of each manifest that was read or written."""
        self._replaces = True  # there may be a temporary one
        self.write_secs: float | None = None
        """The seconds from the start of the latest save until its checkpoint existed; None while it is written."""

    def commit_of(
        self,
        number: int,
        manifest: Manifest,
        left_out: Callable[[], tuple[LeftOutLeaf, ...]],
        flushes: Iterable[Callable[[], None]],
        temporary_secs: float | None = None,
        listener: Listener | None = None,
    ) -> Commit:
        """Return the end of a save.

        `number` is that of `Commit`. `manifest` still lacks files, retention and left-out leaves, and values of `extra`
        that are functions. The checkpoint is temporary within `temporary_secs` after the last permanent one. `listener`
        receives a permanent one, and is waited for before one is deleted.
        """
        began, self.write_secs = time.monotonic(), None

        def finish(files: Files, publish: Callable[[Manifest], Sequence[str]]) -> None:
            for flush in flushes:
                flush()
            victims, retained, is_temporary = self._decide(manifest, temporary_secs)
            sealed = dataclasses.replace(
                manifest,
                extra=known_values(manifest.extra),
                retention=retained,
                files=files,
                left_out=left_out(),
                temporary=is_temporary,
            )
            self._store.erase(publish(sealed))
            self._retained = retained
            self._complete.add(manifest.step)
            self._known[manifest.step] = _head(sealed)
            self._replaces = is_temporary
            self.write_secs = time.monotonic() - began
            if listener is not None and not is_temporary:
                listener.saved(manifest.step, self._store.path(format_name(self._prefix, manifest.step)))
            for path in victims:
                if listener is not None:
                    listener.wait(path)
                evict(self._store, path)

        return Commit(number, manifest.saved_at, finish)

    def _decide(self, manifest: Manifest, temporary_secs: float | None) -> tuple[list[str], RetainedSteps, bool]:
        """Return the paths to delete, the retention state, and whether this checkpoint is temporary."""
        retained = self._load()
        if self._max_to_keep is None and temporary_secs is None and not self._replaces:
            return [], retained, False
        paths = dict(self._store.newest_first(self._prefix, trusted=retained.steps | self._complete))
        self._known = {step: head for step, head in self._known.items() if step in paths}
        new = manifest.step
        # A permanent checkpoint is replaced by a permanent one, such as one saved by hand before the run saves
        # this step by itself.
        was_permanent = new in paths and self._permanent_saved_at({new: paths[new]}) is not None
        others = {step: path for step, path in paths.items() if step != new}
        previous = self._permanent_saved_at(others)
        is_temporary = not was_permanent and (
            temporary_secs is not None and previous is not None and 0 <= manifest.saved_at - previous < temporary_secs
        )
        newest_finite = self._newest_finite(others, manifest)
        temporary = {step for step, head in self._known.items() if head.temporary} - {newest_finite}
        replaced = [path for step, path in others.items() if step in temporary]
        remaining = {step: path for step, path in others.items() if step not in temporary}
        if is_temporary or self._max_to_keep is None:
            return replaced, retained, is_temporary
        self._complete = set(remaining)
        times = {step: self._saved_at(step, path, retained) for step, path in remaining.items()}
        times[new] = manifest.saved_at
        victims, retained = evictions(times, new, retained, self._max_to_keep, self._every_n_hours, newest_finite)
        return [*replaced, *(remaining[step] for step in victims)], retained, False

    def _permanent_saved_at(self, paths: Mapping[int, str]) -> float | None:
        """Return when the newest permanent checkpoint was saved, if known."""
        for step in sorted(paths, reverse=True):
            manifest = self._manifest(step, paths[step])
            if manifest is None or not manifest.temporary:
                return None if manifest is None else manifest.saved_at
        return None

    def _newest_finite(self, paths: Mapping[int, str], new: Manifest) -> int | None:
        for step in sorted({*paths, new.step}, reverse=True):
            manifest = new if step == new.step else self._manifest(step, paths[step])
            if manifest is not None and manifest.finite:
                return step
        return None

    def _manifest(self, step: int, path: str) -> Manifest | None:
        if step not in self._known:
            with contextlib.suppress(CheckpointError, OSError):
                self._known[step] = _head(self._store.manifest(path))
        return self._known.get(step)

    def delete(self, step: int, path: str) -> None:
        self._complete.discard(step)
        self._known.pop(step, None)
        self._store.erase(self._store.hide(path))

    def evictable(self) -> list[str]:
        """Return the checkpoints that are not permanent, lowest step first."""
        paths = dict(self._store.newest_first(self._prefix))
        permanent = self._load().steps
        return [paths[step] for step in sorted(paths) if step not in permanent]

    def _load(self) -> RetainedSteps:
        if self._retained is None:
            self._retained = RetainedSteps(frozenset(), self._since)
            for _, path in self._store.newest_first(self._prefix):
                with contextlib.suppress(CheckpointError, OSError):
                    self._retained = self._store.manifest(path).retention
                    break
        return self._retained

    def _saved_at(self, step: int, path: str, retained: RetainedSteps) -> float:
        if self._every_n_hours is None or step in retained.steps:
            return 0.0
        manifest = self._manifest(step, path)
        return retained.since if manifest is None else manifest.saved_at  # too young to keep permanently


def _head(manifest: Manifest) -> Manifest:
    """Return a manifest without its large fields."""
    return dataclasses.replace(manifest, leaves=(), files={}, extra=None, left_out=())
