"""Which checkpoints stay: the last few, and one for every so many hours for good."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from jstep.checkpoint import _directory as folder
from jstep.checkpoint import manifest as _manifest
from jstep.checkpoint.manifest import CheckpointError, Manifest

_logger = logging.getLogger("jstep")


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is remembered from save to save, and written into every manifest.

    Attributes:
        steps: Checkpoints kept for good.
        since: The time up to which hours are accounted for, in seconds: the first save more than
            `every_n_hours` after it is the next to be kept for good.
    """

    steps: frozenset[int]
    since: float

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {"kept": sorted(self.steps), "since": self.since}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Kept":
        """What `to_json` wrote."""
        return cls(frozenset(data["kept"]), data["since"])


def evictions(
    saved_at: Mapping[int, float], new: int, kept: Kept, max_to_keep: int | None, every_n_hours: float | None
) -> tuple[list[int], Kept]:
    """Which checkpoints to delete now that `new` is there, and what to remember.

    As in TF: a checkpoint that falls out of the last `max_to_keep` is kept for good where more than `every_n_hours`
    have passed since the one kept before. A long pause counts once, it does not make up for what was not saved.

    Args:
        saved_at: Step → time of saving in seconds, of all checkpoints there are, the new one included.
        new: The step just saved. Neither it nor the highest step is evicted.
        kept: What was remembered before.
        max_to_keep: How many of the others stay; None for all.
        every_n_hours: None where none is kept for good.
    """
    for_good, since = (kept.steps & saved_at.keys()) - {new}, kept.since
    passing = sorted(step for step in saved_at if step not in for_good)
    excess = 0 if max_to_keep is None else len(passing) - max_to_keep
    victims: list[int] = []
    for step in [step for step in passing if step not in (new, max(saved_at))][: max(excess, 0)]:
        hours = (saved_at[step] - since) / 3600
        if every_n_hours is not None and hours > every_n_hours:
            for_good |= {step}
            since += 3600 * every_n_hours * math.floor(hours / every_n_hours)
        else:
            victims.append(step)
    return victims, Kept(frozenset(for_good), since)


class Keeper:
    """Gives finished checkpoints their names, and deletes those whose time has passed.

    What has to be remembered lies in the manifest of the newest checkpoint, whoever wrote it.
    """

    def __init__(
        self, directory: str, prefix: str, max_to_keep: int | None, every_n_hours: float | None, since: float
    ) -> None:
        self._directory, self._prefix = directory, prefix
        self._max_to_keep, self._every_n_hours = max_to_keep, every_n_hours
        self._since = since
        self._kept: Kept | None = None
        self._mentioned = False

    def publish(self, manifest: Manifest, temporary: str, final: str) -> None:
        """Seals a checkpoint that was written, gives it its name, and deletes what it supersedes."""
        found: dict[int, str] = {}
        kept = self._kept or self._remembered()
        victims: list[int] = []
        if self._max_to_keep is not None:
            found = folder.checkpoints(self._directory, self._prefix, trusted=kept.steps)
            found.pop(manifest.step, None)
            times = {step: self._saved_at(step, path, kept) for step, path in found.items()}
            times[manifest.step] = manifest.saved_at
            victims, kept = evictions(times, manifest.step, kept, self._max_to_keep, self._every_n_hours)
            self._mention_later(manifest.step, max(times))
        files = _manifest.collect(temporary)
        _manifest.write(temporary, dataclasses.replace(manifest, retention=kept.to_json(), files=files))
        folder.publish(temporary, final)
        self._kept = kept
        for step in victims:
            folder.evict(found[step])

    def passing(self) -> list[str]:
        """The paths of the checkpoints that are not kept for good, lowest step first."""
        found = folder.checkpoints(self._directory, self._prefix)
        for_good = (self._kept or self._remembered()).steps
        return [found[step] for step in sorted(found) if step not in for_good]

    def _mention_later(self, step: int, highest: int) -> None:
        if step < highest and not self._mentioned:
            self._mentioned = True
            _logger.warning(
                "step %d was saved, and there is %s: restoring goes on from there unless it is deleted",
                step,
                folder.name(self._prefix, highest),
            )

    def _saved_at(self, step: int, path: str, kept: Kept) -> float:
        return 0.0 if self._every_n_hours is None or step in kept.steps else folder.saved_at(path)

    def _remembered(self) -> Kept:
        for _, path in folder.newest_first(self._directory, self._prefix):
            with contextlib.suppress(CheckpointError):
                return Kept.from_json(_manifest.read(path).retention)
        return Kept(frozenset(), self._since)
