"""The hooks of a run: called when they are due, and at its end."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

from jstep.core import trees
from jstep.core.exceptions import note
from jstep.core.stopwatch import FIRST_CALL, HOOKS, STEPPING
from jstep.hooks.cadence import Cadence, Due, next_call
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.hook import NEVER, Hook, check_hook_result, check_step, name_of
from jstep.hooks.run_hook import RunHook
from jstep.hooks.states import is_public
from jstep.loop.run import Calling, Run
from jstep.loop.saving import ENDED, RunSaverHook
from jstep.loop.stages import EndsAhead, StageBoundaries


class HookRunner:
    """The hooks of a run, called in order.

    Args:
        run: The run, with all of its hooks.

    Attributes:
        is_checking: Whether the first state of a stage is being checked.
        ended_at: The step at which `end` of the hooks was called last, by this start or an earlier one, or None.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = [hook for hook in run.hooks if _overrides(hook, "before_step")]
        self._due: list[Due] = []
        self._ends: EndsAhead | None = None
        self.is_checking = self._was_last = False
        self._next_check = run.first
        self.ended_at: int | None = run.resumed.extra.get(ENDED)
        # Hooks of the user's own that have something to do at the end; what jstep's do there shows in the checkpoint.
        self._ends_of_users = any(_overrides(hook, "end") and not is_public(type(hook)) for hook in run.options.hooks)

    def begin(self) -> bool:
        """Begin the hooks; return whether one of them ends the run before any step."""
        run, is_done = self._run, False
        for hook in run.hooks:
            if hasattr(hook, "begin") and self._call(hook, "begin", run.state):
                is_done = True
        self._due = [Due(hook, run.first) for hook in run.hooks if _acts(hook)]
        self._timed = [due for due in self._due if due.deadline != math.inf]
        self._next_due = min((due.next for due in self._due), default=NEVER)
        return is_done

    def before(self) -> None:
        """Call `before_step` of the hooks that have one, before a call."""
        for hook in self._before:
            self._call(hook, "before_step", self._run.step, self._run.state)

    def evaluate(self, method: str) -> bool:
        """Evaluate before the first step; return whether that ends the run.

        Args:
            method: `evaluate_first`, or `evaluate_owed` for what a signal interrupted before the restart.
        """
        run, is_done = self._run, False
        for hook in run.evaluations:
            if self._take(hook, method, self._call(hook, method, run.step, run.state)):
                is_done, run.stopped_by = True, hook.stopped_by or run.stopped_by
        return is_done

    def after(self, first: int) -> bool:
        """Run hooks after a call that began at step `first`; return whether the run stops here."""
        run = self._run
        step = run.step
        run.reports.count_examples(step - first, run.rows)
        if first >= self._next_check:
            self._check_step(first)
        for due in self._timed:
            if due.cadence.clock() >= due.deadline:
                self._next_due = step
        if step >= self._next_due or run.pending:
            self._call_due_hooks()
        if self._ends is not None:
            self._ends.extend()
        if run.signals.to_stop():
            run.signals.is_heeded = True
        return run.signals.is_heeded or run.stopped_by is not None

    def _check_step(self, first: int) -> None:
        """Check, once for each stage, that its step advances the global step by one; waits for the device."""
        run = self._run
        if first == run.first:
            run.watch.started()
            for due in self._due:  # intervals of saves that the run makes by itself begin with its first step
                if callable(due.cadence.secs):
                    due.done(run.step)
            run.times.log()
        self.is_checking = True
        began = run.watch.clock()
        check_step(run.step, run.state, first)
        run.in_flight.look()
        run.watch.record(FIRST_CALL, began, share=1 / (run.step - first))
        self.is_checking = False
        edge = run.programs.train_steps.edge_after(first)
        self._next_check = NEVER if edge is None else edge

    def _call_due_hooks(self) -> None:
        """Call what is due; all of it, even if one raises, so that no output is missing after a restart."""
        run, errors = self._run, Errors(self._run)
        step, watch, pending = run.step, run.watch, tuple(run.pending)
        if pending:
            watch.switch(HOOKS)
        for hook, look in pending:
            run.pending.remove((hook, look))  # one that raises is not called again
            run.calling = Calling(hook, "after_step")
            with errors:
                if look():
                    run.pending.append((hook, look))
        for due in self._due:
            hook = due.hook
            if not due.now(step):
                continue
            calling = Calling(hook, "after_step")
            began = watch.switch(calling.part)
            due.called = step
            if errors.all and isinstance(hook, CheckpointSaverHook) and not errors.are_of_savers:
                continue  # the handler of the error saves
            run.calling = calling
            if calling.is_users:
                run.reports.sums.flush()
            with errors:
                self._apply(hook, hook.after_step(step, run.state, run.metrics))
                if errors.all:
                    continue
                run.calling = Calling(hook, "next_due")
                due.done(step)
                self._record(calling, began)
        if watch.current != STEPPING:
            watch.switch(STEPPING)
        errors.end()
        self._next_due = min((due.next for due in self._due), default=NEVER)

    def _apply(self, hook: Any, result: Any) -> None:
        """Apply the result of `after_step`."""
        if self._take(hook, "after_step", result) and self._run.stopped_by is None:
            self._run.stopped_by = getattr(hook, "stopped_by", None) or name_of(hook)

    def _take(self, hook: Any, method: str, result: Any) -> bool:
        """Apply the result of a hook; return whether it ends the run."""
        run = self._run
        stop, run.state = check_hook_result(result, run.state, run.step, f"{name_of(hook)}.{method}")
        return stop

    def last(self, failed: Callable[[Exception], None] | None = None) -> None:
        """Run hooks after the last call, once; `failed` receives their exceptions while another error is handled."""
        run, errors = self._run, Errors(self._run)
        if run.step == run.first or self._was_last:
            return
        self._was_last = True
        pending, run.pending = run.pending, []
        last = {id(due.hook): due.hook for due in self._due if due.at_last(run.step)}  # each once
        for hook, look in [*pending, *((hook, None) for hook in last.values())]:
            run.calling = Calling(hook, "after_step")
            with errors, run.watch.part(HOOKS):
                if look is not None:
                    look(wait=True)
                else:
                    self._apply(hook, hook.after_step(run.step, run.state, run.metrics))
        run.calling, is_delivered = None, False
        while not is_delivered:  # a row that fails is dropped, and the others are delivered
            with errors:
                run.reports.transfers.deliver_all()
                is_delivered = True
        errors.end(failed)

    def end(self) -> None:
        """Call `end` of the hooks after a run that was not interrupted, once for each end of a run.

        A start that takes no step only repeats the last evaluations, for whoever reads their results, unless the hooks
        of the checkpoint that it restored had not ended. The savers come last, each is tried.
        """
        run, errors = self._run, Errors(self._run)
        hooks = run.hooks
        if run.step == run.first and (run.restored is None or self.ended_at == run.step):
            left = [hook for hook in run.evaluations if hook.owes_end(run.step)]
            for hook in run.evaluations:
                if hook not in left:
                    self._call(hook, "repeat", run.step, run.state)
            hooks = [*left, *run.savers] if left else []
        before = run.state
        for hook in hooks:
            is_saver = isinstance(hook, CheckpointSaverHook)
            if is_saver:
                self.ended_at = run.step
            if not hasattr(hook, "end"):
                continue
            try:
                self._take(hook, "end", self._call(hook, "end", run.step, run.state))
            except Exception as error:
                if is_saver:
                    errors.add(error, run.calling)
                    continue
                if not trees.is_donated(before):
                    run.state = before  # the next start calls all of them again
                raise
        errors.end()

    def has_ended(self) -> bool:
        """Whether the hooks have ended at this step, or have nothing left to do there but to save."""
        run = self._run
        if self.ended_at == run.step:
            return True
        is_last = run.step >= run.options.last_step or run.stopped_by is not None
        is_evaluated = all(run.step in hook.results for hook in run.evaluations)
        return is_last and is_evaluated and not (self._ends_of_users or run.signals.is_heeded)

    def _call(self, hook: Any, method: str, *args: Any) -> Any:
        run, calling = self._run, Calling(hook, method)
        run.calling = calling
        began = run.watch.clock()
        with contextlib.nullcontext() if isinstance(hook, RunSaverHook) else run.watch.part(calling.part):
            result = getattr(hook, method)(*args)
        self._record(calling, began)
        run.calling = None
        return result

    def _record(self, calling: Calling, began: float) -> None:
        """Keep how long a call took, unless the hook measures itself."""
        if calling.part != STEPPING:
            self._run.watch.record(calling.thing, began)

    def ends(self, boundaries: StageBoundaries) -> EndsAhead:
        """The steps at which calls must end, also those at which a hook is due. Close it after the run."""
        run, known = self._run, [hook for hook in self._run.hooks if hasattr(hook, "next_due")]
        # Process 0 alone writes lines, and all processes end a call where one is due.
        lines = Cadence(None if run.options.progress is False else run.options.log_steps)

        def due_after(step: int) -> int:
            due = lines.next_multiple(step)
            for hook in known:
                run.calling = Calling(hook, "next_due")
                try:
                    due = min(due, next_call(hook, step)[1])
                except Exception as error:  # raised once the run is there
                    note(error, f"jstep: in {name_of(hook)}.next_due({step}), which says where calls end")
                    raise
                finally:
                    run.calling = None
            return due

        self._ends = EndsAhead(boundaries.ends(run.first, run.options.last_step, due_after))
        return self._ends

    def not_called(self) -> list[str]:
        """The names of the hooks that are due at this step and that were not called, because another one hangs."""
        step = self._run.step
        late = [due.hook for due in self._due if due.called < step and due.next <= step]
        return [name_of(hook) for hook in late if not isinstance(hook, CheckpointSaverHook)]


class Errors:
    """The errors of hooks all of which are called, each in this context.

    At the end, `run.calling` is the call that raised the first of them.

    Attributes:
        all: The errors.
        are_of_savers: Whether only savers raised some.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._calling: Calling | None = None
        self.are_of_savers = True
        self.all: list[Exception] = []

    def __enter__(self) -> None:
        """Make a call."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self.add(error, self._run.calling)
        return True

    def add(self, error: Exception, calling: Calling | None) -> None:
        """Add the error of a call, which is one of the hook whose numbers it delivers."""
        is_of_saver = calling is not None and isinstance(calling.hook, CheckpointSaverHook)
        self.are_of_savers = self.are_of_savers and is_of_saver
        transfers = self._run.reports.transfers
        owner, transfers.failed_owner = transfers.failed_owner, None
        if owner is not None:
            calling = Calling(owner, "after_step" if calling is None else calling.method)
        self._calling = self._calling or calling
        self.all.append(error)

    def end(self, failed: Callable[[Exception], None] | None = None) -> None:
        """Give the errors to a function, or raise the first one, of which the others become notes."""
        self._run.calling = self._calling
        if failed is not None:
            for error in self.all:
                failed(error)
        elif self.all:
            error, *others = self.all
            for other in others:
                note(error, f"Additionally, {other}")
            self.all.clear()
            try:
                raise error
            finally:
                del error  # breaks the reference cycle with this frame, which its traceback holds


def _acts(hook: Any) -> bool:
    """Whether a hook may have something to do after a step: it has a cadence, or methods of its own."""
    if isinstance(hook, RunHook) and hook.cadence is not None:
        return True
    return _overrides(hook, "after_step") or (hasattr(hook, "after_step") and _overrides(hook, "next_due"))


def _overrides(hook: Any, method: str) -> bool:
    """Whether a hook overrides a method of its base class, `Hook` or `RunHook`."""
    own = getattr(getattr(hook, method, None), "__func__", getattr(hook, method, None))
    does_nothing = getattr(RunHook if isinstance(hook, RunHook) else Hook, method)
    return own is not None and own is not does_nothing
