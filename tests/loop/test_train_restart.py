"""Starting a run again: what is restored, what is dropped, and why no step is run."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import make_state, same, train

import jstep
from jstep.checkpoint.reading import OpenCheckpoint


def messages(caplog, level=logging.INFO):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def test_a_restart_reports_the_hook_that_stopped_the_run(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    stop_hook = lambda: jstep.StopAtStepHook(last_step=5)  # noqa: E731
    train(20, hooks=[stop_hook()], checkpoint_dir=tmp_path)
    assert jstep.Saver(tmp_path).extra(5)["stopped"] == "StopAtStepHook"
    caplog.clear()
    for _ in range(2):
        train(20, hooks=[stop_hook()], checkpoint_dir=tmp_path)
    lines = [line for line in messages(caplog) if "nothing left to run" in line]
    assert len(lines) == 2
    assert all(
        "StopAtStepHook stopped it at step 5" in line and "EarlyStopping(reset=True)" in line
        for line in lines
    )
    caplog.clear()
    assert jstep.global_step(train(20, checkpoint_dir=tmp_path)) == 20
    assert any("StopAtStepHook stopped this run at step 5" in line for line in messages(caplog))
    assert "stopped" not in jstep.Saver(tmp_path).extra(20)


class Converged(jstep.Hook):
    over = False

    def after_step(self, step, state, metrics):
        self.over = step >= 5
        return self.over


class StaysConverged(Converged):
    def get_state(self):
        return self.over

    def set_state(self, over):
        return over


@pytest.mark.thorough(except_for=["<lambda>-steps0", "StaysConverged-steps2"])
@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: jstep.every(1, Converged().after_step), [5, 6, 7]),
        (Converged, [5, 6, 7]),
        (StaysConverged, [5, 5, 5]),
    ],
)
def test_a_run_that_a_hook_stopped_runs_one_more_step_unless_the_hook_remembers(
    make, steps, tmp_path
):
    ends = [jstep.global_step(train(20, hooks=[make()], checkpoint_dir=tmp_path)) for _ in range(3)]
    assert ends == steps


def test_an_abstract_state_requires_a_checkpoint(tmp_path):
    abstract = jax.eval_shape(make_state)
    for kwargs in ({}, {"checkpoint_dir": tmp_path}):
        with pytest.raises(ValueError, match=r"state: its .* is a shape without values"):
            train(3, state=abstract, **kwargs)
    train(3, checkpoint_dir=tmp_path)
    assert same(train(6, state=abstract, checkpoint_dir=tmp_path), train(6))


def test_a_dropped_state_is_a_warning(tmp_path, caplog):
    train(4, checkpoint_dir=tmp_path)
    caplog.set_level(logging.WARNING)
    train(6, state=train(4), checkpoint_dir=tmp_path)  # the same step: nothing is lost
    assert messages(caplog) == []
    train(8, state=train(3), checkpoint_dir=tmp_path)
    (line,) = messages(caplog)
    assert "(step 3) is ignored in favor of model-6" in line


def test_an_edited_held_hyperparameter_is_a_warning(tmp_path, caplog):
    def run(rate, last, shapes=lambda make: make()):
        optimizer = jstep.gradient_descent(jstep.held("learning_rate", rate))
        step = jstep.minimize(lambda params, x: jnp.sum(params["w"]) * x, optimizer)
        state = shapes(lambda: jstep.TrainState.create({"w": jnp.ones(2)}, optimizer))
        half = jstep.every(
            2, lambda step, state, m: jstep.set_hyperparameter(state, "learning_rate", 0.05)
        )
        return train(
            last,
            lambda n: np.float32(1),
            step=step,
            state=state,
            checkpoint_dir=tmp_path,
            hooks=[half],
        )

    caplog.set_level(logging.WARNING)
    run(0.1, 4)
    run(0.1, 6)  # a change by a hook does not count as an edit
    run(0.1, 7, jax.eval_shape)  # a restart needs no values
    assert messages(caplog) == []
    run(0.01, 8)
    (line,) = messages(caplog)
    assert "'learning_rate' is created as 0.01, but was 0.1 when this run began" in line
    assert "0.1" in line


def test_the_directory_is_claimed_before_anything_is_restored(tmp_path, monkeypatch):
    train(3, checkpoint_dir=tmp_path)
    order = []
    for owner, name in ((jstep.Saver, "claim"), (OpenCheckpoint, "restore")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda self, *a, real=real, name=name, **k: order.append(name) or real(self, *a, **k),
        )
    train(6, checkpoint_dir=tmp_path)
    assert order[:2] == ["claim", "restore"]
    order.clear()
    train(6, checkpoint_dir=tmp_path)  # a finished run can be read while another one writes
    assert order == ["restore"]


# What a run begins with, in its log.


def test_a_fresh_start_beside_checkpoints_of_another_prefix_is_reported(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(2, checkpoint_dir=tmp_path / "a")
    with jstep.Saver(tmp_path / "a", prefix="other") as saver:
        train(2, checkpoint_dir=saver)
    assert f"no checkpoint other-* in {tmp_path / 'a'}: starts at step 0" in messages(caplog)


def test_a_last_step_before_the_newest_checkpoint_is_a_warning(tmp_path, caplog):
    train(10, checkpoint_dir=tmp_path)
    caplog.set_level(logging.INFO)
    assert train(5, checkpoint_dir=tmp_path).global_step == 10
    (line,) = messages(caplog, logging.WARNING)
    assert line == (
        "last_step=5: the run is already at step 10; "
        "there is nothing left to run. Give a larger last_step"
    )


def other_run(kind):
    optimizer = jstep.lion(1e-3) if kind == "optimizer" else jstep.adam(0.1)
    params = {"v" if kind == "model" else "w": jnp.ones(3 if kind in ("model", "shapes") else 2)}
    statistics = {"model_state": {"mean": jnp.ones(2)}} if kind == "statistics" else {}

    def loss_fn(params, batch):
        return sum(jnp.sum(leaf) for leaf in params.values()) * jnp.sum(batch["x"])

    return jstep.minimize(loss_fn, optimizer), jstep.TrainState.create(
        params, optimizer, **statistics
    )


OTHERS = {
    "optimizer": "another optimizer: its slots differ",
    "model": "another model: its params and slots differ",
    "shapes": "another model: its params and slots differ",
    "statistics": "another model: its model_state differ",
}


@pytest.mark.thorough(except_for=["optimizer-False", "model-True"])
@pytest.mark.parametrize("is_abstract", [False, True])
@pytest.mark.parametrize("kind", OTHERS)
def test_another_model_or_optimizer_in_an_old_directory_is_named_before_anything_is_compiled(
    kind, is_abstract, tmp_path, caplog
):
    first = jstep.TrainState.create({"w": jnp.ones(2)}, jstep.adam(0.1))
    step = jstep.minimize(lambda params, batch: jnp.mean(batch["x"] @ params["w"]), jstep.adam(0.1))
    train(3, state=first, step=step, checkpoint_dir=tmp_path)
    caplog.set_level(logging.DEBUG, "jstep")
    step, state = other_run(kind)
    if is_abstract:
        state = jax.eval_shape(lambda: state)
    with pytest.raises(
        ValueError, match=f"^checkpoint_dir: model-3 was saved by a run with {OTHERS[kind]}"
    ) as error:
        train(6, state=state, step=step, checkpoint_dir=tmp_path)
    text = str(error.value)
    assert "give a new run another checkpoint_dir, see docs: help/errors#another-run" in text
    assert "target does not fit" in text
    assert step._cache_size() == 0
    assert not any("compil" in line for line in messages(caplog, logging.DEBUG))
    with jstep.Saver(tmp_path) as saver:
        assert saver.all_steps() == [3]
