"""`jstep.Run`, a context manager around a training loop.

`jstep.train` is such a loop with an empty body. Read `Run._iterate` first: it is the whole loop.
`course.py` lists the states of a run, `stopping.py` how it ends at each moment.

Entering the block pushes on one stack whatever its end has to undo. The last row is undone first:

| pushed | at the end of the block |
|---|---|
| `_enter_settings` | the mesh, the log, the cache of programs and the warnings are as before it |
| `_agree_and_exit` | a signal that arrived while the run closed raises its exception last |
| `signals.end` | the previous signal handlers are back; not earlier: the record may close slowly |
| each observer | the record, progress line and watch for stalls close: they saw how the run ended |
| `_close_hooks` | `failed`, `closed` and `close` of the user's hooks |
| `_wait_for_background` | the calls of `saved` in another thread are waited for |
| `context.closing` | what `open_run` has opened closes: batches, compilations, logs, checkpoints |
| `_release` | the state is dropped, so that closing needs no device memory |
| `_rescue` | after an error, the state is saved if it may be, and attached to the error |
"""

import contextlib
import inspect
import itertools
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias

import jax

from jstep.checkpoint.saver import Saver
from jstep.compiling.chunks import Chunk
from jstep.compiling.stages import as_stages
from jstep.compiling.start_times import StartTimes
from jstep.core import interactive, processes, trees
from jstep.core.checks import as_int, as_string, describe_type
from jstep.core.logs import log_to_stderr, warning_once
from jstep.core.meshes import mesh_of, overriding_mesh
from jstep.core.public_names import explains_attributes
from jstep.core.signals import StopWaiting
from jstep.core.stopwatch import HOOKS, SAVING, STARTING, STEPPING
from jstep.core.tracebacks import original_error, shorten, shortens_tracebacks
from jstep.core.trees import P, Tree
from jstep.data.loaders import check_batches
from jstep.data.loop_batches import LoopBatches
from jstep.hooks.course import (
    BEGINNING,
    BETWEEN,
    CLOSING,
    READY,
    WITHIN,
    Activity,
    Course,
    LoopState,
)
from jstep.hooks.hook import as_returned_state
from jstep.loop import stopping
from jstep.loop.ending import make_end
from jstep.loop.feeder import fetch_by_all
from jstep.loop.hook_runner import RunChunk, close_hooks
from jstep.loop.run_context import RunContext
from jstep.loop.start import begin_hooks, open_run
from jstep.origin.arguments import Step, cache_directory, check_state, options_in, validated
from jstep.running.attached import attached_observers, check_attached
from jstep.state.sharding import place_with_params
from jstep.state.train_state import TrainState
from jstep.stores.compile_cache import persistent_cache
from jstep.stores.files import check_no_links
from jstep.training.metrics import Metrics

_Kind: TypeAlias = type[BaseException] | None
_Trace: TypeAlias = TracebackType | None


class _KeepFailure(contextlib.AbstractContextManager[None]):
    """Keeps the error that ends the run in its `Course`, in case the user's block swallows it."""

    def __init__(self, course: Course) -> None:
        self._course = course

    def __exit__(self, kind: _Kind, error: BaseException | None, trace: _Trace) -> None:
        course = self._course
        if error is None:
            return
        is_closed_from_outside = course.activity is Activity.BODY or course.status == CLOSING
        if isinstance(error, GeneratorExit) and is_closed_from_outside:
            # The user or `_release` has called `close` of the iterator, which raises it at the
            # `yield`. Any other one comes from the user's loader or hook, also in an `end`, and is
            # an error like any other.
            return
        # Leaving the contexts of the loop sets `__traceback__`, which a class of exceptions may
        # reject. Then `error` is what that assignment raises, and `original_error` finds the
        # exception of the user in its context.
        course.failure = original_error(error)
        if course.failure is not error:
            raise course.failure from None


class _Owner(NamedTuple):
    """The process and the thread that have entered a run, and hold it."""

    process: int
    thread: int

    @classmethod
    def current(cls) -> "_Owner":
        return cls(os.getpid(), threading.get_ident())


@explains_attributes
class Run(Generic[P]):
    """A context manager around your training loop, which runs steps, saves checkpoints and resumes.

    `train` is `with Run(…) as run: for _ in run: pass`. The number that the loop yields is the
    number of steps completed.

    Entering the block restores the newest checkpoint. Leaving it, also by `break` or `return`,
    calls the `end` of hooks, saves and closes. Each iteration runs one call of the step (of up to
    `steps_per_call` steps), then the hooks that are due, then your loop body. You can also call
    `next(run)` instead of using `for`. With `steps_per_call` above 1, where calls end, and so at
    which steps the body runs, also depends on when this start saves: a body that acts at certain
    steps uses `every(n)`.

    Checkpoints are taken only between iterations, and signals, stops and `last_step` also take
    effect there. If an exception leaves the body or a hook, nothing of its iteration is saved: the
    exception's attribute `state` holds the state, and a note names the checkpoint that a restart
    resumes from.

    If batches is None or `from_loop(…)`, the body makes the batches and calls `train_step` itself,
    any number of times in an iteration. The last iteration may therefore pass last_step.

    Iterate over a run in the thread that entered it, and execute the same iterations on all
    processes. In a notebook, put the whole block into one cell.

    Args:
        train_step: As in `train`, like all arguments that are not listed here.
        batches: As in `train`, or None or `from_loop(…)` if the body makes the batches.

    Attributes:
        step: The number of training steps completed.
        state: The latest state, which is donated to the next step. In the body, you may replace it
            by a state of the same step, structure, shapes and dtypes. After the block, it is the
            last complete state, or None if that was donated.
        metrics: The metrics of the latest call, on the device; None before the first one.

    Raises:
        RuntimeError: The run is entered twice, `run.state = …` or `train_step` is used outside of
            the body, or `every` is called twice, or after the first step.
        Preempted: Raised by the `for` statement, or at the end of the block: see `train`, also for
            other exceptions.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> with jstep.Run(train_step, state, lambda step: jnp.ones(()), last_step=10) as run:
        ...     for step in run:
        ...         if step % 5 == 0:
        ...             print(step, round(float(run.metrics["loss"]), 4))
        5 0.0039
        10 0.0
        >>> print(round(float(run.state.params["w"]), 4))
        0.999

    Source: `tf.train.MonitoredTrainingSession`.
    """

    _has_body: ClassVar[bool] = True
    _run_chunk: RunChunk

    @shortens_tracebacks
    def __init__(
        self,
        train_step: Step | Mapping[int, Step],
        state: TrainState[P],
        batches: Callable[[int], Tree] | Tree,
        last_step: int | None,
        *,
        hooks: Sequence[Any] = (),
        checkpoint_dir: str | os.PathLike[str] | Saver | None = None,
        checkpoint_prefix: str = "model",
        save_checkpoint_secs: float | str | None = "auto",
        save_checkpoint_steps: int | None = None,
        logdir: str | os.PathLike[str] | None = None,
        save_summaries_steps: int | None = 100,
        log_steps: int | None = 100,
        steps_per_call: int | str = 1,
        progress: bool | None = None,
        batch_sharding: Any = None,
        compile_cache: str | os.PathLike[str] | bool | None = None,
        stop_secs: float | None = None,
        config: Any = None,
        start_from: str | os.PathLike[str] | None = None,
    ) -> None:
        given = options_in(locals())  # first, while there are no other local names
        times = StartTimes()
        self._batches = LoopBatches() if batches is None else batches
        self._loop_batches = self._batches if isinstance(self._batches, LoopBatches) else None
        options = validated(given, state, self._batches)
        options = check_attached(options, _DEFAULTS)
        stages = as_stages(train_step)
        check_state(state, options.stop_step, options.hooks)
        processes.check_no_other_run()
        check_batches(self._batches)
        self._cached_in = cache_directory(options.compile_cache, options.checkpoint_dir)
        if self._cached_in is not None:
            check_no_links(self._cached_in, *options.directories)
        with times.timing("devices"):
            jax.devices()
        values = place_with_params(trees.copy_numpy(state, "state"))
        self._context = RunContext(options, given, stages, values, times, has_body=self._has_body)
        self._stack: contextlib.ExitStack | None = None
        self._owner: _Owner | None = None
        # Until `__enter__`, an empty generator, as `_release` calls its `close`.
        self._iterator: Generator[int, None, None] = (step for step in range(0))
        # When the body last resumed, by the stopwatch; only if it makes the batches.
        self._body_resumed_at = 0.0
        # The last position, set when the loop ends or fails. It is kept here and not in the
        # `Course`, which hooks and observers refer to in cycles: from here, the last state is freed
        # as soon as the user drops the run.
        self._outcome = LoopState(0, None)

    # What a loop uses.

    @property
    def step(self) -> int:
        return self._context.step

    @property
    def state(self) -> TrainState[P]:
        state: TrainState[P] = self._latest.state
        return state

    @state.setter
    def state(self, state: TrainState[P]) -> None:
        course = self._context.course
        self._require_body("run.state = …")
        if not isinstance(state, TrainState):
            raise TypeError(f"run.state: must be a TrainState, got {describe_type(state)}")
        position = course.position
        new_state = as_returned_state(
            state, position.state, position.step, "run.state was assigned"
        )
        course.replace_state(new_state, "the body")

    @property
    def metrics(self) -> Metrics:
        return self._latest.metrics

    @property
    def _latest(self) -> LoopState:
        position = self._context.course.position
        # The `Course` drops its state when the run closes.
        return self._outcome if position.state is None else position

    def stop(self, by: str = "the loop") -> None:
        """End the run after this iteration; `by` is the reason that the record gives."""
        context = self._context
        if context.step >= context.course.stop_step:
            return  # it ends anyway: the record must not say that it was stopped
        context.stop(as_string(by, "by"))

    def __iter__(self) -> Iterator[int]:
        """Return the iterator over the rest of the run, which yields the step of `state`."""
        if self._stack is None:
            raise RuntimeError(
                "Run: must be entered first: with jstep.Run(…) as run: for step in run: …"
            )
        # Any thread may iterate over a run that is over: it yields nothing.
        if self._owner != _Owner.current() and not self._context.course.is_over:
            raise RuntimeError(
                "Run: must be iterated over by the process and the thread that entered it"
            )
        return self._iterator

    def __next__(self) -> int:
        return next(iter(self))

    def every(self, steps: int) -> Iterator[int]:
        """Return the iterator over the run whose body runs at multiples of `steps`, and at the end.

        Calls end there, whatever `steps_per_call` is. It must be called before the first step.
        """
        interval = as_int(steps, "steps", 1, "a number of steps")
        course = self._context.course
        if self._loop_batches is not None:
            raise RuntimeError(
                "run.every: the body makes the batches, so it "
                "must run each time: if step % n == 0: …"
            )
        if course.status not in (BEGINNING, READY):
            raise RuntimeError(
                "run.every: must be called before the first step, because it sets where calls end"
            )
        timetable = self._context.timetable
        if timetable.body_interval is not None:
            raise RuntimeError(
                f"run.every({steps}): was called before, with {timetable.body_interval}, and a run "
                "has one body; use if step % n == 0: … in it"
            )
        iterator = iter(self)  # first, as it raises if the run was not entered
        timetable.body_interval = interval
        return iterator

    @shortens_tracebacks
    def train_step(self, *args: Any) -> Metrics:
        """Take one step, `train_step(state, *args)`, and call the due hooks; return its metrics."""
        context = self._context
        if self._loop_batches is None:
            raise RuntimeError(
                "run.train_step: the run takes its batches itself; to make them in the body, give "
                "batches=None or jstep.from_loop(…)"
            )
        self._require_body("run.train_step(…)")
        self._pause_body()
        self._loop_batches.passed.append(args)
        with _KeepFailure(context.course):
            self._take(next(context.components.feeder))
        self._resume_body()
        return self.metrics

    def _require_body(self, what: str) -> None:
        course = self._context.course
        if course.activity is not Activity.BODY or self._owner != _Owner.current():
            if course.failure is not None:  # the block has swallowed it
                raise course.failure
            raise RuntimeError(
                f"{what}: must be in the body of `for step in run:`, before the run has ended"
            )

    # The loop.

    def _iterate(self) -> Generator[int, None, None]:
        """The loop, from its first batch to its last hooks; it yields to the body of the user.

        The order within an iteration is a promise: the call, the hooks of its step, the body, and
        only then whatever a restart may resume from. So in a checkpoint of step N, the hooks and
        the body of N have run, each once.
        """
        course = self._context.course
        with _KeepFailure(course):
            try:
                for chunk in self._begin():
                    if chunk is None:  # the body makes the batches, and takes the steps
                        course.iterations += 1
                        course.forbid_saves()
                    else:
                        self._take(chunk)
                    if course.has_body and course.take_due_body():
                        self._resume_body()
                        yield course.position.step
                        # A `train_step` in the body has failed, and the body has caught its error.
                        # `__exit__` raises it again; until then no hook runs, and nothing is saved.
                        if course.failure is not None:
                            return
                        self._pause_body()
                    course.status = BETWEEN  # `course.end_iteration()`, inlined
                    # Savers come after the body: what it does belongs to the checkpoint of its
                    # step.
                    if self._has_duty() and not self._end_iteration():
                        break
                    course.activity = Activity.FETCHING
            except StopWaiting:
                # A signal has ended the wait for a batch or a program. The state is still that of
                # the latest boundary, and the batch is made again after the restart.
                course.leave()
            if course.owes_body:
                course.begin_last_body()
                self._resume_body()
                yield course.position.step
                self._pause_body()
                course.end_iteration()
            self._finish()

    def _begin(self) -> Iterable[Chunk | None]:
        """Return the chunks of the run, or None for each iteration of a body that makes batches."""
        context = self._context
        if not context.course.has_next:
            return ()
        context.signals.make_interrupt = context.components.feeder.signal_exception
        context.course.begin_loop()
        context.course.activity = Activity.FETCHING
        self._run_chunk = context.components.runner.make_run_chunk(context.components.dispatch)
        if self._loop_batches is not None:
            return itertools.repeat(None)
        return fetch_by_all(context.components.feeder)

    def _take(self, chunk: Chunk) -> None:
        """Run a call, and the hooks that are due after it."""
        context = self._context
        course = context.course
        if context.in_flight.is_check_due:
            # This waits for a call that was made long ago. If the device hangs, the report of the
            # stall must not name the batches.
            course.activity = Activity.CALLING
            context.in_flight.make_room()
        if context.signals.received is not None and chunk.can_interrupt:
            context.signals.check()  # it arrived since the batch was fetched
        course.activity = Activity.CALLING
        state, metrics = self._run_chunk(course.position.state, chunk)
        step = chunk.first + chunk.steps
        course.position = LoopState(step, state, metrics, chunk.program.rows)
        # `course.forbid_saves()`, inlined. Not before the call: if tracing or compiling the step
        # fails, the state is still that between two iterations, and is saved.
        course.status = WITHIN
        context.in_flight.add(chunk.first, step, state, metrics)
        for listener in context.components.dispatch.due_listeners:
            listener(chunk, state)
        context.components.runner.call_after_step(chunk.first)

    # The time of a body counts as hooks. That of a body that makes the batches counts as waiting
    # for a batch, until it calls `train_step`.

    def _resume_body(self) -> None:
        context = self._context
        context.course.activity = Activity.BODY
        if self._loop_batches is None:
            context.watch.begin_body()
        else:
            self._body_resumed_at = context.watch.switch(context.watch.waiting)

    def _pause_body(self) -> None:
        context = self._context
        context.course.activity = Activity.CALLING
        if self._loop_batches is None:
            context.watch.end_body(Activity.BODY)
        else:
            # How long the body took between two of its steps. Stalls of the body are found by
            # comparison with these times.
            context.watch.record(Activity.BODY, self._body_resumed_at)
            self._switch_to_calls()

    def _switch_to_calls(self) -> None:
        self._context.watch.switch(STEPPING if self._context.course.has_trained else STARTING)

    # Between two iterations.

    def _has_duty(self) -> bool:
        """Whether there is something to do before the next iteration; mostly, there is not.

        On several processes there always may be: to agree on a signal, all must poll after each
        call.
        """
        context = self._context
        course = context.course
        signals = context.signals
        step = course.position.step
        if step >= context.timetable.next_save or step >= course.stop_step:
            return True
        if signals.received is not None or not signals.is_single_process:
            return True
        return course.stopped_by is not None or bool(context.failures)

    def _end_iteration(self) -> bool:
        """Save if due, and obey a signal; return whether another iteration follows.

        The save comes first: a signal that arrives meanwhile is obeyed here, and not a step later.
        The last step is not saved here, without the last rows of logs, but by the end of the run.
        """
        context = self._context
        course = context.course
        runner = context.components.runner
        defers_failures = False
        if context.failures:
            # Of several processes only one may have failed to write a log. It asks all to stop, as
            # for a signal, and its error is raised where they do. On one process, `stop_all`
            # returns False, and the error is raised below.
            defers_failures = context.signals.stop_all()
        if course.has_next:
            if course.position.step >= context.timetable.next_save:
                runner.save(raises_failures=not defers_failures)
            elif context.failures and not defers_failures:
                runner.raise_log_errors()
        if context.signals.poll_stop_signal():
            course.leave()
        return course.has_next

    # The end.

    def _finish(self) -> None:
        """Make the end of the run, unless a signal comes first, or there is nothing to end."""
        context = self._context
        course = context.course
        runner = context.components.runner
        # Both are read before `course.end()` changes the status. If the loop has ended though
        # another iteration would follow, there is no batch for it.
        are_batches_used_up = course.has_next
        is_left_before_first = course.status == READY
        course.end()
        if are_batches_used_up:
            stopping.report_early_end(context)
        context.signals.disable_interrupts()
        runner.call_at_last_step()
        context.check_step()
        if course.is_leaving or context.signals.poll_stop_signal():
            stopping.exit_on_signal(context)
        if is_left_before_first or not course.owes_end:
            # A block that is left before its first batch, although there are steps to take, has
            # done nothing, and so ends well. If its checkpoint owes `end`s, it still owes them:
            # nothing here marks them as made.
            course.is_finished = True
        elif not make_end(context):  # a signal has cut it short
            stopping.exit_on_signal(context)
        # Polled again, as the `end`s may have taken minutes. If they have run, that is saved, and a
        # restart does not make them again.
        if context.signals.poll_stop_signal():
            stopping.exit_on_signal(context)
        runner.raise_log_errors()
        self._outcome = course.position
        course.activity = Activity.AFTER_LOOP
        context.watch.switch(HOOKS)

    def _end(self) -> None:
        """End a run whose block has ended without an error, perhaps before its loop has."""
        context = self._context
        if context.course.is_over:
            return
        if context.course.status != BEGINNING:
            # A run that had no step to take was not stopped here.
            self.stop()
        if context.course.activity is Activity.BODY:
            # The block has left the body, by `break` or `return`.
            self._pause_body()
            context.course.end_iteration()
        self._finish()

    # Enter and leave: the table above lists what is pushed.

    @shortens_tracebacks
    def __enter__(self) -> "Run[P]":
        if self._stack is not None:
            raise RuntimeError(
                "Run: must be entered once; make another Run to resume from its checkpoint"
            )
        context = self._context
        with contextlib.ExitStack() as stack:
            self._stack = stack
            self._owner = _Owner.current()
            self._enter_settings(stack)
            stack.push(self._agree_and_exit)
            stack.callback(context.signals.end)
            for make_observer in attached_observers():
                observer = stack.enter_context(make_observer(context))
                context.observers = (*context.observers, observer)
            stack.push(self._close_hooks)
            stack.callback(self._wait_for_background)
            stack.enter_context(context.closing)
            stack.callback(self._release)
            stack.push(self._rescue)
            context.signals.begin()
            context.components = open_run(context, self._batches)
            if begin_hooks(context):
                context.course.set_ready()
            self._iterator = self._iterate()
            self._stack = stack.pop_all()
        return self

    @shortens_tracebacks
    def __exit__(self, kind: _Kind, error: BaseException | None, trace: _Trace) -> None:
        course = self._context.course
        failure = course.take_failure()
        # A `GeneratorExit` that the loop has not raised closes a generator around the block.
        # Between two iterations, the block then ends as by `break`. In the body, half an iteration
        # is left, which must not be saved.
        closes_generator = isinstance(error, GeneratorExit) and error is not failure
        ends_like_break = closes_generator and course.status != WITHIN
        stack = self._stack
        if stack is None or self._owner is None:
            return
        if self._owner.process != os.getpid():  # the body has forked; the run belongs to the parent
            return
        # The block may have left a body, whose time is not recorded: it may have ended early.
        self._context.watch.end_body()
        if error is not None and not ends_like_break:
            stack.__exit__(kind, error, trace)
            shorten(error)
            return
        with stack:
            try:
                if failure is not None:  # the block has swallowed it
                    raise failure
                self._end()
            finally:
                del failure  # breaks the reference cycle with this frame, which its traceback holds

    def _enter_settings(self, stack: contextlib.ExitStack) -> None:
        progress = self._context.options.progress
        level = logging.NOTSET
        if progress is None and interactive.is_notebook():
            # The progress bar shows what lines of level INFO would.
            level = logging.WARNING
        stack.enter_context(overriding_mesh(mesh_of(self._context.state)))
        if progress is not False and processes.is_process_0():
            stack.enter_context(log_to_stderr(level))
        stack.enter_context(persistent_cache(self._cached_in))
        stack.enter_context(warning_once())

    def _rescue(self, kind: _Kind, error: BaseException | None, trace: _Trace) -> None:
        """On an error, save the state if a restart may resume from it; attach it to the error."""
        context = self._context
        if error is None:
            return
        context.signals.disable_interrupts()  # a second exception here would lose the state
        context.signals.is_obeyed = context.signals.received is not None
        context.course.fail()
        # The error may have interrupted any phase, such as the wait for a batch, which ends here.
        self._switch_to_calls()
        if context.is_open:
            stopping.rescue(context, error)
        else:
            stopping.attach_last_state(context, error)
        self._outcome = context.course.position._replace(state=getattr(error, "state", None))
        if context.signals.received_twice and isinstance(error, KeyboardInterrupt):
            stopping.exit_immediately(context.step, error)

    def _release(self) -> None:
        """Let the observers read the last state, then drop it and all that holds it.

        Whatever closes after this only writes.
        """
        context = self._context
        for observer in context.observers:
            observer.on_close()
        context.watch.switch(SAVING)
        context.course.close()
        context.in_flight.clear()
        self._iterator.close()  # its frame holds the latest chunk

    def _wait_for_background(self) -> None:
        if not self._context.signals.received_twice:
            self._context.background.wait()

    def _agree_and_exit(self, kind: _Kind, error: BaseException | None, trace: _Trace) -> None:
        """Agree with the other processes on a signal received while the run closed; obey it."""
        context = self._context
        signals = context.signals
        state = self._outcome.state
        if error is None:
            signals.agree_at_end()
        elif isinstance(error, Exception) and not hasattr(error, "state") and state is not None:
            # Raised while the run closed: an earlier error has got its state in `_rescue`.
            stopping.note_closing(context, error, state)
        if signals.received is not None and not signals.is_obeyed:
            stopping.exit_after_closing(context, state)

    def _close_hooks(self, kind: _Kind, error: BaseException | None, trace: _Trace) -> None:
        context = self._context
        try:
            close_hooks(
                context.course,
                context.watch,
                context.options.hooks,
                context.background.end(),
                error,
                must_leave=lambda: context.signals.received_twice,
            )
        except BaseException as failure:
            stopping.attach_state(failure, self._outcome.state)
            raise
        if error is None:
            interactive.forget()  # after a run that ended well, `interrupted_state()` returns None


_DEFAULTS = {
    name: argument.default for name, argument in inspect.signature(Run.__init__).parameters.items()
}
