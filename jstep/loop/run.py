"""One run of `train`: restore, run the steps between the hooks, save, whatever ends it."""

import contextlib
import functools
import logging
from typing import Any, NoReturn

from jstep.core.notes import note
from jstep.hooks import CheckpointSaverHook, memory
from jstep.hooks.audit import audited
from jstep.hooks.hook import check_step, name_of
from jstep.loop.accounts import Accounts
from jstep.loop.around import Around
from jstep.loop.beginning import Beginning, beginning, opened
from jstep.loop.cards import cards_of
from jstep.loop.drive import At, drive
from jstep.loop.early import Early, early_of, read_from
from jstep.loop.endings import ended_early, why_done
from jstep.loop.equipment import Equipment, equipment
from jstep.loop.feed import Feed, Fetched, calls, owned
from jstep.loop.options import Options
from jstep.loop.positions import POSITION, POSITIONS, of_all_processes
from jstep.loop.programs import Programs
from jstep.loop.rescue import batches_named, is_past_a_nan, rescue
from jstep.loop.saving import HOOKS, STOPPED, Wiring
from jstep.loop.score import ahead_of
from jstep.loop.signals import StopSignals, StopWaiting
from jstep.loop.stages import Edges, TrainSteps
from jstep.loop.start import StartTimes
from jstep.state import TrainState
from jstep.timeline import stopwatch

_logger = logging.getLogger("jstep")


class Run:
    """One run of `train`.

    Args:
        options: What `train` was given.
        stages: The training steps.
        state: Where to start.
        times: How long the start takes.
    """

    def __init__(self, options: Options, stages: TrainSteps, state: TrainState, times: StartTimes) -> None:
        self._options, self._stages, self._times = options, stages, times
        several = options.steps_per_call > 1
        self._signals = StopSignals(self._before_the_first_step)
        self._at = At(0, state)
        self._accounts = Accounts(options, self._at)
        watch = self._accounts.watch
        self._programs = Programs(stages, options.unroll, several=several, first_call=times.compiling, watch=watch)
        self._begun: Beginning | None = None
        self._equipped: Equipment | None = None
        self._around: Around | None = None
        self._feed: Feed | None = None
        self._fetched = Fetched()

    def go(self, batches: Any) -> TrainState:
        """Runs to its end; returns the last state."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._accounts)  # closed last
            stack.enter_context(self._signals)
            try:
                accounts = self._accounts
                opening = opened(self._options, self._at.state, stack, self._signals, accounts.open)
                self._fetched = Fetched()
                early = early_of(
                    batches,
                    opening,
                    self._options,
                    self._stages,
                    self._programs,
                    self._at.state,
                    self._fetched,
                    self._times,
                    stack,
                    stopping=lambda: self._signals.interrupts,
                )
                with contextlib.nullcontext() if opening.latest is None else self._times.part("restore"):
                    begun = self._begun = beginning(opening, self._at.state)
                self._at.step, self._at.state = begun.step, begun.state
                accounts.began(begun.step)
                write = accounts.write if accounts.is_open else None
                self._programs.cards = cards_of(write, self._options, self._stages, begun, batches, stack)
                written = accounts.before_save
                wiring = Wiring(self._positions, self._stopped_by, self._before_save, accounts.watch, written)
                equipped = self._equipped = equipment(
                    self._options, begun, self._programs, wiring, stack, self._signals.to_stop
                )
                around = self._around = Around(
                    equipped.hooks,
                    begun.step,
                    equipped.run.sums,
                    equipped.run.pending,
                    to_stop=self._signals.to_stop,
                    watch=accounts.watch,
                    on_first=self._times.log if equipped.logs_lines else lambda: None,
                )
                self._feed = self._fed(batches, early, begun, equipped, around, stack)
                return self._run(begun, around)
            except BaseException as error:
                self._rescue(error)
                if self._signals.at_once and isinstance(error, KeyboardInterrupt):
                    again = KeyboardInterrupt(f"SIGINT came twice: the run was left at once, at step {self._at.step}")
                    again.state = getattr(error, "state", None)  # type: ignore[attr-defined]
                    # From inside of whatever was at work, a traceback of many pages would come.
                    raise again.with_traceback(None) from None
                raise
            finally:
                self._accounts.watch.switch(stopwatch.SAVING)  # what is left is to wait for what is being written
                # What refers to the run from its hooks and signals is not to keep its state alive.
                self._equipped = self._around = self._feed = None
                self._programs.starting = self._programs.ahead = self._programs.cards = None
                self._signals.on_first = _no_haste

    def _fed(
        self,
        batches: Any,
        early: Early | None,
        begun: Beginning,
        equipped: Equipment,
        around: Around,
        stack: contextlib.ExitStack,
    ) -> Feed | None:
        """The batches as calls, once the hooks have begun; None where no step is to be made."""
        options = self._options
        if early is not None:
            source, items = early.source, iter(early.first)
        else:
            is_kept = begun.saver is not None
            source = read_from(batches, begun.step, options.last_step, begun.kept, is_kept=is_kept)
            items = self._times.first_of(owned(source, self._fetched))
        memory.check(equipped.hooks)
        done = around.begin(begun.state)
        if begun.restored is not None:
            done = memory.set_states(equipped.hooks, begun.kept.get(HOOKS)) or done
            if equipped.saving is not None:
                equipped.saving.restored(begun.restored, begun.state)
            done = around.resume(self._at) or done
        if done or begun.step >= options.last_step:
            _logger.info("the run is at step %d already: no step is made%s", begun.step, why_done(begun, options))
            return None
        if begun.kept.get(STOPPED) is not None:
            _logger.info("%s stopped this run at step %d; it resumes", begun.kept[STOPPED], begun.step)
        edges = Edges(self._stages, source.next_change)
        self._programs.ahead = ahead_of(
            self._programs,
            edges,
            source,
            self._at.state,
            begun.step,
            options.last_step,
            options.steps_per_call,
            options.batch_sharding,
            stopping=lambda: self._signals.interrupts,
        )
        if self._programs.ahead is not None:
            stack.callback(self._programs.ahead.close)
        stacked = options.steps_per_call > 1
        made = calls(
            items,
            begun.step,
            around.lengths(options.last_step, options.steps_per_call, edges) if stacked else None,
            options.batch_sharding,
            on_device=self._programs.on_device,
            stack_one=self._programs.stacks_one,
            why_one=lambda: around.why_one,
        )
        feed = Feed(source, made, stopping=lambda: self._signals.interrupts, watch=self._accounts.watch)
        stack.callback(feed.close)
        self._signals.on_first = self._while_it_runs
        return feed

    def _run(self, begun: Beginning, around: Around) -> TrainState:
        at, last_step = self._at, self._options.last_step
        called_off = False
        if self._feed is not None:
            try:
                apart = functools.partial(self._accounts.watch.part, stopwatch.HOOKS)
                take = audited(self._programs, self._programs.step_of, around.hooks, apart)
                drive(take, at.state, self._feed, begun.step, last_step, around.after, at, around.before)
            except StopWaiting:
                called_off = True
            called_off = called_off or around.called_off
            self._signals.on_first = _no_haste
            if at.step < last_step and not (called_off or around.stopped_by is not None):
                ended_early(at, begun, last_step)
        else:
            self._signals.on_first = _no_haste
        around.last(at)
        check_step(at.step, at.state)
        if not called_off:
            around.end(at)
        if self._signals.received is not None:  # also where it came meanwhile
            self._leave()
        return at.state

    def _positions(self) -> dict[str, Any]:
        if self._begun is None:
            return {}
        if self._feed is None:  # no step was made: they are where they were
            return {key: self._begun.kept[key] for key in (POSITION, POSITIONS) if key in self._begun.kept}
        # A batch that was handed out and made no step is to come again.
        return of_all_processes(self._feed.position_after(self._at.step - self._begun.step))

    def _stopped_by(self) -> str | None:
        """Who stopped the run, now or, where no step follows, when it ran."""
        if self._around is None or self._begun is None:
            return None
        kept = self._begun.kept.get(STOPPED) if self._feed is None else None
        return self._around.stopped_by or kept

    def _before_save(self, step: int) -> bool:
        return self._around is not None and self._around.before_save(step)

    # Signals.

    def _before_the_first_step(self) -> None:
        raise self._signals.stopped("before its first step")

    def _while_it_runs(self) -> None:
        if self._feed is not None and self._feed.waiting:
            raise StopWaiting

    def _leave(self) -> NoReturn:
        at, savers = self._at, self._savers()
        when = f"after step {at.step}"
        if savers and is_past_a_nan(at, self._programs.skip_metric):
            self._before_save(at.step)  # a hook that looks for it says more
            raise self._signals.stopped(f"{when}, which is not saved: its loss is not finite")
        saved = [hook.save(at.step, at.state, wait=True) for hook in savers]
        if saved:
            outcome = "is saved; start the run again to go on" if all(saved) else "is not saved, as a hook demands"
            when = f"{when}, which {outcome}"
        raise self._signals.stopped(when)

    def _savers(self) -> list[CheckpointSaverHook]:
        return [] if self._equipped is None else self._equipped.all_saving

    # Errors.

    def _rescue(self, error: BaseException) -> None:
        self._signals.on_first = _no_haste
        at, around = self._at, self._around
        savers = [] if self._feed is None else self._savers()
        if self._begun is None or around is None:
            rescue(error, at, None, during="", savers=[], skip_metric=None)
            return
        during = self._during()
        if self._signals.at_once or (self._signals.received is not None and not isinstance(error, Exception)):
            savers = []  # it is saved, or is not to be
        if not self._signals.at_once:
            around.last(at, failed=lambda other: None if other is error else note(error, f"Besides, {other}"))
        rescue(error, at, self._begun.step, during=during, savers=savers, skip_metric=self._programs.skip_metric)

    def _during(self) -> str:
        """What was under way, in words that name step and batch."""
        at, around, feed = self._at, self._around, self._feed
        assert around is not None
        at_step = f"at step {at.step}"
        last = f", which batch {at.step - 1} made" if self._begun is not None and at.step > self._begun.step else ""
        if around.acting is not None:
            hook, method = around.acting
            return f"{at_step}{last}, in {name_of(hook)}.{method}"
        if feed is None:
            return at_step
        if feed.waiting:
            return f"{at_step}{last}, while batch {self._being_fetched()} was fetched"
        if self._signals.received is not None or at.step >= self._options.last_step or around.stopped_by is not None:
            return f"{at_step}{last}"
        return f"{at_step}{last}, in the step that takes {batches_named(at.step, self._steps())}"

    def _being_fetched(self) -> int:
        """With several steps a call, the batches before it in that call are there already."""
        if self._begun is None:
            return self._at.step
        return self._begun.step + self._fetched.count

    def _steps(self) -> int:
        return 1 if self._feed is None else self._feed.steps


def _no_haste() -> None:
    """The first signal where nothing is waited for: it is looked for when there is time."""
