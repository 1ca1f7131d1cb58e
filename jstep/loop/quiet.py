"""Calls between two steps at which something is due: only batches, calls and bodies, in one loop.

Most iterations of `Run._iterate` find nothing to do besides their call and the body, and to find that out takes half of
the loop's own time. A stretch asks once up to which step nothing is due, and by which clocks. After each call it asks
only for what the body or other threads may have begun.
"""

from collections.abc import Iterator

from jstep.core.trees import batch_to_args
from jstep.hooks.cadence import Cadence
from jstep.hooks.run_hook import LoopState
from jstep.loop.chunks import Chunk
from jstep.loop.course import Activity
from jstep.loop.dispatch import is_profiling
from jstep.loop.run_context import RunContext

_PAUSE = 64
"""The number of steps without a try after batches have cut a stretch short, mostly by other shapes, or allow none."""
_MIN_CALLS = 4
"""The least number of calls of a stretch: to begin and to end one costs what three of its calls save."""


class QuietStretch:
    """Takes steps of a run whose calls need nothing but their body, and leaves the run as its loop would.

    The run has one process, calls of one step, and batches that JAX places.

    Attributes:
        next_try: The step before which `take` need not be called, as it would take none.
        has_asked: Whether the latest stretch has asked for a batch that it did not take: the loop asks again first.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._latest_program: object = None
        self.next_try = 0
        self.has_asked = False

    @classmethod
    def of(cls, run: RunContext) -> "QuietStretch | None":
        """Return the stretches of a run; None if each of its calls needs more."""
        table = run.components.dispatch.table
        is_placed = table.on_device or run.options.batch_sharding is not None
        if not run.signals.is_single_process or table.is_looped or is_placed or run.components.runner.acts_before_steps:
            return None
        return cls(run)

    def take(self, latest: Chunk) -> Iterator[int]:
        """Take the steps before the next one at which something is due, if there are several; `latest` was called.

        Yields each step that a body follows, to the loop, which calls it.
        """
        self.has_asked = False
        run = self._run
        program = latest.program
        is_repeated = program is self._latest_program  # batches may alternate between shapes
        self._latest_program = program
        if not is_repeated or not program.is_settled:
            return
        first = run.course.position.step
        if not run.components.batches.can_take_alike:
            self._pause(first)
            return
        last = self._next_due(latest) - 1
        if last - first < _MIN_CALLS or not self._is_quiet():
            return
        try:
            yield from self._take_until(last, latest)
        finally:
            step = run.course.position.step
            run.components.feeder.go_on_at(step)
        if step - first < _MIN_CALLS:
            self._pause(step)

    def _pause(self, step: int) -> None:
        self.next_try = step + _PAUSE
        self._latest_program = None  # that of the call before the next try is not known

    def _next_due(self, latest: Chunk) -> int:
        """Return the next step at which a hook, a body of `every`, another stage or the end is due."""
        course = self._run.course
        body = Cadence(course.body_interval).next_multiple(course.position.step)
        hooks = self._run.components.runner.next_due_step
        return min(hooks, body, latest.program.stage.stop, course.stop_step)

    def _is_quiet(self) -> bool:
        run = self._run
        course = run.course
        # A state that a hook or the body has made may need another program, which the loop's next call reports.
        if course.replaced_at == course.position.step or run.components.dispatch.call_listeners:
            return False
        if run.signals.received is not None or course.stopped_by is not None:
            return False
        return not run.pending and not run.failures and not is_profiling()

    def _take_until(self, last: int, latest: Chunk) -> Iterator[int]:
        """Take the steps up to `last`, or until a batch is of another type, a clock is due or something begins.

        Without a body, the status stays `BETWEEN`. In `Run._take` it becomes `WITHIN` with the new position, as hooks
        follow there. Here only bookkeeping follows, so each position is the state between two iterations.
        """
        run = self._run
        course = run.course
        feeder = run.components.feeder
        in_flight = run.in_flight
        sums = run.sums
        failures = run.failures
        signals = run.signals
        runner = run.components.runner
        dispatch = run.components.dispatch
        has_bodies = course.has_body and course.body_interval is None
        counts = dispatch.compiler.counts
        num_programs = counts.programs
        program = latest.program
        deadlines = runner.deadlines()
        checks_at = feeder.checks_at
        chunk = Chunk(program, (), 1, course.position.step)  # one for all calls: `run` does not keep it
        for step in range(course.position.step + 1, last + 1):
            course.activity = Activity.FETCHING
            batch = feeder.take_alike()
            if batch is None:
                self.has_asked = True
                return
            course.activity = Activity.CALLING
            if in_flight.is_check_due:
                in_flight.make_room()
                signals.check()  # as after each wait
            chunk.args = batch_to_args(batch)
            chunk.first = step - 1
            old_state = course.position.state
            state, metrics = program.run(old_state, chunk, sums)
            if counts.programs != num_programs:  # arrays of the same types may be on other devices
                dispatch.note_compiled(old_state, chunk, (state, metrics), feeder.received_at)
                num_programs = counts.programs
            course.position = LoopState(step, state, metrics, program.rows)
            in_flight.add(step - 1, step, state, metrics)
            run.steps_by_rows[program.rows] += 1
            is_due = False
            for clock, deadline in deadlines:
                if clock() >= deadline:
                    is_due = True
            if is_due or has_bodies:
                course.forbid_saves()
                if is_due:
                    runner.call_after_step(step)
                if has_bodies:
                    course.take_due_body()
                    yield step
                course.end_iteration()
            # What the body, other threads, the profiler, or a signal have begun.
            if is_due or failures or course.replaced_at == step or is_profiling():
                return
            if course.stopped_by is not None or signals.received is not None:
                return
            if feeder.received_at >= checks_at:
                return
