"""The callback of evaluations that keeps the checkpoints of the best ones."""

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import jax

from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core.checks import as_int, kind, shown
from jstep.core.meshes import internal_transfers
from jstep.core.selection import VarList, check_form
from jstep.evaluating.callbacks import checked_metric, is_better, score
from jstep.hooks.hook import step_of
from jstep.hooks.run_hook import RunInfo
from jstep.state.contents import StateContents, briefly
from jstep.state.train_state import TrainState
from jstep.stores.urls import location, resolved

_logger = logging.getLogger("jstep")


class KeepBest:
    """Keep the checkpoints of the best evaluations, such as `best-1200`; a callback of `EvaluationHook`.

    Each checkpoint stores its value (`saver.extra()` returns `{"accuracy": 0.93}`), so a resumed run knows the best
    ones from the directory. Every run competes with the checkpoints that it finds there; one that resumes from no
    checkpoint logs a warning, since they are those of another run. On a tie the earlier checkpoint is kept. A value
    that is not finite is never kept, nor are parameters with NaN. To use the checkpoints, call
    `jstep.Saver(directory, prefix="best").restore(state)`. It restores the newest one kept, which with keep=1 is the
    best.

    Args:
        directory: The directory or URL to keep the checkpoints in.
        metric: The name of a metric that evaluate returns.
        mode: `"min"` if lower values are better, `"max"` if higher values are. None means `"min"` for names that end in
            loss, error or perplexity, and is an error for others.
        keep: Number of checkpoints to keep, ≥ 1; worse ones are deleted.
        prefix: The prefix of their names, before the step.
        leave_out: Parameters that are not saved, as in `Saver`; None to use those of the run's Saver.

    Attributes:
        values: Step → value of each checkpoint that is kept.

    Raises:
        ValueError: An argument is out of range, or the metric needs a mode. Before the first step: the directory and
            prefix are those of the run.

    Example:
        >>> import jstep, tempfile
        >>> state = jstep.TrainState.create({"w": 1.0}, jstep.adam(), global_step=3)
        >>> directory = tempfile.mkdtemp()
        >>> best = jstep.KeepBest(directory, "accuracy", mode="max")
        >>> best(3, state, {"accuracy": 0.5})
        >>> best.close()
        >>> with jstep.Saver(directory, prefix="best") as saver:
        ...     print(saver.latest_step(), saver.extra())
        3 {'accuracy': 0.5}

    Source: Keras' `ModelCheckpoint(save_best_only=True)`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        metric: str,
        mode: str | None = None,
        keep: int = 1,
        prefix: str = "best",
        *,
        leave_out: VarList = None,
    ) -> None:
        if not isinstance(directory, str | os.PathLike):
            raise TypeError(f"directory={shown(directory)}: must be a directory or a URL, got {kind(directory)}")
        self.metric, self._mode = checked_metric(metric, mode)
        self._keep = as_int(keep, "keep", 1, "a number of checkpoints")
        checkpoint_name(prefix, 0)  # validates the prefix
        self._directory, self._prefix = location(directory, "directory"), prefix
        check_form(leave_out, "leave_out")
        self._given = self._leave_out = leave_out
        self._saver: Saver | None = None
        self._is_fresh = False
        self._at_start: StateContents | None = None
        self.values: dict[int, float] = {}

    def use_run(self, run: RunInfo) -> None:
        """Check that the checkpoints are not those of the run itself.

        Raises:
            ValueError: They have the same directory and prefix as those of the run.
        """
        saver, self._is_fresh = run.saver, run.restored is None
        # A run that resumes from a checkpoint does not evaluate its step again: what it kept there must exist.
        run.reports.flushes.append(self._settle)
        self._leave_out = saver.leave_out if self._given is None and saver is not None else self._given
        if saver is None or saver.prefix != self._prefix:
            return
        if resolved(saver.directory) == resolved(self._directory):
            raise ValueError(
                f"KeepBest: directory={os.fspath(self._directory)!r}, prefix={self._prefix!r} are those of the run's "
                "own checkpoints, which it would delete; give another directory, or another prefix"
            )

    def begin(self, state: TrainState) -> None:
        """Read the best values so far, and check that the directory is writable.

        Raises:
            OSError: The directory is not writable.
        """
        self._open()
        self._at_start = StateContents(state, params_only=True)
        if self._is_fresh and self.values and jax.process_index() == 0:
            best = max(self.values, key=self._worse_first)
            _logger.warning(
                "KeepBest: this run starts at step %d, not from a checkpoint of its own, but %s holds %s of another "
                "run with %s=%g, which is kept unless this run does better; give a new directory to keep only its own",
                step_of(state),
                self._directory,
                checkpoint_name(self._prefix, best),
                self.metric,
                self.values[best],
            )

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any]) -> None:
        """Save the state if it is among the best, and delete checkpoints that no longer are.

        Raises:
            CheckpointError: The state could not be saved.
            KeyError: evaluate does not return the metric.
        """
        value = score(results, self.metric, "KeepBest")
        saver = self._saver or self._open()
        # The step has a value if the run was resumed from an earlier step.
        has_rival = step in self.values or len(self.values) >= self._keep
        rival = self.values[step if step in self.values else self._worst()] if has_rival else None
        if not math.isfinite(value) or not is_better(value, rival, self._mode):
            return
        contents = StateContents(state, params_only=True)
        if nan := contents.with_nan():  # for which a metric may be the best ever
            if jax.process_index() == 0:
                text = "KeepBest: step %d is not kept, though %s=%g: NaN in %s"
                _logger.warning(text, step, self.metric, value, briefly(nan))
            return
        worse, _ = contents.worse_since(self._at_start)
        with internal_transfers(), saver.knowing(not worse):
            saver.save(state, extra={self.metric: value})
            self.values[step] = value
            # The new checkpoint must be on disk before another is deleted.
            while len(self.values) > self._keep:
                saver.wait()
                worst = self._worst()
                saver.delete(worst)
                del self.values[worst]

    def close(self) -> None:
        """Wait for pending writes and close the saver."""
        if self._saver is not None:
            saver, self._saver = self._saver, None
            saver.close()

    def _settle(self) -> None:
        """Wait until the save in progress has ended; if it failed, the next call raises its error."""
        if (saver := self._saver) is not None:
            saver.settle()

    def _worst(self) -> int:
        return min(self.values, key=self._worse_first)

    def _worse_first(self, step: int) -> tuple[float, int]:
        """Sort key, worst first; of equal values, the later one is worse."""
        value = self.values[step]
        return (-value if self._mode == "min" else value), -step

    def _open(self) -> Saver:
        self.close()
        saver = Saver(self._directory, prefix=self._prefix, max_to_keep=None, leave_out=self._leave_out)
        self._saver = saver
        self.values = {}
        for step in saver.all_steps():
            try:
                kept = saver.extra(step)
                value = kept.get(self.metric) if isinstance(kept, Mapping) else None
                if not isinstance(value, int | float):
                    raise ValueError(f"its extra {kept!r} has no {self.metric!r}")
                self.values[step] = float(value)
            except (CheckpointError, ValueError) as error:
                if jax.process_index() == 0:
                    _logger.warning(
                        "KeepBest skips %s: %s. Saver.restore may still return it, if it is the newest; give a new "
                        "directory",
                        checkpoint_name(self._prefix, step),
                        error,
                    )
        saver.claim()
        return saver
