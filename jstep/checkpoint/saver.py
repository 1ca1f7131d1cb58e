"""`Saver`, the public interface of `SaverEngine`: saves one at a time, in the background."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from jstep.array_store.best_record import best_step
from jstep.array_store.listing import format_name
from jstep.array_store.manifest import CheckpointError, as_checkpoint_extra
from jstep.checkpoint import names as naming
from jstep.checkpoint.engine import SaverEngine
from jstep.checkpoint.match import Names
from jstep.core import exceptions, placement
from jstep.core.checks import as_bool, as_int, as_number, describe_type, format_value
from jstep.core.public_names import explains_attributes
from jstep.core.selection import VarList, check_form
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import T, Tree
from jstep.state.leaves import PARAMS
from jstep.state.slots import as_average_names
from jstep.state.train_state import TrainState


@explains_attributes
class Saver:
    """Saves and restores training states.

    The checkpoint `directory/model-1000` is the state after exactly 1000 steps. The arrays are
    written in the background; you may donate the state right after `save`. A checkpoint is atomic:
    it gets its name once all of it is on disk. Arrays have checksums, which `restore` verifies.
    Orbax can open the checkpoints.

    The newest checkpoint is the one with the highest step. To return to an earlier one permanently,
    delete all later ones. Saving a step again replaces its checkpoint.

    Every call but `read_file`, `flushing` and `close(wait=False)` first waits for a save in
    progress, and raises its error if it failed. A checkpoint survives SIGKILL and a power cut once
    `wait`, or another call that waits, has returned; a save in progress may be lost.

    Only one Saver at a time may write a prefix in a directory, from its first save (or `claim`)
    until `close` or the end of its process; a second one gets an error. Any number of Savers may
    restore at the same time. With several processes, all of them must call `save` and `restore`.

    Args:
        directory: The directory of the checkpoints: a path on a file system that all processes
            share, created by the first `save`, or a URL, `gs://bucket/prefix` or
            `s3://bucket/prefix`.
        prefix: The prefix of the checkpoint names.
        max_to_keep: The number of checkpoints to keep: each save deletes those with the lowest
            steps beyond this number. None or 0 keeps all.
        keep_checkpoint_every_n_hours: Hours between checkpoints that are kept for good: of the
            checkpoints that `max_to_keep` would delete, one per interval is kept. The interval is
            remembered across restarts.
        async_save: Whether to write in the background.
        leave_out: Parameters that are not saved, nor their slots, such as the frozen base model of
            LoRA: a predicate `(path, leaf) -> bool`, paths or globs, or a tree of bools, like
            `var_list`; or `"frozen"` for the parameters that have no label in a `partition`.
            `restore`, with any Saver, takes them from its target, and warns if their values differ
            from those at the time of the save.
        allow_nonfinite: Whether a run saves parameters that became NaN or infinite, instead of
            ending with a `NanLossDuringTrainingError`. A manual `save` saves any values.
            `max_to_keep` never deletes the newest checkpoint whose parameters are finite, so there
            may be one more.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument has an impossible value, such as a prefix with a slash.
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

    @shortens_tracebacks
    def __init__(
        self,
        directory: str | os.PathLike[str],
        prefix: str = "model",
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        *,
        async_save: bool = True,
        leave_out: VarList = None,
        allow_nonfinite: bool = False,
    ) -> None:
        self.directory = naming.as_directory(directory)
        self.prefix = naming.as_prefix(prefix)
        if max_to_keep is not None:
            max_to_keep = as_int(max_to_keep, "max_to_keep", 0, "and None or 0 keeps all") or None
        hours = keep_checkpoint_every_n_hours
        if hours is not None:
            meaning = "None keeps none permanently"
            hours = as_number(
                hours, "keep_checkpoint_every_n_hours", low=0.0, above=True, meaning=meaning
            )
        async_save = as_bool(async_save, "async_save")
        check_form(leave_out, "leave_out")
        self.leave_out = leave_out
        self.allow_nonfinite = as_bool(allow_nonfinite, "allow_nonfinite")
        self._engine = SaverEngine(
            self.directory,
            self.prefix,
            max_to_keep=max_to_keep,
            keep_every_n_hours=hours,
            is_async=async_save,
            leave_out=leave_out,
        )

    def claim(self, state: Tree = None) -> None:
        """Lock the prefix before the first save.

        Check that this Saver can write, and that no other one does. `save` does this, too; a second
        call costs almost nothing.

        Args:
            state: The state to save later, or its shapes, to check its paths and `leave_out`.

        Raises:
            CheckpointError: Another Saver writes this prefix here; names its host and process. Or
                an earlier save failed in the background.
            OSError: The directory cannot be created or written.
            ValueError: The Saver is closed, or leave_out matches no parameter of the state. Or two
                leaves would be stored as one array (`a` and `a/`), or a path has more than 1024
                bytes (characters that are not ASCII have up to 12).
        """
        self._engine.claim(state)

    @shortens_tracebacks
    def save(self, state: Tree, extra: object = None) -> str:
        """Save a state under the name of its global_step.

        Args:
            state: A `TrainState`, or any pytree of arrays with a `global_step`: a field, or a key
                of a dict. In a population, where every leaf has a leading axis, all members usually
                have the same step.
            extra: Values to save with the state: dicts with string keys, lists, strings, numbers,
                booleans and None.

        Returns:
            The path of the checkpoint, which exists once `wait` or the next call returns.

        Raises:
            CheckpointError: This save failed, or an earlier one did in the background. Older
                checkpoints are unchanged.
            OSError: The directory cannot be created or written.
            TypeError: A leaf of the state is not an array, or a value of extra is not JSON (names
                it).
            ValueError: The state has no global_step; a leaf was donated; leave_out matches no
                parameter; extra is larger than 256 MiB as JSON; the Saver is closed; or `claim`
                rejects the paths of the state.
        """
        engine = self._engine
        with engine.exclusive():
            engine.check_open()
            _check_tree(
                state, "state", "save(state, extra=None), whose global_step names the checkpoint"
            )
            placement.check_not_compile_only(state, "state")
            return engine.save(state, as_checkpoint_extra(extra))

    @overload
    def restore(
        self,
        target: None = None,
        step: int | None = None,
        *,
        partial: bool = False,
        use_averages: bool | str | Sequence[str] = False,
        names: Names | None = None,
    ) -> dict[str, Any]: ...

    @overload
    def restore(
        self,
        target: T,
        step: int | None = None,
        *,
        partial: bool = False,
        use_averages: bool | str | Sequence[str] = False,
        names: Names | None = None,
    ) -> T: ...

    @shortens_tracebacks
    def restore(
        self,
        target: Tree = None,
        step: int | None = None,
        *,
        partial: bool = False,
        use_averages: bool | str | Sequence[str] = False,
        names: Names | None = None,
    ) -> Any:
        """Restore a checkpoint.

        Leaves that `leave_out` left out of the checkpoint keep the values of target; if these have
        changed since the save, a warning is logged.

        Args:
            target: A tree of arrays or of `jax.ShapeDtypeStruct` (from `jax.eval_shape`) that gives
                structure, shapes, dtypes and shardings; leaves are matched by path. A leaf without
                a sharding is placed where JAX places new arrays, and a NumPy array is restored as
                one. If None, the checkpoint is returned as a nested dict of NumPy arrays, for
                inspection (PRNG keys as their data).
            step: The step to restore; None for the newest.
            partial: Whether to restore only what fits. The other leaves of target, which must then
                have values, are kept. In a `TrainState`, if the checkpoint lacks a slot that starts
                as a copy of the parameters (`master_weights`, `lookahead`, averages, ...), the slot
                becomes a copy of the restored parameters. If no slot of an optimizer was restored,
                its age is that of target: a fresh one counts from the restored step. A warning
                lists leaves that were copied or kept, unused arrays, and new slots that share their
                age with restored ones.
            use_averages: Whether to restore the moving averages of params in place of params, in
                their dtype, for evaluation, and those of the model state if it has any. A string
                names their slot; a list names slots with averages of different leaves. Other slots
                than averages are rejected.
            names: Leaves that have a different path in the checkpoint: a mapping from paths in
                target (`"params/dense/kernel"`, `"slots/m/dense/kernel"`) to paths in the
                checkpoint, or a function that does this. Leaves that are not mentioned, or for
                which it returns None, have the same path in both.
                `{"params/w": ema.average_name("w")}` restores an average in place of a parameter.

        Returns:
            A tree like target. Its arrays share no memory with anything and may be donated.

        Raises:
            CheckpointError: The checkpoint is corrupted: names the leaf or file, the newest intact
                checkpoint, and the command that moves the corrupted one aside to resume from it. Or
                the step in its name differs from the step in its content, or a save failed in the
                background.
            FileNotFoundError: There is no checkpoint, or none of that step.
            TypeError: A leaf of target has no shape and dtype, or an argument is of the wrong type.
            ValueError: target does not fit: lists the paths missing, extra and differing. Or names
                has a path that does not exist; or target has only shapes for leaves that
                `leave_out` left out of the checkpoint.
        """
        _check_tree(target, "target", "restore(target, step=None)")
        averages = as_average_names(use_averages)
        partial = as_bool(partial, "partial")
        step = _step_or_none(step)
        if names is not None and target is None:
            raise ValueError("names: must come with a target, whose paths it maps")
        with self._engine.locked_finder() as finder:
            placement.check_not_compile_only(target, "target")
            return finder.read(
                step,
                lambda found: found.restore(
                    target, partial=partial, averages=averages, names=names
                ),
            )

    def restore_params(
        self,
        target_params: T,
        step: int | None = None,
        *,
        names: Names | None = None,
        use_averages: bool | str | Sequence[str] = False,
    ) -> T:
        """Restore the parameters without slots and step: for inference, or fine-tuning from step 0.

        Args:
            target_params: A tree of arrays or of `jax.ShapeDtypeStruct` with the structure of the
                parameters (including lists and tuples), as `target` of `restore`.
            step: The step to restore; None for the newest.
            names: Leaves that have another path in the checkpoint (`"params/dense/kernel"`), as in
                `restore`.
            use_averages: Whether to restore the moving averages in place of the parameters, in the
                dtype of the parameters. A string names their slot, a list several, as in `restore`.

        Returns:
            A tree like target_params. Its arrays share no memory with anything and may be donated.

        Raises:
            CheckpointError: The checkpoint is corrupted, or a save failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
            TypeError: A leaf of target_params has no shape and dtype, or an argument is of the
                wrong type.
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
                f"target_params: must be a tree of parameters, got {describe_type(target_params)}; "
                "pass state.params, or shapes from jax.eval_shape. restore(None) returns a "
                "checkpoint without a target"
            )
        step = _step_or_none(step)
        averages = as_average_names(use_averages)
        with self._engine.locked_finder() as finder:
            placement.check_not_compile_only(target_params, "target_params")
            target = {PARAMS: target_params}
            restored = finder.read(
                step,
                lambda found: found.restore(
                    target, averages=averages, names=names, params_only=True
                ),
            )
            return restored[PARAMS]

    def extra(self, step: int | None = None) -> Any:
        """Return the `extra` of a checkpoint (the newest if step is None); None if `save` had none.

        `train` saves a dict with what a run needs to resume.

        Raises:
            CheckpointError: The manifest is corrupted, or a save failed in the background.
            FileNotFoundError: There is no checkpoint, or none of that step.
        """
        with self._engine.locked_finder() as finder:
            return finder.read(_step_or_none(step), lambda found: found.extra)

    def read_file(self, name: str, step: int) -> bytes:
        """Return the bytes of a checkpoint's file to which its `extra` refers as `{"$file": name}`.

        They hold large arrays of positions and hooks. Any thread may call this, even during a save.

        Raises:
            CheckpointError: The file is corrupted, or the checkpoint has no such file.
            FileNotFoundError: There is no checkpoint of that step.
        """
        return self._engine.finder.open_here(as_int(step, "step", 0)).file(name)

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step, atomically.

        Raises:
            CheckpointError: Another Saver writes this prefix, or a save failed in the background.
            FileNotFoundError: There is no checkpoint of this step.
            OSError: The storage rejects it.
            TypeError: step is not an integer.
            ValueError: The Saver is closed.
        """
        self._engine.delete(as_int(step, "step", 0))

    def all_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in ascending order.

        Raises:
            CheckpointError: A save failed in the background. `latest_step` and `last_checkpoints`
                raise this, too.
        """
        return self._engine.all_steps()

    def latest_step(self) -> int | None:
        """Return the highest step with a complete checkpoint, or None."""
        return self._engine.newest_step()

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint of a `KeepBest`, for `restore(state, step=…)`.

        Checkpoints compete if they have the metric and the mode of the newest one; on a tie, the
        earlier one is best.

        Returns:
            The step; None if there is no checkpoint.

        Raises:
            CheckpointError: A manifest is corrupted, or a save failed in the background.
            ValueError: No checkpoint of this prefix is of a `KeepBest`.
        """
        steps = self.all_steps()
        best = best_step(self._engine.best_records(steps))
        if best is None and steps:
            raise ValueError(
                "best_step: must have checkpoints of a KeepBest, got "
                f"{format_name(self.prefix, steps[-1])} in {self.directory}, which has no value of "
                "a metric; give the directory and the prefix of the KeepBest, such as "
                "Saver(directory, prefix='best')"
            )
        return best

    @property
    def last_checkpoints(self) -> list[str]:
        """The paths of the checkpoints that `max_to_keep` counts, oldest first.

        These are all but those that are kept for good, one every `keep_checkpoint_every_n_hours`,
        and the temporary ones of a run, which its next save replaces.
        """
        return self._engine.counted_checkpoints()

    def wait(self) -> None:
        """Wait until the save in progress is on disk.

        Raises:
            CheckpointError: The save failed.
        """
        self._engine.wait()

    @contextlib.contextmanager
    def flushing(self, flush: Callable[[], None]) -> Iterator[None]:
        r"""Context in which saves call a function in the background, before the checkpoint exists.

        What `flush` writes, such as a log, is therefore never older than the newest checkpoint. An
        exception that it raises is an error of the save.

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
        with self._engine.flushing(flush):
            yield

    def close(self, *, wait: bool = True) -> None:
        """Wait for the save in progress and close the Saver, which can still restore.

        A second call does nothing.

        Args:
            wait: Whether to wait. If not, a save in progress is lost with the process, which exits
                within a second.

        Raises:
            CheckpointError: The last save failed.
        """
        self._engine.close(wait=as_bool(wait, "wait"))

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            # The error of the block matters more.
            exceptions.note(error, f"Additionally, {failure}")

    def __repr__(self) -> str:
        return f"<jstep.Saver {self._engine.path_of_prefix}-*>"


def engine_of(saver: Saver) -> SaverEngine:
    """Return the engine of a Saver, with methods that only a run may call."""
    return saver._engine


def _step_or_none(step: object) -> int | None:
    if isinstance(step, str | os.PathLike):
        raise TypeError(
            f"step={format_value(step)}: must be an integer, got {describe_type(step)}; the "
            "directory is an argument of Saver, and the step names the checkpoint: "
            "Saver(directory).restore(target, step=1000)"
        )
    return None if step is None else as_int(step, "step", 0)


def _check_tree(value: object, name: str, call: str) -> None:
    """Reject a step or a path in the place of a tree, as in calls of Orbax and TensorFlow."""
    if isinstance(value, int | str | os.PathLike):
        raise TypeError(
            f"{name}={format_value(value)}: must be a TrainState, or another tree of arrays, got "
            f"{describe_type(value)}; the arguments are {call}"
        )
