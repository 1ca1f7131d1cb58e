"""`train`: start, end, early stops, and donation of the state."""

import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import OPTIMIZER, Calls, by_hand, make_state, same, train

import jstep
from jstep.hooks.cadence import Cadence
from jstep.hooks.run_hook import RunHook

# Start and end


def test_last_step_is_absolute():
    assert same(train(12, state=by_hand(5)), by_hand(12))
    state = by_hand(5)
    assert train(5, state=state) is state
    assert train(3, state=state) is state


def test_hooks_are_called_in_order():
    calls = Calls()
    train(3, hooks=[calls])
    assert calls.seen == [
        ("begin", 0), ("first", 1), ("step", 1), ("step", 2), ("step", 3), ("end", 3), ("close",),
    ]  # fmt: skip
    assert set(calls.metrics[2]) == {"loss", "learning_rate", "beta1", "beta2", "epsilon"}
    assert float(calls.metrics[2]["learning_rate"]) == pytest.approx(0.1 * 0.9**0.1)


def test_a_run_without_steps_calls_begin_alone(tmp_path):
    calls = Calls()
    train(0, hooks=[calls])
    train(4, hooks=[calls], state=make_state(4), checkpoint_dir=tmp_path)
    assert calls.seen == [("begin", 0), ("close",), ("begin", 4), ("close",)]
    assert jstep.Saver(tmp_path).all_steps() == []


# Stopping


def test_a_true_result_stops_after_that_step():
    first, second = Calls(stop=4), Calls()
    state = train(10, hooks=[first, second])
    assert jstep.global_step(state) == 4
    assert second.steps() == [1, 2, 3, 4]  # the other hooks are still called
    assert second.seen[-2:] == [("end", 4), ("close",)]
    assert same(state, by_hand(4))


# Donation


def test_metrics_remain_valid_after_later_steps(tmp_path):
    """A step can return its parameters as metrics; the next step donates the state, not the
    metrics."""
    step = jstep.minimize(
        lambda params, batch: (jnp.mean((batch["x"] @ params["w"]) ** 2), {"w0": params["w"]}),
        OPTIMIZER,
        has_aux=True,
    )
    calls = Calls()
    train(5, hooks=[calls], step=step)
    assert np.asarray(calls.metrics[1]["w0"]).tolist() == [1, 1]
    assert len({np.asarray(calls.metrics[n]["w0"]).tobytes() for n in range(1, 6)}) == 5


# `train`: functions as hooks, results of hooks, state of hooks, and custom Savers.


def scaled(state, factor):
    return state.replace(params=jax.tree.map(lambda p: p * factor, state.params))


@pytest.mark.thorough(except_for=["2"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_the_run_continues_with_a_state_that_a_hook_returns(steps_per_call, tmp_path):
    reference = []

    def halve(step, state, metrics):
        return scaled(state, 0.5)

    def look(step, state, metrics):
        reference.append(state)

    hooks = [jstep.every(4, halve), jstep.every(4, halve), jstep.every(4, look)]
    state = train(
        6,
        hooks=hooks,
        steps_per_call=steps_per_call,
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=4,
    )
    expected = by_hand(6, state=scaled(by_hand(4), 0.25))
    np.testing.assert_allclose(state.params["w"], expected.params["w"], rtol=1e-5)
    # The checkpoint holds the changed state.
    restored = jstep.Saver(tmp_path).restore(make_state(), step=4)
    np.testing.assert_allclose(restored.params["w"], 0.25 * by_hand(4).params["w"], rtol=1e-5)
    assert len(reference) == 1


def test_a_custom_saver(tmp_path):
    with jstep.Saver(tmp_path, prefix="mine", max_to_keep=2) as saver:
        train(6, checkpoint_dir=saver, save_checkpoint_steps=1)
        assert saver.all_steps() == [5, 6]
        state = train(8, checkpoint_dir=saver)  # the first run did not close it
        saver.save(jax.tree.map(jnp.copy, by_hand(9)))
        assert saver.latest_step() == 9
    assert same(state, by_hand(8))
    with pytest.raises(
        ValueError, match="checkpoint_prefix='other': checkpoint_dir is a Saver, whose own prefix"
    ):
        train(9, checkpoint_dir=saver, checkpoint_prefix="other")


def test_what_a_hook_returns_at_the_last_step_counts(tmp_path):
    """Also if it is due there only because the run ends."""

    class AtLast(RunHook):
        _cadence = Cadence(steps=100, at_last_step=True)

        def _when_due(self, step, state, metrics):
            return state.replace(params={"w": jnp.full(2, 123.0)})

    class Stops(AtLast):
        def _when_due(self, step, state, metrics):
            return True

    state = train(10, hooks=[AtLast(), Stops()], checkpoint_dir=tmp_path)
    assert state.params["w"].tolist() == [123.0, 123.0]
    assert same(jstep.Saver(tmp_path).restore(train(0)), state)
    assert jstep.Saver(tmp_path).extra()["stopped"].endswith("Stops")


# `train(last_step=None)`: the batches, a hook or a signal end the run.

OPTIMIZER_OF_LAST = jstep.adam(0.1)
X = np.ones(3, np.float32)
STEP = jstep.minimize(
    lambda params, x: jnp.sum((params["w"] - x.reshape(3)) ** 2), OPTIMIZER_OF_LAST
)


def run(batches, **options):
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, OPTIMIZER_OF_LAST)
    return jstep.train(STEP, state, batches, None, **options)


def ended_queue():
    queue = jstep.FIFOQueue(10)
    for _ in range(5):
        queue.enqueue(X)
    queue.close()
    while True:
        yield queue.dequeue()


SOURCES = {
    "list": lambda: [X] * 5,
    "generator": lambda: (X for _ in range(5)),
    "queue": ended_queue,
    "batches": lambda: jstep.batches(np.ones((5, 3), np.float32), 1, num_epochs=1),
}


@pytest.mark.thorough(except_for=["generator-2", "queue-1"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("source", list(SOURCES))
def test_the_batches_end_the_run(source, steps_per_call, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "jstep"):
        state = run(SOURCES[source](), checkpoint_dir=tmp_path, steps_per_call=steps_per_call)
    assert int(state.global_step) == 5
    assert jstep.Saver(tmp_path).latest_step() == 5
    assert not [record.getMessage() for record in caplog.records if "ended" in record.getMessage()]


def test_a_finished_run_stays_finished_and_more_batches_continue_it(tmp_path):
    for number, expected in ((5, 5), (5, 5), (8, 8)):
        assert int(run([X] * number, checkpoint_dir=tmp_path).global_step) == expected


@pytest.mark.thorough(except_for=["4"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_hook_ends_the_run(steps_per_call):
    class Stop(jstep.Hook):
        def after_step(self, step, state, metrics):
            return step >= 8

    hooks = [Stop(), jstep.NanLossHook(), jstep.LoggingHook(every_n_steps=4)]
    assert int(run(lambda step: X, hooks=hooks, steps_per_call=steps_per_call).global_step) == 8


def test_the_progress_bar_has_no_total(capsys):
    pytest.importorskip("tqdm")
    file = io.StringIO()
    run([X] * 5, hooks=[jstep.ProgressHook(last_step=None, file=file)], progress=False)
    assert "5step" in file.getvalue().replace(" ", "")
    assert "%" not in file.getvalue()
