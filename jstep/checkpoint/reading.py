"""Finding, verifying and restoring checkpoints."""

import concurrent.futures
import copy
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jstep.checkpoint import processes
from jstep.checkpoint.format import ages, left_out, place_leaf
from jstep.checkpoint.format.manifest import CheckpointError, Manifest
from jstep.checkpoint.format.match import Match, Names, check_averages, listing, match
from jstep.checkpoint.format.match_params import PARAMS, match_params
from jstep.checkpoint.store.protocol import CorruptedError, Store
from jstep.core import trees
from jstep.core.contexts import internal_transfers

_TRIES = 10  # a concurrent writer evicts one checkpoint per save, and a read takes no longer than a few saves
_logger = logging.getLogger("jstep")


class _GoneError(Exception):
    """A checkpoint was deleted or replaced while it was read."""


class Reader:
    """Reader of the checkpoints of one prefix."""

    def __init__(self, store: Store, prefix: str, verify: bool) -> None:
        self._store, self._prefix, self._verify = store, prefix, verify

    def extra(self, step: int | None) -> Any:
        """See `Saver.extra`."""
        return self._retry(step, lambda path, manifest: copy.deepcopy(manifest.extra))

    def restore(self, target: Any, step: int | None, partial: bool, averages: str | None, names: Names | None) -> Any:
        """See `Saver.restore`."""

        def read(path: str, manifest: Manifest) -> Any:
            if averages is not None:
                check_averages(averages, manifest.leaves, path)
            if target is None:
                return self._read_nested(path, manifest, averages)
            found = match(target, manifest.leaves, averages, partial, names, path, manifest.left_out)
            with internal_transfers():
                values = self._read_leaves(path, manifest, found)
            self._log_differences(path, manifest.step, target, found, values)
            self._warn_of_changed(path, found, values)
            return jax.tree.unflatten(trees.structure(target), values)

        return self._retry(step, read)

    def restore_params(self, params: Any, step: int | None, names: Names | None, averages: str | None) -> Any:
        """See `Saver.restore_params`."""
        target = {PARAMS: params}

        def read(path: str, manifest: Manifest) -> Any:
            if averages is not None:
                check_averages(averages, manifest.leaves, path)
            found = match_params(target, manifest, averages, names, path)
            with internal_transfers():
                values = self._read_leaves(path, manifest, found)
            self._warn_of_changed(path, found, values)
            return jax.tree.unflatten(trees.structure(target), values)[PARAMS]

        return self._retry(step, read)

    def _retry(self, step: int | None, read: Any) -> Any:
        """Read one checkpoint; if it is evicted meanwhile, choose again which one to read."""
        for _ in range(_TRIES):
            try:
                return read(*self._find(step))
            except _GoneError as gone:
                path = gone.args[0]
        raise CheckpointError(f"{path} was deleted while it was read, and so were {_TRIES - 1} others before it")

    def _find(self, step: int | None) -> tuple[str, Manifest]:
        """Return the path and manifest of a checkpoint, the same on every process."""
        step = self._newest() if step is None else step
        path = self._store.at(self._prefix, step)
        if processes.any_process(path is None):
            steps = sorted(step for step, _ in self._store.newest_first(self._prefix))
            raise FileNotFoundError(
                f"step={step}: there is no complete checkpoint {self._prefix}-{step} in {self._store.directory}, "
                f"which has {f'steps {steps}' if steps else 'no checkpoints'}"
            )
        assert path is not None
        manifest, problem = None, ""
        try:
            manifest = self._store.manifest(path)
        except FileNotFoundError:
            pass
        except CheckpointError as error:
            problem = str(error)
        if processes.any_process(manifest is None and not problem):
            raise _GoneError(path)
        if manifest is not None and manifest.step != step:
            problem = (
                f"its name says step {step}, and it holds step {manifest.step}: it was copied or renamed; "
                f"rename it to {self._prefix}-{manifest.step}, or delete it"
            )
        if processes.any_process(bool(problem)):
            raise self._corrupted(path, [problem or "see the error of another process"])
        assert manifest is not None
        return path, manifest

    def _newest(self) -> int:
        """Return the highest step. Its checkpoint must be complete: older ones are never restored silently."""
        newest = next(self._store.newest_first(self._prefix), None)
        broken = self._store.broken(self._prefix, -1 if newest is None else newest[0])
        step = processes.broadcast_first(-2 if broken else -1 if newest is None else newest[0])
        if step == -2:
            path, _, problem = (broken or [f"{self._prefix}-*: see the error of another process"])[0].partition(": ")
            raise self._corrupted(path, [problem])
        if step == -1:
            raise FileNotFoundError(f"there is no checkpoint {self._prefix}-* in {self._store.directory}")
        return step

    def _read_nested(self, path: str, manifest: Manifest, averages: str | None) -> dict[str, Any]:
        arrays = self._read(path, manifest, {leaf.array: None for leaf in manifest.leaves if leaf.array is not None})
        return place_leaf.nested_values(manifest.leaves, arrays, averages)

    def _read_leaves(self, path: str, manifest: Manifest, found: Match) -> list[Any]:
        left = {
            i: place_leaf.keep_target_leaf(want, manifest.step)
            for i, want in enumerate(found.wanted)
            if want.source is None
        }
        sources = [want.source for want in found.wanted if want.source is not None]
        uses = Counter(source.array for source in sources)
        shardings: dict[str, Any] = {}
        for want in found.wanted:
            if want.source is not None and want.source.array is not None:
                shardings.setdefault(want.source.array, place_leaf.stored_sharding(want))
        arrays = self._read(path, manifest, shardings)

        def value(i: int) -> Any:
            want = found.wanted[i]
            if want.source is None:
                return left[i]
            array: Any = arrays.get(want.source.array or "")
            shared = uses[want.source.array] > 1 and isinstance(array, jax.Array)
            return place_leaf.place_leaf(want, array.copy() if shared else array)

        return [value(i) for i in range(len(found.wanted))]

    def _warn_of_changed(self, path: str, found: Match, values: Sequence[Any]) -> None:
        """Warn of leaves that were left out of the checkpoint and have other values in the target."""
        with internal_transfers():
            pairs = zip(found.wanted, values, strict=True)
            changed = left_out.changed((one.left_out, value) for one, value in pairs if one.left_out is not None)
        if changed:
            _logger.warning(
                "%s: target has other values, for leaves that Saver(leave_out=…) left out, than when the checkpoint "
                "was saved%s. The values of target are used: unless this is intended, pass the parameters that the run "
                "started with",
                path,
                listing("differing", [repr(leaf.path) for leaf in changed]),
            )

    def _log_differences(self, path: str, step: int, target: Any, found: Match, values: Sequence[Any]) -> None:
        """Log what a partial restore has left out: only this log shows a misspelt path."""
        if guards := [repr(want.path) for want in found.wanted if want.is_guard]:
            _logger.info(
                "%s was saved without a guard (skip_nonfinite, dynamic_loss_scale) that the target has: the guard "
                "starts at step %d, with fresh %s",
                path,
                step,
                ", ".join(guards),
            )
        if not found.differences():
            return
        without = [i for i, want in enumerate(found.wanted) if want.source is None and want.left_out is None]
        left = [i for i in without if not found.wanted[i].is_guard]
        _logger.warning(
            "%s was restored in part%s%s",
            path,
            listing("left unchanged in target", [repr(found.wanted[i].path) for i in left]),
            listing("not used from the checkpoint", [repr(one) for one in found.extra]),
        )
        if stale := ages.warning(target, values, left):
            _logger.warning(stale)

    def _read(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read the stored arrays of these names and verify them meanwhile: corrupted arrays are never returned."""
        share = jax.process_index(), jax.process_count()
        failure: Exception | None = None
        arrays: dict[str, Any] = {}
        problems: list[str] = []
        with concurrent.futures.ThreadPoolExecutor(1, "jstep-verify") as pool:
            verify = self._verify and not self._store.checks_what_it_reads
            verdict = pool.submit(self._problems, path, manifest, share) if verify else None
            try:
                arrays = self._store.restore(path, manifest, shardings)
            except CorruptedError as error:
                problems = error.problems
            except Exception as error:
                failure = error
            if verdict is not None:
                problems = verdict.result() or problems
        if processes.any_process(bool(problems) or failure is not None):
            if processes.any_process(self._is_gone(path, manifest)):
                raise _GoneError(path)
            if failure is not None and not problems:
                raise CheckpointError(f"{path} could not be read: {short(failure)}") from failure
            raise self._corrupted(path, problems or ["another process names the file"])
        return arrays

    def _problems(self, path: str, manifest: Manifest, share: tuple[int, int]) -> list[str]:
        try:
            return self._store.find_corruption(path, manifest, share)
        except OSError as error:
            return [str(error)]

    def _is_gone(self, path: str, manifest: Manifest) -> bool:
        try:
            return self._store.manifest(path).files != manifest.files
        except FileNotFoundError:
            return True
        except (CheckpointError, OSError):
            return False

    def _corrupted(self, path: str, problems: Sequence[str]) -> CheckpointError:
        """Return the error for a corrupted checkpoint: the problems, the newest intact one, and what to delete."""
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        return CheckpointError(f"{path} is corrupted: {'; '.join(problems[:3])}{more}. {self._advice(path)}.")

    def _advice(self, path: str) -> str:
        later: list[str] = []
        for step, other in self._store.newest_first(self._prefix):
            if other != path and is_intact(self._store, other, step):
                intact = f"The newest intact checkpoint is step {step} ({other}): Saver.restore(target, step={step}) "
                return intact + "restores it" + _delete(later + self._broken(step), "resume from it")
            later.append(other)
        none = f"No other checkpoint {self._prefix}-* in {self._store.directory} is intact"
        return none + _delete(later + self._broken(-1), "start from scratch")

    def _broken(self, above: int) -> list[str]:
        return [line.partition(": ")[0] for line in self._store.broken(self._prefix, above)]


def _delete(paths: Sequence[str], purpose: str) -> str:
    return f"; to {purpose}, delete {' and '.join(paths)}" if paths else ""


def newest_in_words(store: Store, prefix: str) -> str:
    """Describe the newest checkpoint, for the end of an error message."""
    try:
        newest = next(store.newest_first(prefix), None)
    except OSError as error:
        return f"they cannot be listed now ({error})."
    return f"the newest is {newest[1]}." if newest else "there are none yet."


def is_intact(store: Store, path: str, step: int | None = None) -> bool:
    """Return whether every byte of a checkpoint is as it was written, and its step is `step` if that is given."""
    try:
        manifest = store.manifest(path)
        return (step is None or manifest.step == step) and not store.find_corruption(path, manifest)
    except (CheckpointError, OSError):
        return False


def short(error: Exception) -> str:
    """Format an error as one readable line."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    return text if len(text) <= 500 else text[:500] + "…"
