"""The engine of a `Saver`: one save at a time in the background, and reads between saves.

`Saver` is its public interface. A run calls the engine itself for what users must not call: with
another listener, or without the other processes, a checkpoint could be lost.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from jstep.array_store.attempts import writer_module
from jstep.array_store.best_record import BestRecord
from jstep.array_store.host_copies import HostBlock, HostCopies, shared_block
from jstep.array_store.leaf_records import SavedState, array_names, start_leaf_fingerprints
from jstep.array_store.listing import format_name
from jstep.array_store.manifest import CheckpointError, CheckpointExtra, Manifest
from jstep.checkpoint import names as naming
from jstep.checkpoint.finding import CheckpointFinder
from jstep.checkpoint.peers import Peers, post_failure
from jstep.checkpoint.reading import OpenCheckpoint
from jstep.checkpoint.retention import Listener, Published, Retention
from jstep.checkpoint.save import Save
from jstep.core import exceptions, meshes, processes, trees
from jstep.core.checks import as_int, describe_type
from jstep.core.secret_text import describe_error
from jstep.core.selection import VarList
from jstep.core.trees import Tree
from jstep.slots.roles import roles_in
from jstep.state.leaves import GLOBAL_STEP, PARAMS, StateLeaves, field_of
from jstep.state.nonfinite import StateContents
from jstep.stores.untrusted import is_step


class SaverEngine:
    """The writes and reads of one `Saver`.

    Attributes:
        finder: Finds checkpoints. Outside of `locked_finder`, use it only for what no save touches:
            the files of a complete checkpoint.
        saves_begun: The number of saves that have begun.
    """

    def __init__(
        self,
        directory: str,
        prefix: str,
        *,
        max_to_keep: int | None,
        keep_every_n_hours: float | None,
        is_async: bool,
        leave_out: VarList,
    ) -> None:
        self.directory = directory
        self.prefix = prefix
        self.leave_out = leave_out
        self._is_async = is_async
        self._store = naming.open_store(directory, prefix)
        self._retention = Retention(
            self._store, prefix, max_to_keep, keep_every_n_hours, interval_start=time.time()
        )
        self.finder = CheckpointFinder(self._store, prefix)
        self._flushes: list[Callable[[], None]] = []
        self._listener: Listener | None = None
        # Held by every call that saves, deletes or finds checkpoints, and by nothing that runs in
        # the background.
        self._lock = threading.RLock()
        self._is_closed = False
        # The path of the latest save until `wait` has returned, and its error if it has failed.
        self._saving: str | None = None
        self._failure: BaseException | None = None
        self.saves_begun = 0
        # Set by the first save. While this Saver refers to it, later saves use its memory again.
        self._block: HostBlock | None = None

    @property
    def path_of_prefix(self) -> str:
        return self._store.path(self.prefix)

    # Which thread may call, and when.

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock; raise an error if this thread is in `Hook.saved`.

        A save waits for that hook, and the hook would wait for the save.
        """
        if self._listener is not None and self._listener.is_calling():
            raise RuntimeError(
                "Hook.saved: must not use the Saver that calls it, as each could wait for the "
                f"other; read checkpoints with another one, jstep.Saver({self.directory!r})"
            )
        return self._lock

    @contextlib.contextmanager
    def locked_finder(self) -> Iterator[CheckpointFinder]:
        """Hold the lock, wait for a save in progress, whose error is raised; yield the finder."""
        with self.exclusive():
            self.wait()
            yield self.finder

    def open(self, step: int | None) -> OpenCheckpoint:
        """Open the checkpoint of a step, or the newest one; see `CheckpointFinder.open`."""
        with self.locked_finder() as finder:
            return finder.open(step)

    def check_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"this Saver of {self.directory} is closed; create another one")

    # Reads.

    def all_steps(self) -> list[int]:
        """See `Saver.all_steps`."""
        with self.locked_finder():
            return self._store.all_steps(self.prefix)

    def counted_checkpoints(self) -> list[str]:
        """Return the checkpoints that `max_to_keep` counts, lowest step first."""
        with self.locked_finder():
            return self._retention.counted_checkpoints()

    def best_records(self, steps: Sequence[int]) -> dict[int, BestRecord | None]:
        """Return step → the evaluation for which it was kept; None if no `KeepBest` saved it."""
        with self.locked_finder() as finder:
            return finder.best_records(steps)

    def best(self, step: int) -> BestRecord | None:
        """Return the evaluation for which a checkpoint was kept; None if no `KeepBest` saved it."""
        with self.locked_finder() as finder:
            return finder.read(step, lambda found: found.best)

    def newest_step(self) -> int | None:
        """Return the highest step with a complete checkpoint, without reading the others."""
        with self.locked_finder():
            return next((step for step, _ in self._store.newest_first(self.prefix)), None)

    # Saves.

    def claim(self, state: Tree = None) -> None:
        """See `Saver.claim`."""
        with self.exclusive():
            self.check_open()
            self.wait()
            if state is not None:
                # Raises what a save would, before the run has taken a step.
                leaves = StateLeaves(state)
                array_names(leaves)
                leaves.left_out(self.leave_out)
            problem = (
                f"{self.prefix}-* in {self.directory} cannot be written; see the error of process 0"
            )
            # If the first process fails, all raise: a process that continued would wait forever.
            processes.share_errors(self._claim_on_first, problem, CheckpointError)

    def _claim_on_first(self) -> None:
        if processes.is_process_0():
            self._store.claim()

    def save(self, state: Tree, extra: CheckpointExtra) -> str:
        """Begin to save a state; return the path that its checkpoint will have."""
        attempt_id, microseconds = self._agree_on_save()
        with meshes.internal_transfers():
            path = self._save(state, extra, attempt_id, microseconds / 1e6)
        if not self._is_async:
            self.wait()
        return path

    def _agree_on_save(self) -> list[int]:
        """Return a random ID of this save, and its time in microseconds: the first process's.

        All processes start the save, or all raise.
        """

        def propose() -> tuple[int, int]:
            # In here, and not before the exchange: only the process whose write failed knows it,
            # and all must raise.
            self.wait()
            self._claim_on_first()
            return secrets.randbits(31), max(0, int(time.time() * 1e6))

        problem = (
            f"{self.prefix}-* in {self.directory} cannot be saved; see the error of another process"
        )
        return processes.first_ints_on_all(propose, 2, problem, CheckpointError)

    def _save(self, state: Tree, extra: CheckpointExtra, attempt_id: int, saved_at: float) -> str:
        leaves = StateLeaves(state)
        saved = SavedState.collect(leaves, self.leave_out)
        step = _step_of(state)
        finite = extra.finite
        param_names = None
        if finite is None:
            param_names = self._find_copied_params(leaves, saved)
            if param_names is None:
                finite = StateContents(leaves, params_only=True).are_finite()
        path = self._store.path(format_name(self.prefix, step))
        self._saving = path
        self._retention.reset_write_secs()
        try:
            if self._block is None:
                self._block = shared_block()
            copies = HostCopies(self._block)
            # A caller who waits for the save runs no step meanwhile.
            own_parts = writer_module().take(saved.arrays, copies if self._is_async else None)
            manifest = Manifest(
                step=step,
                saved_at=saved_at,
                leaves=tuple(saved.leaves),
                extra=extra.values,
                parts={array.name: array.part for array in own_parts if array.part != array.shape},
                finite=bool(finite),
                processes=jax.process_count(),
                best=extra.best,
                averages=_declared_averages(state),
            )
            self.saves_begun += 1
            process = jax.process_index()
            count = jax.process_count()
            attempt = self._store.begin(path, attempt_id, saved_at, process=process, count=count)
            nbytes = sum([leaf.nbytes for leaf in saved.leaves])
            own_bytes = sum([values.nbytes for array in own_parts for _, values in array.values])
            save = Save(
                store=self._store,
                attempt=attempt,
                peers=Peers(attempt, attempt_id, process, count, nbytes, own_bytes),
                retention=self._retention,
                manifest=manifest,
                arrays=own_parts,
                unchecked_params=param_names,
                files=extra.files,
                release=copies.release,
                nbytes=nbytes,
                left_out=start_leaf_fingerprints(saved.left_out),
                flushes=tuple(self._flushes),
                permanent_every_secs=extra.permanent_every_secs,
                listener=self._listener,
                number=self.saves_begun,
            )
            self._store.start(attempt, save.run)
        except Exception as error:
            if processes.is_single_process():
                self._abandon_and_raise(error)
            # The other processes have begun to save, and continue. This one continues as if its
            # write had failed: all raise the error at the next exchange (`_agree_on_save`).
            post_failure(attempt_id, jax.process_index(), error)
            self._failure = error
        return path

    def _find_copied_params(self, leaves: StateLeaves, saved: SavedState) -> set[str] | None:
        """Return the names of the parameters' arrays, if the thread of the save can check them.

        It finds in their copies whether they are finite. None if it cannot: the save is not in the
        background, there are several processes, a leaf is left out, or a parameter is stored as
        another dtype or is not in the host's memory.
        """
        if not self._is_async or jax.process_count() > 1 or saved.left_out:
            return None
        names = set[str]()
        shardings = set[Any]()
        for index in jax.tree.leaves(field_of(leaves.indices, PARAMS)):
            value = leaves.values[index]
            record = saved.leaves[index]
            if record.stored_as is not None:
                return None
            if isinstance(value, jax.Array):
                shardings.add(value.sharding)
            if record.array is not None:
                names.add(record.array)
        if not all(map(writer_module().is_read_in_place, shardings)):
            return None
        return names

    def _abandon_and_raise(self, error: BaseException) -> NoReturn:
        """Remove the leftovers of a failed save, and raise the error that explains it."""
        path = self._saving
        self._saving = None
        if path is not None and processes.is_process_0():
            self._store.abandon(path)
        what = path or "the last checkpoint"
        failure = CheckpointError(
            f"{what} was not saved: {describe_error(error)}. Earlier checkpoints are unchanged."
        )
        for text in getattr(error, "__notes__", ()):  # such as the hook whose `flush` raised it
            exceptions.note(failure, text)
        raise failure from error

    @contextlib.contextmanager
    def flushing(self, flush: Callable[[], None]) -> Iterator[None]:
        """See `Saver.flushing`."""
        self._flushes.append(flush)
        try:
            yield
        finally:
            self._flushes.remove(flush)

    def set_listener(self, listener: Listener | None) -> None:
        """Notify a listener of each permanent checkpoint, from the next save on."""
        self._listener = listener

    # A save in progress.

    def wait(self) -> None:
        """See `Saver.wait`."""
        with self.exclusive():
            self.wait_until_finished()
            failure = self._failure
            self._failure = None
            if failure is not None:
                self._abandon_and_raise(failure)
            self._saving = None

    def wait_until_finished(self) -> None:
        """Wait for the save in progress; unlike `wait`, leave its error to the next call."""
        with self.exclusive():
            error = self._store.wait()
            self._failure = self._failure or error

    def is_saving(self) -> bool:
        """Return whether a save is in progress, without waiting for anything."""
        return self._store.is_writing()

    @property
    def published(self) -> Published | None:
        """The newest checkpoint of this Saver that is on disk.

        None before the first one, and on other processes.
        """
        return self._retention.published

    @property
    def write_secs(self) -> float | None:
        """The seconds of the latest save in the background, with the deletions after it.

        None until they have ended.
        """
        return self._retention.write_secs

    # Deletions, and the end.

    def delete(self, step: int) -> None:
        """See `Saver.delete`."""
        with self.exclusive():
            self.claim()
            path = self._store.find_path(self.prefix, step)
            if processes.any_process(path is None):
                raise FileNotFoundError(
                    f"step={step}: there is no checkpoint {format_name(self.prefix, step)} "
                    f"in {self.directory}"
                )
            assert path is not None
            if self._listener is not None:
                self._listener.wait(path)

            def delete_on_first() -> None:
                if processes.is_process_0():
                    self._retention.delete(step, path)

            # The other processes return when it is deleted.
            problem = f"{path} was not deleted; see the error of process 0"
            processes.share_errors(delete_on_first, problem, CheckpointError)

    def delete_alone(self, step: int) -> None:
        """Delete a checkpoint like `delete`, but alone: no other process still uses it.

        The caller has claimed the prefix before: `claim` needs all processes.
        """
        with self.exclusive():
            self.check_open()
            self.wait_until_finished()
            path = self._store.find_path(self.prefix, step)
            if path is not None:
                self._retention.delete(step, path)

    def close(self, *, wait: bool) -> None:
        """See `Saver.close`."""
        with self.exclusive():
            try:
                if wait:
                    self.wait()
            finally:
                if not self._is_closed:
                    self._is_closed = True
                    self._block = None
                    self._store.close(wait)


def _declared_averages(state: Tree) -> tuple[str, ...] | None:
    """Return the slots that the optimizer declares as averages; None if it declares no roles."""
    roles = roles_in(state)
    if not roles:
        return None
    return tuple(sorted(roles.averages & state.slots.keys()))


def _step_of(state: Tree) -> int:
    """Return the global step: a field, a key, or the common step of a population's members."""
    step = field_of(state, GLOBAL_STEP)
    if step is None:
        if isinstance(state, tuple):  # `(state, metrics)`, what a step has returned
            raise TypeError(f"state: must be a state, got {describe_type(state)}")
        raise ValueError(
            "state: it has no global step, which names the checkpoint; "
            "add one with state.replace(global_step=jstep.create_global_step())"
        )
    if trees.is_array(step) and np.ndim(step) and not trees.is_traced(step):
        steps = np.unique(np.asarray(step))
        if len(steps) != 1:
            raise ValueError(
                f"state: global_step has the shape {np.shape(step)} and the values "
                f"{steps[:5].tolist()}: must be one step, which names the checkpoint; save the "
                "members on their own"
            )
        step = steps[0]
    number = as_int(step, "state: global_step", 0)
    if not is_step(number):
        raise ValueError(f"state: global_step is {number}: must be below 2**63")
    return number
