"""Checkpoints: the state at a step, whole on disk or not at all."""

import os
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from jstep.checkpoint import arguments as checked
from jstep.checkpoint.format.manifest import CheckpointError
from jstep.checkpoint.reading import Reader
from jstep.checkpoint.restorer import Restorer
from jstep.checkpoint.retention import RetentionManager
from jstep.checkpoint.store.open import leave, open_store
from jstep.checkpoint.writing import Writer
from jstep.core.checks import as_bool
from jstep.core.compile_only import refuse_compile_only
from jstep.core.var_list import VarList, check_form


class Saver(Restorer):
    """Saves and restores a state: `directory/model-1000` holds exactly 1000 updates.

    `save` may be followed at once by a step that donates the state: what is on disk is the state as it was
    passed. The arrays are written in the background. Until they are, their memory is not reused, so that steps
    meanwhile need room for one more state. A checkpoint gets its name when all of it is on disk, with checksums
    of every file, which `restore` verifies.

    The newest checkpoint is that of the highest step: to go back to an earlier one for good, delete those after it.
    Saving a step again replaces its checkpoint, and the old one is there until the new one is. What went wrong in the
    background is raised by the next call, whatever it is; each of them first waits for a save under way. A save under
    way is lost with a process that is killed (SIGKILL, no power): up to two intervals of work may be.

    One Saver at a time writes a prefix in a directory, from its first save (or `claim`) until `close`, the end of its
    process, or the end of the last reference to it; another one, in this process or elsewhere, is refused, with the
    host and process that writes. Any number may restore meanwhile. On several processes all of them call
    `save` and `restore`, each writes and reads its shards, and the first one keeps the directory.

    Each save leaves some 20 kB in the process, lists that tensorstore's own metrics never free.

    Args:
        directory: Where the checkpoints are: a path on a file system that all processes share, made by the first
            `save`, or a URL, `gs://bucket/prefix` or `s3://bucket/prefix`.
        prefix: Of their names.
        max_to_keep: How many to keep: a save deletes the lowest steps beyond. None or 0 keeps all.
        keep_checkpoint_every_n_hours: Of those deleted, one for every so many hours stays for good. Remembered after a
            restart, as is the rest.
        async_save: Whether to write in the background.
        stage: Whether `save` copies the state into memory it keeps for that, one more state, so that the
            following steps reuse theirs. On the CPU this about halves the wait; elsewhere arrays are copied to the
            host anyway.
        compress: Whether to compress (zstd). Trained floats shrink by a tenth, and writing them takes several times as
            long; None looks at a sample, and compresses where that halves the bytes.
        verify: Whether `restore` verifies checksums first, for which it reads every file once more.
        clock: The time in seconds since 1970.
        leave_out: Parameters that are not saved, such as a frozen base under LoRA, and whose slots are not saved
            either: a predicate `(path, leaf) -> bool`, paths or globs, or a tree of bools, as `var_list`. The
            checkpoint lists them with their fingerprints; `restore` takes them from its target, with any Saver, and
            warns if they have other values than they had when it was saved.

    Attributes:
        leave_out: As given.

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
        stage: bool = False,
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
        self._writer = Writer(self._store, self.prefix, self._retention, compress, as_bool(stage, "stage"), leave_out)
        self._reader = Reader(self._store, self.prefix, as_bool(verify, "verify"))
        self._lock = threading.RLock()
        self._closed = False
        weakref.finalize(self, leave, self._store).atexit = False

    def claim(self) -> None:
        """Makes sure, ahead of the first save, that this Saver can write and nobody else does.

        `save` does it by itself; a run of hours asks before its first step. A second call costs next to nothing.

        Raises:
            CheckpointError: Another Saver writes this prefix here; names its host and process. Or an earlier save
                failed in the background.
            OSError: The directory cannot be made or written.
            ValueError: The Saver is closed.
        """
        with self._lock:
            self._check_open()
            self.wait()
            self._writer.claim()

    def save(self, state: Any, extra: Any = None, *, step: int | None = None) -> str:
        """Saves a state under the name of its global_step.

        Args:
            state: A `TrainState`, or any pytree of arrays with a `global_step`: a field, or a key of a dict. In a
                population, where every leaf has a leading axis, the members' steps are one as a rule.
            extra: Values to keep with it: dicts with string keys, lists, strings, numbers, booleans and None.
            step: What to call it by where the state does not say: a population of members at different steps.

        Returns:
            The path of the checkpoint, which is there once `wait` or the next call is through.

        Raises:
            CheckpointError: This save failed, or an earlier one did in the background. Older checkpoints
                are as they were.
            OSError: The directory cannot be made or written.
            TypeError: A leaf of the state is no array, or a value of extra is not JSON (names it).
            ValueError: The state has no global_step, or another one than `step`; a leaf was donated; leave_out means
                no parameter of it; or the Saver is closed.
        """
        with self._lock:
            self._check_open()
            refuse_compile_only(state, "state")
            self._writer.settle()
            extra = checked.json_copy(extra, "extra")
            path = self._writer.save(state, step, self._now(), extra)
            if not self._async_save:
                self.wait()
            return path

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of a step, whole: at no moment is half of it there.

        Raises:
            CheckpointError: Another Saver writes this prefix, or a save failed in the background.
            FileNotFoundError: There is none of that step.
            ValueError: The Saver is closed.
        """
        with self._lock:
            self.claim()
            self._retention.delete(checked.step(step))

    def all_steps(self) -> list[int]:
        """The steps of all whole checkpoints, in order."""
        with self._lock:
            self.wait()
            return sorted(step for step, _ in self._store.newest_first(self.prefix))

    def latest_step(self) -> int | None:
        """The highest step there is a whole checkpoint of, or None."""
        with self._lock:
            self.wait()
            return next((step for step, _ in self._store.newest_first(self.prefix)), None)

    @property
    def last_checkpoints(self) -> list[str]:
        """The paths of the last `max_to_keep` checkpoints, oldest first, without those kept for good."""
        with self._lock:
            self.wait()
            return self._retention.evictable()

    def wait(self) -> None:
        """Waits until what was saved is on disk.

        Raises:
            CheckpointError: It failed.
        """
        with self._lock:
            self._writer.wait()

    def close(self, wait: bool = True) -> None:
        """Waits until what was saved is on disk, and ends the Saver; it can still restore. A second call does nothing.

        Args:
            wait: Whether to wait. Without it a save under way may be lost with the process.

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
                    self._writer.close(wait)

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
            error.add_note(f"Besides, {failure}")  # the error under way is the one to see

    def __repr__(self) -> str:
        return f"<jstep.Saver {self._store.path(self.prefix)}-*>"

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"this Saver of {self.directory} is closed; make another one")

    def _now(self) -> float:
        return float((self._clock or time.time)())
