"""When a checkpoint of a run is saved, what prevents it, and where a restart begins.

`contents.py` lists what a checkpoint contains in addition to the state.
"""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jstep.checkpoint.engine import SaverEngine
from jstep.checkpoint.names import checkpoint_name, open_store
from jstep.checkpoint.retention import ALWAYS_TEMPORARY
from jstep.checkpoint.saver import Saver, engine_of
from jstep.compiling.programs import AUTO
from jstep.core import processes
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import SAVING, STEPPING
from jstep.hooks.cadence import Cadence, make_cadence
from jstep.hooks.nan_loss import describe_initial_nan
from jstep.hooks.run_extra import BEFORE_END
from jstep.hooks.saver_hook import LatestSave, SaverHook, may_save, write
from jstep.loop.contents import NOTHING, Contents, RunContents
from jstep.loop.run_context import RunContext
from jstep.origin.arguments import MAX_SECS
from jstep.state.train_state import TrainState
from jstep.stores.urls import is_url
from jstep.training.metrics import Metrics

# The interval between automatic saves.

FIRST_SECS = 10.0
"""The seconds until the first save, and the least between two."""
BUCKET_SECS = 60.0
"""The least seconds between two saves in a bucket."""
_LOOP_SHARE = 0.01
"""The share of the time for which saves may block the loop."""
_WRITER_SHARE = 0.1
"""The share of the time for which a writer may be busy."""
_PERMANENT_SECS = 600.0
"""The seconds after a permanent checkpoint for which automatic ones are temporary."""


class SaveInterval:
    """The seconds between automatic saves, chosen so that they cost little.

    A save may block the loop for a hundredth of the time since the one before, and its write may
    take a tenth of it.

    Attributes:
        blocked_secs: How long the latest save blocked the loop.
    """

    def __init__(self, engine: SaverEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._least_secs = BUCKET_SECS if is_url(engine.directory) else FIRST_SECS
        self._saved_at: float | None = None  # by the clock, when the latest save returned
        self.blocked_secs = 0.0

    def seconds(self) -> float:
        """Return the seconds from the latest save to the next one.

        They grow while the checkpoint of the latest save is being written.
        """
        if self._saved_at is None:
            return FIRST_SECS
        write_secs = self._engine.write_secs
        if write_secs is None:
            write_secs = self._clock() - self._saved_at
        secs = max(self._least_secs, self.blocked_secs / _LOOP_SHARE, write_secs / _WRITER_SHARE)
        return min(MAX_SECS, secs)

    @contextlib.contextmanager
    def timing_save(self) -> Iterator[None]:
        """A context that times a save, from which `seconds` computes when the next one is due."""
        began = self._clock()
        try:
            yield
        finally:
            self._saved_at = self._clock()
            self.blocked_secs = self._saved_at - began


# The hook that saves.


class RunSaverHook(SaverHook):
    """Saves the checkpoints from which a run resumes: the state, and the contents beside it.

    A step is saved again if only the contents have changed since.
    """

    _phase = STEPPING  # it measures its own time, and only when it saves

    def __init__(self, run: RunContext, saver: Saver) -> None:
        options = run.options
        secs: Any = options.save_checkpoint_secs
        self._context = run
        self._contents = RunContents(run)
        self.saver = saver
        self._interval: SaveInterval | None = None  # of "auto" alone
        if secs == AUTO:
            self._interval = SaveInterval(engine_of(saver))
            self._cadence = Cadence(secs=self._interval.seconds, together=True)
        else:
            steps = ("save_steps", options.save_checkpoint_steps)
            self._cadence = make_cadence(
                steps=steps, secs=("save_secs", secs), required=False, together=True
            )
        # What the latest checkpoint holds. The contents stay known after a failed write: a stalled
        # run saves them.
        self._latest_save: LatestSave | None = None
        self._saved_contents = NOTHING
        self._is_temporary = False
        # While the `end`s run, the contents as they were before; None at all other times. The
        # `end`s change the states of hooks, so another save of the state before them takes those
        # states from here.
        self._pre_end: Contents | None = None

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        wait: bool = False,
        permanent_every_secs: float | None = None,
    ) -> bool:
        """Save, unless the latest checkpoint holds the same; return False if a hook prevents it."""
        run = self._context
        # Wait for the device here, so that this does not count as saving. The save raises an error
        # of the device again, and explains it better.
        with contextlib.suppress(Exception):
            jax.block_until_ready(state)
        timing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._interval is not None:
            # The first import is slow, and must not count as part of a save.
            import jstep.array_store.array_writer  # noqa: F401

            timing = self._interval.timing_save()
        with run.watch.phase(SAVING), timing:
            if not self._has_saved_contents(step, state):
                if not may_save(run, step, state):
                    return False
                self._write(step, state, permanent_every_secs)
            if wait:
                self._wait()
        return True

    def _write(self, step: int, state: TrainState, permanent_every_secs: float | None) -> None:
        run = self._context
        # Of a run's checkpoints, only the pre-end one is always temporary.
        is_pre_end = permanent_every_secs == ALWAYS_TEMPORARY
        is_finite = run.components.require_finite(step, self.saver)
        contents = self._pre_end
        if contents is None:
            contents = self._contents.take()
        extra = self._contents.as_extra(contents, is_pre_end=is_pre_end)
        extra = extra._replace(finite=is_finite, permanent_every_secs=permanent_every_secs)
        write(run, self.saver, state, extra)
        self._mark_saved(step, state, contents)
        self._is_temporary = permanent_every_secs is not None

    def _has_saved_contents(self, step: int, state: TrainState) -> bool:
        """Whether a checkpoint taken now would be the latest one again."""
        if not self.has_saved_state(step, state):
            return False
        if self._pre_end is not None:
            # The pre-end checkpoint is saved again while it is temporary: no other one may ever
            # replace it.
            return self._saved_contents is self._pre_end and not self._is_temporary
        return self._contents.equals(self._saved_contents)

    def has_saved_state(self, step: int, state: TrainState) -> bool:
        """Whether the latest save of this process, finished or in progress, holds this state."""
        return self._latest_save is not None and self._latest_save.holds(step, state)

    def _mark_saved(self, step: int, state: TrainState, contents: Contents) -> None:
        self._latest_save = LatestSave(step, weakref.ref(state))
        self._saved_contents = contents
        # `save_without_peers` and a second pre-end save read these files, once they are no longer
        # in memory.
        for name, file in (*contents.hooks.files.items(), *contents.positions.files.items()):
            file.load = functools.partial(self.saver.read_file, name, step)

    def _wait(self) -> None:
        try:
            self.saver.wait()
        except Exception:
            # Otherwise another try would return True without saving. The error may be of this
            # process alone, and `has_saved_state` is then True on others. But it ends the run here,
            # and `_save_after_error` calls no collective on several processes.
            self._latest_save = None
            raise

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Save; an automatic checkpoint may be temporary."""
        permanent_every_secs = None if self._interval is None else _PERMANENT_SECS
        self.save(step, state, permanent_every_secs=permanent_every_secs)

    # The end, in the order of `ending.py`.

    def save_pre_end(self, step: int, state: TrainState) -> None:
        """Begin to save the state before the `end`s.

        From here on until `save_end`, every save has these contents.
        """
        if self.save(step, state, permanent_every_secs=ALWAYS_TEMPORARY):
            self._pre_end = self._saved_contents

    def save_end(self, step: int, state: TrainState) -> None:
        """Save the state after the `end`s, with the mark, and wait for it."""
        pre_end = self._pre_end
        self._pre_end = None
        try:
            self.save(step, state, wait=True)
        except BaseException:
            self._pre_end = pre_end  # the run is back where it was before the `end`s
            raise

    def save_without_peers(self, step: int, state: TrainState, *, is_finite: bool) -> None:
        """Save from another thread while the loop hangs in a loader.

        The hooks' states are those of the latest save.
        """
        if not self.has_saved_state(step, state):
            contents = self._contents.take(hooks=self._saved_contents.hooks)
            extra = self._contents.as_extra(contents)._replace(finite=is_finite)
            with internal_transfers():
                self.saver.save(state, extra=extra)
        self.saver.wait()

    def resume(self, step: int, state: TrainState) -> None:
        """Continue from the restored checkpoint.

        A branch saves it as its own, so that a restart does not read the other run again. A pre-end
        checkpoint, left by a run that was killed in its end, is saved again, too: it was temporary,
        and must not stay so.
        """
        run = self._context
        if run.origin.is_new_branch or BEFORE_END in run.origin.extra:
            self.save(step, state, wait=True)
        else:
            self._mark_saved(step, state, self._contents.take())
        if not run.components.finiteness.has_nan_hook and not self.saver.allow_nonfinite:
            run.poll(self, self._warn_of_nan)

    def _warn_of_nan(self, *, wait: bool = False) -> None:
        """A check for `RunInfo.poll`, called once; it reads the contents with or without `wait`."""
        bad = self._context.components.initial_contents.paths_with_nan()
        if bad:
            logger.warning("%s", describe_initial_nan(bad, self._context.course.first))


def find_own_saver(run: RunContext) -> RunSaverHook | None:
    """Return the hook that saves to `checkpoint_dir`, or None; all other savers are the user's."""
    for hook in run.components.finiteness.savers:
        if isinstance(hook, RunSaverHook):
            return hook
    return None


# What prevents a save after an error or a stall, and where a restart begins then.


def why_not_saved(run: RunContext) -> str:
    """Return why the last state must not be saved, as the rest of a sentence; "" if it may be."""
    if not run.course.is_resumable:
        return "because the iteration has not ended"
    if run.best_failure is not None:
        return "because a best checkpoint of an evaluation before it could not be saved"
    num_steps = run.step - run.course.first
    if run.saver is None or not run.components.batches.source.is_lost_after(num_steps):
        return ""
    return (
        "because the data source has advanced, and its position is too large (above 64 kB) to be "
        "copied before each batch"
    )


def describe_restart(run: RunContext) -> str:
    """Return from which checkpoint the next start resumes, as the rest of a sentence.

    The sentence is "" if the run saves none. This waits for a save in progress, and lists the
    checkpoints.
    """
    saver = run.saver
    if saver is None:
        return ""
    unknown = "; a restart resumes from the newest checkpoint, if there is one"
    if not processes.is_single_process() or run.signals.received_twice:  # this could wait forever
        return unknown
    try:
        engine_of(saver).wait_until_finished()
        store = open_store(saver.directory)
        found = next(iter(store.newest_first(saver.prefix)), None)
        if found is None:
            return "; there is no checkpoint yet, so a restart begins from scratch"
        step, path = found
        age = max(0.0, time.time() - store.manifest(path).saved_at)
    except Exception:  # the save has failed, or the store cannot be reached
        return unknown
    return f"; a restart resumes from {checkpoint_name(saver.prefix, step)}, {age:.0f} s old"
