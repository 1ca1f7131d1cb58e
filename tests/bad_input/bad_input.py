"""The names that the calls of `refused_calls/` use."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jstep

PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}, "n": jnp.arange(2)}
GRADS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}, "n": None}
create = jstep.TrainState.create
adam = jstep.adam()


def linear(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(x @ params["dense"]["kernel"] + params["dense"]["bias"][None])


def apply(
    grads: Any, optimizer: jstep.Optimizer = adam, state_optimizer: jstep.Optimizer | None = None
) -> Any:
    return jstep.apply_gradients(create(PARAMS, state_optimizer or optimizer), grads, optimizer)


def changed(**changes: Any) -> Any:
    return {**GRADS, "dense": {**GRADS["dense"], **changes}}


def compute(loss_fn: Any = linear, x: Any = None, **kwargs: Any) -> Any:
    return jstep.compute_gradients(loss_fn, **kwargs)(PARAMS, jnp.ones((6, 2)) if x is None else x)


def step(
    loss_fn: Any = linear, optimizer: Any = adam, state: Any = None, args: Any = None, **kwargs: Any
) -> Any:
    state = create(PARAMS, adam) if state is None else state
    return jstep.minimize(loss_fn, optimizer, **kwargs)(
        state, *((jnp.ones((6, 2)),) if args is None else args)
    )


def rows(values: Any = (2, 1), indices: Any = (0, 1), shape: Any = (4, 1)) -> jstep.IndexedSlices:
    return jstep.IndexedSlices(jnp.ones(values), jnp.asarray(indices), shape)


def sparse(slices: jstep.IndexedSlices) -> Any:
    optimizer = jstep.gradient_descent(1.0)
    return jstep.apply_gradients(
        create({"table": jnp.zeros((4, 1))}, optimizer), {"table": slices}, optimizer
    )


def with_norm(norm: Any) -> Any:
    return jstep.clip_by_global_norm({"a": jnp.ones(2)}, 1.0, use_norm=norm)


def scanned(**kwargs: Any) -> Any:
    one = jstep.minimize(lambda p: linear(p, jnp.ones((1, 2))), adam)
    return jstep.scan_steps(one, **kwargs)(create(PARAMS, adam))


def train(
    last_step: Any = 3,
    step: Any = None,
    batches: Any = lambda n: np.zeros(2, np.float32),
    state: Any = None,
    **kwargs: Any,
) -> Any:
    one = (
        jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), adam)
        if step is None
        else step
    )
    first = create({"w": jnp.ones(2)}, adam) if state is None else state
    return jstep.train(one, first, batches, last_step, progress=False, **kwargs)
