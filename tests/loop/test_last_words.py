"""What is saved, and said of it, when a run hangs or fails: by another thread, with calls of hooks
left out."""

import math

import numpy as np
import pytest
from doubles import raising
from loop_runs import DATA, Calls, train

import jstep
from jstep.hooks.cadence import Cadence
from jstep.hooks.run_hook import RunHook
from jstep.loop import stopping
from jstep.loop.saving import RunSaverHook


def said_in(directory, look):
    """Call a function of the run at step 3, where it waits for a batch; return its result."""
    hook, said = RunHook(), []

    def batches(step):
        if step == 3:
            said.append(look(hook._run))
        return DATA[step]

    train(5, batches, hooks=[hook, Calls()], checkpoint_dir=directory)
    return said[0]


def steps_in(directory):
    return sorted(jstep.Saver(directory).all_steps())


def test_a_hang_is_not_saved_if_the_state_must_not_be_or_cannot(tmp_path, monkeypatch):
    def at_step_3(run):
        run.course.position = run.position._replace(metrics={"loss": np.float32(math.nan)})
        return stopping.save_stalled_run(run)

    assert said_in(tmp_path / "a", at_step_3) == "step 3 is not saved: its loss is not finite"
    assert steps_in(tmp_path / "a") == [5]
    allowed = jstep.Saver(tmp_path / "b", allow_nonfinite=True)
    assert said_in(allowed, at_step_3).startswith("step 3 is saved as model-3")

    with monkeypatch.context() as lost:
        lost.setattr(stopping, "why_not_saved", lambda run: "because the data source has advanced")
        said = said_in(tmp_path / "d", stopping.save_stalled_run)
    assert said.startswith(
        "step 3 is not saved, because the data source has advanced; there is no checkpoint yet"
    )

    monkeypatch.setattr(RunSaverHook, "save_without_peers", raising(OSError("the disk is full")))
    said = said_in(tmp_path / "c", stopping.save_stalled_run)
    assert said == "step 3 could not be saved: OSError: the disk is full"


@pytest.mark.parametrize("is_same", [False, True])
def test_another_error_of_a_hook_that_the_last_step_calls_is_a_note(is_same):
    error = KeyError("mine")

    class AtLast(RunHook):
        _cadence = Cadence(100, at_last_step=True)

        def after_step(self, step, state, metrics):
            called.append(step)
            raise error if is_same else ValueError("another")

    def batches(step):
        if step == 3:
            raise error
        return DATA[step]

    called = []
    with pytest.raises(KeyError) as caught:
        train(5, batches, hooks=[AtLast()])
    assert called == [3]
    notes = [line for line in caught.value.__notes__ if line.startswith("Additionally")]
    assert notes == ([] if is_same else ["Additionally, ValueError: another"])
