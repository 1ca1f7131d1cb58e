"""Retention of checkpoints: the last few, and one every N hours permanently. Stores delete leftovers of saves."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jstep.checkpoint.attempts import Files
from jstep.checkpoint.listing import format_name
from jstep.checkpoint.manifest import CheckpointError, LeftOutLeaf, Manifest, RetainedSteps, known_values
from jstep.checkpoint.store import Store

ALWAYS = math.inf
"""The `temporary_secs` of a checkpoint that is temporary whatever precedes it."""


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
        self._heads: dict[int, Manifest] = {}
        """By step, see `_head`."""
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
        self._heads[manifest.step] = _head_of(sealed)
        seconds = time.monotonic() - end.began
        if end.listener is not None and not is_temporary:
            end.listener.saved(manifest.step, self._store.path(format_name(self._prefix, manifest.step)))
        for path in victims:
            if end.listener is not None:
                end.listener.wait(path)
            self._store.evict(path)
        self._published_secs = seconds

    def _decide(self, new: Manifest, temporary_secs: float | None) -> tuple[list[str], RetainedSteps, bool]:
        """Return the paths to delete, the retention state, and whether this checkpoint is temporary."""
        paths = self._store.own_paths()
        retained = self._load(paths)
        if self._max_to_keep is None and temporary_secs is None and not retained.temporary:
            return [], retained, False
        self._heads = {step: head for step, head in self._heads.items() if step in paths}
        others = sorted(paths.keys() - {new.step}, reverse=True)
        is_temporary = False
        # A permanent checkpoint is replaced by a permanent one, such as one saved by hand before the run saves
        # this step by itself.
        if temporary_secs is not None and not (new.step in paths and self._is_permanent(new.step)):
            previous = next((self._heads[step].saved_at for step in others if self._is_permanent(step)), -math.inf)
            is_temporary = temporary_secs == ALWAYS or 0 <= new.saved_at - previous < temporary_secs
        finite = next((step for step in sorted({*others, new.step}, reverse=True) if self._is_finite(step, new)), None)
        temporary = {step for step in others if step in retained.temporary and not self._is_permanent(step)}
        replaced = temporary - {finite}
        marks = temporary - replaced | ({new.step} if is_temporary else set())
        victims: list[int] = []
        if self._max_to_keep is not None and not is_temporary:
            times = {new.step: new.saved_at}
            for step in {*others} - replaced:
                if step in retained.steps:
                    times[step] = 0.0
                elif (head := self._head(step)) is not None:
                    times[step] = head.saved_at
            victims, retained = evictions(times, new.step, retained, self._max_to_keep, self._every_n_hours, finite)
        retained = dataclasses.replace(retained, temporary=frozenset(marks))
        return [paths[step] for step in [*sorted(replaced), *victims]], retained, is_temporary

    def _head(self, step: int) -> Manifest | None:
        """Return the head of a complete checkpoint's manifest, which is read once; None if there is no such checkpoint.

        If it cannot be read, its time is NaN: it is too young to be kept permanently.
        """
        if step not in self._heads and (path := self._store.at(self._prefix, step)) is not None:
            self._heads[step] = Manifest(step, math.nan, (), finite=False)
            with contextlib.suppress(CheckpointError, OSError):
                self._heads[step] = _head_of(self._store.manifest(path))
        return self._heads.get(step)

    def _is_finite(self, step: int, new: Manifest) -> bool:
        head = new if step == new.step else self._head(step)
        return head is not None and head.finite

    def _is_permanent(self, step: int) -> bool:
        return (head := self._head(step)) is not None and not head.temporary

    def delete(self, step: int, path: str) -> None:
        self._heads.pop(step, None)
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


def _head_of(manifest: Manifest) -> Manifest:
    """Return a manifest without its large fields."""
    return dataclasses.replace(manifest, leaves=(), files={}, extra=None, left_out=())
