"""The checkpoint of a run: the state, and everything else that a restart needs."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.checkpoint.manifest import Extra
from jstep.checkpoint.names import checkpoint_name
from jstep.core.checks import scoped
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import SAVING, STEPPING
from jstep.core.tagged_json import Files, as_json
from jstep.data.loaders import gather_positions, kept_positions
from jstep.distributed import processes
from jstep.hooks.cadence import Cadence
from jstep.hooks.hook import Metrics, get_states
from jstep.hooks.metric_sums_program import is_bad
from jstep.hooks.nan_loss import nonfinite_params
from jstep.hooks.numbers import host
from jstep.hooks.stock import CheckpointSaverHook
from jstep.loop.calls import AUTO
from jstep.loop.run_record import Run
from jstep.state.contents import in_words
from jstep.state.train_state import TrainState
from jstep.stores.objects import is_url

HOOK_STATES, STOPPED, ENDED, HELD = "hooks", "stopped", "ended", "held"
"""Keys of a checkpoint's `extra`, in addition to the positions of loaders: the states of hooks, the name of the hook
that stopped the run, the step at which the hooks have ended, and the initial values of held hyperparameters."""


class _Memory(NamedTuple):
    """The parts of a checkpoint, apart from the state, that hooks may change at the same step after it is saved.

    Attributes:
        positions: The positions of the batches.
        hooks: The states of the hooks.
    """

    positions: Extra
    hooks: Extra


FIRST_SECS, BUCKET_SECS, MOST_SECS = 10.0, 60.0, 600.0
"""The seconds until the first save and between two, between two in a bucket, and at most. A checkpoint within the last
of these after one that is kept is passing."""
_LOOP_SHARE, _WRITER_SHARE = 0.01, 0.1
"""The share of the time that the loop may stand still for saves, and that a writer may be busy."""
_EARLY = 0.1
"""The seconds by which a save may be too early."""


class SaveInterval:
    """The seconds between two saves that a run makes by itself: as few as a small share of its time allows.

    Args:
        saver: The run's Saver.
        clock: Returns seconds.

    Attributes:
        still: The seconds that the loop stood still for the latest save.
    """

    def __init__(self, saver: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._saver, self._clock = saver, clock
        self._least = BUCKET_SECS if is_url(saver.directory) else FIRST_SECS
        self._saved_at: float | None = None
        self.still = 0.0

    def __call__(self) -> float:
        """Return the seconds from now to the next save, as far as the costs of the latest one are known."""
        if self._saved_at is None:
            return FIRST_SECS
        now = self._clock()
        busy = self._saver.write_secs
        if busy is None:  # it is still being written
            busy = now - self._saved_at
        secs = min(MOST_SECS, max(self._least, self.still / _LOOP_SHARE, busy / _WRITER_SHARE))
        return max(self._saved_at + secs - now, 0.0)

    def is_too_early(self) -> bool:
        """Whether a save that is due now would cost too much: the latest one took longer than was known."""
        return self._saved_at is not None and self() > _EARLY

    @scoped
    def saving(self) -> Iterator[None]:
        """Measure a save."""
        began = self._clock()
        try:
            yield
        finally:
            self._saved_at = self._clock()
            self.still = self._saved_at - began


class RunSaverHook(CheckpointSaverHook):
    """Hook that saves the state, the position of the batches, the states of hooks, and which hook stopped the run.

    A step is saved again if a hook changed the state, its own, or the position of the batches, after the save.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        options = run.options
        secs: Any = options.save_checkpoint_secs
        is_auto = secs == AUTO
        super().__init__(
            run.saver,
            save_secs=None if is_auto else secs,
            save_steps=options.save_checkpoint_steps,
            extra=self._made_extra,
            before_save=(self._call_before,),
        )
        self._interval = SaveInterval(run.saver) if is_auto else None
        if self._interval is not None:
            self.cadence = Cadence(secs=self._interval, together=True)
        self.part = STEPPING  # it measures its own time when it saves
        self._loop, self._is_passing = run, False
        self._memory = self._of_this_save = _Memory(Extra({}, {}), Extra({}, {}))

    def _call_before(self, step: int) -> None:
        run = self._loop
        if run.writer is not None:  # a run that resumes from a checkpoint does not write earlier summaries again
            run.writer.drain()
        for observer in run.observers:
            observer.before_save()

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> bool:
        """Save like `CheckpointSaverHook.save`; waiting for steps in flight does not count as time for saving."""
        with contextlib.suppress(Exception):  # saving reports a failed step in more detail
            jax.block_until_ready(state)
        if self._interval is None:
            with self._loop.watch.part(SAVING):
                return super().save(step, state, wait=wait)
        import jstep.checkpoint.orbax_arrays  # noqa: F401  # takes long, once: no cost of a save

        with self._loop.watch.part(SAVING), self._interval.saving():
            return super().save(step, state, wait=wait)

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Save; a checkpoint that the run makes by itself may be passing, unless it is that of the last step."""
        run, interval = self._loop, self._interval
        if interval is not None and processes.broadcast_ints(interval.is_too_early())[0]:
            return
        is_last = step >= run.options.last_step or run.stopped_by is not None
        self._passing_secs = None if interval is None or is_last else MOST_SECS
        try:
            self.save(step, state)
            self._is_passing = self._passing_secs is not None
        finally:
            self._passing_secs = None

    def end(self, step: int, state: TrainState) -> None:
        """Save the last state, which is kept."""
        if self._is_passing:
            self._saved = None
        super().end(step, state)

    def save_alone(self, step: int, state: TrainState) -> None:
        """Save from another thread while the loader or a hook hangs: no method of a hook is called.

        The states of hooks are those of the latest save.
        """
        if not super().has_saved(step, state):
            self._call_before(step)
            extra = self._extra_of(_Memory(self._positions(), self._memory.hooks))
            with internal_transfers(), self._loop.saver.knowing(not nonfinite_params(self._loop)):
                self._loop.saver.save(state, extra=extra)
        self._loop.saver.wait()

    def restored(self, step: int, state: TrainState) -> None:
        """Record that a checkpoint of this step was restored, with the current state and states of hooks."""
        self._of_this_save = _Memory(self._positions(), self._remembered())
        self.is_saved(step, state)

    def is_saved(self, step: int, state: TrainState) -> None:
        """Record that a checkpoint of this step holds this state and the states of hooks when it was made."""
        super().is_saved(step, state)
        self._memory = self._of_this_save
        for name, one in self._memory.hooks.files.items():  # for `save_alone`, when they are no longer in memory
            one.load = functools.partial(self._loop.saver.read_file, name, step)

    def has_saved(self, step: int, state: TrainState) -> bool:
        """Whether a checkpoint of this step holds this state, and the current states of hooks and position."""
        if not super().has_saved(step, state):
            return False
        feeder = self._loop.feeder
        # Only these can change after their step; the comparison comes first, as all processes take part in it.
        is_same = True
        if feeder is not None and feeder.live is not None:
            is_same = not processes.any_process(not self._positions().is_same(self._memory.positions))
        return self._remembered().is_same(self._memory.hooks) and is_same

    def _remembered(self) -> Extra:
        run, by = self._loop, self._stopped_by()
        states = get_states(run.hooks)
        known = {HOOK_STATES: states or None, STOPPED: by, ENDED: run.step if run.runner.has_ended() else None}
        values = {key: value for key, value in known.items() if value is not None}
        files = Files("hooks.")
        return Extra(as_json(values, files), files if jax.process_index() == 0 else {})

    def _stopped_by(self) -> str | None:
        """The hook that stopped the run, now or, if this run takes no step, the earlier run."""
        kept = self._loop.extra.get(STOPPED) if self._loop.feeder is None else None
        return self._loop.stopped_by or kept

    def _positions(self) -> Extra:
        """The positions of the batches; must be called on all processes."""
        run = self._loop
        files = Files()
        if run.feeder is None:  # no step was run: the positions have not changed
            return Extra(kept_positions(run.extra, files), files)
        # A batch that was fetched but not trained on is fetched again after a restart.
        return Extra(gather_positions(run.feeder.position_after(run.step - run.first), files), files)

    def _past(self) -> dict[str, Any]:
        run = self._loop
        return {key: value for observer in run.observers for key, value in observer.past(run.step).items()}

    def _made_extra(self) -> Extra:
        self._of_this_save = _Memory(self._positions(), self._remembered())
        return self._extra_of(self._of_this_save)

    def _extra_of(self, memory: _Memory) -> Extra:
        positions, hooks = memory
        held = {HELD: self._loop.held} if self._loop.held else {}
        values = positions.values | self._past() | hooks.values | held
        return Extra(values, {**positions.files, **hooks.files})


# What prevents a save at the end of a run: at any other time, `before_save` of the hooks decides.


def why_not_finite(run: Run) -> str:
    """Describe why the state must not be saved: a loss that is not finite, or parameters; empty if all are.

    Parameters that were not finite when the run began do not count. The result is the same on all processes.
    """
    if _is_loss_nonfinite(run):
        return "its loss is not finite"
    try:
        return in_words(nonfinite_params(run))
    except Exception:  # the device failed; the save reports it
        return ""


def _is_loss_nonfinite(run: Run) -> bool:
    """Whether a loss of the last call was not finite; `NanLossHook` may not have checked it yet.

    The losses of skipped updates are ignored. The result is the same on all processes.
    """
    metrics = run.metrics if isinstance(run.metrics, Mapping) else {}
    loss = metrics.get("loss")
    if loss is None or not (processes.is_single_process() or _is_on_all(loss)):
        return False
    try:
        with internal_transfers():
            latest, skip_metric = run.sums.latest(), run.programs.constants.skipped
            if latest is not None and latest.bad is not None:
                return True
            finite = np.isfinite(host(loss).astype(np.float64))
            skipped = host(metrics.get(skip_metric, 0)) == 1 if skip_metric is not None else np.False_
            return bool(np.any(is_bad(finite, skipped)))
    except (TypeError, ValueError):
        return False
    except Exception:  # the device failed, so the loss cannot be read
        return True


def _is_on_all(value: Any) -> bool:
    return isinstance(value, jax.Array) and not value.is_fully_addressable and value.is_fully_replicated


def why_position_lost(run: Run) -> str:
    """Describe why the state must not be saved: the batches have moved on past it; empty if they have not."""
    if run.saver is None or run.feeder is None or not run.feeder.is_position_lost(run.step - run.first):
        return ""
    newest = run.saver.latest_step()
    name = "" if newest is None else checkpoint_name(run.saver.prefix, newest)
    return (
        "the object that makes the batches has moved on, and its position is too large (above 64 kB) to be copied "
        f"before each batch; {f'the newest is {name}' if name else 'there is no checkpoint'}"
    )
