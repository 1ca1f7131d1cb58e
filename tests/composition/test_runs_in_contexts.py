"""Resumed runs in every JAX context that a user may have set, and wrapped steps."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jstep


def auto_mesh():
    return jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2))


def explicit_mesh():
    return jax.set_mesh(jax.make_mesh((2, 4), ("data", "model")))


CONTEXTS = {
    "none": contextlib.nullcontext,
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "auto mesh": auto_mesh,
    "explicit mesh": explicit_mesh,
    "x64": lambda: jax.enable_x64(True),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "debug_nans": lambda: jax.debug_nans(True),
    "leaks": jax.checking_leaks,
    "no jit": jax.disable_jit,
    "default device": lambda: jax.default_device(jax.devices()[3]),
}

ROWS = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)


def loss_fn(params, rows, rng):
    noise = jax.random.normal(rng, (), params["w"].dtype)
    error = rows.astype(params["w"].dtype) @ params["w"] - 1
    return jnp.mean(jnp.square(error)) * (1 + noise.astype(error.dtype) / 1000)


def key():
    """Return a key of the current implementation; JAX itself transfers it to the device."""
    with jax.transfer_guard("allow"):
        return jax.random.key(0)


def make():
    optimizer = jstep.with_moving_average(
        jstep.chain(
            jstep.clip_gradients(by_global_norm=1.0), jstep.adam(jstep.cosine_decay(0.1, 20))
        ),
        jstep.ExponentialMovingAverage(0.9, num_updates=True),
    )
    state = jstep.TrainState.create({"w": np.ones(4, np.float32)}, optimizer)
    return state, jstep.minimize(loss_fn, optimizer, rng=key(), metrics=("grad_norm",))


@pytest.mark.thorough
@pytest.mark.parametrize("context", CONTEXTS)
def test_resume_is_bitwise_in_every_context(context, tmp_path):
    with CONTEXTS[context]():
        state, train_step = make()
        data = jstep.batches(ROWS, 8, seed=3)
        run = functools.partial(
            jstep.train, train_step, batches=data, progress=False, save_checkpoint_secs=None
        )
        uninterrupted = run(make()[0], last_step=8)
        run(state, last_step=4, checkpoint_dir=tmp_path)
        resumed = run(make()[0], last_step=8, checkpoint_dir=tmp_path)
    for a, b in zip(jax.tree.leaves(uninterrupted), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jstep.global_step(resumed) == 8
