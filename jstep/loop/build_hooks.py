"""The hooks of a run: the user's, those of observers, and the run's own saver."""

from typing import Any

from jstep.core import processes
from jstep.hooks.saver_hook import SaverHook
from jstep.loop.run_context import RunContext
from jstep.loop.saving import RunSaverHook

NO_LOGS = "the logs cannot be opened"


def build_hooks(run: RunContext) -> list[Any]:
    """Return the user's hooks, jstep's, and the savers.

    Savers are last, so that a checkpoint holds what the other hooks did to the state.
    """
    return processes.share_errors(lambda: _list_hooks(run), NO_LOGS)


def _list_hooks(run: RunContext) -> list[Any]:
    savers = [hook for hook in run.options.hooks if isinstance(hook, SaverHook)]
    hooks = [hook for hook in run.options.hooks if not isinstance(hook, SaverHook)]
    for observer in run.observers:
        hooks += observer.make_hooks(tuple(hooks))
    if run.saver is not None:
        # First, as the exit by a signal or an error names the outcome of the first saver.
        # `ending.py` calls it last.
        savers.insert(0, RunSaverHook(run, run.saver))
    return hooks + savers
