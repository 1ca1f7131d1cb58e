"""Hooks that were made without a writer write where `train` does."""

import jax.numpy as jnp
import pytest

import jstep

pytest.importorskip("tensorboard")


def run(logdir, hooks, last_step=4, **kwargs):
    optimizer = jstep.adam(0.1)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
    train_step = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), optimizer)
    return jstep.train(
        train_step,
        state,
        lambda n: jnp.ones(3),
        last_step,
        hooks=hooks,
        logdir=logdir,
        log_steps=2,
        progress=False,
        **kwargs,
    )


def tags(logdir):
    """Tag → the steps at which it was written, over all files of the directory."""
    found = {}
    for path in sorted(logdir.glob("events.out.tfevents.*")):
        for event in jstep.summary.summary_iterator(path):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(event.step)
    return found


def test_histograms_and_evaluations_join_the_numbers_and_nothing_is_written_twice(tmp_path):
    hooks = [
        jstep.SummarySaverHook(save_steps=2, histograms="params/*"),
        jstep.EvaluationHook(lambda state: {"w0": state.params["w"][0]}, every_n_steps=3),
    ]
    run(tmp_path, hooks)
    found = tags(tmp_path)
    rates = found.pop("global_step/sec")
    assert rates == [2, 4]
    # beta1, beta2 and epsilon never change: they are left out, as the stock hook leaves them out.
    assert found == {"loss": [2, 4], "learning_rate": [2, 4], "params/w": [2, 4], "eval/w0": [3, 4]}
    assert len(list(tmp_path.glob("events.*"))) == 1


def test_a_hook_serves_a_second_run(tmp_path):
    hook = jstep.SummarySaverHook(save_steps=2)
    for name in ("a", "b"):
        run(tmp_path / name, [hook])
        assert tags(tmp_path / name)["loss"] == [2, 4]


def test_a_hook_with_a_writer_of_its_own_leaves_the_stock_one_alone(tmp_path):
    with jstep.summary.SummaryWriter(tmp_path / "own") as writer:
        run(tmp_path / "run", [jstep.SummarySaverHook(writer, save_steps=1)], save_summaries_steps=4)
    assert tags(tmp_path / "own")["loss"] == [1, 2, 3, 4]
    assert tags(tmp_path / "run")["loss"] == [4]


def test_a_summary_hook_with_nowhere_to_write_says_so():
    with pytest.raises(ValueError, match="nowhere to write: give it a summary_writer, or give train a logdir"):
        run(None, [jstep.SummarySaverHook(histograms="params/*")])


def test_an_evaluation_without_a_logdir_is_kept_and_written_nowhere():
    hook = jstep.EvaluationHook(lambda state: {"one": 1.0}, every_n_steps=2)
    run(None, [hook])
    assert hook.results == {2: {"one": 1.0}, 4: {"one": 1.0}}
