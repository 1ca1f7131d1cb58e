"""Short runs of one number, for tests of what `runs` says of them."""

import jax.numpy as jnp
from points import mean

import jstep

optimizer, train_step = mean(0.25)


def train(where, last_step, *hooks, batches=lambda step: jnp.ones(4), width=1, **options):
    state = jstep.TrainState.create({"w": jnp.zeros(width)}, optimizer)
    options = {"log_steps": None, "checkpoint_dir": where, "save_checkpoint_steps": 5} | options
    return jstep.train(train_step, state, batches, last_step, hooks=hooks, **options)


def only(where):
    """The one run below a directory."""
    (found,) = jstep.runs(where)
    return found


def evaluation(where, values):
    """An evaluation whose score at each step is given, and whose greatest is kept."""
    best = jstep.KeepBest(where, "score", mode="max")
    return jstep.EvaluationHook(
        lambda state: {"score": values[int(state.global_step)]}, every_n_steps=5, callbacks=[best]
    )
