"""Finding, verifying and restoring checkpoints."""

import contextlib
import copy
import dataclasses
import enum
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

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

_IS_CORRUPTED = "is corrupted"
"""What an error says of a checkpoint whose bytes have changed."""
_IS_UNREADABLE = "cannot be restored"
"""What an error says of a checkpoint whose bytes are intact."""
SHOWN = 3
"""The maximum number of problems in a message."""
MAX_VERIFIED_BYTES = 2**28
"""The maximum bytes of other checkpoints that are verified for an error message: 1 TB would delay it by an hour."""
_SHARED_AGES = (
    ". Their updates, such as bias corrections, are as of old slots; parts of jstep.partition have ages of their own, "
    "and an average has one with jstep.ExponentialMovingAverage(start_step=…)"
)
_WIDE = {"int64", "uint64", "float64", "complex128"}
"""The dtypes that JAX has only with `jax_enable_x64`."""
_MAX_READS = 10
"""Reads until one is complete: a writer evicts one checkpoint per save, and a read takes no longer than a few saves."""


class _Outcome(enum.IntEnum):
    """The outcome of a read on one of several processes, of which the greatest counts."""

    SUCCEEDED = 0
    FAILED = 1
    CORRUPTED = 2


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


class _Found(NamedTuple):
    """A checkpoint, and its manifest as it was read."""

    step: int
    path: str
    manifest: Manifest


class CheckpointReader:
    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._has_warned = False  # of a raw model state
        # What `find` returned last, so that no process has to read the manifest a second time to read a file of it. The
        # checkpoint may be gone meanwhile.
        self._found: _Found | None = None

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
        if found is not None and found.step == step:
            # If this fails, the manifest is read anew: the checkpoint is gone, or its error is raised below.
            with contextlib.suppress(CheckpointError, OSError):
                return self._store.reader(found.path, found.manifest).read_file(name)
        path = self._store.find_path(self._prefix, step)
        if path is None:
            raise FileNotFoundError(f"step={step}: there is no checkpoint {self._prefix}-{step} to read {name} from")
        try:
            manifest = self._store.manifest(path)
            return self._store.reader(path, manifest).read_file(name)
        except CorruptedCheckpointError as error:
            text = f"{path} {_IS_CORRUPTED}: {format_list(error.problems, SHOWN, '; ')}"
            raise CorruptedCheckpointError(text) from error

    def restore(
        self,
        target: Tree,
        step: int | None,
        *,
        partial: bool,
        averages: Sequence[str] | None,
        names: match.Names | None,
        params_only: bool = False,
    ) -> Any:
        """See `Saver.restore`; with `params_only` the target is `{"params": params}`."""

        def restore_from(path: str, manifest: Manifest) -> Any:
            match.check_averages(averages or (), manifest.leaves, path)
            if target is None:
                arrays = self.read(path, manifest, dict.fromkeys(manifest.leaves_by_array))
                return match.nest_values(manifest.leaves, arrays, averages)
            matched = match.match(target, manifest, averages, names, path)
            if params_only:
                unused = [name for name in matched.unused if name.startswith(f"{PARAMS}/")]
                matched = dataclasses.replace(matched, unused=unused)
            match.check(matched, partial, path, params_only=params_only)
            values = self._fill(path, manifest, matched)
            self._log_differences(path, manifest.step, matched)
            if averages:
                self._warn_of_raw_model_state(path, matched)
            return jax.tree.unflatten(trees.structure(target), values)

        return self._retry(step, restore_from)

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
        self._found = _Found(manifest.step, path, manifest)
        return path, manifest

    def _find(self, requested: int | None) -> tuple[str, Manifest]:
        if processes.is_single_process():
            return self._find_here(requested)

        def as_text() -> str:
            path, manifest = self._find_here(requested)
            return json.dumps([path, encode(manifest).decode()])

        path, text = json.loads(processes.text_from_first(as_text, _KINDS_OF_ERRORS))
        return path, decode(text.encode())

    def _find_here(self, requested: int | None) -> tuple[str, Manifest]:
        """Find the requested step, or the newest one, and read its manifest, on this process alone.

        Raises:
            GoneError: The newest checkpoint was deleted after it was listed, so that there may be another one.
            FileNotFoundError: There is no checkpoint, or not the requested one.
        """
        if requested is None:
            step = self._newest()
            path = self._store.path_to_read(self._prefix, step)
            if path is None:
                raise _gone(self._store.path(format_name(self._prefix, step)))
            return path, self._manifest(path, step)
        path = self._store.path_to_read(self._prefix, requested)
        if path is not None:
            with contextlib.suppress(GoneError):
                return path, self._manifest(path, requested)
        raise self._missing(requested)

    def _missing(self, step: int) -> FileNotFoundError:
        name = format_name(self._prefix, step)
        lacks = dict(self._store.find_broken(self._prefix, step - 1)).get(self._store.path(name))
        steps = sorted(step for step, _ in self._store.newest_first(self._prefix))
        content = f"steps {steps}" if steps else "no checkpoints"
        clause = f"since {lacks}; the directory has {content}" if lacks else f"which has {content}"
        return FileNotFoundError(
            f"step={step}: there is no complete checkpoint {name} in {self._store.directory}, {clause}"
        )

    def _manifest(self, path: str, step: int) -> Manifest:
        try:
            manifest = self._store.manifest(path)
        except FileNotFoundError:
            raise _gone(path) from None
        except UnsupportedFormatError as error:
            # No advice about older checkpoints: this one is intact, and a run that went back would lose steps.
            raise UnsupportedFormatError(f"{path} {_IS_UNREADABLE}: {error}.") from error
        except CheckpointError as error:
            raise self.unusable(path, [str(error)], is_corrupted=True) from error
        except OSError as error:
            if is_url(path):
                raise  # the store is out of reach
            problem = f"{error_text(error)}; make it readable for this user"
            raise self.unusable(path, [problem], is_corrupted=False) from error
        if manifest.step != step:
            raise self.unusable(path, [misnaming_text(self._prefix, step, manifest.step)], is_corrupted=False)
        return manifest

    def _newest(self) -> int:
        """Return the highest step; older checkpoints are never restored silently if it is incomplete."""
        step = next((step for step, _ in self._store.newest_first(self._prefix)), -1)
        broken = self._store.find_broken(self._prefix, step)
        if broken:
            path, lacks = broken[0]
            raise self.unusable(path, [lacks], is_corrupted=True)
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
            reads: dict[int, LeafRead] = {}
            for i, want in enumerate(wanted):
                if want.source is not None and want.fresh_age is None:
                    reads[i] = LeafRead(want.source, want.half, want.sharding_of_data)
                elif want.copy is None and want.fresh_age is None:
                    values[i] = match.keep_target_leaf(want, manifest.step)
            restored = self.read_leaves(path, manifest, list(reads.values()))
            for i, value in zip(reads, restored, strict=True):
                values[i] = targets.place_leaf(wanted[i], value)
            # Copies and ages are made of what was restored.
            for i, want in enumerate(wanted):
                if want.copy is not None:
                    values[i] = match.copy_leaf(want, values)
                if want.fresh_age is not None:
                    values[i] = match.start_age(want, values)
            _warn_of_changed(path, wanted, values)
        return values

    def _log_differences(self, path: str, step: int, matched: match.CheckpointMatch) -> None:
        """Log what a partial restore leaves out: only this log shows a misspelt path."""
        guards = [repr(want.path) for want in matched.wanted if want.is_guard]
        if guards:
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
        model_state = (SLOTS, MODEL_STATE)
        raw: list[match.WantedLeaf] = []
        for want in matched.wanted:
            is_raw = want.source is not None and want.source.keys[:2] == want.keys[:2] == model_state
            if is_raw and trees.is_floating(want.dtype):
                raw.append(want)
        if raw and not self._has_warned and any(want.keys[0] == PARAMS for want in matched.wanted):
            self._has_warned = True
            logger.warning(
                "use_averages: %s has averages of the parameters, and no averages of the model state, such as "
                "statistics of BatchNorm, which belongs to the raw parameters%s. Average both by "
                "jstep.ExponentialMovingAverage(…, model_state=True), or recompute the model state with the averages",
                path,
                format_items("restored as it was", [repr(want.path) for want in raw]),
            )

    def read_leaves(self, path: str, manifest: Manifest, reads: Sequence["LeafRead"]) -> list[Any]:
        """Return the values of leaves, which nothing else uses; as NumPy arrays if JAX does not support their dtype."""
        shardings: dict[str, Any] = {}
        uses: Counter[str | None] = Counter()
        for leaf, half, sharding in reads:
            is_wide = leaf.dtype in _WIDE and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
            if is_wide or (half is not None and half.shape != leaf.shape):  # scales have fewer numbers
                sharding = None
            for part in (leaf, half):
                if part is not None and part.array is not None:
                    shardings.setdefault(part.array, sharding)
            uses[leaf.array] += 1
        arrays = self.read(path, manifest, shardings)
        values = []
        for leaf, half, _ in reads:
            value = leaf_records.leaf_value(leaf, half, arrays)
            if uses[leaf.array] > 1 and isinstance(value, jax.Array):
                value = value.copy()
            values.append(value)
        return values

    def read(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read stored arrays by name; corrupted arrays are never returned. The processes agree on the outcome.

        If other processes hold the same of an array, each reads a part of it, and they exchange the parts.
        """
        read = self._read_here(path, manifest, shardings)
        digest = 0 if read.plan is None else read.plan.digest
        # In one exchange: the worst outcome, and the largest and the smallest digest.
        maxima = processes.max_over_processes(np.array([read.outcome, digest, -digest]))
        worst, largest, negated_smallest = map(int, maxima)
        if worst != _Outcome.SUCCEEDED:
            self._raise_read_error(path, manifest, worst == _Outcome.CORRUPTED, read.problems, read.failure)
        if largest != -negated_smallest:
            raise ValueError(
                "target: must be alike on all processes, got leaves or shardings that differ; give each process the "
                "same target"
            )
        if jax.process_index() == 0:
            self._store.warn_of_orbax_files(path, manifest)
        resharded = _resharded(read.arrays, {name: shardings[name] for name in read.arrays})
        return resharded | read.plan.exchange(read.boxes)

    def _read_here(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> "_OwnRead":
        """Read what this process reads; an error is returned, as all processes must know of it before one raises it."""
        try:
            reader = self._store.reader(path, manifest)
            problem = processes.text_from_first(reader.foreign_content)
            if problem:
                raise CorruptedCheckpointError(problem)
            plan = shared_reads_module().ReadPlan(reader.kinds(shardings), shardings)
            arrays, boxes = shared_reads_module().read_arrays(reader, plan)
        except CorruptedCheckpointError as error:
            return _OwnRead(_Outcome.CORRUPTED, problems=error.problems)
        except Exception as error:
            return _OwnRead(_Outcome.FAILED, failure=error)
        return _OwnRead(_Outcome.SUCCEEDED, plan, arrays, boxes)

    def _raise_read_error(
        self, path: str, manifest: Manifest, is_corrupted: bool, problems: Sequence[str], failure: Exception | None
    ) -> NoReturn:
        """Raise an error on all processes, of which some could not read.

        Args:
            is_corrupted: Whether a process has found corruption, rather than another failure.
            problems: The corruption that this process has found.
            failure: The failure of this process.
        """
        if processes.text_from_first(lambda: "gone" if self._store.is_gone(path, manifest) else ""):
            raise _gone(path)
        if is_corrupted:
            texts = processes.gather_texts("; ".join(problems[: SHOWN + 1]))
            found = list(problems)
            if not processes.is_single_process():
                found = list(dict.fromkeys(text for text in texts if text))

            def describe() -> str:
                files = self._store.describe_files(path, manifest)
                return str(self.unusable(path, [*files, *found], is_corrupted=True))

            raise CorruptedCheckpointError(processes.text_from_first(describe))
        reason = "see the error of another process" if failure is None else error_text(failure)
        raise CheckpointError(f"{path} could not be read: {reason}") from failure

    def unusable(self, path: str, problems: Sequence[str], *, is_corrupted: bool) -> CheckpointError:
        """Return an error that says what is wrong with a checkpoint, and which one is intact instead."""
        try:
            advice = self._advice(path)
        except OSError as error:
            advice = f"The other checkpoints cannot be listed now ({error})"
        phrase = _IS_CORRUPTED if is_corrupted else _IS_UNREADABLE
        text = f"{path} {phrase}: {format_list(problems, SHOWN, '; ')}. {advice}."
        return CorruptedCheckpointError(text) if is_corrupted else CheckpointError(text)

    def _advice(self, path: str) -> str:
        """Name the newest intact checkpoint beside an unusable one, and the command to resume from it."""
        conflicting: list[str] = []
        max_bytes = MAX_VERIFIED_BYTES
        for step, other in self._store.newest_first(self._prefix):
            if other == path:
                conflicting.append(other)
                continue
            verdict = verify(self._store, other, step, max_bytes)
            max_bytes -= verdict.nbytes
            if verdict.is_intact:
                restore = f"Saver.restore(target, step={step}) verifies and restores it"
                command = self._command_to_resume(conflicting, step, "resume from it")
                return f"The newest intact checkpoint is step {step} ({other}): {restore}{command}"
            if verdict.is_intact is not None:
                conflicting.append(other)
        lack = f"No other checkpoint {self._prefix}-* in {self._store.directory} is intact"
        return lack + self._command_to_resume(conflicting, -1, "start from scratch")

    def _command_to_resume(self, conflicting: list[str], step: int, purpose: str) -> str:
        """Return the command that lets `train` resume from a step; -1 for none.

        It deletes nothing: this may be the last copy.
        """
        broken = [path for path, _ in self._store.find_broken(self._prefix, step)]
        commands = [self._store.command_to_set_aside(path) for path in dict.fromkeys([*conflicting, *broken])]
        if not commands:
            return ""
        return f"; to {purpose}, set aside what cannot be used: `{' && '.join(commands)}`"


class _OwnRead(NamedTuple):
    """What one process has read.

    Attributes:
        plan: The `ReadPlan` of all processes.
        arrays: The arrays that this process has read alone, by name.
        boxes: What it has read for others, too.
        problems: The corruption that it has found.
    """

    outcome: _Outcome
    plan: Any = None
    arrays: Mapping[str, Any] = {}
    boxes: Mapping[str, Any] = {}
    problems: Sequence[str] = ()
    failure: Exception | None = None


class LeafRead(NamedTuple):
    """A leaf to read.

    Attributes:
        half: The leaf with its other half, if both make its value.
        sharding: The sharding to read it with; None for a NumPy array.
    """

    leaf: Leaf
    half: Leaf | None
    sharding: Any


def shared_reads_module() -> Any:
    """Return the module `shared_reads`, which is imported on first use: importing tensorstore is slow."""
    from jstep.checkpoint import shared_reads

    return shared_reads


def _resharded(arrays: Mapping[str, Any], shardings: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(arrays)
    running = ProgramsInFlight()
    for name, sharding in shardings.items():
        if sharding is not None and arrays[name].sharding != sharding:
            result[name] = jax.device_put(arrays[name], sharding)
            running.add(result[name])
    return result


class Verdict(NamedTuple):
    """What is known of a checkpoint.

    Attributes:
        is_intact: Whether it seems intact; None if it was deleted.
        nbytes: The bytes that were read to find out.
    """

    is_intact: bool | None
    nbytes: int = 0


def verify(store: Store, path: str, step: int, max_bytes: int) -> Verdict:
    """Verify a checkpoint; one of more than `max_bytes` bytes seems intact if its manifest is."""
    try:
        manifest = store.manifest(path)
        if manifest.step != step:
            return Verdict(False)
        nbytes = sum(leaf.nbytes for leaf in manifest.leaves)
        if nbytes > max_bytes:
            return Verdict(True)
        return Verdict(not store.find_corruption(path, manifest), nbytes)
    except FileNotFoundError:
        return Verdict(None)
    except (CheckpointError, OSError):
        # An unreadable one may be intact, but it is not one to recommend.
        return Verdict(False)


def _warn_of_changed(path: str, wanted: Sequence[match.WantedLeaf], values: Sequence[Any]) -> None:
    """Warn of leaves that the checkpoint leaves out, if those of the target have changed since."""
    left_out = []
    for want, value in zip(wanted, values, strict=True):
        if want.left_out is not None:
            left_out.append((want.left_out, value))
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


def error_text(error: Exception) -> str:
    """Return the reason of an error of the operating system and the file, or kind and text of another; in short."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    return truncate(text, 500)
