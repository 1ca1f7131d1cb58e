"""Reading checkpoints: which one, whether it is whole, and into what."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jstep.checkpoint import processes
from jstep.checkpoint.format import leaves as _leaves
from jstep.checkpoint.format import placed
from jstep.checkpoint.format.manifest import CheckpointError, Manifest
from jstep.checkpoint.store.protocol import DamagedError, Store
from jstep.core import trees

_logger = logging.getLogger("jstep")


class Reader:
    """Reads the checkpoints of one prefix."""

    def __init__(self, store: Store, prefix: str, verify: bool) -> None:
        self._store, self._prefix, self._verify = store, prefix, verify

    def find(self, step: int | None) -> tuple[str, Manifest]:
        """The path and manifest of a checkpoint, the same on every process."""
        where = self._store.directory
        if step is None:
            newest = next(self._store.newest_first(self._prefix), None)
            step = processes.of_the_first(-1 if newest is None else newest[0])
            if step < 0:
                raise FileNotFoundError(f"there is no checkpoint {self._prefix}-* in {where}")
        path = self._store.at(self._prefix, step)
        if path is None:
            steps = sorted(step for step, _ in self._store.newest_first(self._prefix))
            raise FileNotFoundError(
                f"step={step}: there is no whole checkpoint {self._prefix}-{step} in {where}; "
                f"there are those of steps {steps}"
            )
        try:
            return path, self._store.manifest(path)
        except CheckpointError as error:
            raise self._damaged(path, [str(error)]) from None

    def restore(self, target: Any, step: int | None, partial: bool, averages: str | None) -> Any:
        """As `Saver.restore`."""
        path, manifest = self.find(step)
        if averages is not None:
            _leaves.check_averages(averages, manifest.leaves, path)
        if target is None:
            return self._looked_at(path, manifest, averages)
        wanted = _leaves.match(target, manifest.leaves, averages, partial, path)
        values = self._filled(path, manifest, wanted)
        return jax.tree.unflatten(trees.structure(target), values)

    def _looked_at(self, path: str, manifest: Manifest, averages: str | None) -> dict[str, Any]:
        arrays = self._read(path, manifest, {leaf.array: None for leaf in manifest.leaves if leaf.array is not None})
        return placed.looked_at(manifest.leaves, arrays, averages)

    def _filled(self, path: str, manifest: Manifest, wanted: Sequence[_leaves.Wanted]) -> list[Any]:
        left = {i: placed.left_as_is(want) for i, want in enumerate(wanted) if want.source is None}
        if left:
            paths = ", ".join(wanted[i].path for i in left)
            _logger.info("%s was restored in part; left as they were: %s", path, paths)
        uses = Counter(want.source.array for want in wanted if want.source is not None)
        shardings: dict[str, Any] = {}
        for want in wanted:
            if want.source is not None and want.source.array is not None:
                shardings.setdefault(want.source.array, placed.stored_sharding(want))
        arrays = self._read(path, manifest, shardings)

        def value(i: int, want: _leaves.Wanted) -> Any:
            if want.source is None:
                return left[i]
            array: Any = arrays.get(want.source.array or "")
            shared = uses[want.source.array] > 1 and isinstance(array, jax.Array)
            return placed.placed(want, array.copy() if shared else array)

        return [value(i, want) for i, want in enumerate(wanted)]

    def _read(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """The stored arrays of these names. Files are verified first: what is damaged is not decoded."""
        share = jax.process_index(), jax.process_count()
        verify = self._verify and not self._store.checks_what_it_reads
        try:
            problems = self._store.damage(path, manifest, share) if verify else []
        except OSError as error:
            problems = [str(error)]
        if processes.on_any(bool(problems)):
            raise self._damaged(path, problems or ["another process names the file"])
        arrays: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            arrays = self._store.restore(path, manifest, shardings)
        except DamagedError as error:
            problems, failure = error.problems, error
        except Exception as error:
            failure = error
        if not processes.on_any(failure is not None):
            return arrays
        if failure is None or problems:
            raise self._damaged(path, problems or ["another process names the file"])
        raise CheckpointError(f"{path} could not be read: {short(failure)}") from failure

    def _damaged(self, path: str, problems: Sequence[str]) -> CheckpointError:
        """The error for a damaged checkpoint: says what is wrong, and which one to take instead."""
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        rest = f"No other checkpoint {self._prefix}-* in {self._store.directory} is whole."
        for step, other in self._store.newest_first(self._prefix):
            if other != path and is_intact(self._store, other):
                rest = f"The newest step that is whole is {step} ({other}); restore it with step={step}."
                break
        return CheckpointError(f"{path} is damaged: {'; '.join(problems[:3])}{more}. {rest}")


def is_intact(store: Store, path: str) -> bool:
    """Whether every byte of a checkpoint is as it was written."""
    try:
        return not store.damage(path, store.manifest(path))
    except (CheckpointError, OSError):
        return False


def short(error: Exception) -> str:
    """An error in a line that can be read."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 500 else text[:500] + "…"
