"""`train`: start, end, early stops, and donation of the state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import OPTIMIZER, Calls, by_hand, loss_fn, make_state, same, train

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


@pytest.mark.parametrize(("start", "expected"), [(0, [3, 6, 9]), (3, [6, 9]), (4, [6, 9]), (9, [])])
def test_a_hook_with_next_due(start, expected):
    calls = Calls(every_n=3)
    train(10, hooks=[calls], state=make_state(start))
    assert calls.steps() == expected


def test_a_due_step_that_is_not_later_is_rejected():
    class Wrong(jstep.Hook):
        def next_due(self, step):
            return 2

    for steps_per_call in (1, 3):
        with pytest.raises(ValueError, match=r"Wrong.next_due\(2\) returned 2: must be a later step"):
            train(5, hooks=[Wrong()], steps_per_call=steps_per_call)


# Stopping


def test_a_true_result_stops_after_that_step():
    first, second = Calls(stop=4), Calls()
    state = train(10, hooks=[first, second])
    assert jstep.global_step(state) == 4
    assert second.steps() == [1, 2, 3, 4]  # the other hooks are still called
    assert second.seen[-2:] == [("end", 4), ("close",)]
    assert same(state, by_hand(4))


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_stop_at_step(steps_per_call, tmp_path):
    hook = jstep.StopAtStepHook(last_step=6)
    for _ in range(2):  # when restored at step 6, it runs no further steps
        state = train(50, hooks=[hook], checkpoint_dir=tmp_path, steps_per_call=steps_per_call)
        assert jstep.global_step(state) == 6
    state = train(50, hooks=[jstep.StopAtStepHook(num_steps=3)], checkpoint_dir=tmp_path)
    assert jstep.global_step(state) == 9


# Donation


def test_a_compiled_step_donates_the_given_state():
    state = make_state()
    train(2, state=state)
    with pytest.raises(RuntimeError, match="donated"):
        train(2, state=state)


def test_a_plain_step_does_not_donate_the_given_state():
    state = make_state()
    plain = jstep.minimize(loss_fn, OPTIMIZER, rng=jax.random.key(7), jit=False)
    trained = train(2, state=state, step=plain)
    assert state.params["w"].tolist() == [1, 1]
    np.testing.assert_allclose(trained.params["w"], by_hand(2).params["w"], rtol=1e-5)


def test_metrics_remain_valid_after_later_steps(tmp_path):
    """A step can return its parameters as metrics; the next step donates the state, not the metrics."""
    step = jstep.minimize(
        lambda params, batch: (jnp.mean((batch["x"] @ params["w"]) ** 2), {"w0": params["w"]}), OPTIMIZER, has_aux=True
    )
    calls = Calls()
    train(5, hooks=[calls], step=step)
    assert np.asarray(calls.metrics[1]["w0"]).tolist() == [1, 1]
    assert len({np.asarray(calls.metrics[n]["w0"]).tobytes() for n in range(1, 6)}) == 5
