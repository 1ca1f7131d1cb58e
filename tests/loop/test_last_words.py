"""What is saved, and said of it, when a run hangs or fails: by another thread, with calls of hooks left out."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import raising
from loop_runs import DATA, Calls, train

import jstep
from jstep.checkpoint.listing import read_manifest
from jstep.hooks.run_hook import RunHook
from jstep.loop import stopping
from jstep.loop.saving import RunSaverHook
from jstep.metering.cadence import Cadence


class Says(RunHook):
    """Calls a function of the run at step 3, in `after_step`, and keeps what it returns."""

    def __init__(self, look: Callable[[Any], str]) -> None:
        self.look, self.said = look, ""

    def after_step(self, step: int, state: Any, metrics: Any) -> None:
        if step == 3:
            self.said = self.look(self.run)


def said_in(directory: Path, look: Callable[[Any], str], batches: Any = DATA, **more: Any) -> str:
    hook = Says(look)
    train(5, batches, hooks=[hook, Calls(), *more.pop("hooks", ())], checkpoint_dir=directory, **more)
    return hook.said


def steps_in(directory: Path) -> list[int]:
    return sorted(jstep.Saver(directory).all_steps())


def test_a_hang_is_saved(tmp_path: Path) -> None:
    others = [jstep.CheckpointSaverHook(tmp_path / "own", save_steps=3)]  # it is due, and is none of the user's
    assert said_in(tmp_path / "a", stopping.save_while_it_hangs, hooks=others) == (
        "step 3 is saved as model-3, with the states of hooks of the save before"
    )
    assert steps_in(tmp_path / "a") == [3, 5]
    assert read_manifest(str(tmp_path / "a" / "model-3")).finite is True

    found: list[str] = []

    def batches(step: int) -> Any:
        if step == 3:
            found.append(stopping.save_while_it_hangs(hook.run))
        return DATA[step]

    hook = Says(lambda run: "")
    train(5, batches, hooks=[hook], checkpoint_dir=tmp_path / "b")
    assert found == ["step 3 is saved as model-3, with the states of hooks of the save before"]


def test_a_hang_is_not_saved_if_the_state_must_not_be_or_cannot(tmp_path: Path, monkeypatch: Any) -> None:
    def at_step_3(run: Any) -> str:
        run.setup.loop.at = run.setup.loop.at._replace(metrics={"loss": np.float32(math.nan)})
        return stopping.save_while_it_hangs(run)

    assert said_in(tmp_path / "a", at_step_3) == "step 3 is not saved: its loss is not finite"
    assert steps_in(tmp_path / "a") == [5]
    allowed: Any = jstep.Saver(tmp_path / "b", allow_nonfinite=True)
    assert said_in(allowed, at_step_3).startswith("step 3 is saved as model-3")

    with monkeypatch.context() as lost:
        lost.setattr(stopping, "why_position_lost", lambda run: "the data source has advanced")
        said = said_in(tmp_path / "d", stopping.save_while_it_hangs)
    assert said == "step 3 is not saved: the data source has advanced"

    monkeypatch.setattr(RunSaverHook, "save_alone", raising(OSError("the disk is full")))
    said = said_in(tmp_path / "c", stopping.save_while_it_hangs)
    assert said == "step 3 could not be saved: OSError: the disk is full"


def test_what_is_said_of_the_state_after_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    def saved(error: Exception) -> Callable[[Any], str]:
        return lambda run: stopping._saved(run, error)

    error = ValueError("mine")
    expected = ", and is saved as model-3; start the run again to resume"
    assert said_in(tmp_path / "a", saved(error)) == expected

    def of_several(run: Any) -> str:
        with monkeypatch.context() as several:
            several.setattr(stopping.processes, "is_single_process", lambda: False)
            return stopping._saved(run, error)

    expected = ", and is not saved: the other processes may be elsewhere"
    assert said_in(tmp_path / "b", of_several) == expected
    prevents: Any = ValueError("mine")
    prevents.prevents_saving = True
    assert said_in(tmp_path / "c", saved(prevents)) == ", and is not saved"

    with monkeypatch.context() as lost:
        lost.setattr(stopping, "why_position_lost", raising(OSError("of an earlier save")))
        said = said_in(tmp_path / "d", saved(error))
    assert said == ", and could not be saved: OSError: of an earlier save"
    assert [steps_in(tmp_path / name) for name in "abcd"] == [[3, 5], [5], [5], [5]]


@pytest.mark.parametrize("is_same", [False, True])
def test_another_error_of_a_hook_that_the_last_step_calls_is_a_note(is_same: bool) -> None:
    error = KeyError("mine")

    class AtLast(RunHook):
        cadence = Cadence(100, at_last=True)

        def after_step(self, step: int, state: Any, metrics: Any) -> None:
            called.append(step)
            raise error if is_same else ValueError("another")

    def batches(step: int) -> Any:
        if step == 3:
            raise error
        return DATA[step]

    called: list[int] = []
    with pytest.raises(KeyError) as caught:
        train(5, batches, hooks=[AtLast()])
    assert called == [3]
    notes = [line for line in caught.value.__notes__ if line.startswith("Additionally")]
    assert notes == ([] if is_same else ["Additionally, ValueError: another"])
