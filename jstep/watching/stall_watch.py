"""The observer of stalls.

It reports what each process waits for, and ends a run that stalls for too long. The loop does not
call it. About once a second, a thread reads the activity of the loop (`Course.activity`) and of
waiting threads (`core.threads.doing`), and how long the same activity has lasted before
(`Stopwatch.lasted`).
"""

import faulthandler
import os
import socket
import statistics
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import jax

from jstep.core import threads
from jstep.core.checks import as_number, hook_name
from jstep.core.logs import logger
from jstep.core.stopwatch import EVALUATING, SAVING, WAITING
from jstep.hooks.course import Activity, HookCall
from jstep.hooks.run_hook import RunHook, is_user_hook, timing_key
from jstep.loop.observer import Observer
from jstep.loop.run_context import RunContext
from jstep.loop.stopping import STALL_EXIT_CODE, exit_after_stall, log_in_time
from jstep.record.run_record import file_of
from jstep.record.stall_files import AGREEMENT, CALL, StallFiles, silent
from jstep.summary.run_writer import writer_of
from jstep.summary.writer import request_flush

_BATCH = "batch"
_COMPILE = "compile"
_START = "start"
_HOST_WAITS = (_BATCH, _COMPILE, _START)
"""The kinds of waits of the main thread that are not for the device."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LOOP = os.path.join(_PACKAGE, "running", "run.py")
"""The file whose frames are the loop. Their callers are the user's script, which waits for all of
the run."""
_LIBRARIES = (
    *(path + os.sep for name, path in sysconfig.get_paths().items() if "lib" in name),
    "<frozen",
)
_MAX_RECORDED = 100
"""The number of stalls in the record of a start."""
_MAX_NAMED = 8
"""The number of other processes that a line names."""


class StallHook(RunHook):
    """A hook that reports what a stalled run waits for, and that can end it.

    `train` has one with the default settings; one among `hooks` replaces it. A *stall* is a wait,
    such as for a batch, a compilation, a save or other processes, that has lasted longer than

    limit = max(warn_secs, min(factor · usual, usual + 10 · warn_secs)),
    for calls in flight at least 2 · usual · steps,

    where *usual* is the longest of the last 64 durations of the same activity (for batches and
    calls, the median). With the default settings, if a save usually takes 20 s, one is a stall
    after max(60, min(600, 620)) = 600 s. An activity that has not been seen before, such as the
    first compilation, may take 10 · warn_secs, and time in which the process computes counts for a
    tenth.

    Each stall is a warning, and if the run has a directory, a file there, which `jstep stalls`
    reads; see [When a run hangs](../help/on-call.md#when-a-run-hangs).

    Args:
        warn_secs: The minimum duration of a stall, in seconds; None to watch nothing.
        exit_secs: Seconds of one stall after which the process ends with exit code 75, for a
            launcher that starts it again; None to wait forever. It writes the stacks of all threads
            first. If this is the only process, and it stalls in the data loader, it also saves the
            last complete state.
        factor: How many times longer than usual anything may take.

    Raises:
        ValueError: An argument is not positive and finite, or exit_secs is not above warn_secs.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> hooks = [jstep.StallHook(warn_secs=60.0, exit_secs=1800.0)]
        >>> state = jstep.train(
        ...     train_step, state, lambda step: jnp.ones(()), last_step=3, hooks=hooks
        ... )
    """

    _instead = "call faulthandler.dump_traceback_later"

    def __init__(
        self,
        *,
        warn_secs: float | None = 60.0,
        exit_secs: float | None = None,
        factor: float = 30.0,
    ) -> None:
        self.warn_secs = (
            None if warn_secs is None else as_number(warn_secs, "warn_secs", low=0, above=True)
        )
        self.exit_secs = (
            None if exit_secs is None else as_number(exit_secs, "exit_secs", low=0, above=True)
        )
        self.factor = as_number(factor, "factor", low=0, above=True)
        if self.exit_secs is not None and (
            self.warn_secs is None or self.exit_secs <= self.warn_secs
        ):
            raise ValueError(
                f"exit_secs={exit_secs}, warn_secs={warn_secs}: exit_secs must be above warn_secs"
            )


class Wait(NamedTuple):
    """What a run waits for.

    Attributes:
        timing_key: The key of its recorded durations, if not the stopwatch's.
        steps: The first and the last step of a call.
        taken: What it has done, such as batches of an evaluation.
        age: Its seconds so far, except those in which the process was stopped.
        idle: The same, but seconds in which the process computed count a tenth.
        due: The age at which the next line is due; 0 before it is a stall.
        part: The phase at the latest line; empty before there is one.
    """

    kind: str
    what: str
    timing_key: Hashable = None
    steps: tuple[int, int] | None = None
    taken: int = 0
    age: float = 0.0
    idle: float = 0.0
    due: float = 0.0
    part: str = ""

    def is_same(self, other: "Wait") -> bool:
        """Whether both are one wait, observed at two times."""
        identity = (self.what, self.timing_key, self.taken)
        return identity == (other.what, other.timing_key, other.taken)


class StallWatch(Observer):
    """The thread that watches one run, created in the thread of its loop."""

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self._hook = next(
            (hook for hook in run.options.hooks if isinstance(hook, StallHook)), StallHook()
        )
        self._index = jax.process_index()
        self._count = jax.process_count()
        options = run.options
        self._name = f"process {self._index} of {self._count} (host {socket.gethostname()})"
        self._every = min(1.0, self._warn / 4)
        self._files = StallFiles(options.directory, self._index, self._warn, options.prefix)
        self._ended = threading.Event()
        self._thread = threads.Thread(target=self._watch, name="jstep-stalls", daemon=True)
        self._ident = threading.get_ident()
        self._wait = Wait(_START, "")
        # The entry of the present stall in the record of the start, which `_record` replaces while
        # the stall lasts.
        self._recorded: dict[str, Any] | None = None
        if self._warn:
            try:
                self._thread.start()
            except BaseException:  # Ctrl-C, before `__enter__`, so nobody else can stop the thread
                self._ended.set()
                raise

    @property
    def _warn(self) -> float:
        return self._hook.warn_secs or 0.0

    @property
    def _is_shared(self) -> bool:
        """Whether processes read each other's files."""
        return self.run.options.directory is not None and self._count > 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._warn:
            return
        self._ended.set()
        self._thread.join(timeout=10)
        self._end_wait()
        self._files.finish(None)

    def _watch(self) -> None:
        looked_at = time.monotonic()
        cpu_seconds = time.process_time()
        while not self._ended.wait(self._every):
            time_now = time.monotonic()
            elapsed = time_now - looked_at
            looked_at = time_now
            cpu_seconds_before = cpu_seconds
            cpu_seconds = time.process_time()
            # If this thread did not run either, the process was stopped, or the machine slept.
            passed = min(elapsed, 2 * self._every)
            computes = cpu_seconds - cpu_seconds_before > 0.1 * elapsed
            try:
                self._check(passed, 0.1 * passed if computes else passed)
            except Exception:  # an error here must not end the run
                logger.debug("a look for stalls failed", exc_info=True)

    def _check(self, passed: float, idle: float) -> None:
        self._follow(self._current_wait(), passed, idle)
        if self._is_stall(self._wait):
            self._report(self._wait)
        else:
            self._answer_others(self._wait)

    def _answer_others(self, wait: Wait) -> None:
        """Write what this process does if others wait for it, though it does not stall."""
        files = self._files
        is_old = self._is_shared and wait.age > self._warn
        do_others_stall = files.is_reported_elsewhere or any(
            other["stall"] for other in files.others
        )
        if is_old and do_others_stall:
            files.exchange(lambda: self._fields(wait, stall=False), read=True)
        else:
            files.exchange(None, read=is_old)

    def _report(self, wait: Wait) -> None:
        due = wait.due or wait.age
        is_due = wait.age >= due
        self._files.exchange(lambda: self._fields(wait), read=is_due, immediately=is_due)
        self._wait = wait._replace(due=due)
        # Others, which have stalled for as long, need a moment to write their files.
        if wait.age >= due + (3 * self._every if self._is_shared else 0):
            self._wait = wait._replace(due=2 * wait.age, part=self.run.watch.current)
            log_in_time(self._line(wait))
            writer = writer_of(self.run)
            if writer is not None:  # a stalled run may be killed
                request_flush(writer)
        if self._wait.part:
            self._record(self._wait)
        if self._hook.exit_secs is not None and wait.age > self._hook.exit_secs:
            self._exit(self._wait)

    # What the run waits for.

    def _current_wait(self) -> Wait:
        activities = threads.activities_of(self._ident)
        wait = self._wait_of_run(is_tracing=threads.TRACING in activities)
        unfinished = self.run.in_flight.unfinished()
        if threads.AGREEING in activities:
            wait = self._wait_for_others(wait, are_shapes=threads.AGREEING_ON_SHAPES in activities)
        if unfinished is None or wait.kind in _HOST_WAITS:
            return wait
        # Anything else on the host, such as a hook or a save, may wait for the device.
        return _call(unfinished[0], unfinished[1] - 1)

    def _wait_of_run(self, *, is_tracing: bool) -> Wait:
        """Return the wait of the loop, by the activity that it has set."""
        run = self.run
        course = run.course
        activity = course.activity
        step = run.step
        if isinstance(activity, HookCall):
            return self._wait_for_hook(activity, step)
        match activity:
            case Activity.BODY | Activity.AFTER_LOOP:
                return Wait("hook", f"in {activity.value} at step {step}", activity)
            case Activity.ENDING:
                return Wait("close", f"closing after step {step}", "close")
            case Activity.RESTORING:
                return Wait("restore", f"restoring step {course.first}", "restore")
            case Activity.STARTING:
                what = "starting: it looks for checkpoints"
                if course.has_first:
                    what = f"starting at step {step}"
                return Wait(_START, what, _START)
            case Activity.COMPILING:
                return _compilation(step)
            case Activity.FETCHING:
                return Wait(
                    _BATCH, f"waiting for batch {course.first + run.components.batches.consumed}"
                )
        feeder = run.components.feeder
        if activity is Activity.CHECKING:
            return _call(step - feeder.steps, step - 1)
        # Only JAX knows of a compilation within a call of the user's own function.
        if is_tracing or run.components.dispatch.compiler.counts.unfinished >= feeder.received_at:
            return _compilation(step)
        return _call(step, step + feeder.steps - 1)

    def _wait_for_hook(self, call: HookCall, step: int) -> Wait:
        key = timing_key(call)
        if key == SAVING or self.run.watch.current == SAVING:
            return Wait("save", f"saving step {step}", SAVING)
        if key == (id(call.hook), EVALUATING):
            batches = threads.SignsOfLife.evaluation_batches
            return Wait("evaluation", f"in an evaluation at step {step}", key, taken=batches)
        kind = "hook" if is_user_hook(call.hook) else "built-in hook"
        return Wait(kind, f"in the hook {hook_name(call.hook)} at step {step}", key)

    def _wait_for_others(self, wait: Wait, *, are_shapes: bool) -> Wait:
        step = self.run.step
        if are_shapes:
            topic = f"the new shapes of batch {step}"
        elif wait.kind in (CALL, *_HOST_WAITS):
            topic = f"what is due at step {step}"
        else:
            topic = wait.what.removeprefix("in ")
        return Wait(AGREEMENT, f"waiting for other processes to agree on {topic}", AGREEMENT)

    def _follow(self, present: Wait, passed: float, idle: float) -> None:
        if self._wait.is_same(present):
            self._wait = self._wait._replace(
                age=self._wait.age + passed, idle=self._wait.idle + idle
            )
        else:
            self._end_wait()
            self._wait = present

    def _end_wait(self) -> None:
        if self._wait.part:
            log_in_time(
                f"{self._name}, which was {self._wait.what}, resumed after "
                f"{_secs(self._wait.age)} s"
            )
            self._record(self._wait)
            self._recorded = None

    def _record(self, wait: Wait) -> None:
        file = file_of(self.run)
        if file is None:
            return
        unfinished = self.run.in_flight.unfinished()
        stall = {
            "time": round(time.time(), 6),
            "step": self.run.step if unfinished is None else unfinished[0],
            "part": wait.part or self.run.watch.current,
            "stalled": round(wait.age, 3),
            "what": wait.what,
            "process": self._index,
        }
        stalls = file.fields["stalls"]
        if stalls and stalls[-1] is self._recorded:
            stalls = stalls[:-1]
        self._recorded = stall
        file.update({"stalls": [*stalls, stall][-_MAX_RECORDED:]})
        file.due.set()

    # The definition of a stall.

    def _is_stall(self, wait: Wait) -> bool:
        usual = self._usual(wait)
        if usual is None:
            return wait.idle > 10 * self._warn
        longer = min(self._hook.factor * usual, usual + 10 * self._warn)
        if wait.steps is None:
            return wait.age > max(self._warn, longer)
        first, last = wait.steps
        return wait.age > max(self._warn, longer, 2 * usual * (last + 1 - first))

    def _usual(self, wait: Wait) -> float | None:
        """Return the usual seconds of an activity, or of one step of a call; None if unknown."""
        watch = self.run.watch
        if wait.timing_key is not None:
            return max(watch.lasted[wait.timing_key], default=None)
        if wait.kind == _COMPILE:
            # The times of steps do not tell how long a program takes to compile.
            return None
        lasted = watch.lasted[WAITING] if wait.kind == _BATCH else self.run.in_flight.per_step
        seconds = [*lasted]  # a copy, as the loop adds to it
        return statistics.median(seconds) if seconds else None

    # Messages.

    def _line(self, wait: Wait) -> str:
        usual = self._usual(wait)
        place = self._place(wait)
        text = f"{self._name} has been {wait.what} for {_secs(wait.age)} s"
        if usual is not None:
            text += f" (usually {_secs(usual)} s)"
        if place:
            text += f": {place}"
        return "; ".join([text, *self._elsewhere()])

    def _elsewhere(self) -> Iterator[str]:
        """Describe the other processes: count those that wait for the same, and name the rest."""
        files = self._files
        if files.is_reported_elsewhere:  # the process before this one names them
            return
        others = files.others  # once, as the thread that reads their files replaces it
        counts = Counter(other["what"] for other in others)
        for what, count in counts.items():
            if count > 1:
                yield f"{count} others are {what}"
        single = [other for other in others if counts[other["what"]] == 1]
        for other in single[:_MAX_NAMED]:
            yield f"process {other['process']} (host {other['host']}) is {other['what']}"
        shown = files.shown
        if not self._is_shared or shown is None:
            return
        # Those that live have had the time to write and to be read.
        if time.monotonic() - shown < 2.5 * files.period:
            return
        missing = silent([{"process": self._index}, *others], self._count)
        if missing:
            yield (
                f"no sign of life from process{'es' if len(missing) > 1 else ''} "
                f"{', '.join(map(str, missing))}"
            )

    def _place(self, wait: Wait) -> str:
        """Return the innermost line outside all libraries, else outside jstep, else in jstep."""
        frames = sys._current_frames()
        stacks: list[FrameType] = []
        for ident in [*self._threads_to_blame(wait, frames), self._ident]:
            stacks += _stack(frames.get(ident), is_whole=False)
        others = [frame for frame in stacks if not frame.f_code.co_filename.startswith(_PACKAGE)]
        users = [frame for frame in others if not frame.f_code.co_filename.startswith(_LIBRARIES)]
        for frame in users or others or stacks:
            return os.path.basename(_as_line(frame))
        return ""

    def _threads_to_blame(self, wait: Wait, frames: Collection[int]) -> list[int]:
        """Return the threads that the loop's thread may wait for.

        What they do says more than where it waits.
        """
        if wait.kind in (_BATCH, _COMPILE):
            makers = threads.threads_doing(threads.MAKING)
            return [
                ident
                for ident in makers
                if threads.WAITING_FOR_ROOM not in threads.activities_of(ident)
            ]
        if wait.kind == CALL:
            # Threads of XLA, which run the callbacks of a program.
            python_threads = {thread.ident for thread in threading.enumerate()}
            return [ident for ident in frames if ident not in python_threads]
        return []

    def _fields(self, wait: Wait, *, stall: bool = True) -> dict[str, Any]:
        """Return the fields of the file of this process, except the identity of the process."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks: dict[str, list[str]] = {}
        for ident, frame in sys._current_frames().items():
            stacks[f"{names.get(ident, '')} {ident}"] = [_as_line(line) for line in _stack(frame)]
        return {
            "processes": self._count,
            "step": self.run.step,
            "part": self.run.watch.current,
            "kind": wait.kind,
            "what": wait.what.replace("in a call of ", "in "),
            "since": time.time() - wait.age,
            "stall": stall,
            "line": self._place(wait),
            "steps": wait.steps,
            "threads": stacks,
        }

    # The exit. What may need a lock that the stalled code holds has a limited time.

    def _exit(self, wait: Wait) -> None:
        log_in_time(
            f"{self._name} has been {wait.what} for {_secs(wait.age)} s: it ends with exit code "
            f"{STALL_EXIT_CODE}"
        )
        threads.done_in_time(
            lambda: faulthandler.dump_traceback(2, all_threads=True), 5.0, name="jstep-stall"
        )
        threads.done_in_time(lambda: self._record(wait), 5.0, name="jstep-stall")
        self._files.finish(lambda: {**self._fields(wait), "exit_code": STALL_EXIT_CODE})
        # A restart may resume from a state between two iterations only, and a save needs all
        # processes.
        may_save = wait.kind == _BATCH and self._count == 1
        usual = self._usual(Wait("save", "", SAVING))
        save_secs = 10 * self._warn if usual is None else max(self._warn, 3 * usual)
        exit_after_stall(
            self.run, may_save=may_save, save_secs=save_secs, grace_secs=self._grace_secs()
        )

    def _grace_secs(self) -> float:
        """Return how long to wait for the other processes, so that each writes its wait."""
        if self._count == 1:
            return 0.0
        secs = max(1.5, min(5.0, self._warn))
        # Without process 0, JAX aborts the others, so that it waits longest.
        return 2 * secs if self._index == 0 else secs


def _compilation(step: int) -> Wait:
    return Wait(_COMPILE, f"compiling step {step}'s program")


def _call(first: int, last: int) -> Wait:
    steps = f"step {first}" if last == first else f"steps {first} to {last}"
    return Wait(CALL, f"in a call of {steps}", steps=(first, last))


def _secs(seconds: float) -> str:
    """Format with two digits, or as whole seconds: 0.02, 1.5, 94."""
    if seconds >= 9.95:
        return f"{seconds:.0f}"
    return f"{float(f'{seconds:.2g}'):.6f}".rstrip("0").rstrip(".")


def _stack(frame: FrameType | None, *, is_whole: bool = True) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost first.

    Those of the script that called `train` are included only if `is_whole`.
    """
    while frame is not None and (is_whole or frame.f_code.co_filename != _LOOP):
        yield frame
        frame = frame.f_back


def _as_line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
