"""Finding, verifying and restoring checkpoints."""

import contextlib
import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jstep.checkpoint import leaf_records, match, targets
from jstep.checkpoint.best_record import BestRecord
from jstep.checkpoint.listing import format_name, misnaming_text
from jstep.checkpoint.manifest import (
    CheckpointError,
    CorruptedCheckpointError,
    Leaf,
    Manifest,
    UnsupportedFormatError,
    decode,
    encode,
)
from jstep.checkpoint.store import Store
from jstep.core import meshes, processes, trees
from jstep.core.checks import format_items, format_list, truncate
from jstep.core.logs import logger
from jstep.core.placement import ProgramsInFlight
from jstep.core.trees import Tree
from jstep.state.leaves import PARAMS, SLOTS
from jstep.state.sharding import MODEL_STATE
from jstep.stores.urls import is_url

CORRUPTED = "is corrupted"
"""The verdict on a checkpoint whose bytes have changed."""
UNREADABLE = "cannot be restored"
"""The verdict on a checkpoint whose bytes are intact."""
SHOWN = 3
"""The maximum number of problems in a message."""
VERIFIED = 2**28
"""The maximum bytes of other checkpoints that are verified for an error message: 1 TB would delay it by an hour."""
_SHARED_AGES = (
    ". Their updates, such as bias corrections, are as of old slots; parts of jstep.partition have ages of their own, "
    "and an average has one with jstep.ExponentialMovingAverage(start_step=…)"
)
_WIDE = {"int64", "uint64", "float64", "complex128"}
# Outcomes of a read on one of several processes, of which the greatest counts; 0 is success.
_FAILED = 1
_CORRUPTED = 2
_MAX_READS = 10  # a concurrent writer evicts one checkpoint per save, and a read takes no longer than a few saves


class GoneError(CheckpointError):
    """A checkpoint was deleted or replaced while it was read."""


_KINDS_OF_ERRORS = (
    GoneError,
    CorruptedCheckpointError,
    UnsupportedFormatError,
    CheckpointError,
    FileNotFoundError,
    PermissionError,
    OSError,
)
"""The errors of the first process that the other processes raise, too; the last one stands for any other error."""
_MAX_CONCURRENT = 16
"""Manifests that are read at once."""


def _gone(path: str) -> GoneError:
    return GoneError(f"{path} was deleted or replaced while it was read")


class CheckpointReader:
    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._has_warned = False  # of a raw model state
        # The step, path and manifest that `find` returned last: a process that reads files of this checkpoint need
        # not read its manifest, which all of them would otherwise do. The checkpoint may be gone meanwhile.
        self._found: tuple[int, str, Manifest] | None = None

    def extra(self, step: int | None) -> Any:
        return self._retry(step, lambda path, manifest: copy.deepcopy(manifest.extra))

    def best(self, step: int) -> BestRecord | None:
        return self._retry(step, lambda path, manifest: manifest.best)

    def best_records(self, steps: Sequence[int]) -> dict[int, BestRecord | None]:
        """Return the record of each step, without those of checkpoints that were deleted meanwhile.

        The first process reads the manifests, several at a time, and tells the others.
        """

        def record(step: int) -> tuple[int, BestRecord | None] | None:
            path = self._store.path_to_read(self._prefix, step)
            if path is None:
                return None
            try:
                return step, self._manifest(path, step).best
            except GoneError:
                return None

        def as_text() -> str:
            with ThreadPoolExecutor(_MAX_CONCURRENT, "jstep-manifests") as pool:
                return json.dumps([found for found in pool.map(record, steps) if found is not None])

        records = json.loads(processes.text_from_first(as_text, _KINDS_OF_ERRORS))
        return {step: None if fields is None else BestRecord(*fields) for step, fields in records}

    def file(self, name: str, step: int) -> bytes:
        """See `Saver.read_file`. Each process reads on its own."""
        found = self._found
        if found is not None and found[0] == step:
            with contextlib.suppress(CheckpointError, OSError):  # it is gone, or that is found again below
                return self._store.reader(*found[1:]).read_file(name)
        path = self._store.find_path(self._prefix, step)
        if path is None:
            raise FileNotFoundError(f"step={step}: there is no checkpoint {self._prefix}-{step} to read {name} from")
        try:
            manifest = self._store.manifest(path)
            return self._store.reader(path, manifest).read_file(name)
        except CorruptedCheckpointError as error:
            text = f"{path} {CORRUPTED}: {format_list(error.problems, SHOWN, '; ')}"
            raise CorruptedCheckpointError(text) from error

    def restore(
        self,
        target: Tree,
        step: int | None,
        partial: bool,
        averages: Sequence[str] | None,
        names: match.Names | None,
        of_params: bool = False,
    ) -> Any:
        """See `Saver.restore`; with `of_params` the target is `{"params": params}`."""

        def read(path: str, manifest: Manifest) -> Any:
            match.check_averages(averages or (), manifest.leaves, path)
            if target is None:
                arrays = self.read(path, manifest, dict.fromkeys(manifest.leaves_by_array))
                return match.nest_values(manifest.leaves, arrays, averages)
            matched = match.match(target, manifest, averages, names, path)
            if of_params:
                unused = [name for name in matched.unused if name.startswith(f"{PARAMS}/")]
                matched = dataclasses.replace(matched, unused=unused)
            match.check(matched, partial, path, of_params=of_params)
            values = self._fill(path, manifest, matched)
            self._log_differences(path, manifest.step, matched)
            if averages:
                self._warn_of_raw_model_state(path, matched)
            return jax.tree.unflatten(trees.structure(target), values)

        return self._retry(step, read)

    def check_run(self, state: Tree, step: int) -> None:
        self._retry(step, lambda path, manifest: match.check_run(state, manifest, path))

    def _retry(self, step: int | None, read: Any) -> Any:
        """Read one checkpoint; if it is evicted meanwhile, choose again which one to read."""
        for _ in range(_MAX_READS - 1):
            with contextlib.suppress(GoneError):
                return read(*self.find(step))
        return read(*self.find(step))

    def find(self, requested: int | None) -> tuple[str, Manifest]:
        """Return the path and manifest of a checkpoint, which the first process finds and reads."""
        path, manifest = self._find(requested)
        self._found = manifest.step, path, manifest
        return path, manifest

    def _find(self, requested: int | None) -> tuple[str, Manifest]:

        def found() -> tuple[str, Manifest]:
            step = self._newest() if requested is None else requested
            path = self._store.path_to_read(self._prefix, step)
            if path is not None:
                try:
                    return path, self._manifest(path, step)
                except GoneError:
                    if requested is None:
                        raise
            name = format_name(self._prefix, step)
            if requested is None:
                raise _gone(self._store.path(name))
            lacks = dict(self._store.find_broken(self._prefix, step - 1)).get(self._store.path(name))
            steps = sorted(step for step, _ in self._store.newest_first(self._prefix))
            raise FileNotFoundError(
                f"step={step}: there is no complete checkpoint {name} in {self._store.directory}, "
                f"{f'since {lacks}; it ' if lacks else 'which '}has {f'steps {steps}' if steps else 'no checkpoints'}"
            )

        if processes.is_single_process():
            return found()

        def as_text() -> str:
            path, manifest = found()
            return json.dumps([path, encode(manifest).decode()])

        path, manifest = json.loads(processes.text_from_first(as_text, _KINDS_OF_ERRORS))
        return path, decode(manifest.encode())

    def _manifest(self, path: str, step: int) -> Manifest:
        try:
            manifest = self._store.manifest(path)
        except FileNotFoundError:
            raise _gone(path) from None
        except UnsupportedFormatError as error:
            # No advice about older checkpoints: this one is intact, and a run that went back would lose steps.
            raise UnsupportedFormatError(f"{path} {UNREADABLE}: {error}.") from error
        except CheckpointError as error:
            raise self.unusable(path, [str(error)], CORRUPTED) from error
        except OSError as error:
            if is_url(path):
                raise  # the store is out of reach
            raise self.unusable(path, [f"{short(error)}; make it readable for this user"], UNREADABLE) from error
        if manifest.step != step:
            raise self.unusable(path, [misnaming_text(self._prefix, step, manifest.step)], UNREADABLE)
        return manifest

    def _newest(self) -> int:
        """Return the highest step; older checkpoints are never restored silently if it is incomplete."""
        step = next((step for step, _ in self._store.newest_first(self._prefix)), -1)
        for path, lacks in self._store.find_broken(self._prefix, step)[:1]:
            raise self.unusable(path, [lacks], CORRUPTED)
        if step < 0:
            others = next((path for _, path in self._store.newest_first(None)), None)
            hint = f"; it has {others}: give its prefix, Saver(directory, prefix=…)" if others else ""
            raise FileNotFoundError(f"there is no checkpoint {self._prefix}-* in {self._store.directory}{hint}")
        return step

    def _fill(self, path: str, manifest: Manifest, matched: match.CheckpointMatch) -> list[Any]:
        """Return the leaves of a target: restored, kept, or copies of others."""
        wanted = matched.wanted
        with meshes.internal_transfers():
            values: list[Any] = [None] * len(wanted)
            sources: dict[int, tuple[Leaf, Leaf | None, Any]] = {}
            for i, want in enumerate(wanted):
                if want.source is not None and want.fresh_age is None:
                    sources[i] = want.source, want.half, want.sharding_of_data
                elif want.copy is None and want.fresh_age is None:
                    values[i] = match.keep_target_leaf(want, manifest.step)
            read = self.read_leaves(path, manifest, list(sources.values()))
            for i, value in zip(sources, read, strict=True):
                values[i] = targets.place_leaf(wanted[i], value)
            for i, want in enumerate(wanted):
                if want.copy is not None:
                    values[i] = match.copy_leaf(want, values)
                if want.fresh_age is not None:
                    values[i] = match.start_age(want, values)
            pairs = zip(wanted, values, strict=True)
            left_out = [(want.left_out, value) for want, value in pairs if want.left_out is not None]
            current = leaf_records.start_leaf_fingerprints(left_out)()
            changed = [leaf for (leaf, _), record in zip(left_out, current, strict=True) if record != leaf]
        if changed:
            logger.warning(
                "%s: target has other values, for leaves that Saver(leave_out=…) left out, than when the checkpoint "
                "was saved%s. The values of target are used: unless this is intended, pass the parameters that the run "
                "started with",
                path,
                format_items("differing", [repr(leaf.path) for leaf in changed]),
            )
        return values

    def _log_differences(self, path: str, step: int, matched: match.CheckpointMatch) -> None:
        """Log what a partial restore leaves out: only this log shows a misspelt path."""
        if guards := [repr(want.path) for want in matched.wanted if want.is_guard]:
            logger.info(
                "%s was saved without a guard (skip_nonfinite, dynamic_loss_scale) that the target has: the guard "
                "starts at step %d, with fresh %s",
                path,
                step,
                ", ".join(guards),
            )
        if not matched.differences():
            return
        copies: list[str] = []
        ages: list[str] = []
        left: list[str] = []
        for want in matched.wanted:
            if want.fresh_age is not None:
                ages.append(repr(want.path))
            elif want.copy is not None:
                copies.append(repr(want.path))
            elif want.source is None and want.left_out is None and not want.is_guard and not want.is_draw:
                left.append(repr(want.path))
        shared = [repr(want.path) for want in matched.wanted if want.shares_age]
        logger.warning(
            "%s was restored in part%s%s%s%s%s%s",
            path,
            format_items("started as copies of what was restored", copies),
            format_items("left unchanged in target", left),
            format_items(f"started at step {step}, because their slots are new", ages),
            format_items("not used from the checkpoint", [repr(name) for name in matched.unused]),
            format_items("as old as restored slots, with which they share an age", shared),
            _SHARED_AGES if shared else "",
        )

    def _warn_of_raw_model_state(self, path: str, matched: match.CheckpointMatch) -> None:
        """Warn once of averages of the parameters that were restored beside a model state without averages."""
        pairs = [(want, want.source) for want in matched.wanted if want.source is not None]
        both = {(SLOTS, MODEL_STATE)}
        raw = [
            want for want, source in pairs if {want.keys[:2], source.keys[:2]} == both and trees.is_floating(want.dtype)
        ]
        if raw and not self._has_warned and any(want.keys[0] == PARAMS for want in matched.wanted):
            self._has_warned = True
            logger.warning(
                "use_averages: %s has averages of the parameters, and no averages of the model state, such as "
                "statistics of BatchNorm, which belongs to the raw parameters%s. Average both by "
                "jstep.ExponentialMovingAverage(…, model_state=True), or recompute the model state with the averages",
                path,
                format_items("restored as it was", [repr(want.path) for want in raw]),
            )

    def read_leaves(self, path: str, manifest: Manifest, leaves: Sequence[tuple[Leaf, Leaf | None, Any]]) -> list[Any]:
        """Read leaves, each with its other half if that makes its value, and the sharding to read it with.

        Nothing else uses the arrays returned; those that devices do not support are NumPy's.
        """
        shardings: dict[str, Any] = {}
        uses: Counter[str | None] = Counter()
        for leaf, half, sharding in leaves:
            is_wide = leaf.dtype in _WIDE and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
            if is_wide or (half is not None and half.shape != leaf.shape):  # scales have fewer numbers
                sharding = None
            for part in (leaf, half):
                if part is not None and part.array is not None:
                    shardings.setdefault(part.array, sharding)
            uses[leaf.array] += 1
        arrays = self.read(path, manifest, shardings)
        values = []
        for leaf, half, _ in leaves:
            value = leaf_records.leaf_value(leaf, half, arrays)
            values.append(value.copy() if uses[leaf.array] > 1 and isinstance(value, jax.Array) else value)
        return values

    def read(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read stored arrays by name; corrupted arrays are never returned. The processes agree on the outcome.

        A process reads its part of what others hold, too; they then exchange the parts.
        """
        arrays: dict[str, Any] = {}
        boxes: dict[str, Any] = {}
        problems: list[str] = []
        failure: Exception | None = None
        plan: Any = None
        try:
            reader = self._store.reader(path, manifest)
            if problem := processes.text_from_first(reader.foreign_content):
                raise CorruptedCheckpointError(problem)
            plan = shared_reads().ReadPlan(reader.kinds(shardings), shardings)
            arrays, boxes = shared_reads().read_arrays(reader, plan)
        except CorruptedCheckpointError as error:
            problems = error.problems
        except Exception as error:
            failure = error
        outcome = _CORRUPTED if problems else _FAILED if failure is not None else 0
        digest = 0 if plan is None else plan.digest
        outcome, *ends = map(int, processes.max_over_processes(np.array([outcome, digest, -digest])))
        if not outcome and ends[0] != -ends[1]:
            raise ValueError(
                "target: must be alike on all processes, got leaves or shardings that differ; give each process the "
                "same target"
            )
        if outcome:
            if processes.text_from_first(lambda: "gone" if self._store.is_gone(path, manifest) else ""):
                raise _gone(path)
            if outcome == _CORRUPTED:
                texts = [text for text in processes.gather_texts("; ".join(problems[: SHOWN + 1])) if text]
                found = problems if processes.is_single_process() else list(dict.fromkeys(texts))

                def text() -> str:
                    files = self._store.describe_files(path, manifest)
                    return str(self.unusable(path, [*files, *found], CORRUPTED))

                raise CorruptedCheckpointError(processes.text_from_first(text))
            reason = "see the error of another process" if failure is None else short(failure)
            raise CheckpointError(f"{path} could not be read: {reason}") from failure
        if jax.process_index() == 0:
            self._store.warn_of_unused(path, manifest)
        return _exchanged(arrays, {name: shardings[name] for name in arrays}) | plan.exchange(boxes)

    def unusable(self, path: str, problems: Sequence[str], verdict: str) -> CheckpointError:
        try:
            advice = self._advice(path)
        except OSError as error:
            advice = f"The other checkpoints cannot be listed now ({error})"
        text = f"{path} {verdict}: {format_list(problems, SHOWN, '; ')}. {advice}."
        return CorruptedCheckpointError(text) if verdict == CORRUPTED else CheckpointError(text)

    def _advice(self, path: str) -> str:
        conflicting: list[str] = []
        left = VERIFIED
        for step, other in self._store.newest_first(self._prefix):
            usable, read = (False, 0) if other == path else is_usable(self._store, other, step, left)
            left -= read
            if usable:
                restore = f"Saver.restore(target, step={step}) verifies and restores it"
                aside = self._set_aside(conflicting, step, "resume from it")
                return f"The newest intact checkpoint is step {step} ({other}): {restore}{aside}"
            if usable is not None:
                conflicting.append(other)
        none = f"No other checkpoint {self._prefix}-* in {self._store.directory} is intact"
        return none + self._set_aside(conflicting, -1, "start from scratch")

    def _set_aside(self, conflicting: list[str], above: int, purpose: str) -> str:
        """Return the command that lets `train` resume. It deletes nothing: this may be the last copy."""
        broken = [path for path, _ in self._store.find_broken(self._prefix, above)]
        commands = [self._store.command_to_set_aside(path) for path in dict.fromkeys([*conflicting, *broken])]
        return f"; to {purpose}, set aside what cannot be used: `{' && '.join(commands)}`" if commands else ""


def shared_reads() -> Any:
    """Return the module, which is imported on first use: importing tensorstore is slow."""
    from jstep.checkpoint import shared_reads

    return shared_reads


def _exchanged(arrays: Mapping[str, Any], shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays with these shardings."""
    result, running = dict(arrays), ProgramsInFlight()
    for name, sharding in shardings.items():
        if sharding is not None and arrays[name].sharding != sharding:
            result[name] = jax.device_put(arrays[name], sharding)
            running.add(result[name])
    return result


def is_usable(store: Store, path: str, step: int, max_bytes: int) -> tuple[bool | None, int]:
    """Return whether a checkpoint seems intact, None if it was deleted, and its bytes if they were read, else 0."""
    try:
        manifest = store.manifest(path)
        nbytes = sum(leaf.nbytes for leaf in manifest.leaves)
        if manifest.step != step or nbytes > max_bytes:
            return manifest.step == step, 0
        return not store.find_corruption(path, manifest), nbytes
    except FileNotFoundError:
        return None, 0
    except (CheckpointError, OSError):  # an unreadable one may be intact
        return False, 0


def short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    return truncate(text, 500)
