"""One run of `train`: restore, run steps and hooks, save, and handle signals and errors."""

import contextlib
import functools
import logging
from typing import Any, NoReturn

from jstep.core.notes import note
from jstep.hooks import CheckpointSaverHook, NanLossHook, hook_state
from jstep.hooks.audit import audited
from jstep.hooks.hook import check_step, name_of
from jstep.hooks.metric_sums import MetricSums
from jstep.loop.background_compiler import shapes_of
from jstep.loop.batch_feeder import BatchFeeder, FetchCounter, copied_batches
from jstep.loop.build_hooks import HookSet, build_hooks
from jstep.loop.cards import cards_of
from jstep.loop.compile_ahead import compile_ahead
from jstep.loop.end_messages import reason_done, report_early_end
from jstep.loop.hook_runner import HookRunner
from jstep.loop.options import Options
from jstep.loop.overlapped_start import OverlappedStart, open_source, overlap_start
from jstep.loop.positions import POSITION, POSITIONS, gather_positions
from jstep.loop.programs import Programs
from jstep.loop.restore_or_init import RunStart, open_checkpoints, restore_or_init
from jstep.loop.run_saver_hook import HOOKS, STOPPED, SaverCallbacks
from jstep.loop.run_steps import LoopState, run_steps
from jstep.loop.save_on_failure import format_batches, save_on_failure, why_not_finite
from jstep.loop.signals import StopSignals, StopWaiting
from jstep.loop.stages import StageBoundaries, TrainSteps
from jstep.loop.start_times import StartTimes
from jstep.loop.timeline_recorder import TimelineRecorder
from jstep.state import TrainState
from jstep.timeline import stopwatch

_logger = logging.getLogger("jstep")


class Run:
    """One run of `train`.

    Args:
        options: The arguments of `train`.
        stages: The training steps.
        state: The initial state.
        times: Measures the start-up.
    """

    def __init__(self, options: Options, stages: TrainSteps, state: TrainState, times: StartTimes) -> None:
        self._options, self._stages, self._times = options, stages, times
        self._signals = StopSignals(self._before_the_first_step)
        self._loop = LoopState(0, state)
        self._recorder = TimelineRecorder(options, self._loop)
        watch = self._recorder.watch
        limits = [hook.max_skipped_steps for hook in options.hooks if isinstance(hook, NanLossHook)]
        sums = MetricSums(limit for limit in limits if limit is not None)
        self._programs = Programs(stages, options.steps_per_call, sums=sums, first_call=times.compiling, watch=watch)
        self._programs.state_shapes = shapes_of(state)
        self._run_start: RunStart | None = None
        self._hook_set: HookSet | None = None
        self._runner: HookRunner | None = None
        self._feeder: BatchFeeder | None = None
        self._fetched = FetchCounter()

    def run(self, batches: Any) -> TrainState:
        """Run to the end and return the last state."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._recorder)  # closed last
            stack.enter_context(self._signals)
            try:
                recorder = self._recorder
                checkpoints = open_checkpoints(self._options, self._loop.state, stack, self._signals, recorder.open)
                self._fetched = FetchCounter()
                overlapped = overlap_start(
                    batches,
                    checkpoints,
                    self._options,
                    self._stages,
                    self._programs,
                    self._loop.state,
                    self._fetched,
                    self._times,
                    stack,
                    stopping=lambda: self._signals.interrupts,
                )
                with contextlib.nullcontext() if checkpoints.latest is None else self._times.part("restore"):
                    start = self._run_start = restore_or_init(checkpoints, self._loop.state)
                self._loop.step, self._loop.state = start.step, start.state
                recorder.began(start.step)
                write = recorder.write if recorder.is_open else None
                self._programs.cards = cards_of(write, self._options, self._stages, start, batches, stack)
                written = recorder.before_save
                callbacks = SaverCallbacks(
                    self._positions,
                    self._stopped_by,
                    self._before_save,
                    recorder.watch,
                    written,
                    lambda: self._loop.state,
                )
                hook_set = self._hook_set = build_hooks(
                    self._options, start, self._programs, callbacks, stack, self._signals.to_stop
                )
                runner = self._runner = HookRunner(
                    hook_set.hooks,
                    start.step,
                    hook_set.run.sums,
                    hook_set.run.transfers,
                    to_stop=self._signals.to_stop,
                    watch=recorder.watch,
                    on_first=self._times.log if hook_set.logs_lines else lambda: None,
                    edge_after=self._stages.edge_after,
                )
                self._feeder = self._make_feeder(batches, overlapped, start, hook_set, runner, stack)
                return self._run(start, runner)
            except BaseException as error:
                self._save_on_failure(error)
                if self._signals.at_once and isinstance(error, KeyboardInterrupt):
                    again = KeyboardInterrupt(f"SIGINT came twice: the run was left at once, at step {self._loop.step}")
                    again.state = getattr(error, "state", None)  # type: ignore[attr-defined]
                    # The traceback of the interrupted code would fill many pages.
                    raise again.with_traceback(None) from None
                raise
            finally:
                self._recorder.watch.switch(stopwatch.SAVING)  # only waiting for pending writes is left
                # References to the run from hooks and signal handlers must not keep its state alive.
                self._hook_set = self._runner = self._feeder = None
                self._programs.first_compiler = self._programs.ahead_compiler = self._programs.cards = None
                self._signals.on_first = _do_nothing

    def _make_feeder(
        self,
        batches: Any,
        overlapped: OverlappedStart | None,
        start: RunStart,
        hook_set: HookSet,
        runner: HookRunner,
        stack: contextlib.ExitStack,
    ) -> BatchFeeder | None:
        """Begin the hooks and return the batches as calls; None if there are no steps to run."""
        options = self._options
        if overlapped is not None:
            source, items = overlapped.source, iter(overlapped.first)
        else:
            resumable = start.saver is not None
            source = open_source(batches, start.step, options.last_step, start.extra, resumable=resumable)
            items = self._times.first_of(copied_batches(source, self._fetched))
        hook_state.check_keys(hook_set.hooks)
        done = runner.begin(start.state)
        if start.restored is not None:
            done = hook_state.set_states(hook_set.hooks, start.extra.get(HOOKS)) or done
            if hook_set.saving is not None:
                hook_set.saving.restored(start.restored, start.state)
            done = runner.resume(self._loop) or done
        if done or start.step >= options.last_step:
            _logger.info("the run is at step %d already: no step is run%s", start.step, reason_done(start, options))
            return None
        if start.extra.get(STOPPED) is not None:
            _logger.info("%s stopped this run at step %d; it resumes", start.extra[STOPPED], start.step)
        boundaries = StageBoundaries(self._stages, source.next_change)
        self._programs.ahead_compiler = compile_ahead(
            self._programs,
            boundaries,
            source,
            self._loop.state,
            start.step,
            options.last_step,
            options.batch_sharding,
            stopping=lambda: self._signals.interrupts,
        )
        if self._programs.ahead_compiler is not None:
            stack.callback(self._programs.ahead_compiler.close)
        ends = runner.ends(options.last_step, boundaries) if options.steps_per_call > 1 else None
        made = self._programs.calls(items, start.step, ends, options.batch_sharding)
        feeder = BatchFeeder(source, made, stopping=lambda: self._signals.interrupts, watch=self._recorder.watch)
        stack.callback(feeder.close)
        if ends is not None:
            stack.callback(ends.close)  # first, as the thread of the feeder may wait for one
        self._signals.on_first = self._while_it_runs
        return feeder

    def _run(self, start: RunStart, runner: HookRunner) -> TrainState:
        loop, last_step = self._loop, self._options.last_step
        interrupted = False
        if self._feeder is not None:
            try:
                timed = functools.partial(self._recorder.watch.part, stopwatch.HOOKS)
                run_call = audited(self._programs, self._programs.repeated, runner.hooks, timed)
                run_steps(run_call, loop.state, self._feeder, start.step, last_step, runner.after, loop, runner.before)
            except StopWaiting:
                interrupted = True
            interrupted = interrupted or runner.interrupted
            self._signals.on_first = _do_nothing
            if loop.step < last_step and not (interrupted or runner.stopped_by is not None):
                report_early_end(loop, start, self._options)
        else:
            self._signals.on_first = _do_nothing
        runner.last(loop)
        check_step(loop.step, loop.state)
        if not interrupted:
            runner.end(loop)
        if self._signals.received is not None:  # also if it arrived during the hooks above
            self._exit_on_signal()
        return loop.state

    def _positions(self) -> dict[str, Any]:
        if self._run_start is None:
            return {}
        if self._feeder is None:  # no step was run: the positions have not changed
            return {key: self._run_start.extra[key] for key in (POSITION, POSITIONS) if key in self._run_start.extra}
        # A batch that was fetched but not trained on is fetched again after a restart.
        return gather_positions(self._feeder.position_after(self._loop.step - self._run_start.step))

    def _stopped_by(self) -> str | None:
        """The hook that stopped the run, now or, if this run takes no step, the earlier run."""
        if self._runner is None or self._run_start is None:
            return None
        kept = self._run_start.extra.get(STOPPED) if self._feeder is None else None
        return self._runner.stopped_by or kept

    def _before_save(self, step: int) -> bool:
        return self._runner is not None and self._runner.before_save(step)

    # Signals.

    def _before_the_first_step(self) -> None:
        raise self._signals.stopped("before its first step")

    def _while_it_runs(self) -> None:
        if self._feeder is not None and self._feeder.waiting:
            raise StopWaiting

    def _exit_on_signal(self) -> NoReturn:
        loop, savers = self._loop, self._savers()
        when = f"after step {loop.step}"
        if savers and (why := why_not_finite(loop, self._programs.sums, self._programs.skip_metric)):
            self._before_save(loop.step)  # `NanLossHook` raises a more specific error
            raise self._signals.stopped(f"{when}, which is not saved: {why}")
        saved = [hook.save(loop.step, loop.state, wait=True) for hook in savers]
        if saved:
            outcome = "is saved; start the run again to resume" if all(saved) else "is not saved, as a hook demands"
            when = f"{when}, which {outcome}"
        raise self._signals.stopped(when)

    def _savers(self) -> list[CheckpointSaverHook]:
        return [] if self._hook_set is None else self._hook_set.all_saving

    # Errors.

    def _save_on_failure(self, error: BaseException) -> None:
        self._signals.on_first = _do_nothing
        loop, runner = self._loop, self._runner
        savers = [] if self._feeder is None else self._savers()
        if self._run_start is None or runner is None:
            save_on_failure(error, loop, None, during="", savers=[], sums=self._programs.sums, skip_metric=None)
            return
        during = self._describe_position()
        if self._signals.at_once or (self._signals.received is not None and not isinstance(error, Exception)):
            savers = []  # it is saved already, or must not be saved
        if not self._signals.at_once:
            runner.last(loop, failed=lambda other: None if other is error else note(error, f"Additionally, {other}"))
        save_on_failure(
            error,
            loop,
            self._run_start.step,
            during=during,
            savers=savers,
            sums=self._programs.sums,
            skip_metric=self._programs.skip_metric,
        )

    def _describe_position(self) -> str:
        """Describe what the run was doing, naming the step and the batch."""
        loop, runner, feeder = self._loop, self._runner, self._feeder
        assert runner is not None
        at_step = f"at step {loop.step}"
        last = (
            f", after the update with batch {loop.step - 1}"
            if self._run_start is not None and loop.step > self._run_start.step
            else ""
        )
        if runner.current_call is not None:
            hook, method = runner.current_call
            return f"{at_step}{last}, in {name_of(hook)}.{method}"
        if feeder is None:
            return at_step
        if feeder.waiting:
            return f"{at_step}{last}, while batch {self._being_fetched()} was fetched"
        is_over = self._signals.received is not None or loop.step >= self._options.last_step
        if is_over or runner.is_checking or runner.stopped_by is not None:
            return f"{at_step}{last}"
        return f"{at_step}{last}, while running the step on {format_batches(loop.step, self._steps())}"

    def _being_fetched(self) -> int:
        """The number of the batch being fetched: a call of several steps may have fetched some of them already."""
        if self._run_start is None:
            return self._loop.step
        return self._run_start.step + self._fetched.count

    def _steps(self) -> int:
        return 1 if self._feeder is None else self._feeder.steps


def _do_nothing() -> None:
    """The handler of the first signal while the loop waits for nothing: `to_stop` sees the signal later."""
