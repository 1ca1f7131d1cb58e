"""Writing checkpoints, one at a time in the background, and reporting failures."""

from typing import Any, NoReturn

import jax

from jstep.checkpoint.format import compression, leaves, left_out
from jstep.checkpoint.format.manifest import CheckpointError, Manifest
from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.reading import newest_in_words, short
from jstep.checkpoint.retention import RetentionManager
from jstep.checkpoint.stage import Stage
from jstep.checkpoint.step_of import step_of
from jstep.checkpoint.store.protocol import Store
from jstep.core import trees
from jstep.core.contexts import internal_transfers
from jstep.core.var_list import VarList
from jstep.distributed import agreement


class Writer:
    """Writer of the checkpoints of one prefix, which also deletes old ones."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        retention: RetentionManager,
        compress: bool | None,
        stage: bool,
        leave_out: VarList,
    ) -> None:
        self._leave_out = leave_out
        self._store, self._prefix, self._retention = store, prefix, retention
        self._compress, self._stage = compress, Stage() if stage else None
        self._saving: str | None = None

    def claim(self, state: Any = None) -> None:
        """Claim the prefix as `Store.claim` does; if the first process fails, all processes raise.

        A process that continued alone would wait for the others forever.

        Args:
            state: The state to save, if known, or its shapes; see `Saver.claim`.
        """
        absent = left_out.left_out_indices(state, self._leave_out) if state is not None else set()
        error = None
        if jax.process_index() == 0:
            try:
                self._store.claim(self._prefix)
            except (OSError, CheckpointError) as failure:
                error = failure
        if agreement.any_process(error is not None):
            raise error or CheckpointError(
                f"{self._prefix}-* in {self._store.directory} cannot be written; see the error of process 0"
            )
        if state is not None and jax.process_index() == 0:
            paths = trees.paths_of(state)
            self._retention.load(path for i, path in enumerate(paths) if i not in absent)

    def wait_on_all_processes(self) -> None:
        """Call `wait`, and raise on all processes if one has failed, so that all of them start the next save.

        Raises:
            CheckpointError: The last save failed, here or on another process.
        """
        failure = None
        try:
            self.wait()
        except CheckpointError as error:
            failure = error
        if agreement.any_process(failure is not None):
            raise failure or CheckpointError("the last checkpoint was not saved; see the error of another process")

    def save(self, state: Any, step: int | None, saved_at: float, extra: Any) -> str:
        """Start to write a state, and return the path of its checkpoint.

        Raises:
            CheckpointError: The save failed.
            OSError: The directory cannot be written.
            TypeError: A leaf of the state cannot be saved (names it).
            ValueError: A leaf was donated (names it), or the state has no step.
        """
        with internal_transfers():
            return self._save(state, step, saved_at, extra)

    def _save(self, state: Any, step: int | None, saved_at: float, extra: Any) -> str:
        absent = left_out.left_out_indices(state, self._leave_out)
        everything = leaves.named(state)
        named = [one for i, one in enumerate(everything) if i not in absent]
        step = step_of(state, step)
        manifest = Manifest(step, saved_at, tuple(leaf for leaf, _ in named), extra)
        arrays = {leaf.array: leaves.to_stored(leaf, value) for leaf, value in named if leaf.array is not None}
        path = self._store.path(checkpoint_name(self._prefix, step))
        self.claim()
        self._saving = path
        try:
            records = left_out.started([everything[i] for i in sorted(absent)])
            if self._stage is not None:
                arrays = self._stage.copy(arrays)
            compress = compression.is_worthwhile(arrays.values()) if self._compress is None else self._compress
            self._store.save(path, arrays, compress, self._retention.commit_of(manifest, records))
        except Exception as error:
            self._give_up(error)
        return path

    def wait(self) -> None:
        """Wait for the write in progress.

        Raises:
            CheckpointError: The write failed.
        """
        try:
            self._store.wait()
        except Exception as error:
            self._give_up(error)
        self._saving = None

    def _give_up(self, error: Exception) -> NoReturn:
        """Remove what a failed save left behind, and raise the error that explains it."""
        path, self._saving = self._saving, None
        if path is not None and jax.process_index() == 0:
            self._store.abandon(path)
        raise CheckpointError(
            f"{path} was not saved: {short(error)}. Earlier checkpoints are unchanged; "
            + newest_in_words(self._store, self._prefix)
        ) from error

    def close(self, wait: bool) -> None:
        """End the threads, release the claim, and free the staging buffers."""
        self._store.close(wait)
        self._stage = None
