"""A small linear regression, shared by the tests of training."""

import jax.numpy as jnp
import numpy as np

import jstep

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
Y = X @ jnp.array([1.0, -2.0, 0.5])


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def fresh(optimizer, **kwargs):
    return jstep.TrainState.create({"w": jnp.ones(3), "b": 0.5}, optimizer, **kwargs)
