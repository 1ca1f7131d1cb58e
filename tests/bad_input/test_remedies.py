"""Mistakes of people who know another library: each error or warning names a working remedy."""

import contextlib
import threading

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jstep

OPTIMIZER = jstep.adam(0.1)


def new_state(**more):
    return jstep.TrainState.create({"w": jnp.zeros(3)}, OPTIMIZER, **more)


def step_of(loss=lambda params, x: jnp.sum((params["w"] - x) ** 2)):
    return jstep.minimize(loss, OPTIMIZER)


def ones(step):
    return jnp.ones(3)


def test_the_state_of_another_library_is_named():
    state = flax.training.train_state.TrainState.create(
        apply_fn=None, params={"w": jnp.zeros(3)}, tx=optax.adam(0.1)
    )
    with pytest.raises(
        TypeError, match=r"must be a jstep.TrainState, got flax's TrainState; .*TrainState.create\("
    ):
        jstep.train(step_of(), state, ones, 1)


def test_keys_of_nnx_are_no_key():
    with pytest.raises(
        TypeError, match=r"rng: must be one key, .* got flax's Rngs; rngs.params\(\) draws one"
    ):
        jstep.minimize(lambda params, x, rng: 0.0, OPTIMIZER, rng=nnx.Rngs(0))


def test_all_variables_of_a_linen_module_are_no_parameters():
    variables = {"params": {"w": jnp.zeros(3)}, "batch_stats": {"mean": jnp.zeros(3)}}
    with pytest.raises(
        TypeError, match=r"'batch_stats' is not trained, .* pass variables\['params'\] as params"
    ):
        jstep.TrainState.create(variables, jstep.adamw(0.1))
    jstep.TrainState.create({"params": variables["params"]}, jstep.adamw(0.1))
    jstep.TrainState.create(
        variables["params"], jstep.adamw(0.1), model_state=variables["batch_stats"]
    )


@pytest.mark.parametrize("finished", [OPTIMIZER, jstep.scale_by_learning_rate(0.1)])
def test_a_negative_factor_behind_finished_updates_is_warned_of(finished):
    with pytest.warns(
        UserWarning, match="has a negative factor: the sign flips twice, so this is gradient ascent"
    ):
        ascends = jstep.chain(finished, jstep.scale(-1.0))
    state = jstep.apply_gradients(
        jstep.TrainState.create({"w": 0.0}, ascends), {"w": jnp.float32(1.0)}, ascends
    )
    assert float(state.params["w"]) > 0
    jstep.chain(finished, jstep.scale(0.5))
    jstep.chain(jstep.scale_by_adam(), jstep.scale(-0.1))
    with pytest.warns(UserWarning, match="gradient ascent"):
        jstep.chain(
            jstep.chain(jstep.scale_by_adam(), jstep.scale(-1.0)), jstep.scope(finished, "outer")
        )


def test_a_state_without_a_step_is_asked_for_one():
    with pytest.raises(RuntimeError, match=r"^state: it has no global_step"):
        jstep.train(step_of(), new_state().replace(global_step=None), ones, 1)


def test_one_hook_object_is_given_once():
    hook = jstep.every(1, lambda step, state, metrics: None)
    with pytest.raises(
        ValueError, match=r"hooks\[2\]=every.*: must be another object than hooks\[0\]"
    ):
        jstep.train(step_of(), new_state(), ones, 1, hooks=[hook, jstep.Hook(), hook])


@pytest.mark.parametrize("place", ["hook", "body"])
def test_parameters_at_a_second_place_of_a_returned_state_are_copied(place):
    """A target network in model_state: the next step donates each leaf, and one buffer cannot be
    donated twice."""

    def renewed(state):
        return state.replace(model_state={"target": state.params["w"]})

    state = new_state(model_state={"target": jnp.zeros(3)})
    if place == "hook":
        hook = jstep.every(1, lambda step, state, metrics: renewed(state))
        state = jstep.train(step_of(), state, ones, 4, hooks=[hook])
    else:
        with jstep.Run(step_of(), state, ones, 4) as run:
            for _ in run:
                run.state = renewed(run.state)
        state = run.state
    np.testing.assert_array_equal(state.model_state["target"], state.params["w"])


def test_checkpoints_that_are_elsewhere_are_found(tmp_path):
    with jstep.Saver(tmp_path / "run", prefix="best") as saver:
        path = saver.save(new_state())
    with pytest.raises(FileNotFoundError, match=r"it has .*best-0: give its prefix"):
        jstep.Saver(tmp_path / "run").restore(new_state())
    for call in (
        jstep.Saver,
        jstep.latest_checkpoint,
        lambda d: jstep.train(step_of(), new_state(), ones, 1, checkpoint_dir=d),
    ):
        with pytest.raises(ValueError, match=r"got a checkpoint; pass .*run', and"):
            call(path)


def test_restore_params_and_load_weights_name_a_call_that_works(tmp_path):
    with jstep.Saver(tmp_path) as saver:
        path = saver.save(new_state())
        target = {"w": jnp.ones(3), "b": jnp.ones(2)}
        with pytest.raises(
            ValueError, match=r"jstep\.load_weights\(path, target_params, partial=True\)"
        ):
            saver.restore_params(target)
    loaded = jstep.load_weights(path, target, partial=True)
    np.testing.assert_array_equal(loaded["w"], 0)
    half = {"w": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"dtype='bfloat16' converts"):
        jstep.load_weights(path, half)
    assert jstep.load_weights(path, half, dtype="bfloat16")["w"].dtype == jnp.bfloat16


def test_a_thread_that_waits_in_a_queue_is_told_how_it_ends():
    queue, coord = jstep.FIFOQueue(capacity=1), jstep.Coordinator()
    queue.enqueue(1.0)

    def feed():
        with contextlib.suppress(jstep.CancelledError):
            while not coord.should_stop():
                queue.enqueue(1.0)

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    coord.request_stop()
    with pytest.raises(RuntimeError, match=r"queue\.close\(cancel_pending_enqueues=True\)"):
        coord.join([thread], stop_grace_period_secs=0.05)
    queue.close(cancel_pending_enqueues=True)
    thread.join(60)
    assert not thread.is_alive()


def test_merged_metrics_are_shown_in_a_line():
    assert (
        repr(jstep.metrics.auc(jnp.ones(3), jnp.array([1, 0, 1])))
        == "AUC(curve='ROC', thresholds: 6400)"
    )
