"""A run that a loop holds, `jstep.Run`; `jstep.train` is a loop with an empty body.

`course.py` lists the states of a run, `stopping.py` how it ends in each. Signals are handled from `__enter__` until the
block is left.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeAlias

import jax

from jstep.core import interactive, processes, trees
from jstep.core.checks import as_int, as_string, describe_type
from jstep.core.exceptions import setting
from jstep.core.logs import WARNED, log_to_stderr
from jstep.core.meshes import mesh_of, overriding_mesh
from jstep.core.stopwatch import HOOKS, SAVING, STARTING, STEPPING
from jstep.core.tracebacks import original_error, shorten, shortens_tracebacks
from jstep.core.trees import P, Tree
from jstep.data.loaders import check_batches
from jstep.data.loop_batches import LoopBatches
from jstep.hooks.hook import check_returned_state
from jstep.hooks.run_hook import LoopState
from jstep.loop import stopping
from jstep.loop.arguments import Options, cache_directory, check, takes_options
from jstep.loop.course import AFTER_LOOP, BEGINNING, BETWEEN, BODY, ENDING, LEAVING, WITHIN
from jstep.loop.feeder import fetch_by_all
from jstep.loop.hook_runner import RunChunk, close_hooks
from jstep.loop.programs import Chunk, as_stages
from jstep.loop.run_context import Observer, RunContext
from jstep.loop.signals import StopWaiting
from jstep.loop.start import begin, open_run
from jstep.loop.start_times import StartTimes
from jstep.state.global_step import check_step
from jstep.state.train_state import TrainState
from jstep.stores.compile_cache import persistent_cache
from jstep.watching.batch_watch import BatchWatch
from jstep.watching.process_recorder import ProcessRecorder
from jstep.watching.progress import Progress
from jstep.watching.recorder import Recorder
from jstep.watching.stalls import StallWatch
from jstep.watching.utilization import Meters

OBSERVERS: tuple[Callable[[RunContext], Observer], ...] = (
    Progress,
    Recorder,
    ProcessRecorder,
    BatchWatch,
    StallWatch,
    Meters,
)
"""The observers of a run, in the order in which they are called; they exit in reverse order, `Progress` last."""
_SHORT = 1e-4
"""A body that takes fewer seconds counts as a part of the step, which is cheaper."""
_Kind: TypeAlias = type[BaseException] | None
_Trace: TypeAlias = TracebackType | None


class _Failure(contextlib.AbstractContextManager[None]):
    """Keeps the error that ends a run, in case the block of the user swallows it."""

    error: BaseException | None = None

    def take(self) -> BaseException | None:
        """Return the error and drop it: its traceback holds the frames of the run."""
        error, self.error = self.error, None
        return error

    def __exit__(self, kind: _Kind, error: BaseException | None, trace: _Trace) -> None:
        if error is None or isinstance(error, GeneratorExit):
            return
        self.error = original_error(error)
        if self.error is not error:
            raise self.error from None


class Run(Generic[P]):
    """A training run for a loop of your own; `train` is `with Run(…) as run: for _ in run: pass`.

    Entering the block restores the newest checkpoint. Leaving it, also by `break` or `return`, calls the last hooks,
    saves and closes. Each iteration is one call of the step, of up to `steps_per_call` steps, followed by the hooks
    that are due. `next(run)` works as `for` does.

    A restart resumes only between two iterations: savers, signals, stops and `last_step` take effect there. An
    exception in the body, or in a hook, saves nothing of its iteration: the state is in the exception's `state`, and a
    note names the checkpoint that the next start resumes from.

    If batches is None or `from_loop(…)`, the body makes the batches and calls `train_step`, any number of times in an
    iteration, so the last one may pass last_step.

    A run is iterated over in the thread that entered it, on several processes alike. In a notebook, one cell holds the
    block.

    Args:
        train_step: As in `train`, like the arguments that are not named here.
        batches: As in `train`, or None or `from_loop(…)` if the body makes the batches.

    Attributes:
        step: The number of training steps completed.
        state: The latest state, which is donated to the next step. In the body it may be replaced by a state of the
            same step, structure, shapes and dtypes. After the block it is the last complete state, or None if that was
            donated.
        metrics: The metrics of the latest call, on the device; None before the first one.

    Raises:
        RuntimeError: It is entered twice, or used where it must not be: `run.state = …` and `train_step` outside of the
            body, `every` after the first step.
        Preempted: From the loop, or where the block ends: see `train`, also for the other exceptions.

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

    @takes_options(Options)
    def __init__(self, train_step: object, state: TrainState[P], batches: Tree, options: Options[P]) -> None:
        times = StartTimes()
        self._batches = LoopBatches() if batches is None else batches
        stages = as_stages(train_step)
        check(state, options.stop_step)
        processes.refuse_another_run()
        check_batches(self._batches)
        self._cached_in = cache_directory(options.compile_cache, options.checkpoint_dir)
        with times.timing("devices"):
            jax.devices()
        values = trees.copy_numpy(state, "state")
        self._context = RunContext(options, stages, values, times, has_body=self._has_body)
        self._stack: contextlib.ExitStack | None = None
        self._owner = 0, 0
        self._iterator: Generator[int, None, None] = (step for step in range(0))
        self._last = LoopState(0, None)
        self._has_steps = False
        self._is_handled = False
        self._failure = _Failure()

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
        step, before, _, _ = course.position
        course.replace_state(check_returned_state(state, before, step, "run.state was assigned"), BODY)

    @property
    def metrics(self) -> Any:
        return self._latest.metrics

    @property
    def _latest(self) -> LoopState:
        position = self._context.course.position
        return self._last if position.state is None else position

    def stop(self, by: str = "the loop") -> None:
        """End the run after this iteration; `by` is the reason that the record gives."""
        run = self._context
        if run.step < run.course.stop_step:  # else the run has reached its end
            run.stop(as_string(by, "by"))

    def __iter__(self) -> Iterator[int]:
        """Return the iterator over the rest of the run, which yields the step of `state`."""
        if self._stack is None:
            raise RuntimeError("Run: must be entered first: with jstep.Run(…) as run: for step in run: …")
        if self._owner != (os.getpid(), threading.get_ident()) and not self._context.is_over:
            raise RuntimeError("Run: must be iterated over by the process and the thread that entered it")
        return self._iterator

    def __next__(self) -> int:
        return next(iter(self))

    def every(self, steps: int) -> Iterator[int]:
        """Return the iterator over the run whose body runs at multiples of `steps`, and at the end.

        Calls end there, whatever `steps_per_call` is. It must be called before the first step.
        """
        interval = as_int(steps, "steps", 1, "a number of steps")
        if isinstance(self._batches, LoopBatches):
            raise RuntimeError("run.every: the body makes the batches, so it must run each time: if step % n == 0: …")
        if self._context.course.status != BEGINNING:
            raise RuntimeError("run.every: must be called before the first step, because it sets where calls end")
        iterator = iter(self)
        self._context.course.body_interval = interval
        return iterator

    @shortens_tracebacks
    def train_step(self, *args: Any) -> Any:
        """Take one step, `train_step(state, *args)`, and call the hooks that are due; return its metrics."""
        run = self._context
        if not isinstance(self._batches, LoopBatches):
            raise RuntimeError(
                "run.train_step: the run takes its batches itself; to make them in the body, give batches=None or "
                "jstep.from_loop(…)"
            )
        self._require_body("run.train_step(…)")
        self._pause_body()
        self._batches.passed.append(args)
        with self._failure:
            self._take(next(self._context.opened.feeder))
        self._resume_body()
        return run.metrics

    def _require_body(self, what: str) -> None:
        if self._context.course.calling is not BODY or self._owner != (os.getpid(), threading.get_ident()):
            outside = RuntimeError(f"{what}: must be in the body of `for step in run:`, before the run has ended")
            raise self._failure.error or outside

    # Enter, and leave: what the end has to undo is pushed on one stack, which is unwound in reverse order.

    @shortens_tracebacks
    def __enter__(self) -> "Run[P]":
        if self._stack is not None:
            raise RuntimeError("Run: must be entered once; make another Run to resume from its checkpoint")
        run = self._context
        with contextlib.ExitStack() as stack:
            self._stack, self._owner = stack, (os.getpid(), threading.get_ident())
            self._enter_settings(stack)
            stack.push(self._leave)
            stack.callback(run.signals.end)  # late, as the record of the run may be closing for seconds
            for make_observer in OBSERVERS:
                run.observers = (*run.observers, stack.enter_context(make_observer(run)))
            stack.push(self._close_hooks)  # before the observers, which see how the run ends
            stack.callback(self._wait_for_background)
            stack.enter_context(run.closing)
            stack.callback(self._release)
            stack.push(self._rescue)
            run.signals.begin()
            open_run(run, self._batches)
            self._has_steps = begin(run, run.opened)
            makes_batches = isinstance(self._batches, LoopBatches)
            self._iterator = self._iterate_bodies() if makes_batches else self._iterate_calls()
            self._stack = stack.pop_all()
        return self

    @shortens_tracebacks
    def __exit__(self, kind: _Kind, error: BaseException | None, trace: _Trace) -> None:
        failure, stack = self._failure.take(), self._stack
        if stack is None or self._owner[0] != os.getpid():  # the body has forked; the run belongs to the parent
            return
        self._context.watch.end_aside()
        if error is not None and not isinstance(error, GeneratorExit):  # a generator that is dropped stops its run
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
        # The progress bar of a notebook shows the rest.
        least = logging.WARNING if progress is None and interactive.is_notebook() else logging.NOTSET
        stack.enter_context(overriding_mesh(mesh_of(self._context.state)))
        if progress is not False and jax.process_index() == 0:
            stack.enter_context(log_to_stderr(least))
        stack.enter_context(persistent_cache(self._cached_in))
        stack.enter_context(setting(WARNED, set()))

    def _rescue(self, kind: _Kind, error: BaseException | None, trace: _Trace) -> None:
        run = self._context
        if error is None:
            return
        run.signals.only_record()
        self._is_handled = run.signals.received is not None
        run.course.fail()
        run.watch.switch(STEPPING if run.course.has_stepped else STARTING)  # whatever the error has interrupted
        if run.is_open:
            stopping.rescue(run, error)
        else:
            stopping.attach_last_state(run, error)
        self._last = run.position._replace(state=getattr(error, "state", None))
        if run.signals.received_twice and isinstance(error, KeyboardInterrupt):
            stopping.leave_at_once(run.step, error)

    def _release(self) -> None:
        run = self._context
        for observer in run.observers:
            observer.before_close()
        run.watch.switch(SAVING)  # only pending writes are left
        run.course.close()
        run.in_flight.clear()
        self._iterator.close()

    def _wait_for_background(self) -> None:
        if not self._context.signals.received_twice:
            self._context.background.wait()

    def _leave(self, kind: _Kind, error: BaseException | None, trace: _Trace) -> None:
        """Agree on the end, and obey a signal that arrived while the run closed."""
        run, state = self._context, self._last.state
        if error is None:
            run.signals.agree_at_end()
        elif isinstance(error, Exception) and not hasattr(error, "state") and state is not None:
            stopping.note_closing(run, error, state)
        if run.signals.received is not None and not self._is_handled:
            stopping.leave_after_closing(run, state)

    def _close_hooks(self, kind: _Kind, error: BaseException | None, trace: _Trace) -> None:
        run = self._context
        try:
            close_hooks(run.course, run.watch, run.options.hooks, run.background.end(), error)
        except Exception as failure:
            stopping.attach_state(failure, self._last.state)
            raise
        if error is None:
            interactive.forget()

    # The loop.

    def _iterate_calls(self) -> Generator[int, None, None]:
        run, course, watch = self._context, self._context.course, self._context.watch
        signals, savers, clock = run.signals, run.opened.runner.savers, run.watch.clock
        has_body, interval = course.has_body, course.body_interval
        has_run = run.restored is None or run.opened.runner.ended_at == course.first
        with self._failure:
            try:
                for chunk in self._begin_steps():
                    step = self._take(chunk)
                    has_run = has_body and (interval is None or step % interval == 0 or course.is_at_last)
                    if has_run:
                        course.calling, watch.aside = BODY, (began := clock())
                        yield step
                        if clock() - began > _SHORT:
                            watch.end_aside()
                            watch.record(BODY.timing_key, began)
                        course.calling = watch.aside = None
                    course.status = BETWEEN
                    # Most steps have nothing to save and no signal to obey, so they skip the call of `_end_iteration`.
                    is_quiet = signals.received is None and signals.is_alone and course.stopped_by is None
                    is_quiet = is_quiet and step < savers.next and step < course.stop_step and not run.failures
                    if not is_quiet and not self._end_iteration():
                        break
            except StopWaiting:
                course.status = LEAVING
            if not has_run and self._owes_body():
                course.begin_iteration()
                course.calling, watch.aside = BODY, clock()
                yield course.position.step
                watch.end_aside()
                course.status, course.calling = BETWEEN, None
            self._finish()

    def _owes_body(self) -> bool:
        """Whether the batches, also of an earlier start, have ended before a multiple of the body's interval."""
        course = self._context.course
        interval = course.body_interval
        is_between = interval is not None and course.position.step % interval > 0
        return is_between and course.has_body and course.status != LEAVING and self._context.opened.feeder.has_begun

    def _iterate_bodies(self) -> Generator[int, None, None]:
        course = self._context.course
        with self._failure:
            self._begin_steps()
            resumes = self._has_steps and not course.is_at_last
            while resumes:
                self._context.opened.feeder.iterations += 1
                course.begin_iteration()
                self._resume_body()
                yield course.position.step
                if course.calling is not BODY:  # one of its steps has failed
                    return
                self._pause_body()
                course.status = BETWEEN
                resumes = self._end_iteration()
            self._finish()

    # The time of a body that makes the batches counts as waiting for them.

    def _resume_body(self) -> None:
        run = self._context
        run.course.calling = BODY
        run.watch.switch(run.watch.waiting)

    def _pause_body(self) -> None:
        run = self._context
        run.course.calling = None
        run.watch.switch(STEPPING if run.course.has_stepped else STARTING)

    def _begin_steps(self) -> Iterable[Chunk]:
        """Return the chunks of the run; none if it is stopped, or if the body makes the batches."""
        run = self._context
        if not self._has_steps or run.course.is_at_last:
            return ()
        run.signals.interrupts = run.opened.feeder.interrupted
        run.course.status = BETWEEN
        self._run_chunk = run.opened.runner.with_before_step(run.opened.dispatch)
        return () if isinstance(self._batches, LoopBatches) else fetch_by_all(run.opened.feeder)

    def _take(self, chunk: Chunk) -> int:
        run, course = self._context, self._context.course
        if run.in_flight.is_full:
            run.in_flight.make_room()
        if run.signals.received is not None and not chunk.must_run:
            run.signals.check()  # it arrived meanwhile
        step = chunk.first + chunk.steps
        result = self._run_chunk(course.position.state, chunk)
        course.position = position = LoopState._make((step, *result, chunk.program.rows))
        if course.has_body:
            course.status = WITHIN
        run.in_flight.add(chunk.first, step, position.state, position.metrics)
        run.opened.runner.after(chunk.first)
        return step

    def _end_iteration(self) -> bool:
        """Save if due, and obey a signal; return whether another iteration follows."""
        run, course = self._context, self._context.course
        if course.position.step >= run.opened.runner.savers.next or run.failures:
            run.opened.runner.save()
        if run.signals.to_stop():
            course.status = LEAVING
        return course.status != LEAVING and not course.is_at_last

    # The end.

    def _end(self) -> None:
        run = self._context
        if run.is_over:
            return
        if self._has_steps:
            self.stop()
        if run.course.calling is BODY:
            self._pause_body()
            run.course.status = BETWEEN
        self._finish()

    def _finish(self) -> None:
        run, course, runner = self._context, self._context.course, self._context.opened.runner
        is_idle = self._has_steps and not run.opened.feeder.has_begun  # it was stopped before its first iteration
        if course.status != LEAVING:
            course.status = ENDING
            if self._has_steps and not course.is_at_last:
                stopping.report_early_end(run)
        run.signals.only_record()
        runner.call_at_last()
        check_step(run.step, run.state)
        if course.status != LEAVING and not is_idle:
            runner.end()
        if course.status == LEAVING or run.signals.to_stop():  # also during the hooks above
            stopping.exit_on_signal(run)
        runner.raise_log_errors()
        self._last = run.position
        course.calling = AFTER_LOOP
        run.watch.switch(HOOKS)
