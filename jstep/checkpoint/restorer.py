"""The half of a Saver that restores."""

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
    """Restores checkpoints, once what is being saved is on disk."""

    _reader: Reader
    _lock: threading.RLock

    def wait(self) -> None:
        """As `Saver.wait`."""
        raise NotImplementedError

    def restore(
        self,
        target: Any = None,
        step: int | None = None,
        partial: bool = False,
        use_averages: bool | str = False,
        names: Names | None = None,
    ) -> Any:
        """Restores a checkpoint.

        Args:
            target: A tree of arrays or of `jax.ShapeDtypeStruct` (from `jax.eval_shape`) that says structure, shapes,
                dtypes and shardings; leaves are found by path. A leaf that names no sharding comes back where
                JAX puts new arrays, and a NumPy array as one. None for a nested dict of NumPy arrays, for
                looking (PRNG keys as their data).
            step: Which; the newest where None.
            partial: Whether to restore what fits: the rest of the target, which then has to have values, stays. What
                was left and what was not used is logged as a warning.
            use_averages: Whether params are to be their moving averages, for evaluation, in the dtype of params. A
                string names their slot.
            names: What has another path in the checkpoint: a mapping from paths of target
                (`"params/dense/kernel"`, `"slots/m/dense/kernel"`) to paths in the checkpoint, or a function from the
                one to the other; what is not mentioned, or for which it returns None, has the same path.

        What `leave_out` left out of the checkpoint stays as it is in target; if its values are others than when it was
        saved, a warning says so.

        Returns:
            A tree like target. Its arrays share no memory with anything and may be donated.

        Raises:
            CheckpointError: The checkpoint is damaged: names the file, the newest step that is whole, and what to
                delete to go on from that. Or its name and content differ in step, or a save failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
            TypeError: A leaf of target has no shape and dtype, or an argument is of the wrong type.
            ValueError: target does not fit. Lists the paths missing, extra and differing. Or names has a path that is
                not there; or target has only shapes for what `leave_out` left out of the checkpoint.
        """
        averages = _averages(use_averages)
        partial, step = as_bool(partial, "partial"), _step_or_none(step)
        if names is not None and target is None:
            raise ValueError("names: must come with a target, whose paths it names")
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
        """Restores the parameters alone, without slots and step: for inference, or to start a fine-tune at step 0.

        Args:
            target_params: A tree of arrays or of `jax.ShapeDtypeStruct` with the structure of the parameters, its lists
                and tuples too, as `target` of `restore`.
            step: Which; the newest where None.
            names: What has another path in the checkpoint, as in `restore`; `params/` may be left out. A function
                that does not rename a path that the checkpoint lacks is asked for it without `params/`, too.
            use_averages: Whether to restore their moving averages in place of the parameters, in the dtype of the
                parameters. A string names their slot.

        Returns:
            A tree like target_params. Its arrays share no memory with anything and may be donated.

        Raises:
            CheckpointError: The checkpoint is damaged, or a save failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
            TypeError: A leaf of target_params has no shape and dtype, or an argument is of the wrong type.
            ValueError: target_params does not fit. Lists the paths missing, extra and differing.

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
                f"target_params: must be a tree of parameters, got {kind(target_params)}; give state.params, or shapes "
                "from jax.eval_shape. restore(None) shows a checkpoint without a target"
            )
        step, averages = _step_or_none(step), _averages(use_averages)
        with self._lock:
            self.wait()
            refuse_compile_only(target_params, "target_params")
            return self._reader.restore_params(target_params, step, names, averages)

    def extra(self, step: int | None = None) -> Any:
        """The values that were saved with a checkpoint, the newest where step is None; None where save was given none.

        Raises:
            CheckpointError: The manifest is damaged, or a save failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
        """
        with self._lock:
            self.wait()
            return self._reader.extra(_step_or_none(step))


def _step_or_none(step: Any) -> int | None:
    return None if step is None else checked.step(step)


def _averages(use_averages: Any) -> str | None:
    """The slot of averages to restore, or None."""
    if not isinstance(use_averages, bool | str):
        raise TypeError(f"use_averages={use_averages!r}: must be True, False or the name of the slot of averages")
    return AVERAGES if use_averages is True else use_averages or None
