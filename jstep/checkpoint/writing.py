"""Writing checkpoints, one at a time in the background, and reporting failures."""

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from jstep.checkpoint import arguments as checked
from jstep.checkpoint.format import leaves, left_out
from jstep.checkpoint.format.manifest import CheckpointError, Manifest
from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.reading import newest_in_words, short
from jstep.checkpoint.retention import RetentionManager
from jstep.checkpoint.store.protocol import Store
from jstep.core import trees
from jstep.core.meshes import internal_transfers
from jstep.core.selection import VarList
from jstep.distributed import processes


class Writer:
    """Writer of the checkpoints of one prefix, which also deletes old ones.

    Attributes:
        flushes: Functions to call in the background before each checkpoint exists.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        retention: RetentionManager,
        compress: bool | None,
        leave_out: VarList,
    ) -> None:
        self._leave_out = leave_out
        self._store, self._prefix, self._retention = store, prefix, retention
        self._compress = compress
        self._saving: str | None = None
        self._failure: Exception | None = None
        self.flushes: list[Callable[[], None]] = []

    def claim(self, state: Any = None) -> None:
        """Claim the prefix as `Store.claim` does; if the first process fails, all processes raise.

        A process that continued alone would wait for the others forever.

        Args:
            state: The state to save, if known, or its shapes; see `Saver.claim`.
        """
        absent = left_out.left_out_indices(state, self._leave_out) if state is not None else set()
        is_first = jax.process_index() == 0
        problem = f"{self._prefix}-* in {self._store.directory} cannot be written; see the error of process 0"
        claim = functools.partial(self._store.claim, self._prefix)
        processes.on_all_processes(claim if is_first else bool, problem, CheckpointError)
        if state is not None and is_first:
            paths = trees.paths_of(state)
            self._retention.load(path for i, path in enumerate(paths) if i not in absent)

    def wait_on_all_processes(self) -> None:
        """Call `wait`, and raise on all processes if one has failed, so that all of them start the next save.

        Raises:
            CheckpointError: The last save failed, here or on another process.
        """
        problem = "the last checkpoint was not saved; see the error of another process"
        processes.on_all_processes(self.wait, problem, CheckpointError)

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
            compress = is_worthwhile(arrays.values()) if self._compress is None else self._compress
            commit = self._retention.commit_of(manifest, records, tuple(self.flushes))
            self._store.save(path, arrays, compress, commit)
        except Exception as error:
            self._give_up(error)
        return path

    def wait(self) -> None:
        """Wait for the write in progress.

        Raises:
            CheckpointError: The write failed.
        """
        self.settle()
        failure, self._failure = self._failure, None
        if failure is not None:
            self._give_up(failure)
        self._saving = None

    def settle(self) -> None:
        """Wait until the write in progress has ended. If it failed, the next `wait` raises its error."""
        try:
            self._store.wait()
        except Exception as error:
            self._failure = self._failure or error

    def _give_up(self, error: Exception) -> NoReturn:
        """Remove what a failed save left behind, and raise the error that explains it."""
        path, self._saving = self._saving, None
        if path is not None and jax.process_index() == 0:
            self._store.abandon(path)
        raise CheckpointError(
            f"{path or 'the last checkpoint'} was not saved: {short(error)}. Earlier checkpoints are unchanged; "
            + newest_in_words(self._store, self._prefix)
        ) from error


def step_of(state: Any, given: Any = None) -> int:
    """Return the global step of a state: a field, a key, or the common step of the members of a population.

    Args:
        state: A `TrainState`, or any pytree with a `global_step`.
        given: The step to use for a population whose members differ; usually None.

    Raises:
        TypeError: The step is not an integer.
        ValueError: The state has no step, the step is negative, members of a population differ and `given` is None,
            or `given` differs from the step of the state.
    """
    step = state.get("global_step") if isinstance(state, Mapping) else getattr(state, "global_step", None)
    if step is None:
        raise ValueError(
            "state: it has no global step, which names the checkpoint; "
            "add one with state.replace(global_step=jstep.create_global_step())"
        )
    if trees.is_array(step) and np.ndim(step) and not trees.is_traced(step):
        return _of_population(step, given)
    number = checked.step(step, "state: global_step")
    if given is not None and checked.step(given) != number:
        raise ValueError(f"step={given}: must be the state's global_step, {number}, which names its checkpoint")
    return number


def _of_population(steps: Any, given: Any) -> int:
    if given is not None:
        return checked.step(given)
    found = np.unique(np.asarray(steps))
    if len(found) != 1:
        raise ValueError(
            f"state: global_step has the shape {np.shape(steps)} and the values {found[:5].tolist()}: the members of "
            "this population have no step in common; name the checkpoint with save(state, step=…)"
        )
    return checked.step(found[0], "state: global_step")


_ARRAYS = 64  # number of arrays to sample, of all sizes
_SAMPLE = 1024  # bytes from the middle of each array
_WORTH_IT = 0.6


def is_worthwhile(arrays: Iterable[Any]) -> bool:
    """Return whether compression about halves the bytes, by a sample that takes a millisecond or two.

    Only arrays on the CPU are sampled. Always False on several processes, which would have to agree.
    """
    by_size = sorted(arrays, key=lambda array: int(array.nbytes))
    looked_into = by_size[-1 :: -max(1, len(by_size) // _ARRAYS)]  # the largest among them
    if jax.process_count() > 1 or not all(_is_on_cpu(array) for array in looked_into):
        return False
    before = sum(array.nbytes for array in looked_into)
    after = sum(array.nbytes * _ratio(array) for array in looked_into)
    return bool(after < _WORTH_IT * before)


def _is_on_cpu(array: Any) -> bool:
    return isinstance(array, np.ndarray) or all(device.platform == "cpu" for device in array.sharding.device_set)


def _ratio(array: Any) -> float:
    part = array if isinstance(array, np.ndarray) else np.asarray(array.addressable_shards[0].data)
    start = part.size // 2
    sample = part.ravel("K")[start : start + _SAMPLE // part.itemsize].tobytes()
    return min(1.0, len(zlib.compress(sample, 1)) / max(len(sample), 1))
