"""The end of a run as one transaction.

Either the last checkpoint records all of it, or a restart repeats all of it.

| in order | what | if it fails, or the process is killed |
|---|---|---|
| 1 | last rows of logs (`call_at_last_step`, `make_last_row`) | after an error, all savers save |
| 2 | the temporary *pre-end checkpoint*, if user `end`s or evaluations follow | the newest stays |
| 3 | each `end`, in hook order, with owed evaluations and callbacks | 2's or the newest stays |
| 4 | the user's savers, until their checkpoints are on disk | the same |
| 5 | the run's own checkpoint: the state after the `end`s, the hooks' states, the mark | the same |

After an error in 1, nothing follows the saves. The callbacks in 3 are those of the evaluations.

The pre-end checkpoint holds the state before the `end`s. While they run, it is being written to
disk; the last save replaces it. If that save never happens, it becomes a checkpoint like any other:
`stopping.rescue` and `exit_on_signal` save it once more, with the states that hooks had before the
`end`s (`RunSaverHook.save_pre_end`), and after a kill a restart does this.

Each save after the last iteration says that the iterations are over (`LAST_ITERATION`): whatever
triggers it, the `end`s are owed at this step. The mark is the step at which they were made
(`ENDED`). A restart that has no step to run makes the end

- if its checkpoint says that the iterations are over, and has no mark,
- if `last_step` is the step of its checkpoint, which has no mark, such as one that was saved with a
  larger `last_step`,
- if it finds that the batches are used up there, or makes an evaluation there that was owed, and
  which stops the run.

Any other restart that has no step to run is in mid-run: a hook's `begin` has returned True, or
`last_step` is smaller. It makes no end and saves nothing, so that a later start has the same bits
as without it.

The user's savers are called before the run's own: once the mark is on disk, a restart would not
call them again.

All processes together check for a signal between two `end`s, and between the batches of an
evaluation. If nothing was left out by then, the end is complete and gets its mark.
"""

from typing import Any

from jstep.core import processes
from jstep.core.public_names import is_public
from jstep.hooks.course import HookCall
from jstep.hooks.hook import defines
from jstep.hooks.run_hook import RunHook, make_last_row, owes_end
from jstep.hooks.saver_hook import SaverHook
from jstep.loop.hook_errors import HookErrors
from jstep.loop.run_context import RunContext
from jstep.loop.saving import RunSaverHook, find_own_saver


def make_end(run: RunContext) -> bool:
    """Make the end of a run after `call_at_last_step`; return False if a signal has cut it short.

    Then, and after an error, the run is where it was before the `end`s, and has no mark.
    """
    course = run.course
    _make_last_rows(run)
    state_before = course.position.state
    own_saver = find_own_saver(run)
    if processes.any_process(bool(run.failures)):
        # A log has failed. All processes save, though only those that write it know: a save needs
        # all of them.
        _save_by_all(run, run.components.finiteness.savers)
        run.components.runner.raise_log_errors_of_all()
    if own_saver is not None and any(_acts_at_end(run, hook) for hook in run.components.hooks):
        own_saver.save_pre_end(run.step, state_before)
    is_whole = False
    try:
        if _call_ends(run):
            _save_end(run, own_saver)
            is_whole = True
    finally:
        if not is_whole:
            # Also if an `end` has donated it: the note then says that the state is lost, which is
            # true.
            course.replace_state(state_before, None)
            course.ended_at = None
    course.is_finished = is_whole
    return is_whole


def _make_last_rows(run: RunContext) -> None:
    course = run.course
    errors = HookErrors(course)
    step, state, metrics, _ = course.position
    for hook in run.components.hooks:
        if isinstance(hook, RunHook):
            with errors:
                course.call_hook(
                    HookCall(hook, "make_last_row"), make_last_row, hook, step, state, metrics
                )
    run.components.runner.deliver_all(errors)
    errors.end()


def _call_ends(run: RunContext) -> bool:
    """Call `end` of all hooks but savers; return False if a signal has left one out."""
    course = run.course
    for hook in run.components.hooks:
        if isinstance(hook, SaverHook) or not hasattr(hook, "end"):
            continue
        # All processes call the same `end`s, and so agree here equally often. An `end` that changes
        # nothing is called in any case: it only closes what its hook has opened.
        if _acts_at_end(run, hook) and run.components.poll_stop_signal():
            return False
        step, state, _, _ = course.position
        result = run.components.runner.call(hook, "end", step, state)
        course.apply(HookCall(hook, "end"), result)
        if owes_end(hook, step):  # it was interrupted
            return False
    return True


def _acts_at_end(run: RunContext, hook: Any) -> bool:
    """Whether the `end` of a hook changes anything.

    The `end` of a user's hook does, and so does that of an evaluation that is still owed.
    """
    is_owed = owes_end(hook, run.step)
    if is_owed is not None:
        return is_owed
    is_given = any(hook is option for option in run.options.hooks)
    # jstep's own classes only check, write and close in `end`, which a restart may do again. A
    # subclass of the user's may do more.
    return is_given and defines(hook, "end") and not is_public(type(hook))


def _save_end(run: RunContext, own_saver: RunSaverHook | None) -> None:
    _save_by_all(run, [hook for hook in run.components.finiteness.savers if hook is not own_saver])
    run.course.ended_at = run.step
    if own_saver is not None:
        run.course.call_hook(HookCall(own_saver, "end"), own_saver.save_end, run.step, run.state)


def _save_by_all(run: RunContext, savers: list[SaverHook]) -> None:
    """Let each saver save, even if one before it fails; raise the first error."""
    errors = HookErrors(run.course)
    for hook in savers:
        with errors:
            run.course.call_hook(HookCall(hook, "end"), hook.end, run.step, run.state)
    errors.end()
