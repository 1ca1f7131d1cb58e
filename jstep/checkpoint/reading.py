"""Reading of one checkpoint. `finding` opens it, which reads its manifest; nothing rereads it."""

import copy
import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from jstep.array_store import leaf_records
from jstep.array_store.best_record import BestRecord
from jstep.array_store.manifest import CheckpointError, CorruptedCheckpointError, Leaf, Manifest
from jstep.array_store.store import Store
from jstep.checkpoint import match, targets
from jstep.checkpoint.verdicts import IS_CORRUPTED, SHOWN, unusable
from jstep.core import meshes, processes, trees
from jstep.core.checks import format_items, format_list
from jstep.core.logs import logger
from jstep.core.placement import ProgramsInFlight
from jstep.core.secret_text import describe_error
from jstep.core.trees import Tree
from jstep.state.leaves import PARAMS, SLOTS
from jstep.state.sharding import MODEL_STATE

_SHARED_AGES = (
    ". Their updates, such as bias corrections, are as of old slots; parts of jstep.partition have "
    "ages of their own, and an average has one with jstep.ExponentialMovingAverage(start_step=…)"
)
_WIDE = {"int64", "uint64", "float64", "complex128"}
"""The dtypes that JAX has only with `jax_enable_x64`."""
_RAW = "raw model state"


class _Outcome(enum.IntEnum):
    """The outcome of a read on one of several processes, of which the greatest counts."""

    SUCCEEDED = 0
    FAILED = 1
    CORRUPTED = 2


class GoneError(CheckpointError):
    """A checkpoint was deleted or replaced while it was read."""


def gone(path: str) -> GoneError:
    return GoneError(f"{path} was deleted or replaced while it was read")


class OpenCheckpoint:
    """An open checkpoint.

    All that is read belongs to this checkpoint, never to one that has replaced it since. All
    methods but `file` are called on all processes.

    Attributes:
        path: Its path or URL.
        manifest: Its manifest, as it was read when it was opened.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        path: str,
        manifest: Manifest,
        warned_of: set[str] | None = None,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self.path = path
        self.manifest = manifest
        # All checkpoints that a Saver opens share the set: an evaluator, which restores one after
        # the other, warns once.
        self._warned_of = set[str]() if warned_of is None else warned_of

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def extra(self) -> Any:
        return copy.deepcopy(self.manifest.extra)

    @property
    def best(self) -> BestRecord | None:
        return self.manifest.best

    def is_gone(self) -> bool:
        """Whether it was deleted or replaced since it was opened."""
        return self._store.is_gone(self.path, self.manifest)

    def corrupted(self, problem: str) -> CheckpointError:
        """Return the error for content that jstep does not write; it names an intact checkpoint."""
        return self._unusable([problem])

    def file(self, name: str) -> bytes:
        """See `Saver.read_file`. Each process reads on its own."""
        try:
            return self._store.reader(self.path, self.manifest).read_file(name)
        except CorruptedCheckpointError as error:
            text = f"{self.path} {IS_CORRUPTED}: {format_list(error.problems, SHOWN, '; ')}"
            raise CorruptedCheckpointError(text) from error

    def check_run(self, state: Tree) -> None:
        """Check that a run with this state, or with these shapes, can resume from it.

        Only the manifest is used.

        Raises:
            ValueError: Another model or optimizer saved the checkpoint: says which, and lists the
                paths.
        """
        match.check_run(state, self.manifest, self.path)

    def restore(
        self,
        target: Tree,
        *,
        partial: bool = False,
        averages: Sequence[str] | None = None,
        names: match.Names | None = None,
        params_only: bool = False,
    ) -> Any:
        """See `Saver.restore`; with `params_only` the target is `{"params": params}`.

        Raises:
            GoneError: It was deleted or replaced meanwhile.
        """
        manifest = self.manifest
        if averages is not None:
            averages = match.full_names(averages, manifest, self.path)
        if target is None:
            arrays = self._read(dict.fromkeys(manifest.leaves_by_array))
            return match.nest_values(manifest.leaves, arrays, averages)
        matched = match.match(target, manifest, averages, names, self.path)
        if params_only:
            unused = [name for name in matched.unused if name.startswith(f"{PARAMS}/")]
            matched = dataclasses.replace(matched, unused=unused)
        match.check(matched, partial, self.path, params_only=params_only)
        values = self._fill(matched)
        self._log_differences(matched)
        if averages:
            self._warn_of_raw_model_state(matched)
        return jax.tree.unflatten(trees.structure(target), values)

    def _fill(self, matched: match.CheckpointMatch) -> list[Any]:
        """Return the leaves of a target: restored, kept, or copies of others."""
        wanted = matched.wanted
        with meshes.internal_transfers():
            values: list[Any] = [None] * len(wanted)
            reads: dict[int, LeafRead] = {}
            for i, want in enumerate(wanted):
                if want.source is not None and want.fresh_age is None:
                    reads[i] = LeafRead(want.source, want.half, want.sharding_of_data)
                elif want.copy is None and want.fresh_age is None:
                    values[i] = match.keep_target_leaf(want, self.step)
            restored = self.read_leaves(list(reads.values()))
            for i, value in zip(reads, restored, strict=True):
                values[i] = targets.place_leaf(wanted[i], value)
            # Copies and ages are computed from the restored values.
            for i, want in enumerate(wanted):
                if want.copy is not None:
                    values[i] = match.copy_leaf(want, values)
                if want.fresh_age is not None:
                    values[i] = match.start_age(want, values)
            _warn_of_changed(self.path, wanted, values)
        return values

    def _log_differences(self, matched: match.CheckpointMatch) -> None:
        """Log what a partial restore skips: nothing else shows that a path is misspelt."""
        guards = [repr(want.path) for want in matched.wanted if want.is_guard]
        if guards:
            logger.info(
                "%s was saved without a guard (skip_nonfinite, dynamic_loss_scale) that the target "
                "has: the guard starts at step %d, with fresh %s",
                self.path,
                self.step,
                ", ".join(guards),
            )
        if not matched.differences():
            return
        copies: list[str] = []
        ages: list[str] = []
        unchanged: list[str] = []
        for want in matched.wanted:
            if want.fresh_age is not None:
                ages.append(repr(want.path))
            elif want.copy is not None:
                copies.append(repr(want.path))
            elif want.is_unmatched:
                unchanged.append(repr(want.path))
        shared = [repr(want.path) for want in matched.wanted if want.shares_age]
        logger.warning(
            "%s was restored in part%s%s%s%s%s%s",
            self.path,
            format_items("started as copies of what was restored", copies),
            format_items("left unchanged in target", unchanged),
            format_items(f"started at step {self.step}, because their slots are new", ages),
            format_items("not used from the checkpoint", [repr(name) for name in matched.unused]),
            format_items("as old as restored slots, with which they share an age", shared),
            _SHARED_AGES if shared else "",
        )

    def _warn_of_raw_model_state(self, matched: match.CheckpointMatch) -> None:
        """Warn once of parameter averages restored beside a model state without averages."""
        if _RAW in self._warned_of:
            return
        if not any(want.keys[0] == PARAMS for want in matched.wanted):
            return
        model_state = (SLOTS, MODEL_STATE)
        raw: list[str] = []
        for want in matched.wanted:
            if want.source is None or not trees.is_floating(want.dtype):
                continue
            if want.source.keys[:2] == want.keys[:2] == model_state:
                raw.append(repr(want.path))
        if raw:
            self._warned_of.add(_RAW)
            logger.warning(
                "use_averages: %s has averages of the parameters, and no averages of the model "
                "state, such as statistics of BatchNorm, which belongs to the raw parameters%s. "
                "Average both by jstep.ExponentialMovingAverage(…, model_state=True), or recompute "
                "the model state with the averages",
                self.path,
                format_items("restored as it was", raw),
            )

    def read_leaves(self, reads: Sequence["LeafRead"]) -> list[Any]:
        """Return the values of leaves, each with memory of its own.

        They are NumPy arrays if JAX does not support their dtype.
        """
        shardings: dict[str, Any] = {}
        uses: Counter[str | None] = Counter()
        for leaf, half, sharding in reads:
            is_wide = (
                leaf.dtype in _WIDE and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
            )
            # The other half may be scales. They have fewer numbers, which the sharding of the leaf
            # need not fit.
            has_scales = half is not None and half.shape != leaf.shape
            sharding_of_parts = None if is_wide or has_scales else sharding
            for part in (leaf, half):
                if part is not None and part.array is not None:
                    shardings.setdefault(part.array, sharding_of_parts)
            uses[leaf.array] += 1
        arrays = self._read(shardings)
        values = []
        for leaf, half, _ in reads:
            value = leaf_records.leaf_value(leaf, half, arrays)
            if uses[leaf.array] > 1 and isinstance(value, jax.Array):
                value = value.copy()
            values.append(value)
        return values

    def _read(self, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read stored arrays by name; corrupted arrays are never returned.

        Either all processes succeed, or all raise an error. Of data that several processes need,
        each reads a part, and they exchange the parts.
        """
        read = self._read_here(shardings)
        digest = 0 if read.plan is None else read.plan.digest
        # In one exchange: the worst outcome, and the largest and the smallest digest.
        maxima = processes.max_over_processes(np.array([read.outcome, digest, -digest]))
        worst, largest, negated_smallest = map(int, maxima)
        if worst != _Outcome.SUCCEEDED:
            self._raise_read_error(worst == _Outcome.CORRUPTED, read.problems, read.failure)
        if largest != -negated_smallest:
            raise ValueError(
                "target: must be alike on all processes, got leaves or shardings that differ; give "
                "each process the same target"
            )
        if processes.is_process_0():
            self._store.warn_of_orbax_files(self.path, self.manifest)
        resharded = _resharded(read.arrays, {name: shardings[name] for name in read.arrays})
        return resharded | read.plan.exchange(read.boxes)

    def _read_here(self, shardings: Mapping[str, Any]) -> "_OwnRead":
        """Read this process's share; return an error, which all must know before one raises it."""
        try:
            reader = self._store.reader(self.path, self.manifest)
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
        self, is_corrupted: bool, problems: Sequence[str], failure: Exception | None
    ) -> NoReturn:
        """Raise an error on all processes, after at least one of them could not read.

        Args:
            is_corrupted: Whether a process has found corruption, rather than another failure.
            problems: The corruption that this process has found.
            failure: The failure of this process.
        """
        if processes.text_from_first(lambda: "gone" if self.is_gone() else ""):
            raise gone(self.path)
        if not is_corrupted:
            reason = "see the error of another process"
            if failure is not None:
                reason = describe_error(failure)
            raise CheckpointError(f"{self.path} could not be read: {reason}") from failure
        texts = processes.gather_texts("; ".join(problems[: SHOWN + 1]))
        found = list(problems)
        if not processes.is_single_process():
            found = list(dict.fromkeys(text for text in texts if text))

        def describe() -> str:
            problems_of_files = self._store.describe_files(self.path, self.manifest)
            return str(self._unusable([*problems_of_files, *found]))

        raise CorruptedCheckpointError(processes.text_from_first(describe))

    def _unusable(self, problems: Sequence[str]) -> CheckpointError:
        return unusable(self._store, self._prefix, self.path, problems, is_corrupted=True)


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
    """Return the module `shared_reads`, imported on first use: importing tensorstore is slow."""
    from jstep.array_store import shared_reads

    return shared_reads


def _resharded(arrays: Mapping[str, Any], shardings: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(arrays)
    running = ProgramsInFlight()
    for name, sharding in shardings.items():
        if sharding is not None and arrays[name].sharding != sharding:
            result[name] = jax.device_put(arrays[name], sharding)
            running.add(result[name])
    return result


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
            "%s: target has other values, for leaves that Saver(leave_out=…) left out, than when "
            "the checkpoint was saved%s. The values of target are used: unless this is intended, "
            "pass the parameters that the run started with",
            path,
            format_items("differing", [repr(leaf.path) for leaf in changed]),
        )
