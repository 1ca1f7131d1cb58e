"""Retention of checkpoints: the last few, and one every N hours permanently. Stores delete leftovers of saves."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from jstep.checkpoint.attempts import Files
from jstep.checkpoint.listing import format_name
from jstep.checkpoint.manifest import CheckpointError, LeftOutLeaf, Manifest, RetainedSteps, known_values
from jstep.checkpoint.store import Store

ALWAYS = math.inf
"""The `temporary_secs` of a checkpoint that is temporary whatever precedes it."""


_MAX_CONCURRENT = 16
"""Manifests to read at once."""


def in_question(
    steps: Iterable[int], new: int, permanent: Iterable[int], max_to_keep: int | None, newest_finite: int | None
) -> list[int]:
    """Return the checkpoints beyond `max_to_keep`, lowest step first, of which one may have to be kept permanently.

    The new step, the highest one, and the highest finite one are never among them.
    """
    steps = {*steps, new}
    evictable = sorted(steps - ({*permanent} - {new}))
    excess = 0 if max_to_keep is None else max(0, len(evictable) - max_to_keep)
    spared = {new, max(steps), newest_finite}
    return [step for step in evictable if step not in spared][:excess]


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
    have passed since the previous permanent one. A long pause counts once.

    Args:
        saved_at: Step → when it was saved; of those that are not `in_question`, the time is not used.
    """
    permanent = (retained.steps & saved_at.keys()) - {new}
    since = retained.since
    victims: list[int] = []
    for step in in_question(saved_at, new, permanent, max_to_keep, newest_finite):
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
        number: The number of the save, among those of the Saver.
    """

    manifest: Manifest
    left_out: Callable[[], tuple[LeftOutLeaf, ...]]
    flushes: Sequence[Callable[[], None]]
    temporary_secs: float | None
    listener: Listener | None
    number: int = 0
    began: float = dataclasses.field(default_factory=time.monotonic)


class Published(NamedTuple):
    """The newest checkpoint that is on disk: its step, and the number of its save among those of the Saver."""

    step: int
    number: int


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
        """By step, see `_read_head`."""
        self._absent: set[int] = set()
        """Steps that have no complete checkpoint, as long as one save decides."""
        self._published_secs: float | None = None
        self.published: Published | None = None

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
        remains = publish(sealed)
        self.published = Published(manifest.step, end.number)
        self._store.erase(remains)
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
        """Return the paths to delete, the retention state, and whether this checkpoint is temporary.

        It reads the newest manifest, those back to the newest finite one and to the newest permanent one, and those of
        checkpoints that may have to be deleted, however many are kept.
        """
        paths = self._store.own_paths()
        self._absent.clear()
        retained = self._load(paths)
        if self._max_to_keep is None and temporary_secs is None and not retained.temporary:
            return [], retained, False
        self._heads = {step: head for step, head in self._heads.items() if step in paths}
        others = sorted(paths.keys() - {new.step}, reverse=True)
        is_temporary = False
        # A permanent checkpoint is replaced by a permanent one, such as one saved by hand before the run saves
        # this step by itself.
        if temporary_secs is not None and not (new.step in paths and self._is_permanent(new.step)):
            newest = self._first(others, lambda head: not head.temporary)
            previous = -math.inf if newest is None else self._heads[newest].saved_at
            is_temporary = temporary_secs == ALWAYS or 0 <= new.saved_at - previous < temporary_secs
        finite = self._newest_finite(others, new)
        marked = [step for step in others if step in retained.temporary]
        self._read_heads(marked)
        temporary = {step for step in marked if not self._is_permanent(step)}
        replaced = temporary - {finite}
        marks = temporary - replaced | ({new.step} if is_temporary else set())
        victims: list[int] = []
        if self._max_to_keep is not None and not is_temporary:
            times = self._times({*others} - replaced, new, retained, finite)
            victims, retained = evictions(times, new.step, retained, self._max_to_keep, self._every_n_hours, finite)
        retained = dataclasses.replace(retained, temporary=frozenset(marks))
        return [paths[step] for step in [*sorted(replaced), *victims]], retained, is_temporary

    def _newest_finite(self, others: Sequence[int], new: Manifest) -> int | None:
        """Return the highest step whose parameters are finite."""
        above = [step for step in others if step > new.step]
        found = self._first(above, lambda head: head.finite)
        if found is not None or new.finite:
            return new.step if found is None else found
        return self._first([step for step in others if step < new.step], lambda head: head.finite)

    def _times(self, steps: set[int], new: Manifest, retained: RetainedSteps, finite: int | None) -> dict[int, float]:
        """Return the steps of complete checkpoints, with the times of those that may have to be deleted."""
        while True:
            wanted = in_question(steps, new.step, retained.steps & steps, self._max_to_keep, finite)
            self._read_heads(wanted)
            incomplete = self._absent & {*wanted}
            if not incomplete:
                break
            # They count as no checkpoints, so that others may have to be kept in their place.
            steps = steps - incomplete
        times = dict.fromkeys(steps, 0.0)
        for step in wanted:
            times[step] = self._heads[step].saved_at
        return times | {new.step: new.saved_at}

    def _first(self, steps: Sequence[int], has: Callable[[Manifest], bool]) -> int | None:
        """Return the first of some steps whose head has a property. More and more are read at a time."""
        count = 1
        for i, step in enumerate(steps):
            if step not in self._heads and step not in self._absent:
                self._read_heads(steps[i : i + count])
                count = min(4 * count, _MAX_CONCURRENT)
            if step in self._heads and has(self._heads[step]):
                return step
        return None

    def _read_heads(self, steps: Sequence[int]) -> None:
        """Read the heads of complete checkpoints, each once, and several at a time: a bucket answers slowly."""
        missing = [step for step in steps if step not in self._heads and step not in self._absent]
        if len(missing) > 1:
            with ThreadPoolExecutor(min(_MAX_CONCURRENT, len(missing)), "jstep-manifests") as pool:
                found = list(pool.map(self._read_head, missing))
        else:
            found = [self._read_head(step) for step in missing]
        for step, head in zip(missing, found, strict=True):
            if head is None:
                self._absent.add(step)
            else:
                self._heads[step] = head

    def _read_head(self, step: int) -> Manifest | None:
        """Read the head of a manifest; None if there is no such checkpoint, or it is incomplete.

        If it cannot be read, its time is NaN: it is too young to be kept permanently.
        """
        unreadable = Manifest(step, math.nan, (), finite=False)
        try:
            manifest = self._store.complete_manifest(self._prefix, step)
        except (CheckpointError, OSError):
            return unreadable
        return None if manifest is None else _head_of(manifest)

    def _is_permanent(self, step: int) -> bool:
        self._read_heads([step])
        return step in self._heads and not self._heads[step].temporary

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
            newest = self._first(sorted(paths, reverse=True), lambda head: not math.isnan(head.saved_at))
            self._retained = (
                RetainedSteps(frozenset(), self._since) if newest is None else self._heads[newest].retention
            )
        return self._retained


def _head_of(manifest: Manifest) -> Manifest:
    """Return a manifest without its large fields."""
    return dataclasses.replace(manifest, leaves=(), files={}, extra=None, left_out=())
