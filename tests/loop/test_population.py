"""A population of states under `train`: its members share one step, and all other leaves have an
axis of members."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
DATA = jstep.batches(X, 16, seed=0)
OPTIMIZER = jstep.with_moving_average(jstep.adam(1e-2), jstep.ExponentialMovingAverage(0.9))
STEP = jstep.minimize(
    lambda params, x: jnp.mean((x @ params["w"] - 1.0) ** 2), OPTIMIZER, jit=False
)


def create(seed):
    return jstep.TrainState.create({"w": jax.random.normal(jax.random.key(seed), (4,))}, OPTIMIZER)


AXES = jax.tree.map(lambda _: 0, jax.eval_shape(create, 0)).replace(global_step=None)


@jstep.TrainStep
def step_of_all(states, x):
    states, metrics = jax.vmap(STEP, in_axes=(AXES, None), out_axes=(AXES, 0))(states, x)
    return states, {"loss": metrics["loss"].mean()}


def train(last_step, directory=None, **kwargs):
    states = jax.vmap(create, out_axes=AXES)(jnp.arange(8))
    return jstep.train(
        step_of_all, states, DATA, last_step, checkpoint_dir=directory, log_steps=None, **kwargs
    )


def test_a_population_with_one_step(tmp_path):
    whole = train(40)
    train(17, tmp_path)
    assert train(40, tmp_path) == whole
    assert whole.global_step.shape == ()
    step, alone = jax.jit(STEP), create(3)
    for n in range(40):
        alone, _ = step(alone, DATA[n])
    third = jax.tree.map(lambda leaf: leaf[3] if leaf.ndim else leaf, whole)
    for one, other in zip(jax.tree.leaves(third), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert train(40, steps_per_call=8).params["w"].shape == (8, 4)


def test_the_error_of_a_population_with_several_steps_names_the_way():
    with pytest.raises(ValueError, match=r"shape \(8,\), must be a scalar.*sweeps with vmap"):
        jstep.train(step_of_all, jax.vmap(create)(jnp.arange(8)), DATA, 4)
