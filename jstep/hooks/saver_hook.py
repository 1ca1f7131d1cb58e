"""What all hooks that save share: their place in a run, the checks before a save, and the write."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jstep.array_store.manifest import CheckpointExtra
from jstep.checkpoint.saver import Saver, engine_of
from jstep.core import processes
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import SAVING
from jstep.hooks.run_hook import RunHook
from jstep.hooks.run_info import RunInfo
from jstep.state.global_step import check_alive
from jstep.state.train_state import TrainState
from jstep.training.metrics import Metrics


class SaverHook(RunHook):
    """A hook that saves the state of a run.

    The loop calls it between two iterations, and last at the end.

    Attributes:
        saver: The `Saver`.
    """

    _phase = SAVING
    _instead = "call save(state) of a jstep.Saver"
    saver: Saver

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        wait: bool = False,
        permanent_every_secs: float | None = None,
    ) -> bool:
        """Save, unless this is saved already; return False if a hook prevented it.

        With `wait`, the checkpoint is on disk on return. `permanent_every_secs` is that of
        `CheckpointExtra`.
        """
        raise NotImplementedError

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        self.save(step, state)

    def end(self, step: int, state: TrainState) -> None:
        self.save(step, state, wait=True)


class LatestSave(NamedTuple):
    """What the latest save holds; the state is a weak reference, as the next step donates it."""

    step: int
    state: Callable[[], TrainState | None]

    def holds(self, step: int, state: TrainState) -> bool:
        """Whether it holds this state: a hook may have replaced it at the same step."""
        return self.step == step and self.state() is state


def may_save(
    run: RunInfo, step: int, state: TrainState, checks: Sequence[Callable[[int], bool | None]] = ()
) -> bool:
    """Call all checks before a save; return False if one of them prevents it.

    Nothing of the checkpoint may be read before: they deliver the rows of metrics, which are part
    of it.
    """
    if processes.any_process(run.best_failure is not None):
        raise run.best_failure or RuntimeError(
            "another process could not save a best checkpoint: see its error"
        )
    check_alive(state)
    # A list, as each must be called: `any` of a generator would stop at the first one that prevents
    # the save.
    answers = [bool(check(step)) for check in (run.components.prevents_save, *checks)]
    if any(answers):
        return False
    run.check_step()
    return True


def write(run: RunInfo, saver: Saver, state: TrainState, extra: CheckpointExtra) -> None:
    """Begin to write a checkpoint; once it is complete, `saved` of the run's hooks is called."""
    engine_of(saver).set_listener(run.background)
    with internal_transfers():
        saver.save(state, extra=extra)
