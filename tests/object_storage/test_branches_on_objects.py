"""Branches, the table of runs and complete checkpoints in object stores."""

import jax.numpy as jnp
import pytest

import jstep

pytestmark = pytest.mark.usefixtures("fast_retries")
optimizer = jstep.adam(0.1)
train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)


def train(last_step, where, *hooks, state=None, **options):
    state = jstep.TrainState.create({"w": 0.0}, optimizer) if state is None else state
    options = {
        "log_steps": None,
        "save_checkpoint_steps": 5,
        "save_checkpoint_secs": None,
    } | options
    return jstep.train(
        train_step,
        state,
        lambda step: jnp.float32(step),
        last_step,
        checkpoint_dir=where,
        hooks=hooks,
        **options,
    )


class Told(jstep.Hook):
    def __init__(self):
        self.paths = []

    def saved(self, step, path):
        with jstep.Saver(path.rpartition("/")[0]) as saver:
            assert step in saver.all_steps()
        self.paths.append(path)


@pytest.mark.thorough
def test_a_branch_of_a_run_in_a_bucket(store, tmp_path):
    trunk, told = store.run, Told()
    train(10, trunk, told)
    assert told.paths == [f"{trunk}/model-5", f"{trunk}/model-10"]
    whole = train(15, tmp_path / "whole")
    for where in (f"{trunk}-branch", tmp_path / "branch"):
        assert train(15, where, start_from=f"{trunk}/model-10") == whole
    assert train(15, f"{trunk}-other", start_from=trunk) == whole
    with pytest.raises(FileNotFoundError, match="model-10"):
        train(15, f"{trunk}-missing", start_from=f"{trunk}/model-9")
    found = {run.path: run for run in jstep.runs(trunk.rpartition("/")[0])}
    assert found[trunk].status == "finished"
    assert found[f"{trunk}-branch"].parent == (f"{trunk}/model-10", 10)
    page = jstep.report([trunk, f"{trunk}-branch"], f"{trunk}/page.html").html
    assert store.data("run/page.html").decode() == page
