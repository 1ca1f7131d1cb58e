"""Mixtures in training loops, evaluators and prefetching."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import jstep

SOURCES = {"a": np.arange(30.0), "b": -np.arange(1.0, 8.0)}
MIX = jstep.mixture(SOURCES, 4, {0: {"a": 1, "b": 1}, 5: {"a": 1, "b": 0}}).skip(2, 4)


def test_train_uses_batch_n_at_step_n_after_a_restart(tmp_path):
    seen = []

    def step(state, batch):
        seen.append(batch.tolist())
        return state.replace(global_step=state.global_step + 1), {"loss": jnp.float32(0)}

    for last_step in (3, 8):
        state = jstep.TrainState.create({"w": 0.0}, jstep.gradient_descent(0.1))
        jstep.train(step, state, MIX, last_step, checkpoint_dir=tmp_path, progress=False)
    assert seen == [batch.tolist() for batch in MIX[:8]]


def test_evaluator_refuses_endless_mixtures():
    state = jstep.TrainState.create({"w": 0.0}, jstep.gradient_descent(0.1))

    def metrics(params, x):
        return {"mean": jnp.mean(x)}

    with pytest.raises(ValueError, match=r"Mixture of 4.*has no end"):
        jstep.evaluator(metrics, MIX)
    want = np.mean([MIX[i] for i in range(6)])
    assert np.isclose(jstep.evaluator(metrics, MIX[:6])(state)["mean"], want)


def test_evaluator_with_several_batch_sizes():
    state = jstep.TrainState.create({"w": 0.0}, jstep.gradient_descent(0.1))
    data = jstep.batches(np.arange(20.0), {0: 4, 2: 6}, num_epochs=1)
    evaluate = jstep.evaluator(lambda params, x: {"mean": jnp.mean(x)}, data)
    assert np.isclose(evaluate(state)["mean"], np.mean(np.concatenate(list(data))))


def test_prefetching_a_mixture():
    with jstep.prefetch_to_device(MIX.from_step(3)) as items:
        for step, batch in zip(range(3, 10), itertools.islice(items, 7), strict=True):
            assert np.array_equal(batch, MIX[step].astype(np.float32))
