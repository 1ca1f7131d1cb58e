"""The restoring half of `Saver`."""

import threading
from typing import Any

from jstep.checkpoint import arguments as checked
from jstep.checkpoint.format.match import Names
from jstep.checkpoint.reading import Reader
from jstep.core.checks import as_bool, kind
from jstep.core.compile_only import refuse_compile_only
from jstep.optimizers.wrappers.exponential_moving_average import NAME as AVERAGES
from jstep.state import TrainState


class Restorer:
    """Restorer of checkpoints, which waits for a save in progress first."""

    _reader: Reader
    _lock: threading.RLock

    def wait(self) -> None:
        """See `Saver.wait`."""
        raise NotImplementedError

    def restore(
        self,
        target: Any = None,
        step: int | None = None,
        partial: bool = False,
        use_averages: bool | str = False,
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
                kept. Leaves that were kept and arrays that were not used are logged as a warning.
            use_averages: Whether to restore the moving averages of params in place of params, for evaluation, in the
                dtype of params. A string names their slot.
            names: Leaves that have another path in the checkpoint: a mapping from paths of target
                (`"params/dense/kernel"`, `"slots/m/dense/kernel"`) to paths in the checkpoint, or a function from one
                to the other. Leaves that are not mentioned, or for which it returns None, have the same path.

        Returns:
            A tree like target. Its arrays share no memory with anything and may be donated.

        Raises:
            CheckpointError: The checkpoint is corrupted: names the file, the newest intact checkpoint (one of more
                than 256 MB is only checked for completeness), and what to delete to resume from it. Or the step in its
                name differs from the step in its content, or a save failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
            TypeError: A leaf of target has no shape and dtype, or an argument is of the wrong type.
            ValueError: target does not fit: lists the paths missing, extra and differing. Or names has a path that
                does not exist; or target has only shapes for leaves that `leave_out` left out of the checkpoint.
        """
        averages = _averages(use_averages)
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
        use_averages: bool | str = False,
    ) -> Any:
        """Restore the parameters alone, without slots and step: for inference, or to start fine-tuning at step 0.

        Args:
            target_params: A tree of arrays or of `jax.ShapeDtypeStruct` with the structure of the parameters
                (including lists and tuples), as `target` of `restore`.
            step: The step to restore; None for the newest.
            names: Leaves that have another path in the checkpoint, as in `restore`; `params/` may be omitted. A
                function that does not rename a path that the checkpoint lacks is also called without `params/`.
            use_averages: Whether to restore the moving averages in place of the parameters, in the dtype of the
                parameters. A string names their slot.

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
        step, averages = _step_or_none(step), _averages(use_averages)
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


def _step_or_none(step: Any) -> int | None:
    return None if step is None else checked.step(step)


def _averages(use_averages: Any) -> str | None:
    """Return the slot of averages to restore, or None."""
    if not isinstance(use_averages, bool | str):
        raise TypeError(f"use_averages={use_averages!r}: must be True, False or the name of the slot of averages")
    return AVERAGES if use_averages is True else use_averages or None
