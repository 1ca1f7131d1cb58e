"""Checkpoints: the state at a step, whole on disk or not at all."""

import errno
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import jax

from jstep.checkpoint import _arguments as checked
from jstep.checkpoint import _compression, _leaves, _processes, _restored
from jstep.checkpoint import _directory as folder
from jstep.checkpoint import manifest as _manifest
from jstep.checkpoint._retention import Keeper
from jstep.checkpoint._stage import Stage
from jstep.checkpoint.manifest import CheckpointError, Manifest
from jstep.core import trees
from jstep.optimizers.wrappers.exponential_moving_average import NAME as AVERAGES
from jstep.state import get_global_step

_logger = logging.getLogger("jstep")


def checkpoint_name(prefix: str, step: int) -> str:
    """The name of the checkpoint of a step: `prefix-step`.

    Raises:
        TypeError: `prefix` is no string, or `step` no integer.
        ValueError: `step` is negative, or `prefix` cannot be the beginning of a file name.

    Example:
        >>> import jstep
        >>> jstep.checkpoint_name("my-model", 1000)
        'my-model-1000'
    """
    return folder.name(checked.prefix(prefix), checked.step(step))


def latest_checkpoint(directory: str | os.PathLike[str], prefix: str | None = None) -> str | None:
    """The path of the newest whole checkpoint, that of the highest step; None where there is none.

    Args:
        directory: Where the checkpoints are; it may be missing.
        prefix: Of their names; any where None.

    Example:
        >>> import jstep
        >>> print(jstep.latest_checkpoint("/no/such/directory"))
        None
    """
    found = folder.newest(checked.directory(directory), None if prefix is None else checked.prefix(prefix))
    return None if found is None else found[1]


class Saver:
    """Saves and restores a state: `directory/model-1000` holds exactly 1000 updates.

    `save` may be followed at once by a step that donates the state: what is on disk is the state as it was
    passed. The arrays are written in the background. Until they are, their memory is not reused, so that steps
    meanwhile need room for one more state. A checkpoint gets its name when all of it is on disk, with checksums
    of every file, which `restore` verifies.

    The newest checkpoint is that of the highest step: to go back to an earlier one for good, delete those after it.
    Saving a step again replaces its checkpoint, and the old one is there until the new one is. What went wrong in the
    background is raised by the next call, whatever it is; each of them first waits for a save under way.
    One Saver at a time writes a prefix in a directory; any number may restore. On several processes all of them
    call `save` and `restore`, each writes and reads its shards, and the first one keeps the directory.

    Args:
        directory: Where the checkpoints are, on a file system all processes share; made by the first `save`.
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

    Raises:
        NotADirectoryError: `directory` is a file.
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range.

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
    ) -> None:
        self.directory = checked.directory(directory)
        self.prefix = checked.prefix(prefix)
        self._clock = checked.clock(clock)
        self._keeper = Keeper(
            self.directory,
            self.prefix,
            checked.max_to_keep(max_to_keep),
            checked.hours(keep_checkpoint_every_n_hours),
            since=self._now(),
        )
        self._async_save, self._compress, self._verify = async_save, compress, verify
        self._stage = Stage() if stage else None
        from jstep.checkpoint import _orbax  # not at the top: `import jstep` is quick, orbax is not

        self._checkpointer = _orbax.Checkpointer(self.prefix)
        self._lock = threading.RLock()
        self._saving: str | None = None
        self._swept = self._closed = False

    def save(self, state: Any, extra: Any = None) -> str:
        """Saves a state under the name of its global_step.

        Args:
            state: A `TrainState`, or any pytree of arrays with a `global_step`.
            extra: Values to keep with it: dicts with string keys, lists, strings, numbers, booleans and None.

        Returns:
            The path of the checkpoint, which is there once `wait` or the next call is through.

        Raises:
            CheckpointError: This save failed, or an earlier one did in the background. Older checkpoints
                are as they were.
            OSError: The directory cannot be made or written.
            TypeError: A leaf of the state is no array, or a value of extra is not JSON (names it).
            ValueError: The state has no global_step, a leaf was donated, or the Saver is closed.
        """
        with self._lock:
            if self._closed:
                raise ValueError(f"this Saver of {self.directory} is closed; make another one")
            self.wait()
            extra = checked.json_copy(extra, "extra")
            leaves = _leaves.named(state)
            step = _step_of(state)
            manifest = Manifest(step, self._now(), tuple(leaf for leaf, _ in leaves), extra)
            arrays = {leaf.array: _leaves.to_stored(leaf, value) for leaf, value in leaves if leaf.array is not None}
            path = os.path.join(self.directory, folder.name(self.prefix, step))
            self._prepare()
            self._saving = path
            try:
                if self._stage is not None:
                    arrays = self._stage.copy(arrays)
                compress = _compression.pays(arrays.values()) if self._compress is None else self._compress
                self._checkpointer.save(path, arrays, compress, functools.partial(self._keeper.publish, manifest))
            except Exception as error:
                self._give_up(error)
            except BaseException:  # interrupted: the next save clears away what is left
                self._swept = False
                raise
            if not self._async_save:
                self.wait()
            return path

    def restore(
        self, target: Any = None, step: int | None = None, partial: bool = False, use_averages: bool | str = False
    ) -> Any:
        """Restores a checkpoint.

        Args:
            target: A tree of arrays or of `jax.ShapeDtypeStruct` (from `jax.eval_shape`) that says structure, shapes,
                dtypes and shardings; leaves are found by path. A leaf that names no sharding comes back where
                JAX puts new arrays, and a NumPy array as one. None for a nested dict of NumPy arrays, for
                looking (PRNG keys as their data).
            step: Which; the newest where None.
            partial: Whether to restore what fits: the rest of the target, which then has to have values, stays.
            use_averages: Whether params are to be their moving averages, for evaluation, in the dtype of params. A
                string names their slot.

        Returns:
            A tree like target. Its arrays share no memory with anything and may be donated.

        Raises:
            CheckpointError: The checkpoint is damaged (names the file, and the newest step that is whole), or a save
                failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
            TypeError: A leaf of target has no shape and dtype.
            ValueError: target does not fit. Lists the paths missing, extra and differing.
        """
        if not isinstance(use_averages, bool | str):
            raise TypeError(f"use_averages={use_averages!r}: must be True, False or the name of the slot of averages")
        averages = AVERAGES if use_averages is True else use_averages or None
        with self._lock:
            self.wait()
            path, manifest = self._find(step)
            if averages is not None:
                _leaves.check_averages(averages, manifest.leaves, path)
            if target is None:
                return self._looked_at(path, manifest, averages)
            wanted = _leaves.match(target, manifest.leaves, averages, partial, path)
            values = self._filled(path, manifest, wanted)
            return jax.tree.unflatten(trees.structure(target), values)

    def extra(self, step: int | None = None) -> Any:
        """The values that were saved with a checkpoint, the newest where step is None; None where there were none.

        Raises:
            CheckpointError: The manifest is damaged, or a save failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
        """
        with self._lock:
            self.wait()
            return self._find(step)[1].extra

    def all_steps(self) -> list[int]:
        """The steps of all whole checkpoints, in order."""
        with self._lock:
            self.wait()
            return sorted(folder.checkpoints(self.directory, self.prefix))

    def latest_step(self) -> int | None:
        """The highest step there is a whole checkpoint of, or None."""
        with self._lock:
            self.wait()
            found = folder.newest(self.directory, self.prefix)
            return None if found is None else found[0]

    @property
    def last_checkpoints(self) -> list[str]:
        """The paths of the last `max_to_keep` checkpoints, oldest first, without those kept for good."""
        with self._lock:
            self.wait()
            return self._keeper.passing()

    def wait(self) -> None:
        """Waits until what was saved is on disk.

        Raises:
            CheckpointError: It failed.
        """
        with self._lock:
            try:
                self._checkpointer.wait()
            except Exception as error:
                self._give_up(error)
            self._saving = None

    def close(self) -> None:
        """Waits until what was saved is on disk, and ends the Saver; it can still restore. A second call does nothing.

        Raises:
            CheckpointError: The last save failed.
        """
        with self._lock:
            try:
                self.wait()
            finally:
                if not self._closed:
                    self._closed = True
                    self._checkpointer.close()
                    self._stage = None

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
        return f"<jstep.Saver {os.path.join(self.directory, self.prefix)}-*>"

    def _now(self) -> float:
        return float((self._clock or time.time)())

    def _prepare(self) -> None:
        """Makes the directory, and once clears away what an earlier run left behind."""
        try:
            os.makedirs(self.directory, exist_ok=True)
        except OSError as error:
            what = f"the directory of checkpoints cannot be made: {error.strerror}"
            raise OSError(error.errno, what, self.directory) from error
        if not os.access(self.directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(errno.EACCES, "the directory of checkpoints cannot be written", self.directory)
        if not self._swept and jax.process_index() == 0:
            folder.sweep(self.directory, self.prefix, self._checkpointer.is_in_use)
        self._swept = True

    def _give_up(self, error: Exception) -> NoReturn:
        """Clears away what a failed save left, and says what happened."""
        path, self._saving, self._swept = self._saving, None, False
        if path is not None and jax.process_index() == 0:
            folder.remove(path + folder.TEMPORARY)
        newest = folder.newest(self.directory, self.prefix)
        raise CheckpointError(
            f"{path} was not saved: {_short(error)}. Checkpoints saved before are as they were; "
            + (f"the newest is {newest[1]}." if newest else "there are none yet.")
        ) from error

    def _find(self, step: int | None) -> tuple[str, Manifest]:
        """The path and manifest of a checkpoint, the same on every process."""
        if step is None:
            newest = folder.newest(self.directory, self.prefix)
            step = _processes.of_the_first(-1 if newest is None else newest[0])
            if step < 0:
                raise FileNotFoundError(f"there is no checkpoint {self.prefix}-* in {self.directory}")
        path = folder.at(self.directory, self.prefix, checked.step(step))
        if path is None:
            steps = sorted(folder.checkpoints(self.directory, self.prefix))
            raise FileNotFoundError(
                f"step={step}: there is no whole checkpoint {self.prefix}-{step} in {self.directory}; "
                f"there are those of steps {steps}"
            )
        try:
            return path, _manifest.read(path)
        except CheckpointError as error:
            raise folder.damaged(path, [str(error)], self.directory, self.prefix) from None

    def _looked_at(self, path: str, manifest: Manifest, averages: str | None) -> dict[str, Any]:
        arrays = self._read(path, manifest, {leaf.array: None for leaf in manifest.leaves if leaf.array is not None})
        return _restored.looked_at(manifest.leaves, arrays, averages)

    def _filled(self, path: str, manifest: Manifest, wanted: Sequence[_leaves.Wanted]) -> list[Any]:
        left = {i: _restored.left_as_is(want) for i, want in enumerate(wanted) if want.source is None}
        if left:
            paths = ", ".join(wanted[i].path for i in left)
            _logger.info("%s was restored in part; left as they were: %s", path, paths)
        uses = Counter(want.source.array for want in wanted if want.source is not None)
        shardings: dict[str, Any] = {}
        for want in wanted:
            if want.source is not None and want.source.array is not None:
                shardings.setdefault(want.source.array, _restored.stored_sharding(want))
        arrays = self._read(path, manifest, shardings)

        def value(i: int, want: _leaves.Wanted) -> Any:
            if want.source is None:
                return left[i]
            array: Any = arrays.get(want.source.array or "")
            shared = uses[want.source.array] > 1 and isinstance(array, jax.Array)
            return _restored.placed(want, array.copy() if shared else array)

        return [value(i, want) for i, want in enumerate(wanted)]

    def _read(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """The stored arrays of these names. Files are verified first: what is damaged is not decoded."""
        share = jax.process_index(), jax.process_count()
        try:
            problems = _manifest.damage(path, manifest, share) if self._verify else []
        except OSError as error:
            problems = [str(error)]
        if _processes.on_any(bool(problems)):
            raise folder.damaged(path, problems or ["another process names the file"], self.directory, self.prefix)
        names = [leaf.array for leaf in manifest.leaves if leaf.array is not None]
        try:
            return self._checkpointer.restore(path, names, shardings) if shardings else {}
        except Exception as error:
            raise CheckpointError(f"{path} could not be read: {_short(error)}") from error


def _step_of(state: Any) -> int:
    step = get_global_step(state)
    if step is None:
        raise ValueError(
            "state: it has no global step, which names the checkpoint; "
            "give it one with state.replace(global_step=jstep.create_global_step())"
        )
    return checked.step(step, "state: global_step")


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 500 else text[:500] + "…"
