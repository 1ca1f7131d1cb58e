"""`train`: start, end, early stops, and donation of the state."""

import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import OPTIMIZER, Calls, by_hand, make_state, same, train

import jstep

# Start and end


def test_train_equals_the_plain_loop():
    assert same(train(12), by_hand(12))


def test_last_step_is_absolute():
    assert same(train(12, state=by_hand(5)), by_hand(12))
    state = by_hand(5)
    assert train(5, state=state) is state
    assert train(3, state=state) is state


def test_hooks_are_called_in_order():
    calls = Calls()
    train(3, hooks=[calls])
    assert calls.seen == [("begin", 0), ("first", 1), ("step", 1), ("step", 2), ("step", 3), ("end", 3), ("close",)]
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
    """A step can return its parameters as metrics; the next step donates the state, not the metrics."""
    step = jstep.minimize(
        lambda params, batch: (jnp.mean((batch["x"] @ params["w"]) ** 2), {"w0": params["w"]}), OPTIMIZER, has_aux=True
    )
    calls = Calls()
    train(5, hooks=[calls], step=step)
    assert np.asarray(calls.metrics[1]["w0"]).tolist() == [1, 1]
    assert len({np.asarray(calls.metrics[n]["w0"]).tobytes() for n in range(1, 6)}) == 5
