"""The callback that keeps the checkpoints of the best evaluations.

No run resumes from a best checkpoint automatically. But best checkpoints belong to the same history
as the run's own checkpoints, so the two are kept consistent:

| | what is ensured | by |
|---|---|---|
| before | the run's checkpoint appears only after the best ones up to it | `_wait_until_finished` |
| failure | if a best one fails, the run ends unsaved; a restart evaluates again | `_fail` |
| after | a superseded one is deleted only after a later checkpoint of the run | `_superseded` |
| restart | those beyond the step from which the run resumes do not count | `_lost_steps` |
"""

import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from jstep.array_store.best_record import BestRecord
from jstep.array_store.manifest import CheckpointError, UnsupportedFormatError, as_checkpoint_extra
from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.retention import Listener
from jstep.checkpoint.saver import Saver, engine_of
from jstep.checkpoint.shared_directory import check_shared
from jstep.core import processes
from jstep.core.checks import as_int, format_list
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.threads import Task, run_in_background
from jstep.evaluating.callbacks import MetricReader, is_better
from jstep.hooks.hook_states import StateFormat, register_format
from jstep.hooks.origin import Kind
from jstep.hooks.run_info import RunInfo
from jstep.record.differences import changes
from jstep.record.run_record import had_name, was_best_checkpoint
from jstep.state.global_step import state_step
from jstep.state.nonfinite import StateContents
from jstep.state.train_state import TrainState
from jstep.stores.urls import absolute, join_path, location, resolve_path

_HASH_SECS = 10
"""How long a save waits for the hash of the data; without it, other data are not noticed after a
restart."""
_CHANGED = "KeepBest: %s before the %s changed, so later values may not compare%s"


class Best(NamedTuple):
    value: float
    step: int
    path: str


class _SavedPaths:
    """The paths of the checkpoints on disk, by step; a listener of a `Saver` that passes all on."""

    def __init__(self, listener: Listener | None = None) -> None:
        self.paths: dict[int, str] = {}
        self._listener = listener

    def saved(self, step: int, path: str) -> None:
        self.paths[step] = path
        if self._listener is not None:
            self._listener.saved(step, path)

    def wait(self, path: str | None = None) -> None:
        if self._listener is not None:
            self._listener.wait(path)

    def is_calling(self) -> bool:
        return self._listener is not None and self._listener.is_calling()


class _FailedSave(NamedTuple):
    step: int
    error: Exception


class KeepBest(MetricReader):
    """Keep the checkpoints of the best evaluations, such as `best-1200`.

    This is a callback of `EvaluationHook`. `Saver(directory, prefix="best").best_step()` returns
    the step of the best one. Each checkpoint stores its value (`saver.extra()` returns
    `{"accuracy": 0.93}`, and also `"averages": True` if averages of the parameters were evaluated).
    It leaves out the parameters that the run's own checkpoints leave out. A run competes with all
    checkpoints in `directory`; a warning is logged if the best value was measured with another
    config, or on other data. On a tie the earlier checkpoint is kept. A nonfinite value is never
    kept, nor are parameters with NaN.

    A checkpoint of the run appears only after the best checkpoints of all evaluations up to it. If
    one of these cannot be saved, the run ends at the end of the iteration with that error and saves
    nothing, so that a restart evaluates again. A superseded best checkpoint is deleted once a later
    checkpoint of the run is on disk, so up to twice `max_to_keep` may exist for a while. After a
    restart, best checkpoints of this run beyond the step that it resumes from do not count until
    their evaluation is repeated.

    Args:
        directory: The directory or URL to keep the checkpoints in.
        metric: As in `EarlyStopping`.
        mode: As in `EarlyStopping`.
        max_to_keep: Number of checkpoints to keep, ≥ 1; worse ones are deleted.
        prefix: The prefix of their names, before the step.

    Attributes:
        values: Step → value of each checkpoint that is kept.

    Raises:
        KeyError: In a run: evaluate does not return the metric.
        ValueError: An argument is out of range, or the metric needs a mode. Before the first step:
            the run uses the same directory and prefix, or processes see different directories.

    Example:
        >>> import jstep, tempfile
        >>> state = jstep.TrainState.create({"w": 1.0}, jstep.adam(), global_step=3)
        >>> directory = tempfile.mkdtemp()
        >>> best = jstep.KeepBest(directory, "accuracy", mode="max")
        >>> best(3, state, {"accuracy": 0.5})
        >>> best.close()
        >>> with jstep.Saver(directory, prefix="best") as saver:
        ...     print(saver.best_step(), saver.extra())
        3 {'accuracy': 0.5}

    Source: Keras' `ModelCheckpoint(save_best_only=True)`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        metric: str,
        *,
        mode: str | None = None,
        max_to_keep: int = 1,
        prefix: str = "best",
    ) -> None:
        super().__init__(metric, mode)
        self._max_to_keep = as_int(max_to_keep, "max_to_keep", 1, "a number of checkpoints")
        checkpoint_name(prefix, 0)  # validates the prefix
        self._directory = location(directory, "directory")
        self._prefix = prefix
        self._run: RunInfo | None = None  # None if it is called outside of a run
        self._saver: Saver | None = None
        self._initial_contents: StateContents | None = None
        # How values are measured.
        self._are_averages = False
        self._data: Task[str | None] | None = None
        self._measured_on: dict[int, str] = {}  # step of a value → hash of the data
        # A checkpoint in the directory is in exactly one of these, by its step. All processes have
        # the same `values`, as these decide what is saved. Only the first process deletes, so the
        # other two matter only there.
        self.values: dict[int, float] = {}  # those that count: the best ones of the history so far
        # Step → the number of the run's save after which no restart needs it.
        self._superseded: dict[int, int] = {}
        self._lost_steps: set[int] = set()  # of a part of this run that is lost
        # The steps in `values` of other runs, whose checkpoints are not deleted.
        self._foreign_steps = set[int]()
        # The steps in `values` that this run has saved → the number of the first save of the run
        # that follows; 0 for those of an earlier start, which the run's checkpoints already follow.
        self._own_saves: dict[int, int] = {}
        self._saved = _SavedPaths()
        self._failed: _FailedSave | None = None
        self._saving_step: int | None = None  # of the latest save, which may be in progress
        self._saving_run_step = 0  # the step of the latest save of the run

    # Before the first step.

    def _use_run(self, run: RunInfo) -> None:
        self._run = run
        run.check_no_links(self._directory)
        saver = run.saver
        if saver is None or saver.prefix != self._prefix:
            return
        if resolve_path(saver.directory) == resolve_path(self._directory):
            raise ValueError(
                f"KeepBest: prefix={self._prefix!r}: the run's checkpoints in {saver.directory!r} "
                "have it; give another"
            )

    def _use_evaluator(self, evaluate: Any) -> None:
        """Note whether values are measured with averages, and hash the data in the background."""
        self._are_averages = bool(getattr(evaluate, "use_averages", False))
        first_hash = getattr(getattr(evaluate, "batches", None), "first_hash", None)
        self._data = None
        if first_hash is not None:
            self._data = run_in_background(first_hash, name="jstep-data-hash", daemon=True)

    def _leave_run(self) -> None:
        # Not `_data`: the record of the run, which is written last, says on which data the values
        # were measured.
        self._run = None
        self._initial_contents = None
        self._are_averages = False

    def begin(self, state: TrainState) -> None:
        saver = self._open()
        self._initial_contents = StateContents(state, params_only=True)
        run = self._run
        if run is None or self._is_resumed:
            self._warn_of_config(saver)
        else:
            self._warn_of_others(state, run)

    def _open(self) -> Saver:
        """Open the directory, and sort the checkpoints that are there."""
        self.close()
        run = self._run
        check_shared(self._directory, "KeepBest: directory")
        leave_out = None
        if run is not None and run.saver is not None:
            leave_out = run.saver.leave_out
        saver = Saver(self._directory, prefix=self._prefix, max_to_keep=None, leave_out=leave_out)
        self._saver = saver
        self._saved = _SavedPaths(None if run is None else run.background)
        engine_of(saver).set_listener(self._saved)
        self._failed = None
        self._saving_step = None
        self._read(saver)
        while len(self.values) > self._max_to_keep:
            # It was superseded before the run was killed, or the limit was higher.
            worst = self._worst()
            del self.values[worst]
            self._superseded[worst] = 0 if self._is_resumed else self._next_run_save()
        saver.claim()
        return saver

    @property
    def _is_resumed(self) -> bool:
        """Whether the run resumes from a checkpoint of its own."""
        return self._run is not None and self._run.origin.kind is Kind.RESUMED

    def _read(self, saver: Saver) -> None:
        self.values = {}
        self._superseded = {}
        self._lost_steps = set()
        self._own_saves = {}
        self._foreign_steps = set()
        for step in saver.all_steps():
            try:
                record = engine_of(saver).best(step)
                if record is None or record.metric != self.metric:
                    raise ValueError(f"it is not kept for {self.metric!r}")
            except UnsupportedFormatError as error:
                # Not skipped as a corrupted one: it is intact, and may be the best.
                raise UnsupportedFormatError(
                    f"KeepBest: {error} Or give a new directory"
                ) from error
            except (CheckpointError, ValueError) as error:
                text = (
                    "KeepBest skips %s: %s. Saver.restore may still return it; give a new directory"
                )
                logger.warning(text, checkpoint_name(self._prefix, step), error)
                continue
            if self._is_own(record):
                if self._is_lost(step):
                    self._lost_steps.add(step)
                    continue
                self._own_saves[step] = 0
            elif self._is_foreign(record, saver):
                self._foreign_steps.add(step)
            self.values[step] = record.value
            self._saved.paths[step] = join_path(
                saver.directory, checkpoint_name(self._prefix, step)
            )

    def _is_foreign(self, record: BestRecord, saver: Saver) -> bool:
        """Whether another run has saved a checkpoint, in a directory that is not this run's."""
        run = self._run
        if run is None or record.run is None:
            return False
        directory = join_path(saver.directory, "")
        if run.saver is not None and directory.startswith(join_path(run.saver.directory, "")):
            return False
        # Starts that ended before their first checkpoint had other names.
        return not had_name(run, record.run)

    def _is_own(self, record: BestRecord) -> bool:
        # A run that does not resume has a new name, so that it finds none.
        if record.run is None or self._run is None:
            return False
        return record.run == self._run.origin.name

    def _is_lost(self, step: int) -> bool:
        """Whether a checkpoint of this run is beyond the step from which it resumes."""
        if self._run is None:
            return False
        origin = self._run.origin
        return origin.is_restored and step > origin.step

    def _warn_of_config(self, saver: Saver) -> None:
        best = self._best_step()
        if best is None or self._config is None or not processes.is_process_0():
            return
        extra = saver.extra(best)
        config = extra.get("config") if isinstance(extra, dict) else None
        found = changes({"config": config}, {"config": self._config}).lines
        if found:
            logger.warning(
                _CHANGED, self._kept_text(best), "config", f": {format_list(found, 5, '; ')}"
            )

    def _warn_of_others(self, state: TrainState, run: RunInfo) -> None:
        best = self._best_step()
        if best is None or not processes.is_process_0():
            return
        is_earlier_start = was_best_checkpoint(run, absolute(self._saved.paths[best]))
        logger.warning(
            "KeepBest: this run starts at step %d, not from its own checkpoint, but %s contains %s "
            "of %s with %s=%g, which is kept unless this %s does better; pass a new directory to "
            "keep only this run's best",
            state_step(state),
            self._directory,
            checkpoint_name(self._prefix, best),
            "an earlier start of this run" if is_earlier_start else "another run",
            self.metric,
            self.values[best],
            "start" if is_earlier_start else "run",
        )

    # Its state in the checkpoints of the run.

    def _identifying_settings(self) -> dict[str, Any]:
        return {"metric": self.metric, "prefix": self._prefix}

    def get_state(self) -> Any:
        measured_on = {
            str(step): data for step, data in self._measured_on.items() if step in self.values
        }
        return {"measured_on": measured_on}

    def set_state(self, value: Any) -> None:
        """Warn, in the background, if the best value was measured on other data."""
        saved = value["measured_on"]
        self._measured_on = {step: saved[str(step)] for step in self.values if str(step) in saved}
        best = self._best_step()
        if best is None or self._data is None or not processes.is_process_0():
            return
        measured_on = self._measured_on.get(best)
        kept = self._kept_text(best)

        def compare(task: Future[str | None]) -> None:
            data = self._data_hash()
            if measured_on is not None and data is not None and measured_on != data:
                logger.warning(_CHANGED, kept, "data of the evaluation", "")

        self._data.add_done_callback(compare)

    # An evaluation.

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any]) -> None:
        value = self._score(results)
        saver = self._saver or self._open()
        self._wait(saver)  # otherwise the save of another step would raise its error
        if self._failed is not None:
            return  # the iteration is not saved, and will be repeated
        self._delete_superseded()
        was_saved = self._forget(step)
        contents = StateContents(state, params_only=True)
        if not self._is_among_best(step, value) or self._has_nan(contents, step, value):
            if was_saved:
                self._delete(step)
            return
        worse, _ = contents.worse_since(self._initial_contents)
        try:
            self._save(saver, step, state, value, is_finite=not worse)
        except Exception as error:
            if self._run is None:
                raise
            self._fail(step, error)
            return
        self.values[step] = value
        if self._run is not None:
            self._own_saves[step] = self._next_run_save()
            self._run.poll(self, self._check_save)
        if len(self.values) > self._max_to_keep:
            self._supersede(self._worst())

    def _forget(self, step: int) -> bool:
        """Forget what this run saved at this step: its evaluation is repeated, and replaces it."""
        if step in self._own_saves:
            del self._own_saves[step]
            del self.values[step]
            return True
        was_lost = step in self._lost_steps
        self._lost_steps.discard(step)
        return was_lost

    def _is_among_best(self, step: int, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if step in self.values:  # of another run, in whose place this one would be saved
            return is_better(value, self.values[step], self._mode)
        if len(self.values) < self._max_to_keep:
            return True
        return is_better(value, self.values[self._worst()], self._mode)

    def _has_nan(self, contents: StateContents, step: int, value: float) -> bool:
        """Whether a parameter is NaN, with which a metric may be the best ever."""
        nan = contents.paths_with_nan()
        if nan:
            text = "KeepBest: step %d is not kept, though %s=%g: NaN in %s"
            logger.warning(text, step, self.metric, value, format_list(nan))
        return bool(nan)

    def _save(
        self, saver: Saver, step: int, state: TrainState, value: float, *, is_finite: bool
    ) -> None:
        if self._data is not None:
            # It hashes a batch that this evaluation has read.
            wait([self._data], timeout=_HASH_SECS)
        extra: dict[str, Any] = {}
        if self._config is not None:
            extra["config"] = dict(self._config)
        if self._are_averages:
            extra["averages"] = True
        extra[self.metric] = value
        run_name = None if self._run is None else self._run.origin.name
        record = BestRecord(self.metric, value, self._mode, run_name)
        full_extra = as_checkpoint_extra(extra)._replace(finite=is_finite, best=record)
        self._saving_step = step
        self._foreign_steps.discard(step)
        with internal_transfers():
            saver.save(state, extra=full_extra)
        data = self._data_hash()
        if data is not None:
            self._measured_on[step] = data

    # The order of best checkpoints and of the checkpoints of the run.

    def _prepare_run_save(self, step: int) -> None:
        """Called in the loop's thread before a save of the run.

        That save waits for the best checkpoint in progress.
        """
        self._saving_run_step = step
        self._delete_superseded()

    def _wait_until_finished(self) -> None:
        """Called in another thread before a save of the run appears; an error prevents that.

        Raises:
            Exception: A best checkpoint of an evaluation up to that save is not on disk.
        """
        saver = self._saver
        if saver is None:
            return
        self._wait(saver)
        if self._failed is not None and self._failed.step <= self._saving_run_step:
            raise self._failed.error

    def _check_save(self, *, wait: bool = False) -> bool:
        """Called after each call of the loop, until the save in progress has ended.

        If that failed, the run ends soon.
        """
        saver = self._saver
        if saver is None:
            return False
        if engine_of(saver).is_saving() and not wait:
            return True
        self._wait(saver)
        return False

    def _wait(self, saver: Saver) -> None:
        step = self._saving_step
        try:
            saver.wait()
        except Exception as error:
            if self._run is None or step is None:
                raise
            self._fail(step, error)

    def _fail(self, step: int, error: Exception) -> None:
        """End the run, and let no save of it appear from this step on.

        Not raised here, as the hooks and the body of this iteration are called first: so the run
        ends at the same place whether the save fails immediately or in the background.
        """
        assert self._run is not None
        if self._failed is None:
            self._failed = _FailedSave(step, error)
            self._run.best_failed(self, error)

    def _next_run_save(self) -> int:
        """The number of the next save of the run, which has all changes of this evaluation."""
        run = self._run
        if run is None or run.saver is None:
            return 0
        return engine_of(run.saver).saves_begun + 1

    def _supersede(self, step: int) -> None:
        """Take a checkpoint out of those that count, and delete it if no restart needs it.

        A start that resumes from before this evaluation has to find what was the best then.
        """
        following_save = self._own_saves.pop(step, 0)
        del self.values[step]
        self._saved.paths.pop(step, None)
        run = self._run
        if run is None or run.saver is None:
            self._delete(step)
            return
        published = engine_of(run.saver).published
        published_number = 0 if published is None else published.number
        if following_save > published_number:
            # Each start that resumes now makes it again: no checkpoint of the run follows it.
            self._delete(step)
        else:
            self._superseded[step] = self._next_run_save()

    def _delete_superseded(self) -> None:
        """Delete the checkpoints that no restart needs any more."""
        run = self._run
        if run is None or run.saver is None:
            # These were beyond `max_to_keep` at the start. They go once a new one is saved.
            if self._saving_step is not None:
                self._delete_all(self._superseded)
            return
        published = engine_of(run.saver).published
        number = 0 if published is None else published.number
        self._delete_all([step for step, needed in self._superseded.items() if needed <= number])
        if published is not None:
            self._delete_all([step for step in self._lost_steps if step <= published.step])

    def _delete_all(self, steps: Iterable[int]) -> None:
        for step in tuple(steps):
            self._superseded.pop(step, None)
            self._lost_steps.discard(step)
            self._delete(step)

    def _delete(self, step: int) -> None:
        """Delete a checkpoint, once the newest one is on disk; only the first process does.

        A failure is only logged, as a checkpoint too many does no harm.
        """
        saver = self._saver
        if saver is None or not processes.is_process_0() or step in self._foreign_steps:
            return
        self._wait(saver)
        if self._failed is not None:
            return
        try:
            if processes.is_single_process():
                saver.delete(step)
            else:
                engine_of(saver).delete_alone(step)
        except FileNotFoundError:
            pass
        except (OSError, CheckpointError) as error:
            logger.warning(
                "KeepBest: %s could not be deleted: %s", checkpoint_name(self._prefix, step), error
            )

    # What others read, by the functions below the class.

    def _best_on_disk(self) -> Best | None:
        values = dict(self.values)  # the loop's thread changes it
        paths = dict(self._saved.paths)
        complete = [
            Best(values[step], step, path) for step, path in paths.items() if step in values
        ]
        return max(complete, key=lambda best: self._rank(best.step, best.value), default=None)

    def _data_hash(self) -> str | None:
        task = self._data
        if task is None or not task.done() or task.exception() is not None:
            return None
        return task.result()

    @property
    def _config(self) -> dict[str, Any] | None:
        return None if self._run is None else self._run.config

    def _best_step(self) -> int | None:
        return max(self.values, key=lambda step: self._rank(step, self.values[step]), default=None)

    def _worst(self) -> int:
        return min(self.values, key=lambda step: self._rank(step, self.values[step]))

    def _rank(self, step: int, value: float) -> tuple[float, int]:
        """Sort key, worst first; of equal values, the later one is worse."""
        quality = -value if self._mode == "min" else value
        return quality, -step

    def _kept_text(self, best: int) -> str:
        return (
            f"{checkpoint_name(self._prefix, best)} ({self.metric}={self.values[best]:g}) was kept"
        )

    # The end.

    def close(self) -> None:
        saver = self._saver
        if saver is None:
            return
        had_failed = self._failed is not None
        try:
            if not had_failed:
                self._delete_superseded()
        finally:
            self._saver = None
            saver.close()
        if self._failed is not None and not had_failed:
            raise self._failed.error  # the run has ended, and would not raise it


register_format(
    KeepBest, StateFormat(1, {"measured_on": {}}, settings=KeepBest._identifying_settings)
)


def best_on_disk(callback: KeepBest) -> Best | None:
    """Return the best checkpoint that is on disk."""
    return callback._best_on_disk()


def data_hash(callback: KeepBest) -> str | None:
    """Return a hash of the data on which the values are measured, once known."""
    return callback._data_hash()
