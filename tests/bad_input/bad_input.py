"""The names that the calls of `refused_calls/` use."""

import jax  # noqa: F401  (the calls use it)
import jax.numpy as jnp
import numpy as np

import jstep

PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}, "n": jnp.arange(2)}
GRADS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}, "n": None}
create = jstep.TrainState.create
adam = jstep.adam()


def linear(params, x):
    return jnp.mean(x @ params["dense"]["kernel"] + params["dense"]["bias"][None])


def apply(grads, optimizer=adam, state_optimizer=None):
    return jstep.apply_gradients(create(PARAMS, state_optimizer or optimizer), grads, optimizer)


def changed(**changes):
    return {**GRADS, "dense": {**GRADS["dense"], **changes}}


def compute(loss_fn=linear, x=None, **kwargs):
    return jstep.compute_gradients(loss_fn, **kwargs)(PARAMS, jnp.ones((6, 2)) if x is None else x)


def step(loss_fn=linear, optimizer=adam, state=None, args=None, **kwargs):
    state = create(PARAMS, adam) if state is None else state
    return jstep.minimize(loss_fn, optimizer, **kwargs)(state, *((jnp.ones((6, 2)),) if args is None else args))


def rows(values=(2, 1), indices=(0, 1), shape=(4, 1)):
    return jstep.IndexedSlices(jnp.ones(values), jnp.asarray(indices), shape)


def sparse(slices):
    optimizer = jstep.gradient_descent(1.0)
    return jstep.apply_gradients(create({"table": jnp.zeros((4, 1))}, optimizer), {"table": slices}, optimizer)


def with_norm(norm):
    return jstep.clip_by_global_norm({"a": jnp.ones(2)}, 1.0, use_norm=norm)


def scanned(**kwargs):
    one = jstep.minimize(lambda p: linear(p, jnp.ones((1, 2))), adam)
    return jstep.scan_steps(one, **kwargs)(create(PARAMS, adam))


def train(
    last_step=3,
    step=None,
    batches=lambda n: np.zeros(2, np.float32),
    state=None,
    **kwargs,
):
    one = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), adam) if step is None else step
    first = create({"w": jnp.ones(2)}, adam) if state is None else state
    return jstep.train(one, first, batches, last_step, progress=False, **kwargs)
