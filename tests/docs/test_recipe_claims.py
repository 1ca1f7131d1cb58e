"""Sentences of recipes that no code of their page runs."""

import contextlib
import pathlib
import shutil

import pytest
from pages import DOCS, blocks_of, run_page

import jstep


@pytest.mark.thorough
@pytest.mark.parametrize("has_labels", [True, False])
def test_the_first_update_of_a_layer_that_thaws(has_labels: bool) -> None:
    """BYOL and DINO: with a label of its own it is that of a fresh Adam, otherwise up to 3.2 times as large."""
    first, rate = 5000, 1e-3
    optimizer = jstep.adam(rate)
    if has_labels:
        parts = {"body": optimizer, "last": optimizer}
        optimizer = jstep.partition(parts, labels=lambda path, leaf: path)

    def loss(params):
        return params["body"] + params["last"]

    stages = {0: jstep.minimize(loss, optimizer, var_list="body"), first: jstep.minimize(loss, optimizer)}
    state = jstep.TrainState.create({"body": 0.0, "last": 0.0}, optimizer)
    state = jstep.train(stages, state, lambda step: (), first + 1, steps_per_call=500)
    update = -float(state.params["last"]) / rate
    assert update == pytest.approx(1.0 if has_labels else 10**0.5, rel=0.01)
    age = first + 1 - int(state.slots["last/start_step" if has_labels else "start_step"])
    assert age == (1 if has_labels else first + 1)


@pytest.mark.thorough
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_loop_that_rolls_back_can_be_started_again(steps_per_call: int, tmp_path: pathlib.Path) -> None:
    """Each attempt meets its spike once more, the last one resumes; the bits are those without these batches."""
    page, section = DOCS / "recipes" / "spikes-and-nans.md", "Recovering from a loss spike"

    def change(code: str) -> str:
        return code.replace(
            '"save_checkpoint_steps": 10', f'"save_checkpoint_steps": 10, "steps_per_call": {steps_per_call}'
        )

    with contextlib.chdir(tmp_path):
        names = run_page(page, change, section)
        (loop,) = (block.code for block in blocks_of(page, section) if "SpikeGuard" in block.code)
        parents = {run.path.rpartition("/")[2]: run.parent for run in jstep.runs("runs")}
        assert parents["second"] == (f"{tmp_path}/runs/first/model-30", 30)
        assert parents["attempt-3"] == (f"{tmp_path}/runs/attempt-2/model-30", 30)
        for killed in ("runs/attempt-3/model-50", "runs/attempt-3", "runs/attempt-1"):
            shutil.rmtree(killed)
            again = dict(names)
            exec(loop, again)
            assert (again["skipped"], again["state"]) == (3, names["state"])
