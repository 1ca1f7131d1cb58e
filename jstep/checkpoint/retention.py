"""Retention of checkpoints: the last few, and one every N hours permanently."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jstep.checkpoint.format.manifest import CheckpointError, LeftOut, Manifest
from jstep.checkpoint.store.listing import name
from jstep.checkpoint.store.protocol import Commit, Files, Store
from jstep.core.checks import listing
from jstep.distributed import processes

_logger = logging.getLogger("jstep")


@dataclasses.dataclass(frozen=True)
class RetainedSteps:
    """The retention state, which is written into every manifest.

    Attributes:
        steps: Steps of the checkpoints that are kept permanently.
        since: The time up to which hours are accounted for, in seconds: the first save more than
            `every_n_hours` after it is the next one kept permanently.
    """

    steps: frozenset[int]
    since: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form for the manifest."""
        return {"kept": sorted(self.steps), "since": self.since}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RetainedSteps":
        """Return what `to_json` wrote."""
        return cls(frozenset(data["kept"]), data["since"])


def evictions(
    saved_at: Mapping[int, float],
    new: int,
    retained: RetainedSteps,
    max_to_keep: int | None,
    every_n_hours: float | None,
) -> tuple[list[int], RetainedSteps]:
    """Return the checkpoints to delete after `new` was saved, and the new retention state.

    As in TF: a checkpoint that falls out of the last `max_to_keep` is kept permanently if more than `every_n_hours`
    have passed since the previous permanent one. A long pause counts once: it does not make up for missing saves.

    Args:
        saved_at: Step → time of saving in seconds, of all existing checkpoints including the new one.
        new: The step just saved. Neither it nor the highest step is evicted.
        retained: The retention state before this save.
        max_to_keep: The number of other checkpoints to keep; None for all.
        every_n_hours: Hours between permanent checkpoints; None to keep none permanently.
    """
    for_good, since = (retained.steps & saved_at.keys()) - {new}, retained.since
    evictable = sorted(step for step in saved_at if step not in for_good)
    excess = 0 if max_to_keep is None else len(evictable) - max_to_keep
    victims: list[int] = []
    for step in [step for step in evictable if step not in (new, max(saved_at))][: max(excess, 0)]:
        hours = (saved_at[step] - since) / 3600
        if every_n_hours is not None and hours > every_n_hours:
            for_good |= {step}
            since += 3600 * every_n_hours * math.floor(hours / every_n_hours)
        else:
            victims.append(step)
    return victims, RetainedSteps(frozenset(for_good), since)


class RetentionManager:
    """Manager that completes the manifests of saves, and deletes old checkpoints.

    The retention state is stored in the manifest of the newest checkpoint, whichever Saver wrote it.
    """

    def __init__(
        self, store: Store, prefix: str, max_to_keep: int | None, every_n_hours: float | None, since: float
    ) -> None:
        self._store, self._prefix = store, prefix
        self._max_to_keep, self._every_n_hours = max_to_keep, every_n_hours
        self._since = since
        self._retained: RetainedSteps | None = None
        self._warned = False
        self._times: dict[int, float] = {}
        self._whole: set[int] = set()

    def commit_of(
        self,
        manifest: Manifest,
        left_out: Callable[[], tuple[LeftOut, ...]],
        flushes: Iterable[Callable[[], None]] = (),
    ) -> Commit:
        """Return the commit of a save.

        Args:
            manifest: The manifest, which still lacks files, retention and left-out leaves.
            left_out: Returns the left-out leaves.
            flushes: Functions to call before the checkpoint exists.
        """

        def seal(files: Files) -> tuple[Manifest, Callable[[], None]]:
            for flush in flushes:
                flush()
            victims, retained = self.decide(manifest)
            sealed = dataclasses.replace(manifest, retention=retained.to_json(), files=files, left_out=left_out())
            return sealed, lambda: self.done(manifest, retained, victims)

        return Commit(manifest.saved_at, seal)

    def decide(self, manifest: Manifest) -> tuple[list[str], RetainedSteps]:
        """Return the paths of the checkpoints to delete once this one exists, and the new retention state."""
        retained = self.load(leaf.path for leaf in manifest.leaves)
        if self._max_to_keep is None:
            return [], retained
        found = dict(self._store.newest_first(self._prefix, trusted=retained.steps | self._whole))
        self._whole = set(found)  # not checked again at the next save
        found.pop(manifest.step, None)
        times = {step: self._saved_at(step, path, retained) for step, path in found.items()}
        times[manifest.step] = manifest.saved_at
        victims, retained = evictions(times, manifest.step, retained, self._max_to_keep, self._every_n_hours)
        self._warn_of_later(manifest.step, max(times))
        return [found[step] for step in victims], retained

    def done(self, manifest: Manifest, retained: RetainedSteps, victims: list[str]) -> None:
        """Record a committed checkpoint, and delete those that it supersedes."""
        self._retained = retained
        self._times[manifest.step] = manifest.saved_at
        self._whole.add(manifest.step)
        for path in victims:
            self._store.evict(path)

    def delete(self, step: int) -> None:
        """Delete one checkpoint by its step, on the first process; the others return when it is deleted.

        Raises:
            FileNotFoundError: There is no checkpoint of this step.
        """
        path = self._store.at(self._prefix, step)
        if processes.any_process(path is None):
            raise FileNotFoundError(
                f"step={step}: there is no checkpoint {name(self._prefix, step)} in {self._store.directory}"
            )
        if jax.process_index() == 0 and path is not None:
            self._store.evict(path)
        self._times.pop(step, None)
        processes.any_process(False)

    def evictable(self) -> list[str]:
        """Return the paths of the checkpoints that are not kept permanently, lowest step first."""
        found = dict(self._store.newest_first(self._prefix))
        for_good = (self._retained or self._retained_in(self._newest_manifest())).steps
        return [found[step] for step in sorted(found) if step not in for_good]

    def _warn_of_later(self, step: int, highest: int) -> None:
        if step < highest and not self._warned:
            self._warned = True
            _logger.warning(
                "step %d was saved, and there is %s: restoring resumes from the latter unless it is deleted",
                step,
                name(self._prefix, highest),
            )

    def load(self, saved: Iterable[str]) -> RetainedSteps:
        """Return the retention state; the first call reads it from the newest checkpoint.

        A warning is logged then if that checkpoint left out some of the leaves that this Saver saves.

        Args:
            saved: The paths of these leaves.
        """
        if self._retained is None:
            newest = self._newest_manifest()
            self._retained = self._retained_in(newest)
            if newest is not None:
                self._warn_of_saved_again(newest, saved)
        return self._retained

    def _warn_of_saved_again(self, newest: Manifest, saved: Iterable[str]) -> None:
        absent = {leaf.path for leaf in newest.left_out}
        again = [repr(path) for path in saved if path in absent]
        if again:
            _logger.warning(
                "%s left out leaves that the next checkpoint contains, because leave_out changed%s. To leave them out "
                "again, pass the same leave_out; with train, checkpoint_dir=jstep.Saver(directory, leave_out=…)",
                name(self._prefix, newest.step),
                listing("saved again", again),
            )

    def _saved_at(self, step: int, path: str, retained: RetainedSteps) -> float:
        if self._every_n_hours is None or step in retained.steps:
            return 0.0
        if step not in self._times:
            try:
                self._times[step] = self._store.manifest(path).saved_at
            except (CheckpointError, OSError):
                self._times[step] = retained.since  # too young to keep permanently
        return self._times[step]

    def _newest_manifest(self) -> Manifest | None:
        for _, path in self._store.newest_first(self._prefix):
            with contextlib.suppress(CheckpointError, OSError):
                return self._store.manifest(path)
        return None

    def _retained_in(self, newest: Manifest | None) -> RetainedSteps:
        if newest is None or "kept" not in newest.retention:
            return RetainedSteps(frozenset(), self._since)
        return RetainedSteps.from_json(newest.retention)
