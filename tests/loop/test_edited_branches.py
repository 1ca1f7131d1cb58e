"""Runs that begin with a state made from a checkpoint: `train(start_from=…)` with a state at that step."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from positioned import Positioned

import jstep

optimizer = jstep.adam(0.1)


def loss_fn(params, x):
    return jnp.mean((params["table"] - x) ** 2)


train_step = jstep.minimize(loss_fn, optimizer)


def make_state(rows=3):
    return jstep.TrainState.create({"table": jnp.zeros((rows, 1))}, optimizer)


def loader():
    return Positioned(lambda n: np.float32(n % 5 + 1))


class Counter(jstep.Hook):
    n = 0

    def after_step(self, step, state, metrics):
        self.n += 1

    def next_due(self, step):
        return step + 1

    def get_state(self):
        return self.n

    def set_state(self, n):
        self.n = n


def train(last_step, where, *hooks, state=None, batches=None, step=train_step, **options):
    options = {"log_steps": None, "save_checkpoint_steps": 5, "save_checkpoint_secs": None} | options
    state, batches = make_state() if state is None else state, loader() if batches is None else batches
    return jstep.train(step, state, batches, last_step, checkpoint_dir=where, hooks=hooks, **options)


def restored(where, step, rows=3):
    with jstep.Saver(where) as saver:
        return saver.restore(make_state(rows), step)


def grown(where, step, rows=5, before=3):
    """Return the state of a checkpoint with more rows."""
    state = restored(where, step, before)
    table = jnp.concatenate([state.params["table"], jnp.full((rows - before, 1), 2.0)])
    return jstep.TrainState.create({"table": table}, optimizer, global_step=state.global_step)


def continued(state, last_step):
    """Return what a run without checkpoints makes of a state, with the batches that follow it."""
    batches = loader()
    batches.at = jstep.global_step(state)
    return jstep.train(train_step, state, batches, last_step, log_steps=None)


@pytest.mark.thorough(except_for=["checkpoint-1", "directory-4"])
@pytest.mark.parametrize("steps_per_call", [1, 4, "auto"])
@pytest.mark.parametrize("given", ["checkpoint", "directory"])
def test_a_branch_begins_with_the_state_passed(given, steps_per_call, tmp_path, caplog):
    trunk, where = tmp_path / "trunk", tmp_path / "branch"
    train(10, trunk, Counter(), steps_per_call=steps_per_call)
    start, counter = trunk / "model-10" if given == "checkpoint" else trunk, Counter()
    options = {"start_from": start, "steps_per_call": steps_per_call}
    with caplog.at_level(logging.INFO, "jstep"):
        branch = train(20, where, counter, state=grown(trunk, 10), **options)
    assert f"this run begins from {trunk}/model-10, with the state passed" in caplog.messages
    assert branch == continued(grown(trunk, 10), 20)
    assert counter.n == 20
    assert restored(where, 10, rows=5) == grown(trunk, 10)
    with jstep.Saver(where) as saver:
        parent = {"path": str(trunk / "model-10"), "step": 10}
        assert [saver.extra(step)["parent"] for step in saver.all_steps()] == [parent] * 3
    with caplog.at_level(logging.INFO, "jstep"):
        assert train(30, where, Counter(), state=grown(trunk, 10), **options) == continued(grown(trunk, 10), 30)
    assert "restored model-20" in caplog.messages
    assert "is ignored" not in caplog.text


def test_on_other_devices(tmp_path):
    train(10, tmp_path / "trunk")
    mesh = jax.make_mesh((2,), ("data",))
    rows = {"table": jax.P("data", None)}
    state = jstep.shard_state(grown(tmp_path / "trunk", 10, rows=4), mesh, rows)
    branch = train(15, tmp_path / "branch", state=state, start_from=tmp_path / "trunk")
    assert branch.params["table"].sharding.spec == rows["table"]
    expected = continued(grown(tmp_path / "trunk", 10, rows=4), 15)
    np.testing.assert_allclose(branch.params["table"], expected.params["table"], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda where: restored(where, 5),
            "must be a checkpoint at the step of the state passed, 5, got one at step 10",
        ),
        (lambda where: grown(where, 10).replace(global_step=0), "table"),
        (lambda where: jax.eval_shape(lambda state: state, grown(where, 10)), "table"),
    ],
    ids=["another step", "step 0", "abstract"],
)
@pytest.mark.parametrize("start", ["trunk", "trunk/model-10"])
def test_what_is_refused(start, make, said, tmp_path):
    train(10, tmp_path / "trunk")
    with pytest.raises(ValueError, match=said):
        train(20, tmp_path / "branch", state=make(tmp_path / "trunk"), start_from=tmp_path / start)
    assert not list(tmp_path.glob("branch/model-*"))
