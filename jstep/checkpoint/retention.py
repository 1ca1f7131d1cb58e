"""Retention of checkpoints: the last few, and one every N hours for good.

A checkpoint is *temporary* or *permanent*. Temporary ones count towards no limit, and a later save
*replaces* them. Of the permanent ones, one every N hours is *kept* for good; the others are
*evictable*. The evictable ones beyond `max_to_keep` are *candidates*: each is kept from then on, if
N hours have passed since the last kept one, or *evicted*. The leftovers of interrupted saves are
deleted by the stores.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from jstep.array_store.manifest import CheckpointError, Manifest, RetainedSteps
from jstep.array_store.store import MAX_MANIFESTS, Store

ALWAYS_TEMPORARY = math.inf
"""The `permanent_every_secs` of a checkpoint that is temporary whatever precedes it."""


def eviction_candidates(
    steps: Iterable[int],
    new: int,
    kept: Iterable[int],
    max_to_keep: int | None,
    newest_finite: int | None,
) -> list[int]:
    """Return the evictable checkpoints beyond `max_to_keep`, lowest step first.

    The new step, the highest one, and the highest finite one are skipped, and the next higher ones
    returned instead.

    Args:
        kept: The checkpoints that are kept for good, without the new one.
    """
    if max_to_keep is None:
        return []
    steps = {*steps, new}
    evictable = sorted(steps.difference(kept))
    excess = max(0, len(evictable) - max_to_keep)
    spared = {new, max(steps), newest_finite}
    return [step for step in evictable if step not in spared][:excess]


def plan_evictions(
    saved_at: Mapping[int, float],
    new: int,
    retained: RetainedSteps,
    max_to_keep: int | None,
    every_n_hours: float | None,
    newest_finite: int | None = None,
) -> tuple[list[int], RetainedSteps]:
    """Return the checkpoints to evict after `new` was saved, and the new retention state.

    As in TF, a checkpoint that falls out of the last `max_to_keep` is kept for good if more than
    `every_n_hours` have passed since the previous one that was. A long pause counts once.

    Args:
        saved_at: Step → when it was saved, NaN if its manifest cannot be read. Only the times of
            candidates are used.
    """
    # The new checkpoint is evictable, even if it replaces one of its step that was kept.
    kept = (retained.kept & saved_at.keys()) - {new}
    interval_start = retained.interval_start
    evicted: list[int] = []
    for step in eviction_candidates(saved_at, new, kept, max_to_keep, newest_finite):
        if math.isnan(saved_at[step]):
            evicted.append(step)
            continue
        # The interval starts after this save if the clock of an earlier host was ahead. Left there,
        # it would let none be kept until this clock has reached it.
        interval_start = min(interval_start, saved_at[step])
        hours = (saved_at[step] - interval_start) / 3600
        if every_n_hours is None or hours <= every_n_hours:
            evicted.append(step)
            continue
        kept |= {step}
        interval_start += 3600 * every_n_hours * int(hours / every_n_hours)
    return evicted, RetainedSteps(frozenset(kept), interval_start)


class Listener(Protocol):
    """A receiver of each saved checkpoint, which can delay its deletion."""

    def saved(self, step: int, path: str) -> None:
        """Receive a checkpoint that is acknowledged and kept; must return immediately."""

    def wait(self, path: str | None = None) -> None:
        """Wait until this checkpoint, or each one, may be deleted."""

    def is_calling(self) -> bool:
        """Return whether this thread reports a checkpoint, so that it must not wait for a save."""


class Published(NamedTuple):
    """The newest checkpoint on disk: its step, and the number of its save among the Saver's."""

    step: int
    number: int


class Decision(NamedTuple):
    """What a save decides before its checkpoint appears.

    Attributes:
        superseded: The paths of the checkpoints to delete: temporary ones that are replaced, and
            evicted ones.
        retained: The retention state for the manifest.
        is_temporary: Whether the new checkpoint is temporary.
    """

    superseded: list[str]
    retained: RetainedSteps
    is_temporary: bool


class Retention:
    """What each save records of the checkpoints that are kept, and which ones it deletes.

    The retention state is in the newest manifest. Others are read only if their checkpoints may
    have to be deleted.

    Args:
        interval_start: When the first interval of `every_n_hours` starts, if no checkpoint says it.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        max_to_keep: int | None,
        every_n_hours: float | None,
        *,
        interval_start: float,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._max_to_keep = max_to_keep
        self._every_n_hours = every_n_hours
        self._interval_start = interval_start
        self._retained: RetainedSteps | None = None
        # Step → the head that `_read_head` has read.
        self._heads: dict[int, _Head] = {}
        # The steps for which it has found no complete checkpoint. They are forgotten when the next
        # save decides, since their checkpoints may have been saved meanwhile.
        self._absent: set[int] = set()
        # The seconds from the beginning of the latest save until its checkpoint existed. None until
        # its deletions have ended, or in a bucket, have begun.
        self.publication_secs: float | None = None
        # None on other processes than the first, and before the first save.
        self.published: Published | None = None

    @property
    def write_secs(self) -> float | None:
        """The seconds of the latest save and of deletions after it; None before these end."""
        publication_secs = self.publication_secs  # once: a writer's thread and the loop's set it
        if publication_secs is None or self._store.is_erasing():
            return None
        return publication_secs + self._store.erase_secs

    def reset_write_secs(self) -> None:
        """Note that a save begins, so that `write_secs` is not that of the one before."""
        self.publication_secs = None

    def published_as(self, manifest: Manifest, number: int) -> None:
        """Note that a checkpoint exists, as it was decided."""
        self.published = Published(manifest.step, number)
        self._retained = manifest.retention
        self._heads[manifest.step] = _head_of(manifest)

    def decide(self, new: Manifest, permanent_every_secs: float | None) -> Decision:
        """Decide what a new checkpoint is, and what it supersedes.

        It reads the newest manifest, those back to the newest finite one and to the newest
        permanent one, and those of candidates, however many checkpoints there are.

        Sets of steps:
            others: All but the new one.
            temporary: Those that the newest manifest lists as temporary, and that were not saved
                again as permanent ones.
            replaced: The temporary ones that this save deletes: all but the newest finite one.
            evicted: The permanent ones that this save deletes.
        """
        paths = self._store.own_paths()
        self._absent.clear()
        retained = self._load_retained(paths)
        if self._max_to_keep is None and permanent_every_secs is None and not retained.temporary:
            return Decision([], retained, is_temporary=False)
        self._heads = {step: head for step, head in self._heads.items() if step in paths}
        others = sorted(paths.keys() - {new.step}, reverse=True)
        is_temporary = self._is_temporary(new, permanent_every_secs, paths, others)
        newest_finite = self._newest_finite(others, new)
        temporary = self._temporary_steps(others, retained)
        replaced = temporary - {newest_finite}
        evicted: list[int] = []
        if self._max_to_keep is not None and not is_temporary:
            saved_at = self._save_times({*others} - temporary, new, retained, newest_finite)
            evicted, retained = plan_evictions(
                saved_at, new.step, retained, self._max_to_keep, self._every_n_hours, newest_finite
            )
        # Those that this save deletes stay marked: if it is killed before, the next one does so.
        marks = {*temporary, new.step} if is_temporary else temporary
        retained = dataclasses.replace(retained, temporary=frozenset(marks))
        superseded = [paths[step] for step in [*sorted(replaced), *evicted]]
        return Decision(superseded, retained, is_temporary)

    def _temporary_steps(self, steps: Sequence[int], retained: RetainedSteps) -> set[int]:
        # Since the manifest that marks it was written, a step may have been saved again, as a
        # permanent checkpoint.
        marked = [step for step in steps if step in retained.temporary]
        self._read_heads(marked)
        return {step for step in marked if not self._is_permanent(step)}

    def _is_temporary(
        self,
        new: Manifest,
        permanent_every_secs: float | None,
        paths: Mapping[int, str],
        others: Sequence[int],
    ) -> bool:
        if permanent_every_secs is None:
            return False
        if new.step in paths and self._is_permanent(new.step):
            # A permanent checkpoint is replaced by a permanent one, such as one saved by hand
            # before the run saves this step by itself.
            return False
        if permanent_every_secs == ALWAYS_TEMPORARY:
            return True
        newest = self._find_step(others, lambda head: not head.temporary)
        if newest is None:
            return False
        # NaN if its manifest cannot be read: then this one is permanent.
        return 0 <= new.saved_at - self._heads[newest].saved_at < permanent_every_secs

    def _newest_finite(self, others: Sequence[int], new: Manifest) -> int | None:
        """Return the highest step whose parameters are finite; `others` are in descending order."""
        higher = [step for step in others if step > new.step]
        found = self._find_step(higher, lambda head: head.finite)
        if found is not None:
            return found
        if new.finite:
            return new.step
        lower = [step for step in others if step < new.step]
        return self._find_step(lower, lambda head: head.finite)

    def _save_times(
        self, steps: set[int], new: Manifest, retained: RetainedSteps, finite: int | None
    ) -> dict[int, float]:
        """Return step → when it was saved, for `plan_evictions`.

        Candidates without a complete checkpoint are left out. Other steps than the candidates and
        the new one have the time 0, which is not used, so that their manifests need not be read.
        """
        while True:
            candidates = eviction_candidates(
                steps, new.step, retained.kept & steps, self._max_to_keep, finite
            )
            self._read_heads(candidates)
            incomplete = self._absent & {*candidates}
            if not incomplete:
                break
            # Without them, fewer checkpoints exceed the limit.
            steps = steps - incomplete
        saved_at = dict.fromkeys(steps, 0.0)
        for step in candidates:
            saved_at[step] = self._heads[step].saved_at
        saved_at[new.step] = new.saved_at
        return saved_at

    def _find_step(self, steps: Sequence[int], is_wanted: Callable[["_Head"], bool]) -> int | None:
        """Return the first of some steps whose head is wanted; read more and more at a time."""
        count = 1
        for i, step in enumerate(steps):
            if step not in self._heads and step not in self._absent:
                self._read_heads(steps[i : i + count])
                count = min(4 * count, MAX_MANIFESTS)
            if step in self._heads and is_wanted(self._heads[step]):
                return step
        return None

    def _read_heads(self, steps: Sequence[int]) -> None:
        """Read heads of complete checkpoints once, several at a time: a bucket answers slowly."""
        missing = [step for step in steps if step not in self._heads and step not in self._absent]
        if len(missing) > 1:
            with ThreadPoolExecutor(min(MAX_MANIFESTS, len(missing)), "jstep-manifests") as pool:
                found = list(pool.map(self._read_head, missing))
        else:
            found = [self._read_head(step) for step in missing]
        for step, head in zip(missing, found, strict=True):
            if head is None:
                self._absent.add(step)
            else:
                self._heads[step] = head

    def _read_head(self, step: int) -> "_Head | None":
        """Read the head of a manifest; None if there is no such checkpoint, or it is incomplete."""
        try:
            manifest = self._store.complete_manifest(self._prefix, step)
        except (CheckpointError, OSError):
            return _Head(saved_at=math.nan, finite=False, temporary=False, retention=None)
        return None if manifest is None else _head_of(manifest)

    def _is_permanent(self, step: int) -> bool:
        self._read_heads([step])
        return step in self._heads and not self._heads[step].temporary

    def delete(self, step: int, path: str) -> None:
        self._heads.pop(step, None)
        self._store.erase(self._store.hide(path))
        self._store.finish_erasing()

    def counted_checkpoints(self) -> list[str]:
        """Return the paths of the evictable checkpoints, lowest step first."""
        paths = dict(self._store.newest_first(self._prefix))
        if self.published is None:
            # Another Saver may have saved since these were read.
            self._retained = None
            self._heads.clear()
            self._absent.clear()
        retained = self._load_retained(paths)
        counted: list[str] = []
        for step in sorted(paths):
            is_temporary = step in retained.temporary and not self._is_permanent(step)
            if step not in retained.kept and not is_temporary:
                counted.append(paths[step])
        return counted

    def _load_retained(self, paths: Mapping[int, str]) -> RetainedSteps:
        """Return the retention state: of the latest save, or of the newest readable manifest."""
        if self._retained is None:
            newest = self._find_step(
                sorted(paths, reverse=True), lambda head: head.retention is not None
            )
            if newest is not None:
                self._retained = self._heads[newest].retention
        if self._retained is None:
            self._retained = RetainedSteps(frozenset(), self._interval_start)
        return self._retained


class _Head(NamedTuple):
    """What retention needs of a manifest.

    Attributes:
        saved_at: When it was saved; NaN if the manifest cannot be read.
        retention: The retention state; None if the manifest cannot be read.
    """

    saved_at: float
    finite: bool
    temporary: bool
    retention: RetainedSteps | None


def _head_of(manifest: Manifest) -> _Head:
    return _Head(manifest.saved_at, manifest.finite, manifest.temporary, manifest.retention)
