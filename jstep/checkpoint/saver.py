"""`Saver`: atomic checkpoints of a training state."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from jstep.checkpoint import arguments as checked
from jstep.checkpoint.format.manifest import CheckpointError
from jstep.checkpoint.format.match import Names
from jstep.checkpoint.names import open_store
from jstep.checkpoint.reading import Reader
from jstep.checkpoint.retention import RetentionManager
from jstep.checkpoint.writing import Writer
from jstep.core.checks import as_bool, kind, note, scoped
from jstep.core.placement import refuse_compile_only
from jstep.core.selection import VarList, check_form
from jstep.optimizers.averages import as_average_names
from jstep.state.train_state import TrainState


class Saver:
    """A saver of training states, which also restores them: `directory/model-1000` holds exactly 1000 updates.

    The arrays are written in the background, and a step may donate the state right after `save`: the checkpoint holds
    the state as it was passed. Until the arrays are written, their memory is not reused, so that steps meanwhile need
    memory for one more state. A checkpoint is atomic: it gets its name when all of it is on disk, with checksums
    of every file, which `restore` verifies.

    The newest checkpoint is the one of the highest step: to return to an earlier one permanently, delete all later
    ones. Saving a step again replaces its checkpoint; the old one exists until the new one does. Every call first waits
    for a save in progress, and raises its error if it failed. If the process is killed, or the machine loses power, a
    save in progress is lost, so that up to two intervals of work may be lost; what `wait`, or the next call, has
    acknowledged is not.

    One Saver at a time writes a prefix in a directory, from its first save (or `claim`) until `close`, the end of its
    process, or the end of the last reference to it. Another one, in this process or elsewhere, is refused with an
    error that names the host and process of the writer. Any number of Savers may restore meanwhile. On several
    processes all of them call `save` and `restore`, each one writes and reads its shards, and the first one manages
    the directory.

    Each save leaks about 20 kB: lists that tensorstore's metrics never free.

    Args:
        directory: The directory of the checkpoints: a path on a file system that all processes share, created by the
            first `save`, or a URL, `gs://bucket/prefix` or `s3://bucket/prefix`.
        prefix: The prefix of the checkpoint names.
        max_to_keep: The number of checkpoints to keep: each save deletes the lowest steps beyond it. None or 0 keeps
            all.
        keep_checkpoint_every_n_hours: Hours between checkpoints that are kept permanently: of those that `max_to_keep`
            would delete, one per interval stays. Remembered across restarts.
        async_save: Whether to write in the background.
        compress: Whether to compress (on a disk zstd, below a URL zlib). Trained floats shrink by a tenth, and writing
            them takes several times as long. If None, a sample is compressed first, and all is compressed if that
            halves the bytes.
        verify: Whether `restore` verifies the checksums of all files before it returns, which reads each file once
            more. Checkpoints that were written below a URL are always verified, as they are read.
        clock: A function that returns the time in seconds since 1970.
        leave_out: Parameters that are not saved, such as a frozen base under LoRA, and whose slots are not saved
            either: a predicate `(path, leaf) -> bool`, paths or globs, or a tree of bools, like `var_list`. The
            checkpoint lists them with their fingerprints; `restore`, with any Saver, takes them from its target and
            warns if their values differ from those at the time of the save.

    Attributes:
        leave_out: The argument as given.

    Raises:
        TypeError: An argument is of the wrong type.
        NotADirectoryError: `directory` is a file.

    Example:
        >>> import tempfile, jax, jstep
        >>> state = jstep.TrainState.create({"w": 1.0}, jstep.momentum(0.1, 0.9))
        >>> with tempfile.TemporaryDirectory() as directory, jstep.Saver(directory) as saver:
        ...     path = saver.save(state, extra={"epoch": 3})
        ...     restored = saver.restore(jax.eval_shape(lambda: state))
        ...     print(saver.latest_step(), saver.extra(), restored.params)
        0 {'epoch': 3} {'w': Array(1., dtype=float32)}

    Source: `tf.train.Saver`, `orbax.checkpoint`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        prefix: str = "model",
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        async_save: bool = True,
        *,
        compress: bool | None = None,
        verify: bool = True,
        clock: Callable[[], float] | None = None,
        leave_out: VarList = None,
    ) -> None:
        self.directory = checked.directory(directory)
        self.prefix = checked.prefix(prefix)
        self._clock = checked.clock(clock)
        self._store = open_store(self.directory, self.prefix)
        self._retention = RetentionManager(
            self._store,
            self.prefix,
            checked.max_to_keep(max_to_keep),
            checked.hours(keep_checkpoint_every_n_hours),
            since=self._now(),
        )
        self._async_save = as_bool(async_save, "async_save")
        compress = None if compress is None else as_bool(compress, "compress")
        check_form(leave_out, "leave_out")
        self.leave_out = leave_out
        self._writer = Writer(self._store, self.prefix, self._retention, compress, leave_out)
        self._reader = Reader(self._store, self.prefix, as_bool(verify, "verify"))
        self._lock = threading.RLock()
        self._closed = False
        weakref.finalize(self, self._store.leave).atexit = False

    def claim(self, state: Any = None) -> None:
        """Claim the prefix before the first save: check that this Saver can write and that no other one does.

        `save` does this automatically; long runs call it before their first step. A second call costs almost nothing.

        Args:
            state: The state to save later, or its shapes, to check `leave_out` before the first save: a warning is
                logged if it selects fewer leaves than that of the newest checkpoint.

        Raises:
            CheckpointError: Another Saver writes this prefix here; names its host and process. Or an earlier save
                failed in the background.
            OSError: The directory cannot be created or written.
            ValueError: The Saver is closed, or leave_out matches no parameter of the state.
        """
        with self._lock:
            self._check_open()
            self.wait()
            self._writer.claim(state)

    def save(self, state: Any, extra: Any = None, *, step: int | None = None) -> str:
        """Save a state under the name of its global_step.

        Args:
            state: A `TrainState`, or any pytree of arrays with a `global_step`: a field, or a key of a dict. In a
                population, where every leaf has a leading axis, all members usually have the same step.
            extra: Values to save with the state: dicts with string keys, lists, strings, numbers, booleans and None.
            step: The step that names the checkpoint of a population whose members are at different steps.

        Returns:
            The path of the checkpoint, which exists once `wait` or the next call returns.

        Raises:
            CheckpointError: This save failed, or an earlier one did in the background. Older checkpoints
                are unchanged.
            OSError: The directory cannot be created or written.
            TypeError: A leaf of the state is not an array, or a value of extra is not JSON (names it).
            ValueError: The state has no global_step, or one that differs from `step`; a leaf was donated; leave_out
                matches no parameter; or the Saver is closed.
        """
        with self._lock:
            self._check_open()
            refuse_compile_only(state, "state")
            self._writer.wait_on_all_processes()
            extra = checked.json_copy(extra, "extra")
            path = self._writer.save(state, step, self._now(), extra)
            if not self._async_save:
                self.wait()
            return path

    def restore(
        self,
        target: Any = None,
        step: int | None = None,
        partial: bool = False,
        use_averages: bool | str | Sequence[str] = False,
        names: Names | None = None,
    ) -> Any:
        """Restore a checkpoint.

        Leaves that `leave_out` left out of the checkpoint keep the values of target; if these differ from the values
        at the time of the save, a warning is logged.

        Args:
            target: A tree of arrays or of `jax.ShapeDtypeStruct` (from `jax.eval_shape`) that gives structure, shapes,
                dtypes and shardings; leaves are matched by path. A leaf without a sharding is placed where JAX
                places new arrays, and a NumPy array is restored as one. If None, the checkpoint is returned as a
                nested dict of NumPy arrays, for inspection (PRNG keys as their data).
            step: The step to restore; None for the newest.
            partial: Whether to restore only what fits. The other leaves of target, which must then have values, are
                kept. A slot that begins as a copy of the parameters (`master_weights`, `lookahead`, averages, ...)
                begins as a copy of the restored ones if the checkpoint lacks it; `target` must be a `TrainState`, which
                knows these slots. Leaves that were copied or kept, and arrays that were not used, are logged as a
                warning.
            use_averages: Whether to restore the moving averages of params in place of params, for evaluation, in the
                dtype of params. A string names their slot; a list names several slots, which have averages of different
                leaves.
            names: Leaves that have another path in the checkpoint: a mapping from paths of target
                (`"params/dense/kernel"`, `"slots/m/dense/kernel"`) to paths in the checkpoint, or a function from one
                to the other. Leaves that are not mentioned, or for which it returns None, have the same path.

        Returns:
            A tree like target. Its arrays share no memory with anything and may be donated.

        Raises:
            CheckpointError: The checkpoint is corrupted: names the file, what can still be read, the newest intact
                checkpoint (one of more than 256 MB is only checked for completeness), and the command that moves the
                corrupted one aside to resume from it. Or the step in its name differs from the step in its content, or
                a save failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
            TypeError: A leaf of target has no shape and dtype, or an argument is of the wrong type.
            ValueError: target does not fit: lists the paths missing, extra and differing. Or names has a path that
                does not exist; or target has only shapes for leaves that `leave_out` left out of the checkpoint.
        """
        averages = as_average_names(use_averages)
        partial, step = as_bool(partial, "partial"), _step_or_none(step)
        if names is not None and target is None:
            raise ValueError("names: must come with a target, whose paths it maps")
        with self._lock:
            self.wait()
            refuse_compile_only(target, "target")
            return self._reader.restore(target, step, partial, averages, names)

    def restore_params(
        self,
        target_params: Any,
        step: int | None = None,
        names: Names | None = None,
        use_averages: bool | str | Sequence[str] = False,
    ) -> Any:
        """Restore the parameters alone, without slots and step: for inference, or to start fine-tuning at step 0.

        Args:
            target_params: A tree of arrays or of `jax.ShapeDtypeStruct` with the structure of the parameters
                (including lists and tuples), as `target` of `restore`.
            step: The step to restore; None for the newest.
            names: Leaves that have another path in the checkpoint, as in `restore`; `params/` may be omitted. A
                function that does not rename a path that the checkpoint lacks is also called without `params/`.
            use_averages: Whether to restore the moving averages in place of the parameters, in the dtype of the
                parameters. A string names their slot, a list several, as in `restore`.

        Returns:
            A tree like target_params. Its arrays share no memory with anything and may be donated.

        Raises:
            CheckpointError: The checkpoint is corrupted, or a save failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
            TypeError: A leaf of target_params has no shape and dtype, or an argument is of the wrong type.
            ValueError: target_params does not fit: lists the paths missing, extra and differing.

        Example:
            >>> import tempfile, jstep
            >>> state = jstep.TrainState.create({"layers": [1.0, 2.0]}, jstep.adam())
            >>> with jstep.Saver(tempfile.mkdtemp()) as saver:
            ...     path = saver.save(state)
            ...     params = saver.restore_params({"layers": [0.0, 0.0]})
            >>> jstep.TrainState.create(params, jstep.momentum(0.1, 0.9)).params
            {'layers': [Array(1., dtype=float32), Array(2., dtype=float32)]}
        """
        if target_params is None or isinstance(target_params, TrainState):
            raise TypeError(
                f"target_params: must be a tree of parameters, got {kind(target_params)}; pass state.params, or shapes "
                "from jax.eval_shape. restore(None) returns a checkpoint without a target"
            )
        step, averages = _step_or_none(step), as_average_names(use_averages)
        with self._lock:
            self.wait()
            refuse_compile_only(target_params, "target_params")
            return self._reader.restore_params(target_params, step, names, averages)

    def extra(self, step: int | None = None) -> Any:
        """Return the `extra` values of a checkpoint (the newest if step is None); None if `save` was given none.

        Those of `train` are a dict with what a run needs to resume, such as the position of a loader; it may be empty.

        Raises:
            CheckpointError: The manifest is corrupted, or a save failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
        """
        with self._lock:
            self.wait()
            return self._reader.extra(_step_or_none(step))

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step, atomically.

        Raises:
            CheckpointError: Another Saver writes this prefix, or a save failed in the background.
            FileNotFoundError: There is no checkpoint of this step.
            ValueError: The Saver is closed.
        """
        with self._lock:
            self.claim()
            self._retention.delete(checked.step(step))

    def all_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in ascending order."""
        with self._lock:
            self.wait()
            return sorted(step for step, _ in self._store.newest_first(self.prefix))

    def latest_step(self) -> int | None:
        """Return the highest step with a complete checkpoint, or None."""
        with self._lock:
            self.wait()
            return next((step for step, _ in self._store.newest_first(self.prefix)), None)

    @property
    def last_checkpoints(self) -> list[str]:
        """The paths of the last `max_to_keep` checkpoints, oldest first, without those kept permanently."""
        with self._lock:
            self.wait()
            return self._retention.evictable()

    def wait(self) -> None:
        """Wait until the save in progress is on disk.

        Raises:
            CheckpointError: The save failed.
        """
        with self._lock:
            self._writer.wait()

    def settle(self) -> None:
        """Wait until the save in progress has ended; if it failed, the next call raises its error."""
        with self._lock:
            self._writer.settle()

    @scoped
    def flushing(self, flush: Callable[[], None]) -> Iterator[None]:
        r"""A context in which each save calls a function in the background, before its checkpoint exists.

        What `flush` writes to disk, such as a log, is therefore never older than the newest checkpoint, and the caller
        of `save` does not wait for it. An exception that it raises is an error of the save.

        Args:
            flush: A function of no arguments. On several processes, the first one calls it.

        Example:
            >>> import os, tempfile, jstep
            >>> state = jstep.TrainState.create({"w": 1.0}, jstep.adam())
            >>> directory = tempfile.mkdtemp()
            >>> with open(f"{directory}/log.txt", "w") as log, jstep.Saver(directory) as saver:
            ...     with saver.flushing(lambda: os.fsync(log.fileno())):
            ...         _ = log.write("step 0\n"), log.flush()
            ...         path = saver.save(state)
        """
        self._writer.flushes.append(flush)
        try:
            yield
        finally:
            self._writer.flushes.remove(flush)

    def close(self, wait: bool = True) -> None:
        """Wait for the save in progress and close the Saver, which can still restore. A second call does nothing.

        Args:
            wait: Whether to wait. If not, a save in progress may be lost with the process.

        Raises:
            CheckpointError: The last save failed.
        """
        with self._lock:
            try:
                if as_bool(wait, "wait"):
                    self.wait()
            finally:
                if not self._closed:
                    self._closed = True
                    self._store.close(wait)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            note(error, f"Additionally, {failure}")  # the error that left the block matters more

    def __repr__(self) -> str:
        return f"<jstep.Saver {self._store.path(self.prefix)}-*>"

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"this Saver of {self.directory} is closed; create another one")

    def _now(self) -> float:
        return float((self._clock or time.time)())


def _step_or_none(step: Any) -> int | None:
    return None if step is None else checked.step(step)
