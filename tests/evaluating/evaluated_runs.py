"""A small training run whose learning rate is held in the state, and scripted evaluations."""

import jax.numpy as jnp
import numpy as np

import jstep

OPTIMIZER = jstep.momentum(jstep.held("learning_rate", 0.25), 0.5)
STEP = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), OPTIMIZER)


def make_state():
    return jstep.TrainState.create({"w": jnp.zeros(2)}, OPTIMIZER)


def batches(step):
    """Return a constant batch that alternates between 1.25 and 0.75."""
    return np.full((2,), 1.0 + 0.25 * (-1) ** step, np.float32)


def train(last_step, hooks, state=None, **kwargs):
    kwargs.setdefault("progress", False)
    source = kwargs.pop("batches", batches)
    return jstep.train(
        STEP, make_state() if state is None else state, source, last_step, hooks=hooks, **kwargs
    )


def in_batches(size, x):
    return [x[i : i + size] for i in range(0, len(x), size)]


def rate(state):
    return jstep.get_hyperparameter(state, "learning_rate")


def scripted(values, every_n_steps=1):
    """Return an evaluate function whose loss is read from a list, by step."""

    def evaluate(state):
        return {"loss": values[min(jstep.global_step(state) // every_n_steps, len(values)) - 1]}

    return evaluate
